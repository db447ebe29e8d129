"""A row without a reward is left out, with its group; it is not reward 0, and the other rows do not change."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError, RewardError
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.rollout.maker import NaiveExperienceMaker
from tests.rollout.test_loader import rollers  # noqa: F401 - a fixture
from tests.support import tiny
from tests.support.daemon import SMALL, Daemon, total
from tests.support.tiny import Tokenizer
from tests.support.told import events_of

PROMPTS = torch.tensor([[0, 5, 6], [4, 5, 7], [3, 8, 9]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])


class Judge:
    """Scores a row by its tokens; the rows with these numbers get no score."""

    def __init__(self, errored: list[int], value: float = math.nan) -> None:
        self.errored = errored
        self.value = value

    def __call__(self, input_ids: Tensor, **_: object) -> Tensor:
        scores = input_ids.float().mean(dim=1)
        scores[self.errored] = self.value
        return scores


def make(errored: list[int], *, grpo: bool, value: float = math.nan, drop: bool = True) -> Experience:
    actor = tiny.llama()
    maker = NaiveExperienceMaker(
        actor,
        None if grpo else Critic.from_actor(actor),
        Judge(errored, value),
        tiny.llama(seed=1),
        Tokenizer(),
        use_grpo=grpo,
        num_generation=2,
        drop_errored=drop,
        reuse_sampling_log_probs=True,
        seed=3,
    )
    return maker.make_experience(PROMPTS, MASK, max_length=9, seed=5)


def assert_rows(some: Experience, all_rows: Experience, kept: list[int]) -> None:
    """Every field of `some` is that of the kept rows."""
    for name in ("sequences", "attention_mask", "action_mask"):
        assert torch.equal(getattr(some, name), getattr(all_rows, name)[kept]), name
    for name in ("action_log_probs", "base_action_log_probs", "values", "reward", "kl", "advantages"):
        # Other rows share the mini-batches: equal but for rounding.
        torch.testing.assert_close(getattr(some, name), getattr(all_rows, name)[kept], atol=2e-5, rtol=1e-5)
    assert some.info is not None and all_rows.info is not None
    for key, values in all_rows.info.items():
        torch.testing.assert_close(some.info[key], values[kept])


def test_grpo_leaves_the_group_of_an_errored_row_out() -> None:
    assert_rows(make([3], grpo=True), make([], grpo=True), [0, 1, 4, 5])


def test_ppo_leaves_the_errored_row_out() -> None:
    assert_rows(make([0, 2], grpo=False), make([], grpo=False), [1])


def test_an_infinite_reward_is_errored_as_well() -> None:
    assert_rows(make([1], grpo=False, value=math.inf), make([], grpo=False), [0, 2])


def test_where_no_row_has_a_reward_there_is_no_experience() -> None:
    with pytest.raises(RewardError, match="3 of 6 rows have no reward, and no row is left"):
        make([0, 2, 5], grpo=True)


def test_without_leave_to_drop_rows_an_errored_one_is_refused_by_its_number() -> None:
    with pytest.raises(RewardError, match="nan for row 2"):
        make([2], grpo=False, drop=False)


IN_PROCESS = """
def score(ids, mask, *, gt_answer, response_start, **_):
    if gt_answer == "bad":
        raise KeyError(gt_answer)
    return "many" if gt_answer == "text" else 1.0
"""


@pytest.fixture
def moody(rollers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """Return a function that loads a roller over prompts with given answers, whose function runs in this process."""
    (tmp_path / "in_process.py").write_text(IN_PROCESS)
    monkeypatch.syspath_prepend(tmp_path)

    def load(*answers: str, rollout: dict[str, object] | None = None):
        texts = ["0" * 40 if answer == "long" else str(place) for place, answer in enumerate(answers)]
        lines = [
            json.dumps({"prompt": f"{text}>", "answer": answer}) for text, answer in zip(texts, answers, strict=True)
        ]
        (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
        options = {"reward_timeout_s": 0, **(rollout or {})}
        prompts = {"path": str(tmp_path / "p.jsonl")}
        return rollers(rollout=options, prompts=prompts, rewards=["in_process:score"])

    yield load
    sys.modules.pop("in_process", None)


def test_each_group_of_a_rollout_has_its_own_prompt_whichever_are_set_aside_or_left_out(moody) -> None:
    roller, *_ = moody("good", "long", "bad", "good", "text", "long", "good")
    prompts = [roller.source.at(position) for position in range(7)]

    rolled = roller.roll(0, 7)

    assert rolled.prompts_failed == 2 and len(rolled.rows) == 3 * 4
    assert rolled.prompts == [(prompt.position, "good") for prompt in prompts if prompt.answer == "good"]
    for group, found in enumerate(rolled.prompts):
        row = 4 * group
        tokens = rolled.rows.columns_of("sequences", row)[: -rolled.rows.counts[row]]
        assert roller.tokenizer.decode(tokens.tolist()) == prompts[found.position].prompt


def test_a_function_in_the_worker_that_raises_costs_its_group_and_is_named_once_with_place_prompt_and_row(
    moody, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        roller, _, telemetry = moody("good", "bad", "text", "good")
        rolled = [roller.roll(0, 4), roller.roll(4, 4)]
    errors = events_of(telemetry.take(), "reward_errored")

    assert [len(each.rows) for each in rolled] == [8, 8], "2 of 4 prompts, 4 responses each"
    assert sorted(errors) == ["exception"] * 8 + ["invalid"] * 8
    logged = [message for message in caplog.messages if message.startswith("reward errored:")]
    assert len(logged) == 2, "each cause once in 32 rows, and in the trial before them"
    raised, invalid = (next(text for text in logged if reason in text) for reason in ("=exception", "=invalid"))
    row = int(re.match(r"reward errored: row=(\d+) ", raised)[1])
    assert raised == (
        f"reward errored: row={row} reason=exception: in_process:score raised KeyError "
        f"({tmp_path}/in_process.py:4) prompt={tmp_path}/p.jsonl:2"
    )
    assert "returned a str; a reward" in invalid and invalid.endswith(f"prompt={tmp_path}/p.jsonl:3")
    assert [roller.source.at(row // 4).line, row % 4] == [2, 0], "the first response to the prompt of that line"


def test_in_mini_batches_each_row_has_the_place_of_its_own_prompt(moody, caplog: pytest.LogCaptureFixture) -> None:
    roller, _, _ = moody("good", "good", "good", "bad", rollout={"inference_batch_size": 3})
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        roller.roll(0, 4)

    (logged,) = [message for message in caplog.messages if message.startswith("reward errored:")]
    assert logged.endswith("p.jsonl:4")


def test_texts_of_a_function_in_the_worker_are_logged_only_if_that_is_configured(
    moody, caplog: pytest.LogCaptureFixture
) -> None:
    roller, _, _ = moody("good", "bad")
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        roller.roll(0, 2)

    assert "KeyError" in caplog.text and "KeyError('bad')" not in caplog.text


def test_a_function_in_the_worker_that_fails_for_each_prompt_ends_the_start_with_its_place(
    moody, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        moody("bad", "bad")

    message = str(raised.value)
    assert message.startswith("rewards: in_process:score raised KeyError('bad') (")
    assert f"({tmp_path}/in_process.py:4), prompt {tmp_path}/p.jsonl:" in message


REWARD = """
import threading

def score(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    if gt_answer.endswith("6"):
        threading.Event().wait()
    if gt_answer.endswith("5"):
        raise KeyError(gt_answer)
    if gt_answer.endswith("4"):
        return float("nan")
    response = tokenizer.decode(input_ids[response_start:response_end], skip_special_tokens=True)
    return 1.0 + (response == gt_answer)
"""
"""One prompt in eight has no reward, for different reasons."""


@pytest.mark.variant
@pytest.mark.integration
@pytest.mark.timeout(240)
def test_a_run_whose_reward_function_fails_now_and_then_goes_on_and_counts(tmp_path: Path, task: Path) -> None:
    (tmp_path / "moody.py").write_text(REWARD)
    settings = (
        *SMALL,
        'rewards=["moody:score"]',
        "rollout.reward_timeout_s=0.3",
        "trainer.max_steps=0",
    )
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()

        def errors(reason: str) -> float:
            return total(daemon.metrics(), "rlhfd_stage_errors_total", stage="reward", reason=reason)

        for reason in ("timeout", "exception", "invalid"):
            daemon.wait_until(lambda reason=reason: errors(reason) > 0, f"a reward errored by {reason}", 120.0)
        daemon.wait_step(daemon.status()["step"] + 5)
        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_experiences_total", outcome="errored") > 0
        assert total(metrics, "rlhfd_process_exits_total") == 0, "no process was lost over it"
        assert total(metrics, "rlhfd_items_unaccounted") == 0
        count = total(metrics, "rlhfd_reward_count")
        assert count > 0
        assert total(metrics, "rlhfd_reward_sum") >= count, "every reward is 1 or 2: none that failed became 0"
        assert daemon.ask("stop").returncode == 0
        assert daemon.wait() == 0
    assert "in score" in daemon.errors, "the stack of the function that hung is in the log"
