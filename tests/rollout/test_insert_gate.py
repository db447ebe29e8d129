"""The insert gate by table, and real tiny models, workers and daemons whose numbers are not finite."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.saved_rows import read_quarantine
from pipeline.experience.types import Experience
from pipeline.rollout.insert_gate import find_fault
from pipeline.runtime.messages import FaultReason
from tests.support.daemon import SMALL, Daemon, telling_reward, total
from tests.support.experiences import made_up, made_up_vl

NAN, INF = float("nan"), float("inf")
VOCABULARY = 99


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
    (put("base_action_log_probs", (1, 0), -INF), "not_finite", "row 1: base_action_log_probs is -inf in column 0 of 1"),
    (put("values", (2, 1), INF), "not_finite", "row 2: values is inf in column 1 of 2"),
    (put("advantages", (0, 0), NAN), "not_finite", "row 0: advantages is nan"),
    (put("kl", (0, 0), NAN), "not_finite", "row 0: kl is nan"),
    (put("reward", (2,), NAN), "not_finite", "row 2: reward is nan"),
    (replace("action_entropy", torch.full((3, 3), NAN)), "not_finite", "row 0: action_entropy is nan"),
    (replace("behaviour_log_probs", torch.full((3, 3), INF)), "not_finite", "row 0: behaviour_log_probs is inf"),
    (replace("returns", torch.tensor([0.0, 0.0, INF])), "not_finite", "row 2: returns is inf"),
    (info("score", torch.tensor([0.0, NAN, 0.0])), "not_finite", "info['score'] is nan at (1,)"),
    (put("sequences", (1, 2), VOCABULARY), "vocabulary", "row 1: sequences has token 99 at position 1"),
    (put("sequences", (0, 0), -1), "vocabulary", "row 0: sequences has token -1 at position 0; the vocabulary has 99"),
    (put("action_mask", (0, 1), 0), "mask", "row 0: its response has a token of an environment, and there is none"),
]


@pytest.mark.parametrize(
    ("change", "reason", "detail"), FAULTS, ids=[f"{reason} {detail}" for _, reason, detail in FAULTS]
)
def test_each_fault_is_named_by_its_reason_field_and_row(
    change: Callable[[Experience], None], reason: FaultReason, detail: str
) -> None:
    experience = three_rows()
    assert find_fault(RaggedRows.of(experience), vocabulary=VOCABULARY) is None
    change(experience)

    fault = find_fault(RaggedRows.of(experience), vocabulary=VOCABULARY)

    assert fault is not None and fault.reason == reason
    assert fault.detail.startswith(detail)


def made_of(**changes: Any) -> RaggedRows:
    """Two rows of 3 and 2 tokens, of which 2 and 1 are actions."""
    given: dict[str, Any] = {
        "tokens": torch.arange(5, 10), "lengths": [3, 2], "counts": [2, 1], "actions": {"values": torch.zeros(3)},
        "rows": {"reward": torch.zeros(2)}, "info": {"score": torch.zeros(2)},
    }  # fmt: skip
    return RaggedRows.of_columns(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": torch.arange(4)}, ShapeError, r"sequences has shape \(4,\), expected 5 values"),
        ({"actions": {"values": torch.zeros(2, 2)}}, ShapeError, r"values has shape \(2, 2\), expected 3 values"),
        ({"rows": {"reward": torch.zeros(3)}}, ShapeError, r"reward has shape \(3,\), expected 2 values"),
        ({"info": {"score": torch.tensor(0.5)}}, ShapeError, r"info\.score has shape \(\), expected 2 values"),
        ({"info": {"score": torch.zeros(2, dtype=torch.complex64)}}, FieldError, "info.score: complex64 cannot be"),
    ],
)
def test_columns_that_disagree_make_no_rows(changes: Any, error: type[Exception], message: str) -> None:
    assert find_fault(made_of(), vocabulary=VOCABULARY) is None

    with pytest.raises(error, match=message):
        made_of(**changes)


@pytest.mark.parametrize("counts", [[3, 1], [2, 0]], ids=["a row without a prompt", "a row without a response"])
def test_a_row_without_prompt_or_response_is_refused(counts: list[int]) -> None:
    rows = made_of(counts=counts, actions={})

    fault = find_fault(rows, vocabulary=VOCABULARY)

    row = 0 if counts[0] == 3 else 1
    assert fault is not None
    assert (fault.reason, fault.detail) == ("mask", f"row {row}: {counts[row]} of its {3 - row} tokens are a response")


def test_observations_between_actions_pass_where_there_is_an_environment() -> None:
    experience = three_rows()
    put("action_mask", (0, 1), 0)(experience)

    assert find_fault(RaggedRows.of(experience), vocabulary=VOCABULARY, has_observations=True) is None


@pytest.mark.parametrize(
    ("mask", "detail"),
    [
        ([1, 0, 1], "row 0: its response ends with a token of its environment"),
        ([0, 1, 1], "row 0: its response begins with a token of its environment"),
        ([1, 1, 0], "row 1: its response begins with a token of its environment"),
    ],
)
def test_other_masks_are_refused_with_an_environment_too(mask: list[int], detail: str) -> None:
    rows = made_of(actions={"action_mask": torch.tensor(mask, dtype=torch.bool)})

    fault = find_fault(rows, vocabulary=VOCABULARY, has_observations=True)

    assert fault is not None and (fault.reason, fault.detail) == ("mask", detail)


def test_an_observation_may_have_no_number() -> None:
    experience = three_rows()
    put("action_mask", (0, 1), 0)(experience)
    put("action_log_probs", (0, 1), NAN)(experience)

    assert find_fault(RaggedRows.of(experience), vocabulary=VOCABULARY, has_observations=True) is None


@pytest.mark.parametrize("ppo", [True, False])
@pytest.mark.parametrize("make", [made_up, made_up_vl])
def test_experience_as_a_maker_leaves_it_passes(make: Callable[..., Experience], ppo: bool) -> None:
    for seed in range(20):
        assert find_fault(RaggedRows.of(make(5, seed=seed, ppo=ppo)), vocabulary=VOCABULARY) is None


def test_a_pixel_that_is_no_number_is_refused() -> None:
    experience: Any = made_up_vl(4, seed=3)
    experience.pixel_values[2, 1] = NAN

    fault = find_fault(RaggedRows.of(experience), vocabulary=VOCABULARY)

    assert fault is not None and fault.reason == "not_finite"
    assert fault.detail.startswith("row 0: pixel_values is nan at (2, ")


def test_every_reason_of_the_gate_is_in_the_table() -> None:
    """The others are those of rows that cannot be made (`made_of`, and `test_worker` for the ticket)."""
    assert {reason for _, reason, _ in FAULTS} == set(get_args(FaultReason)) - {"malformed", "lengths"}


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
