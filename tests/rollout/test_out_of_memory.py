"""A worker's device without memory for a ticket: generation and forward passes go on in halves, to the same rows."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from pipeline.errors import DeviceMemoryError
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.functions import FunctionReward
from tests.support import tiny
from tests.support.told import Told

IDS = torch.tensor([[5, 6, 7], [7, 8, 9], [0, 4, 3], [0, 0, 2]])
MASK = (IDS != 0).long()


class Device:
    """Raises OutOfMemoryError in forward passes of a model over more than some rows, or more than some tokens."""

    def __init__(self, model: torch.nn.Module, *, most_rows: int = 2**30, most_tokens: int = 2**30) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._most_rows, self._most_tokens = most_rows, most_tokens
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, words: Any, keywords: dict[str, Any]) -> None:
        ids = keywords["input_ids"]
        self.shapes.append((ids.shape[0], ids.shape[1]))
        if len(ids) > self._most_rows or ids.numel() > self._most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")


def new_maker(told: Told | None = None, **changes: Any) -> NaiveExperienceMaker:
    settings: dict[str, Any] = {
        "use_grpo": True,
        "num_generation": 2,
        "inference_batch_size": None,
        "logits_forward_batch_size": None,
        "telemetry": told or Told(),
        **changes,
    }
    critic = None if settings["use_grpo"] else Critic.from_actor(tiny.llama())
    rewards = FunctionReward([lambda ids, mask, response_end, **_: float(response_end)], None)
    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=1)
    return NaiveExperienceMaker(tiny.llama(), critic, rewards, tiny.llama(seed=4), tokenizer, **settings)


def made_by(maker: NaiveExperienceMaker) -> Experience:
    return maker.make_experience(IDS, MASK, max_length=9, seed=3)


def assert_same(one: Experience, other: Experience) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for name in ("action_log_probs", "base_action_log_probs", "advantages", "reward", "values"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-5, rtol=0), name


def test_generation_without_memory_goes_on_with_half_the_rows_and_samples_the_same_tokens() -> None:
    told = Told()
    maker = new_maker(told)
    device = Device(maker.actor, most_rows=3)

    made = made_by(maker)

    assert_same(made, made_by(new_maker()))
    assert told.counted["out_of_memory"].count("generate") == 2, "8 rows, then 4, then 2"
    assert max(rows for rows, _ in device.shapes[-4:]) <= 2

    told.counted["out_of_memory"].clear()
    made_by(maker)
    assert "generate" not in told.counted["out_of_memory"], "the halved bound stays for the next ticket"


@pytest.mark.parametrize(("place", "grpo"), [("initial_model", True), ("initial_model", False), ("critic", False)])
def test_a_forward_pass_without_memory_goes_on_in_halves(place: str, grpo: bool) -> None:
    told = Told()
    maker = new_maker(told, use_grpo=grpo)
    model = getattr(maker, place)
    backbone = model.base_model if place == "initial_model" else model.backbone
    device = Device(backbone, most_tokens=20)

    made = made_by(maker)

    assert_same(made, made_by(new_maker([], use_grpo=grpo)))
    assert set(told.counted["out_of_memory"]) == {"pass"}
    assert device.shapes[-1][0] * device.shapes[-1][1] <= 20


def test_a_row_that_does_not_fit_alone_ends_the_worker_and_names_the_key() -> None:
    maker = new_maker()
    Device(maker.actor, most_rows=0)
    with pytest.raises(DeviceMemoryError, match=r"no memory to generate one row.*rollout\.inference_batch_size"):
        made_by(maker)

    maker = new_maker()
    Device(maker.initial_model.base_model, most_tokens=3)
    with pytest.raises(DeviceMemoryError, match=r"one row of \d+ tokens: .*rollout\.logits_forward_batch_size"):
        made_by(maker)


@pytest.mark.parametrize(("place", "grpo"), [("initial_model", True), ("critic", False)])
def test_forward_passes_have_the_tokens_that_are_configured(place: str, grpo: bool) -> None:
    """Those of log-probs and values; a row that is longer is a pass of its own."""
    for most in (30, 5):
        maker = new_maker(use_grpo=grpo, logits_forward_tokens=most)
        model = getattr(maker, place)
        device = Device(model.base_model if place == "initial_model" else model.backbone)

        made = made_by(maker)

        assert_same(made, made_by(new_maker([], use_grpo=grpo)))
        passes = [(rows, width) for rows, width in device.shapes if width > 2]
        assert len(passes) >= 2
        assert all(rows == 1 or rows * width <= most for rows, width in passes), passes
        assert any(rows > 1 for rows, _ in passes) == (most == 30)


def test_forward_passes_of_a_ticket_are_cut_by_tokens_with_a_heartbeat_between_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = made_by(new_maker())
    # As with a model of some billion parameters on a CPU: 20 tokens a pass.
    monkeypatch.setattr("pipeline.rollout.model_passes.default_tokens", lambda *_, **__: 20)
    told = Told()
    maker = new_maker(told)
    device = Device(maker.initial_model.base_model)

    made = made_by(maker)

    assert_same(made, whole)
    passes = device.shapes[-len([shape for shape in device.shapes if shape != (1, 2)]) :]
    assert max(rows * width for rows, width in passes) <= 20 and len(passes) >= 3
    of_the_reference = [done for done, rows, tokens in told.beats if rows == 8 and tokens is None][-len(passes) :]
    assert of_the_reference[-1] == 8 and len(set(of_the_reference)) == len(passes)
