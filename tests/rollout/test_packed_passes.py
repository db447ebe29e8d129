"""Log-prob and value passes of a worker over rows end to end, where a card has a kernel: the numbers of padded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from pipeline.errors import FieldError
from pipeline.models import packing
from pipeline.models.critic import Critic
from pipeline.models.packing import pack_scored_rows, packs_scored_rows
from pipeline.rollout.environment.turn_rows import TurnColumns
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.rows import Rows
from tests.models.test_vision_inputs import ACTIONS, MIXED, answered
from tests.rollout.test_loader import rollers  # noqa: F401 - a fixture
from tests.rollout.test_shared_prefix import passes, rows
from tests.support import tiny, tiny_vision
from tests.support.told import Told
from tests.trainer.test_out_of_memory import Device

CPU = torch.device("cpu")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for which packed rows have a kernel, as a card; the attention itself is that of the CPU."""
    monkeypatch.setattr(packing, "kernel_of", lambda *_: "torch varlen")


def packed(model: Any) -> Any:
    pack_scored_rows([model], CPU)
    assert packs_scored_rows(model)
    return model


def critic_of(actor: Any) -> Critic:
    critic = Critic.from_actor(actor)
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def with_observations(given: Rows) -> Rows:
    """The rows, of whose responses some tokens are answers of an environment."""
    of_row = torch.zeros(len(given))
    observed = torch.rand(int(given.lengths.sum()), generator=torch.Generator().manual_seed(1)) < 0.4
    observed[np.append(0, np.cumsum(given.lengths)[:-1])] = False
    return Rows(
        given.tokens, given.prompts, given.lengths, given.prompt_columns, given.num_actions, tiny.PAD, given.cut,
        turns=TurnColumns(observed, torch.zeros(len(observed)), of_row.long()),
    )  # fmt: skip


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.gemma3])
@pytest.mark.parametrize("change", [lambda given: given, with_observations], ids=["", "turns"])
@torch.no_grad()
def test_log_probs_and_values_are_those_of_padded_passes(build: Any, change: Any) -> None:
    given = change(rows([4, 3, 1]))
    model, critic = packed(build()), packed(critic_of(build()))
    expected = passes().log_probs("m", build(), given, 0.7)
    expected_values = passes().values(critic_of(build()), given, coati=False)
    seen = Device(model).passes

    found = passes().log_probs("m", model, given, 0.7)

    assert seen[-1] == int(given.totals.sum()) - len(given), "no padding, and no token after the last action"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(passes().values(critic, given, coati=False), expected_values, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_the_host_waits_for_a_card_after_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    given, models = rows([4, 3, 1]), [packed(tiny.llama()), packed(critic_of(tiny.llama()))]
    passes_done = Device(models[0]).passes, Device(models[1].backbone).passes
    copies, copied = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: copies.append([*map(len, passes_done)]) or copied(self))
    few = ModelPasses(None, None, True, logits_forward_tokens=20)

    few.log_probs("m", models[0], given, 1.0)
    few.values(models[1], given, coati=False)

    of_actor, of_critic = map(len, passes_done)
    assert copies == [[of_actor, 0]] * 4 + [[of_actor, of_critic]] * 4


@torch.no_grad()
def test_padded_values_are_of_rows_of_similar_length_together() -> None:
    given, critic = rows([4, 3, 1]), critic_of(tiny.llama())
    expected = passes().values(critic, given, coati=False)
    seen = Device(critic.backbone).passes

    found = passes(most_rows=2).values(critic, given, coati=False)

    lengths = sorted(given.totals.tolist())
    assert seen == [2 * longest for longest in lengths[1::2]] and lengths != given.totals.tolist()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def with_images() -> Rows:
    made = tiny_vision.prompts(*MIXED)
    ids, mask = answered(made, [5, 2, 4, 1])
    lengths = mask[:, -ACTIONS:].sum(dim=1).numpy()
    prompts = made["attention_mask"].sum(dim=1).numpy()
    return Rows(
        ids[mask != 0], prompts, lengths, made["input_ids"].shape[1], ACTIONS, tiny_vision.PAD,
        torch.zeros(len(lengths), dtype=torch.bool), vision=tiny_vision.vision_of(made),
    )  # fmt: skip


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_a_model_of_text_alone_is_not_shown_images_end_to_end_either() -> None:
    text = tiny.llama()
    text.resize_token_embeddings(len(tiny_vision.SYMBOLS))
    reference, critic = packed(text), packed(critic_of(text))

    with pytest.raises(FieldError, match="images for a LlamaForCausalLM: not a vision-language model"):
        passes().log_probs("initial_model", reference, with_images(), 1.0)
    with pytest.raises(FieldError, match="images for a Critic: not a vision-language model"):
        passes().values(critic, with_images(), coati=False)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_rows_with_images_are_end_to_end_too() -> None:
    given = with_images()
    expected = passes().log_probs("m", tiny_vision.model(), given, 1.0)

    found = passes().log_probs("m", packed(tiny_vision.model()), given, 1.0)

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_a_pass_has_a_bound_of_tokens_and_one_without_memory_is_run_again_in_halves() -> None:
    model, given = packed(tiny.llama()), rows([4, 3, 4, 1])
    expected = passes().log_probs("m", model, given, 1.0)
    device, told = Device(model, most_tokens=30), Told()

    found = ModelPasses(None, None, True, told, logits_forward_tokens=50).log_probs("m", model, given, 1.0)

    assert told.counted["out_of_memory"] and device.passes[-1] <= 30 < device.passes[0] <= 50
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_without_a_kernel_and_for_a_model_that_cannot_passes_stay_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    pack_scored_rows([model], CPU)
    assert not packs_scored_rows(model) and model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(packing, "kernel_of", lambda *_: "torch varlen")
    other = tiny.with_windows_in_masks_alone(tiny.mistral())

    pack_scored_rows([other], CPU)

    assert not packs_scored_rows(other) and other.config._attn_implementation == "sdpa"
    without_attention = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))
    pack_scored_rows([without_attention], CPU)
    assert not packs_scored_rows(without_attention)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("wanted", "log_probs", "actor", "reference"),
    [(None, "worker", True, True), (True, None, False, True), (False, "worker", False, False)],
    ids=str,
)
def test_the_models_whose_log_probs_a_worker_computes_hold_rows_end_to_end(
    rollers: Any,  # noqa: F811
    wanted: bool | None,
    log_probs: str | None,
    actor: bool,
    reference: bool,
) -> None:
    roller, _, _ = rollers(rollout={"log_probs": log_probs}, trainer={"packing": wanted, "shared_prefix": False})

    assert packs_scored_rows(roller.maker.actor) == actor
    assert packs_scored_rows(roller.maker.initial_model) == reference
