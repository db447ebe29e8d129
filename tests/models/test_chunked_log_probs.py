"""The bound on logits in memory, and the models whose head runs alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2LMHeadModel, PreTrainedModel

from pipeline.models import chunked_log_probs
from pipeline.models.chunked_log_probs import plain_head
from pipeline.models.float32_logits import compute_in_float32
from pipeline.models.log_probs import action_log_probs
from pipeline.rollout.maker import NaiveExperienceMaker
from tests.support import tiny
from tests.support.launches import launches, most_bytes

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


def gemma2(cap: float = 3.0) -> Gemma2ForCausalLM:
    """Caps its logits after the head, cap tanh(x / cap)."""
    config = Gemma2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        final_logit_softcapping=cap,
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cap_far_above_the_logits_of_an_untrained_model_is_found(dtype: torch.dtype) -> None:
    """In 16 bits it changes no logit near 0; those of its head alone were wrong as the model learned."""
    assert plain_head(gemma2(64.0).to(dtype), CPU) is None
    assert plain_head(tiny.llama().to(dtype), CPU) is not None


def test_what_only_answers_like_a_model_has_no_head() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.model = model

    assert plain_head(lambda **_: None, CPU) is None
    assert plain_head(Wrapped(tiny.llama()), CPU) is None
    assert plain_head(tiny.llama().base_model, CPU) is None


def a_head(dtype: torch.dtype, *, bias: bool, device: torch.device = CPU) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head of 60 tokens, 40 states of size 24, and labels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head, states, labels = nn.Linear(24, 60, bias=bias), torch.randn(40, 24), torch.randint(0, 60, (40,))
    return head.to(device, dtype), states.to(device, dtype).requires_grad_(), labels.to(device)


def a_pass(
    head: nn.Linear, states: Tensor, labels: Tensor, *, temperature: float, with_entropy: bool, chunk: int = 7
) -> Tensor:
    """Log-probs, a chunk of tokens at a time; both outputs have gradients that differ from token to token."""
    log_probs, entropies = chunked_log_probs.head_log_probs(
        head, states, labels, temperature=temperature, chunk_tokens=chunk, with_entropy=with_entropy
    )
    weights = torch.linspace(-2, 1, len(labels), device=labels.device)
    loss = (weights * log_probs).sum()
    (loss + (weights.flip(0) * entropies).sum() if with_entropy else loss).backward()
    return log_probs.detach()


def gradients(head: nn.Linear, states: Tensor) -> list[Tensor]:
    found = [each.grad for each in (states, *head.parameters())]
    assert all(each is not None for each in found)
    return [each.double().cpu() for each in found if each is not None]


def exact_gradients(
    given: nn.Linear, states: Tensor, labels: Tensor, temperature: float, entropy: bool
) -> list[Tensor]:
    """Those of log-softmax in float64."""
    head, states = copy.deepcopy(given).double(), states.detach().double().requires_grad_()
    logits = (head(states) / temperature).log_softmax(-1)
    weights = torch.linspace(-2, 1, len(labels), dtype=torch.float64, device=labels.device)
    loss = weights @ logits.gather(-1, labels[:, None])[:, 0]
    (loss - weights.flip(0) @ (logits.exp() * logits).sum(-1) if entropy else loss).backward()
    return gradients(head, states)


def called_a_chunk_at_a_time(head: nn.Linear) -> nn.Linear:
    """A head that counts as more than its product, so that each chunk is checkpointed."""
    head.register_forward_hook(lambda _module, _inputs, output: output)
    return head


def heads_agree(
    dtype: torch.dtype, device: torch.device, *, bias: bool, temperature: float, with_entropy: bool
) -> None:
    for in_float32 in {False, dtype != torch.float32}:
        settings: Any = {"temperature": temperature, "with_entropy": with_entropy}
        head, states, labels = a_head(dtype, bias=bias, device=device)
        exact = exact_gradients(head, states, labels, temperature, with_entropy)
        other, other_states = called_a_chunk_at_a_time(copy.deepcopy(head)), states.detach().clone().requires_grad_()
        for each in (head, other) if in_float32 else ():
            each.get_output_embeddings = lambda head=each: head
            compute_in_float32(each)

        log_probs = a_pass(head, states, labels, **settings)
        expected = a_pass(other, other_states, labels, **settings)

        assert torch.equal(log_probs, expected)
        assert states.grad is not None and other_states.grad is not None
        assert states.grad.dtype == dtype and torch.equal(states.grad, other_states.grad)
        for mine, theirs, truth in zip(gradients(head, states), gradients(other, other_states), exact, strict=True):
            # Of float32, sums in another order differ in their last bits.
            floor = truth.norm() * (1e-6 if dtype == torch.float32 else 0.0)
            assert (mine - truth).norm() <= (theirs - truth).norm() * 1.001 + floor
            assert (mine - truth).norm() <= truth.norm() * (1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "with_entropy"), [(1.0, False), (1.0, True), (0.7, True)])
def test_one_backward_pass_of_all_chunks_is_no_farther_from_float64_than_one_a_chunk(
    dtype: torch.dtype, bias: bool, temperature: float, with_entropy: bool
) -> None:
    """Log-probs and gradients of the states are the same bits; the weight's gradient is rounded less often."""
    heads_agree(dtype, CPU, bias=bias, temperature=temperature, with_entropy=with_entropy)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_a_gpu_too(temperature: float) -> None:
    heads_agree(torch.bfloat16, torch.device("cuda", 0), bias=True, temperature=temperature, with_entropy=True)


@pytest.mark.parametrize("trained", ["head", "states"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    head, states, labels = a_head(torch.float32, bias=False)
    head.requires_grad_(trained == "head")
    states.requires_grad_(trained == "states")

    a_pass(head, states, labels, temperature=1.0, with_entropy=False)

    assert (states.grad is None) == (trained == "head")
    assert (head.weight.grad is None) == (trained == "states")


def test_a_head_with_a_hook_is_still_called() -> None:
    head, states, labels = a_head(torch.float32, bias=False)
    head.register_forward_hook(lambda _module, _inputs, output: 2 * output)

    log_probs = a_pass(head, states, labels, temperature=1.0, with_entropy=False)

    expected = (2 * functional.linear(states, head.weight)).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_has_fewer_launches_and_less_memory_than_one_that_is_checkpointed(
    dtype: torch.dtype, temperature: float
) -> None:
    launched, held = [], []
    for checkpointed in (False, True):
        head, states = nn.Linear(8, 8000, bias=False, dtype=dtype), torch.randn(224, 8, dtype=dtype).requires_grad_()
        head = called_a_chunk_at_a_time(head) if checkpointed else head
        with profile(activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True) as profiler:
            a_pass(head, states, torch.arange(224), temperature=temperature, with_entropy=False, chunk=28)
        launched.append(len(launches(profiler)))
        held.append(most_bytes(profiler) / (28 * 8000 * 4))

    assert launched[0] < 0.6 * launched[1]
    assert held[0] < held[1]
