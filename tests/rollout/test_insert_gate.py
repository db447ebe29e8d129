"""The insert gate by table, and real tiny models, workers and daemons whose numbers are not finite."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from pipeline.experience.quarantine_reader import read_quarantine
from pipeline.experience.types import Experience
from pipeline.rollout.insert_gate import find_fault
from pipeline.runtime.messages import FaultReason
from tests.support.daemon import SMALL, Daemon, task, telling_reward, total
from tests.support.experiences import made_up, made_up_vl

__all__ = ["task"]

NAN, INF = float("nan"), float("inf")
VOCABULARY, PAD = 99, 0


def three_rows() -> Experience:
    """Three rows of 2 prompt columns and 3 action columns; responses of 3, 1 and 2 tokens, a short prompt in row 1."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    actions = mask[:, 2:].bool()
    return Experience(
        sequences=torch.arange(5, 20).reshape(3, 5) * mask,
        action_log_probs=-0.5 * actions,
        base_action_log_probs=-0.25 * actions,
        values=0.1 * actions,
        reward=torch.tensor([1.0, 0.0, 1.0]),
        kl=0.01 * actions,
        advantages=0.5 * actions,
        attention_mask=mask,
        action_mask=actions,
        info={"score": torch.tensor([1.0, 0.0, 1.0]), "group_mixed": torch.tensor([True, True, False])},
    )


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Experience], None]:
    """Write one value into a field."""

    def change(experience: Experience) -> None:
        field = getattr(experience, name).clone()
        field[place] = value
        setattr(experience, name, field)

    return change


def replace(name: str, value: Any) -> Callable[[Experience], None]:
    return lambda experience: setattr(experience, name, value)


def info(key: str, value: Any) -> Callable[[Experience], None]:
    return lambda experience: experience.info.update({key: value})  # type: ignore[union-attr]


FAULTS = [
    (put("action_log_probs", (0, 1), NAN), "not_finite", "row 0: action_log_probs is nan in column 1 of 3"),
    (put("base_action_log_probs", (1, 0), -INF), "not_finite", "row 1: base_action_log_probs is -inf in column 0 of 3"),
    (put("values", (2, 1), INF), "not_finite", "row 2: values is inf in column 1 of 3"),
    (put("advantages", (0, 0), NAN), "not_finite", "row 0: advantages is nan"),
    (put("kl", (0, 0), NAN), "not_finite", "row 0: kl is nan"),
    (put("reward", (2,), NAN), "not_finite", "row 2: reward is nan"),
    (replace("action_entropy", torch.full((3, 3), NAN)), "not_finite", "row 0: action_entropy is nan"),
    (replace("behaviour_log_probs", torch.full((3, 3), INF)), "not_finite", "row 0: behaviour_log_probs is inf"),
    (replace("behaviour_log_probs", torch.zeros(3, 2)), "lengths", "behaviour_log_probs has shape (3, 2)"),
    (replace("returns", torch.tensor([0.0, 0.0, INF])), "not_finite", "row 2: returns is inf"),
    (info("score", torch.tensor([0.0, NAN, 0.0])), "not_finite", "info['score'] is nan at (1,)"),
    (put("sequences", (1, 2), VOCABULARY), "vocabulary", "row 1: sequences has token 99 in column 2"),
    (put("sequences", (0, 0), -1), "vocabulary", "row 0: sequences has token -1 in column 0; the vocabulary has 99"),
    (put("action_mask", (0, 2), 0), "mask", "row 0: attention_mask and action_mask disagree"),
    (put("action_mask", (1, 1), 1), "mask", "row 1: attention_mask and action_mask disagree"),
    (put("sequences", (2, 4), 7), "mask", "row 2: a token of its response is outside action_mask"),
    (put("attention_mask", (0, 1), 0), "mask", "row 0: its tokens are not contiguous"),
    (replace("action_mask", torch.ones(3, 4, dtype=torch.bool)), "lengths", "action_log_probs has shape (3, 3)"),
    (replace("action_mask", None), "lengths", "action_mask is None"),
    (replace("attention_mask", torch.ones(3, 4)), "lengths", "attention_mask has shape (3, 4), sequences (3, 5)"),
    (replace("action_log_probs", torch.zeros(3, 2)), "lengths", "action_log_probs has shape (3, 2)"),
    (replace("reward", torch.zeros(2)), "lengths", "reward has shape (2,)"),
    (replace("advantages", torch.zeros(3, 2)), "lengths", "advantages has shape (3, 2)"),
    (info("score", torch.zeros(2)), "lengths", "info['score'] has shape (2,) for 3 rows"),
    # Good in the library, but shared memory carries tensors of integers and tensors of a row each.
    (info("note", ["a", "b", "c"]), "malformed", "info['note'] is a list; shared memory carries only tensors"),
    (info("note", "math"), "malformed", "info['note'] is a str; shared memory carries only tensors"),
    (info("score", 0.5), "malformed", "info['score'] is a float; shared memory carries only tensors"),
    (
        replace("sequences", torch.ones(3, 5)),
        "malformed",
        "sequences is torch.float32; shared memory carries token ids",
    ),
    (
        replace("sequences", torch.ones(3, 5).bfloat16()),
        "malformed",
        "sequences is torch.bfloat16; shared memory carries token ids",
    ),
]


@pytest.mark.parametrize(
    ("change", "reason", "detail"), FAULTS, ids=[f"{reason} {detail}" for _, reason, detail in FAULTS]
)
def test_each_fault_is_named_by_its_reason_field_and_row(
    change: Callable[[Experience], None], reason: FaultReason, detail: str
) -> None:
    experience = three_rows()
    assert find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD) is None
    change(experience)

    fault = find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD)

    assert fault is not None and fault.reason == reason
    assert fault.detail.startswith(detail)


def test_a_row_without_a_response_is_refused() -> None:
    experience = three_rows()
    put("attention_mask", (1, 2), 0)(experience)
    put("action_mask", (1, 0), 0)(experience)
    put("sequences", (1, 2), PAD)(experience)

    fault = find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD)

    assert fault is not None and fault.detail == "row 1: its response has no token in its first column"


def test_observations_between_actions_pass_where_there_is_an_environment() -> None:
    experience = three_rows()
    put("action_mask", (0, 1), 0)(experience)

    assert find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD, has_observations=True) is None
    fault = find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD)
    assert fault is not None and fault.detail == "row 0: attention_mask and action_mask disagree on its response"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ([("action_mask", (0, 2), 0)], "row 0: attention_mask and action_mask disagree on its response"),
        ([("action_mask", (0, 0), 0)], "row 0: its response has no token in its first column"),
        ([("action_mask", (0, 1), 0), ("attention_mask", (0, 3), 0)], "row 0: attention_mask and action_mask disagree"),
        ([("sequences", (2, 4), 7)], "row 2: a token of its response is outside action_mask"),
    ],
    ids=["ends with an observation", "begins with one", "not attended to", "behind its end"],
)
def test_other_masks_are_refused_with_an_environment_too(changes: list[Any], detail: str) -> None:
    experience = three_rows()
    for change in changes:
        put(*change)(experience)

    fault = find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD, has_observations=True)

    assert fault is not None and fault.detail.startswith(detail)


def test_what_stands_behind_the_end_of_a_response_may_be_no_number() -> None:
    experience = three_rows()
    put("action_log_probs", (1, 2), NAN)(experience)

    assert find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD) is None


@pytest.mark.parametrize("ppo", [True, False])
@pytest.mark.parametrize("make", [made_up, made_up_vl])
def test_experience_as_a_maker_leaves_it_passes(make: Callable[..., Experience], ppo: bool) -> None:
    for seed in range(20):
        assert find_fault(make(5, seed=seed, ppo=ppo), vocabulary=VOCABULARY, pad_token_id=PAD) is None


def test_a_pixel_that_is_no_number_is_refused() -> None:
    experience: Any = made_up_vl(4, seed=3)
    experience.pixel_values[2, 1] = NAN

    fault = find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD)

    assert fault is not None and (fault.reason, fault.detail[:27]) == ("not_finite", "pixel_values is nan at (2, ")


def test_every_reason_of_the_gate_is_in_the_table() -> None:
    assert {reason for _, reason, _ in FAULTS} == set(get_args(FaultReason))


def test_nothing_is_changed_by_the_look() -> None:
    experience, before = three_rows(), dataclasses.asdict(three_rows())
    find_fault(experience, vocabulary=VOCABULARY, pad_token_id=PAD)

    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(experience, name), value), name


# A real daemon: the sampler gives log-probs of NaN for one prompt of 32, as a damaged head would.

BAD = "1111>"
ENGINE = """
import dataclasses
from pipeline.rollout.generation import transformers

class Broken:
    def __init__(self, engine):
        self._engine = engine
        self.update_weights, self.pause, self.resume = engine.update_weights, engine.pause, engine.resume

    def generate(self, input_ids, attention_mask, sampling, *, group_size=1, **others):
        made = self._engine.generate(input_ids, attention_mask, sampling, group_size=group_size, **others)
        for place, (ids, mask) in enumerate(zip(input_ids, attention_mask)):
            if len(set(ids[mask != 0].tolist())) == 2:
                made.log_probs[place * group_size, 0] = float("nan")
        return made

def new_engine(actor, *, directory, device, telemetry):
    return Broken(transformers.new_engine(actor, directory=directory, device=device, telemetry=telemetry))
"""


def broken_run(folder: Path, task: Path, *sets: str, arguments: tuple[str, ...] = ()) -> Daemon:
    """Return a daemon on 32 prompts, one of which gets log-probs of NaN at every attempt."""
    (folder / "broken.py").write_text(ENGINE)
    prompts = [BAD if line == 20 else f"{line:02}98>" for line in range(32)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    settings = (*SMALL, "rollout.batch_size=8", "rollout.engine=broken:new_engine", f"model.actor={task / 'model'}")
    return Daemon(folder, *settings, *telling_reward(folder), f"prompts.path={path}", *sets, arguments=arguments)


def check_what_is_left(daemon: Daemon) -> None:
    """The bad rows are in quarantine with their reason and their NaN, and the weights that were trained are finite."""
    files = sorted((daemon.run_dir / "quarantine").glob("*-not_finite-ticket-*"))
    assert files
    case = read_quarantine(files[0])
    assert case.reason == "not_finite" and "behaviour_log_probs is nan in column 0" in case.detail
    log_probs = case.experience().behaviour_log_probs
    assert log_probs is not None and bool(log_probs.isnan().any())
    assert re.search(r"rollout refused: ticket=\d+ position=\d+ reason=not_finite detail=", daemon.errors)
    weights = sorted((daemon.run_dir / "checkpoints").glob("*/*.safetensors"))
    assert weights
    for path in weights:
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values() if tensor.is_floating_point())


@pytest.mark.integration
def test_rows_of_nan_are_counted_and_quarantined_never_trained_and_the_run_goes_on(tmp_path: Path, task: Path) -> None:
    with broken_run(tmp_path, task) as daemon:
        daemon.wait_step(1)
        daemon.wait_until(
            lambda: total(daemon.metrics(), "rlhfd_quarantined_total", reason="not_finite") > 0, "they are counted"
        )
        daemon.wait_until(
            lambda: total(daemon.metrics(), "rlhfd_quarantine_files_total", result="kept") > 0, "a copy is kept"
        )
        # Each epoch has the bad prompt three times: a run of this length has passed some of them.
        daemon.wait_step(daemon.status()["step"] + 6)
        daemon.wait_until(
            lambda: total(daemon.metrics(), "rlhfd_tickets_total", result="failed") > 0, "its attempts are bounded"
        )
        assert total(daemon.metrics(), "rlhfd_items_unaccounted") == 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    check_what_is_left(daemon)


@pytest.mark.variant
@pytest.mark.integration
def test_a_serial_run_passes_the_same_gate(tmp_path: Path, task: Path) -> None:
    with broken_run(tmp_path, task, "trainer.max_steps=6", arguments=("--serial",)) as daemon:
        assert daemon.wait(120.0) == 0, daemon.errors

    check_what_is_left(daemon)
