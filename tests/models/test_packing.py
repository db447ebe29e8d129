"""A packed batch gives the log-probs, values, losses and gradients of the padded one; its rows are isolated."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.advantages import k3_kl
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import BufferItem, Experience, ExperienceVL
from pipeline.models import packing
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.packing import (
    OWN_ATTENTION,
    packed_action_log_probs,
    packed_action_values,
    packed_attention,
    prepare_packing,
)
from pipeline.trainer.loss.losses import masked_mean, policy_loss, value_loss
from tests.models.test_chunked_log_probs import gemma2
from tests.models.test_varlen_attention import critic_of
from tests.support import tiny
from tests.support.experiences import made_up

BUILDS = [tiny.llama, tiny.gpt2]
ATTENTIONS = ["eager", "sdpa"]


def experience_of(algorithm: Literal["ppo", "grpo"], seed: int = 0) -> Experience:
    """Rows of different lengths whose action masks have holes, with random values."""
    experience = made_up(6, prompt=7, actions=9, seed=seed, ppo=algorithm == "ppo", holes=True)
    experience.sequences = experience.sequences % (tiny.VOCABULARY_SIZE - 2) + 2
    return experience


@torch.no_grad()
def sampled_by_another(actor: PreTrainedModel, experience: Experience, temperature: float) -> Experience:
    """The rows with the log-probs of policies close to this one, so that ratios spread and some are clipped."""
    assert experience.attention_mask is not None
    log_probs = action_log_probs(actor, experience.sequences, experience.attention_mask, 9, temperature=temperature)
    noise = 0.2 * torch.randn(2, *log_probs.shape, generator=torch.Generator().manual_seed(1))
    return replace(experience, action_log_probs=log_probs + noise[0], base_action_log_probs=log_probs + noise[1])


def both_forms(experience: Experience) -> tuple[Experience, Experience]:
    """The same rows as a padded and as a packed batch."""
    items = remove_padding_in_sequences(split_experience_batch(experience))
    return make_experience_batch(items), make_experience_batch(items, packing_samples=True)


def flat(rows: Tensor | list[Tensor] | None) -> Tensor:
    """Packed columns of all rows end to end, as the losses take them."""
    assert isinstance(rows, list)
    return torch.cat(rows)


def per_action(advantages: Tensor | list[Tensor] | None, mask: Tensor | list[Tensor]) -> Tensor:
    """GRPO has one advantage a row."""
    assert advantages is not None
    if isinstance(mask, Tensor):
        assert isinstance(advantages, Tensor)
        return advantages.reshape(len(mask), -1).expand(mask.shape)
    return torch.cat([advantages[row].expand(len(mask[row])) for row in range(len(mask))])


def losses_of(
    experience: Experience, log_probs: Tensor, values: Tensor | None, columns: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Policy loss, KL to the reference, with PPO the value loss, and their sum, as the learner adds them up."""
    e = experience
    mask = columns(e.action_mask)
    advantages = per_action(e.advantages, e.action_mask)  # type: ignore[arg-type]
    policy = policy_loss(log_probs, columns(e.action_log_probs), advantages, mask, 0.2)
    log_ratios = (log_probs - columns(e.base_action_log_probs)).masked_fill(~mask, 0.0)
    losses = {"policy": policy.loss, "kl": 0.05 * masked_mean(k3_kl(log_ratios, mask), mask)}
    if values is not None:
        old = columns(e.values)
        losses["value"] = value_loss(values, old, advantages + old, mask, 0.2)
    return {**losses, "total": torch.stack(list(losses.values())).sum()}, policy.clipped


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@torch.no_grad()
def test_log_probs_of_a_packed_and_a_padded_batch_agree(build: Any, attention: str, temperature: float) -> None:
    model = build()
    model.set_attn_implementation(attention)
    padded, packed = both_forms(experience_of("ppo"))

    log_probs = packed_action_log_probs(model, packed, temperature=temperature)

    mask = padded.action_mask
    assert mask is not None and padded.attention_mask is not None and isinstance(packed.action_mask, list)
    expected = action_log_probs(model, padded.sequences, padded.attention_mask, mask.shape[1], temperature=temperature)
    assert [len(row) for row in log_probs] == [len(row) for row in packed.action_mask]
    assert len({len(row) for row in log_probs}) > 2
    for row, packed_row in enumerate(log_probs):
        torch.testing.assert_close(packed_row, expected[row, -len(packed_row) :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_losses_and_gradients_of_a_packed_and_a_padded_batch_agree(
    build: Any, algorithm: Literal["ppo", "grpo"], temperature: float
) -> None:
    actor = build()
    critic = critic_of(actor)
    padded, packed = both_forms(sampled_by_another(actor, experience_of(algorithm), temperature))
    results = []
    for experience in (padded, packed):
        models = copy.deepcopy(actor), copy.deepcopy(critic)
        values = None
        if experience is padded:
            assert padded.attention_mask is not None and padded.action_mask is not None
            columns: Any = lambda field: field  # noqa: E731
            inputs = padded.sequences, padded.attention_mask, padded.action_mask.shape[1]
            log_probs = action_log_probs(models[0], *inputs, temperature=temperature)
            values = action_values(models[1], *inputs) if algorithm == "ppo" else None
        else:
            columns = flat
            log_probs = flat(packed_action_log_probs(models[0], packed, temperature=temperature))
            values = flat(packed_action_values(models[1], packed)) if algorithm == "ppo" else None
        losses, clipped = losses_of(experience, log_probs, values, columns)
        losses["total"].backward()
        gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        results.append((losses, int(clipped.sum()), gradients))

    (expected, clipped, wanted), (losses, packed_clipped, gradients) = results
    assert losses.keys() == expected.keys()
    for name in expected:
        assert losses[name].item() == pytest.approx(expected[name].item(), rel=1e-6, abs=1e-6), name
    assert packed_clipped == clipped > 0
    assert len(gradients) == len(wanted) > 0
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_no_row_sees_another(build: Any, attention: str) -> None:
    """Other tokens in all rows but one leave that row equal bit for bit; its own first token changes it."""
    model = build()
    model.set_attn_implementation(attention)
    critic = critic_of(model)
    _, packed = both_forms(experience_of("ppo"))
    before = packed_action_log_probs(model, packed), packed_action_values(critic, packed)

    for row in range(len(packed.sequences)):
        others = [ids if at == row else ids % 20 + 3 for at, ids in enumerate(packed.sequences)]
        changed: Any = replace(packed, sequences=others)
        after = packed_action_log_probs(model, changed), packed_action_values(critic, changed)
        for then, now in zip(before, after, strict=True):
            assert torch.equal(now[row], then[row])

    own: Any = replace(packed, sequences=[torch.cat([ids[:1] % 20 + 3, ids[1:]]) for ids in packed.sequences])
    assert not any(
        torch.equal(now, then) for now, then in zip(packed_action_log_probs(model, own), before[0], strict=True)
    )


@pytest.mark.parametrize("rows", [(0, 1), (1,)])
@torch.no_grad()
def test_a_row_without_an_action_has_no_log_prob_and_changes_no_other(rows: tuple[int, ...]) -> None:
    model = tiny.llama()
    items = [
        BufferItem(sequences=torch.tensor([5, 3, 7]), action_mask=torch.tensor([True, True])),
        BufferItem(sequences=torch.tensor([9]), action_mask=torch.zeros(0, dtype=torch.bool)),
    ]

    found = packed_action_log_probs(model, make_experience_batch([items[row] for row in rows], packing_samples=True))

    alone = packed_action_log_probs(model, make_experience_batch(items[:1], packing_samples=True))
    expected = [alone[0], torch.empty(0)]
    for values, row in zip(found, rows, strict=True):
        torch.testing.assert_close(values, expected[row], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_model_that_caps_its_logits_keeps_them_when_packed() -> None:
    model = gemma2()
    padded, packed = both_forms(experience_of("ppo"))

    log_probs = packed_action_log_probs(model, packed)

    assert padded.attention_mask is not None
    expected = action_log_probs(model, padded.sequences, padded.attention_mask, 9)
    for row, packed_row in enumerate(log_probs):
        torch.testing.assert_close(packed_row, expected[row, -len(packed_row) :], atol=1e-5, rtol=0)


def test_a_model_whose_rows_would_see_each_other_is_refused() -> None:
    """Bloom takes no position ids: its positions continue through all rows."""
    config = BloomConfig(vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, n_layer=1, n_head=2)
    _, packed = both_forms(experience_of("ppo"))

    for seed in range(20):
        torch.manual_seed(seed)
        model = BloomForCausalLM(config).eval()
        for _ in range(2):
            with pytest.raises(FieldError, match="BloomModel lets a packed row attend to the row before it"):
                packed_action_log_probs(model, packed)


def test_a_model_without_a_plain_head_is_tested_too() -> None:
    class Sum(nn.Module):
        def forward(self, input_ids: Tensor) -> Any:
            return SimpleNamespace(logits=functional.one_hot(input_ids, tiny.VOCABULARY_SIZE).float().cumsum(1))

    _, packed = both_forms(experience_of("ppo"))

    with pytest.raises(FieldError, match="Sum lets a packed row attend to the row before it"):
        packed_action_log_probs(Sum(), packed)


@pytest.mark.parametrize(
    ("build", "size", "slides"), [(tiny.gpt2, 8, False), (tiny.gemma3, 8, True), (tiny.qwen2, 8, False)]
)
def test_the_kernel_is_that_of_the_models_heads_dtype_and_windows(
    build: Any, size: int, slides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(packing, "kernel_of", lambda *each: asked.append(each) or "a kernel")
    model, device = build().bfloat16(), torch.device("cpu")
    assert packed_attention(model, device) == OWN_ATTENTION
    assert prepare_packing([model], device)

    assert packed_attention(Critic.from_actor(model), device) == "a kernel"
    assert asked[-1] == (device, torch.bfloat16, size, slides)


def test_dropout_is_not_taken_for_a_leak() -> None:
    model = tiny.gpt2().train()
    _, packed = both_forms(experience_of("ppo"))

    assert len(packed_action_log_probs(model, packed)) == 6


def test_what_cannot_be_packed_is_refused() -> None:
    model = tiny.llama()
    padded, packed = both_forms(experience_of("ppo"))
    row = BufferItem(sequences=torch.tensor([5, 3]), action_mask=torch.tensor([True, True]))
    no_prompt = make_experience_batch([row], packing_samples=True)

    with pytest.raises(FieldError, match="the batch is padded"):
        packed_action_log_probs(model, padded)
    with pytest.raises(FieldError, match="action_mask is missing"):
        packed_action_log_probs(model, replace(packed, action_mask=None))
    with pytest.raises(FieldError, match="vision-language"):
        packed_action_log_probs(model, ExperienceVL(**vars(packed)))
    with pytest.raises(ShapeError, match="row 0: 2 actions of 2 tokens"):
        packed_action_log_probs(model, no_prompt)
    with pytest.raises(ValueError, match="temperature is 0"):
        packed_action_log_probs(model, packed, temperature=0)
