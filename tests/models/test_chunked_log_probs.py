"""The bound on logits in memory, and the models whose head runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2LMHeadModel, PreTrainedModel

from pipeline.models import chunked_log_probs
from pipeline.models.chunked_log_probs import plain_head
from pipeline.models.log_probs import action_log_probs
from pipeline.rollout.maker import NaiveExperienceMaker
from tests.support import tiny

V = tiny.VOCABULARY_SIZE
ROWS, COLUMNS, ACTIONS = 6, 26, 20
CPU = torch.device("cpu")


class MostPositions(TorchDispatchMode):
    """Records every tensor of any operation, backward passes included; `seen` is the longest with V columns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[-1] == V:
                self.seen = max(self.seen, tensor.numel() // V)
        return result


@contextmanager
def at_most_logits_of(positions: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The head's weight is V x 16, and transposed it looks like the logits of 16 positions.
    monkeypatch.setattr(chunked_log_probs, "CHUNK_ELEMENTS", positions * V)
    with MostPositions() as most:
        yield
    assert 0 < most.seen <= max(positions, 16)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(2, V, (ROWS, COLUMNS), generator=generator)
    return sequences, (torch.arange(COLUMNS) >= torch.arange(ROWS).unsqueeze(1)).long()


def gemma2() -> Gemma2ForCausalLM:
    """Caps its logits after the head, 3 tanh(x / 3)."""
    config = Gemma2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        final_logit_softcapping=3.0,
        pad_token_id=tiny.PAD,
        bos_token_id=None,
        eos_token_id=tiny.EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("gradients", [False, True])
def test_no_more_logits_exist_than_the_bound(
    build: type[GPT2LMHeadModel], gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of rows and actions, forward and backward; without the bound it would be 120 positions."""
    model, (sequences, mask) = build(), rows()
    saved_columns: list[int] = []

    def saved(tensor: Tensor) -> Tensor:
        saved_columns.append(tensor.shape[-1] if tensor.dim() else 0)
        return tensor

    with at_most_logits_of(18, monkeypatch), torch.set_grad_enabled(gradients):
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            log_probs = action_log_probs(model, sequences, mask, ACTIONS, temperature=0.8)
        if gradients:
            log_probs.sum().backward()

    assert log_probs.shape == (ROWS, ACTIONS)
    assert V not in saved_columns
    assert bool(saved_columns) == gradients
    assert all((parameter.grad is not None) == gradients for parameter in model.parameters())


@pytest.mark.parametrize("mini_batch_rows", [1, 2, None])
def test_the_makers_log_probs_are_bounded_whatever_its_mini_batches(
    mini_batch_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = NaiveExperienceMaker(
        tiny.llama(),
        None,
        lambda input_ids, **_: torch.arange(len(input_ids)).float(),
        tiny.llama(seed=1),
        SimpleNamespace(pad_token_id=tiny.PAD, eos_token_id=tiny.EOS),
        use_grpo=True,
        num_generation=4,
        logits_forward_batch_size=mini_batch_rows,
        seed=0,
    )
    prompts, mask = torch.tensor([[5, 9, 3], [0, 7, 2]]), torch.tensor([[1, 1, 1], [0, 1, 1]])

    # The sampling loop itself has the logits of one position of each of the 8 rows.
    with at_most_logits_of(18, monkeypatch):
        experience = maker.make_experience(prompts, mask, max_length=43, eos_token_id=[])

    assert experience.action_mask is not None
    assert experience.action_mask.sum() == 8 * 40


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_transformers_models_give_their_head(build: type[GPT2LMHeadModel]) -> None:
    model = build()

    assert plain_head(model, CPU) is model.get_output_embeddings()
    assert not model.base_model._forward_hooks


@torch.no_grad()
def test_a_model_that_caps_its_logits_keeps_its_own() -> None:
    model, (sequences, mask) = gemma2(), rows()

    log_probs = action_log_probs(model, sequences, mask, ACTIONS)

    assert plain_head(model, CPU) is None
    logits = model(input_ids=sequences[:1]).logits[0, -ACTIONS - 1 : -1]
    assert logits.abs().max() < 3
    expected = logits.log_softmax(-1).gather(-1, sequences[0, -ACTIONS:, None])[:, 0]
    torch.testing.assert_close(log_probs[0], expected, atol=1e-5, rtol=0)


def test_what_only_answers_like_a_model_has_no_head() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.model = model

    assert plain_head(lambda **_: None, CPU) is None
    assert plain_head(Wrapped(tiny.llama()), CPU) is None
    assert plain_head(tiny.llama().base_model, CPU) is None
