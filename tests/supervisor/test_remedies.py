"""After a hang or without memory the log names configuration keys that exist."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from pipeline.config.schema import Config
from pipeline.supervisor.exits import after_exit
from pipeline.supervisor.hangs import Reason, after_hang
from pipeline.telemetry.metrics import ACTIVITIES
from tests.supervisor.test_exits import Case
from tests.supervisor.test_exits import case as case


def keys_in(text: str) -> list[str]:
    return re.findall(r"\b(?:rollout|trainer|daemon|buffer|model)\.[a-z_]+", text)


@pytest.mark.parametrize(
    ("reason", "stage", "key"),
    [
        ("no progress", "generate", "rollout.inference_batch_size"),
        ("no progress", "logprob", "rollout.logits_forward_tokens"),
        ("no progress", "logprob", "rollout.logits_forward_batch_size"),
        ("no progress", "ref_logprob", "rollout.logits_forward_batch_size"),
        ("no progress", "value", "rollout.logits_forward_batch_size"),
        ("no progress", "reward", "rollout.reward_timeout_s"),
        ("no progress", "reward", "rollout.logits_forward_tokens"),
        ("no progress", "environment", "rollout.environment_timeout_s"),
        ("no progress", "train", "trainer.micro_batch_size"),
        ("no progress", "train", "daemon.hang_timeout_s"),
        ("ticket overdue", "generate", "rollout.ticket_timeout_s"),
        ("ticket overdue", "ref_logprob", "rollout.batch_size"),
    ],
)
def test_a_kill_for_hanging_names_the_key_of_its_stage(reason: str, stage: str, key: str) -> None:
    assert key in keys_in(after_hang(reason, stage))


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_an_exit_for_want_of_memory_names_the_keys_of_its_role(role: str) -> None:
    for text in (
        after_exit(role, "oom", "loading"),
        after_exit(role, "", "OutOfMemoryError: CUDA out of memory. Tried"),
    ):
        assert text.startswith("out of memory: lower ") and any(key.startswith(f"{role}.") for key in keys_in(text))
    assert after_exit(role, "", "ValueError: x") == after_exit("buffer", "oom", "") == ""


def test_a_rank_without_memory_is_told_the_bound_that_is_in_force_by_default() -> None:
    for text in (after_exit("trainer", "oom", ""), after_hang("no progress", "train")):
        keys = keys_in(text)
        assert keys.index("trainer.micro_batch_tokens") < keys.index("trainer.micro_batch_size")
        assert "trainer.micro_batch_size, where it is set" in text


def test_every_key_that_is_named_exists() -> None:
    texts = [after_hang(reason, stage) for reason in get_args(Reason) for stage in ACTIVITIES]
    texts += [after_exit(role, "oom", "") for role in ("rollout", "trainer")]
    named = {key for text in texts for key in keys_in(text)}
    assert len(named) > 5
    for key in named:
        section, _, name = key.partition(".")
        assert hasattr(getattr(Config(), section), name), key


def test_a_stop_is_no_fault_of_the_configuration() -> None:
    assert after_hang("stopped", "generate") == after_hang("not ready in time", "start") == ""


def test_a_worker_killed_for_want_of_memory_is_logged_with_the_keys(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.ends(case.workers[0], -9, ended_by="oom", last_line="loading weights")

    (line,) = [line for line in caplog.messages if line.startswith("rollout-0 ended")]
    assert "killed by signal 9, oom" in line
    assert "loading weights; out of memory: lower rollout.logits_forward_tokens" in line
