"""Logits in float32 from models of 16 bits: exact, differentiable, and only where the spread of log-probs asks."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.config.sections import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import float32_logits
from pipeline.models.float32_logits import compute_in_float32, log_prob_spread, use_float32_logits
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import adapt
from pipeline.rollout import loader
from pipeline.rollout.loader import with_float32_logits
from pipeline.trainer import process
from tests.support import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOKENS = [5, 9, 3, 17, 8, 11, 2, 14]


def confident(**changes: int) -> Any:
    """A bfloat16 model with logits of 20 and more, whose steps are 0.125."""
    model = tiny.llama(tie_word_embeddings=False, **changes)
    head = model.lm_head
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([TOKENS])).last_hidden_state
        head.weight *= 40 / head(states).abs().amax()
    return model.bfloat16()


def rows() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return torch.randint(2, tiny.VOCABULARY_SIZE, (6, 24), generator=draws), torch.ones(6, 24, dtype=torch.int64)


def exact_log_probs(model: Any, sequences: Tensor, mask: Tensor, actions: int) -> Tensor:
    """From the model's own hidden states, everything after them in float64."""
    states = model.model(input_ids=sequences, attention_mask=mask).last_hidden_state[:, -actions - 1 : -1]
    logits = states.double() @ model.lm_head.weight.double().t()
    return torch.log_softmax(logits, dim=-1).gather(-1, sequences[:, -actions:, None]).squeeze(-1)


@torch.no_grad()
def test_log_probs_are_those_of_float64_from_the_same_states() -> None:
    model, (sequences, mask) = confident(), rows()
    exact = exact_log_probs(model, sequences, mask, 16)
    before = action_log_probs(model, sequences, mask, 16)

    compute_in_float32(model)

    after = action_log_probs(model, sequences, mask, 16)
    assert (before - exact).abs().max() > 0.03
    torch.testing.assert_close(after.double(), exact, atol=1e-4, rtol=0)


def test_gradients_have_16_bits_and_are_at_most_5_percent_farther_from_the_exact_ones() -> None:
    plain, (sequences, mask) = confident(), rows()
    exact = copy.deepcopy(plain).double()
    model = copy.deepcopy(plain)
    compute_in_float32(model)
    gradients = []
    for each in (plain, model, exact):
        action_log_probs(each, sequences, mask, 16).mean().backward()
        gradients.append(torch.cat([one.grad.flatten().double() for one in each.parameters()]))

    of_plain, of_model, of_exact = gradients
    assert all(one.grad.dtype == torch.bfloat16 for one in model.parameters())
    assert (of_model - of_exact).norm() <= 1.05 * (of_plain - of_exact).norm()
    assert (of_model - of_exact).norm() < 0.1 * of_exact.norm()


def test_a_bias_has_its_gradient_too() -> None:
    head = nn.Linear(4, 6).bfloat16()
    states = torch.randn(3, 4).bfloat16().requires_grad_()
    expected = (states.float() @ head.weight.float().t() + head.bias.float()).detach()
    head.get_output_embeddings = lambda: head  # type: ignore[assignment]

    compute_in_float32(head)
    head(states).sum().backward()

    assert torch.equal(head(states), expected)
    assert head.bias.grad is not None and head.bias.grad.tolist() == [3.0] * 6


@torch.no_grad()
def test_adapters_of_the_head_stay_and_their_change_is_not_rounded_to_16_bits() -> None:
    model, draws = confident(), torch.Generator().manual_seed(3)
    adapt(model, ModelConfig(lora_rank=2, lora_targets=["lm_head"]), seed=1)
    compute_in_float32(model)
    head = model.lm_head

    head.lora_B.weight.copy_(torch.randn(head.lora_B.weight.shape, generator=draws))

    states = model.model(input_ids=rows()[0]).last_hidden_state
    base, change = (input.float() @ layer.weight.float().t()
                    for input, layer in ((states, head), (head.lora_A(states), head.lora_B)))  # fmt: skip
    assert change.abs().max() > 1.0
    torch.testing.assert_close(model(input_ids=rows()[0]).logits, base + head.lora_scale * change, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_spread_is_what_rounding_makes_of_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_prob_spread(tiny.llama(), TOKENS, CPU) < 1e-4

    def made_up(change: float) -> Any:
        # The second pass has more columns.
        return lambda model, ids, mask, actions, **_: torch.full((len(ids), actions), change * (ids.shape[1] > 128))

    monkeypatch.setattr(float32_logits, "action_log_probs", made_up(0.0))
    assert log_prob_spread(tiny.llama(), TOKENS, CPU) == 0
    monkeypatch.setattr(float32_logits, "action_log_probs", made_up(0.09531))
    assert log_prob_spread(tiny.llama(), TOKENS, CPU) == pytest.approx(0.1, abs=1e-5), "log 1.1"


@pytest.mark.parametrize(("spread", "asked"), [(0.019, False), (0.021, True)])
def test_on_a_card_the_spread_decides(
    spread: float, asked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(float32_logits, "log_prob_spread", lambda *_, **__: spread)
    model = confident()

    with caplog.at_level(logging.INFO):
        used = use_float32_logits(model, TOKENS, GPU, dtype="bfloat16", given=None)

    assert used == asked
    assert model(input_ids=torch.tensor([TOKENS])).logits.dtype == (torch.float32 if asked else torch.bfloat16)
    assert f"spread={spread:.4f} float32_logits={asked}" in caplog.text


@pytest.mark.parametrize(
    ("device", "dtype", "given", "tokens"),
    [(CPU, "bfloat16", None, TOKENS), (GPU, "float32", None, TOKENS), (GPU, "float32", True, TOKENS),
     (GPU, "bfloat16", False, TOKENS), (GPU, "bfloat16", None, [5])],
    ids=["on a CPU", "float32", "float32 by key", "not by key", "no tokens"],
)  # fmt: skip
def test_nothing_is_measured_or_changed(
    device: torch.device, dtype: str, given: bool | None, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_logits, "log_prob_spread", None)
    model = confident()

    assert not use_float32_logits(model, tokens, device, dtype=dtype, given=given)

    assert "forward" not in vars(model.lm_head)


def test_rows_too_short_for_a_response_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_logits, "log_prob_spread", None)

    assert not use_float32_logits(confident(), TOKENS, GPU, dtype="bfloat16", given=None, most_columns=3)


@torch.no_grad()
def test_the_spread_is_that_of_the_runs_temperature_lengths_and_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for a backward pass either. The device has no memory, so that it is not a CPU."""
    seen: list[tuple[int, float, bool]] = []
    inside: list[int] = []

    def computed(model: Any, ids: Tensor, mask: Tensor, actions: int, *, temperature: float) -> Tensor:
        seen.append((ids.shape[1], temperature, torch.is_grad_enabled()))
        return torch.zeros(len(ids), actions)

    def enter(call: Any) -> Tensor:
        inside.append(1)
        return call()  # type: ignore[no-any-return]

    monkeypatch.setattr(float32_logits, "action_log_probs", computed)
    model: Any = confident()
    model.computed, model.reshard = enter, lambda: None
    with torch.enable_grad():
        use_float32_logits(
            model, TOKENS, torch.device("meta"), dtype="bfloat16", given=None, temperature=0.7, most_columns=20
        )

    assert seen == [(20, 0.7, False), (40, 0.7, False), (40, 0.7, False)]
    assert len(inside) == 3


def test_a_model_without_a_linear_head_is_refused_only_if_the_key_asks() -> None:
    model = nn.Linear(3, 3)

    assert not use_float32_logits(model, TOKENS, GPU, dtype="bfloat16", given=None)
    with pytest.raises(ConfigError, match=r"model.float32_logits: a Linear has no linear layer"):
        use_float32_logits(model, TOKENS, CPU, dtype="bfloat16", given=True)
    # A head of another kind, with a weight all the same.
    model.get_output_embeddings = lambda: nn.Embedding(3, 3)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"model.float32_logits: a Linear has no linear layer"):
        use_float32_logits(model, TOKENS, CPU, dtype="bfloat16", given=True)


def test_the_trainer_computes_with_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def learner(trainer: Any, algorithm: str, actor: Any, *_: Any, **__: Any) -> None:
        raise Reached(actor(input_ids=torch.tensor([TOKENS])).logits.dtype)

    for name, value in (
        ("Learner", learner),
        ("TrainerMetrics", MagicMock()),
        ("whole_models", lambda config, device: {"actor": confident()}),
        ("load_tokenizer", lambda path: None),
        ("refuse_large_tokenizer", lambda *_: None),
        ("first_tokens", lambda *_: TOKENS),
    ):
        monkeypatch.setattr(process, name, value)
    config = Config.model_validate({"model": {"dtype": "bfloat16", "float32_logits": True}})
    context: Any = SimpleNamespace(metrics=None, index=0)

    with pytest.raises(Reached, match="float32"):
        process.new_trainer(config, context, MagicMock())


def test_trainer_and_worker_measure_at_the_runs_temperature_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def measure(*_: Any, temperature: float, most_columns: int, **__: Any) -> bool:
        asked.append((temperature, most_columns))
        return False

    for module in (process, loader):
        monkeypatch.setattr(module, "use_float32_logits", measure)
    monkeypatch.setattr(process, "Learner", MagicMock())
    config = Config.model_validate({"rollout": {"temperature": 0.7, "max_length": 20}})

    process.new_learner(config, {"actor": nn.Linear(2, 2)}, TOKENS, CPU)
    with_float32_logits(config, confident(), TOKENS, CPU)

    assert asked == [(0.7, 20)] * 2


def test_a_worker_follows_the_built_in_trainer_and_not_an_external_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_logits, "log_prob_spread", lambda *_, **__: 0.5)

    def used(**sections: Any) -> bool:
        config = Config.model_validate({"model": {"dtype": "bfloat16"}, **sections})
        return with_float32_logits(config, confident(), TOKENS, GPU)

    assert used()
    assert not used(trainer={"kind": "external"})
    assert used(trainer={"kind": "external"}, model={"dtype": "bfloat16", "float32_logits": True})
