"""Log-probs of tokens with a bound on the logits in memory, independent of rows, positions and vocabulary size.

A model's logits are its head applied to the last hidden states of its backbone, (N, H) -> (N, V), and V may be 150,000.
If the head alone produces them, it runs over a chunk of positions at a time, and again in the backward pass, at the
cost of one more product with the head there: 2**26 logits exist at once, not rows x positions x V. A model that changes
its logits after the head (caps or scales them), or has only ``.logits``, returns all of them; then only the number of
rows in the caller's batch bounds them.

The backward pass of all chunks is one autograd function: a chunk's logits become their own gradient in place, and each
chunk adds to one gradient of the weight, in float32. A head with an adapter or hooks is checkpointed chunk by chunk.

Chunks are a loop in Python: one takes 2.7 ms of an H200, forward and backward, and hides its launches. Liger's fused
kernel is not used: it computes gradients in the forward pass, before the loss of a log-prob is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.models.float32_linear import float32_forward, float32_product
from pipeline.models.inputs import backbone_of
from pipeline.models.lora import without_other_hooks

CHUNK_ELEMENTS = 2**26
"""Logits at once if `chunk_tokens` is None: 256 MiB in float32, and as much again for their exp."""

_FAR = 32
"""Factor of the states with which a head is tested; 16 bits hold the products."""

_Product = Callable[[Tensor, Any, Tensor | None], Tensor]

_plain_heads: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Cache of `plain_head`: its test, a forward pass over two tokens, runs once a model."""


def plain_head(model: object, device: torch.device) -> nn.Linear | None:
    """Return the linear layer that alone turns the backbone's last hidden states into the model's logits.

    Args:
        model: Any object; one with a `backbone_of` it and ``get_output_embeddings``, as in transformers, may have such
            a layer.
        device: Device of the model's inputs; the model is tested once, on two tokens.

    Returns:
        The layer; None if the model has no such layer, or its logits are not exactly those of the layer.
    """
    if not isinstance(model, nn.Module):
        return None
    backbone, find_head = backbone_of(model), getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if backbone is None or not isinstance(head, nn.Linear):
        return None
    if model not in _plain_heads:
        _plain_heads[model] = _head_makes_logits(head, model, backbone, device)
    return head if _plain_heads[model] else None


def head_log_probs(
    head: nn.Linear,
    states: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of tokens from hidden states, log softmax(head(states) / temperature), a chunk at a time.

    Args:
        head: Result of `plain_head`. If it has a method ``computed``, this calls a function, with its arguments, while
            the head's weight is whole (`pipeline.trainer.sharding`).
        states: ``(N, H)``, the last hidden states at the positions before the tokens.
        labels: ``(N,)`` int64, the tokens.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits exist at once; None for 2**26 logits.
        with_entropy: Whether to compute the entropy of each position's distribution.

    Returns:
        Log-probs and entropies, each ``(N,)`` float32; the entropies are ``(0,)`` if `with_entropy` is False.
    """
    most = chunk_tokens or max(1, CHUNK_ELEMENTS // head.out_features)
    computed: Any = getattr(head, "computed", None)
    # The call of a sharded head would gather its weight for each chunk.
    apply: Any = head if computed is None else partial(without_other_hooks, head)
    settings: Any = {"temperature": temperature, "chunk_tokens": most, "with_entropy": with_entropy}

    def of_chunk(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits_log_probs(apply(states), labels, **settings)

    def of_all(states: Tensor) -> tuple[Tensor, Tensor]:
        if len(states) <= most:
            return of_chunk(states, labels)
        if (product := _product_of(head, hooks_count=computed is None)) is None:
            return _checkpointed(of_chunk, states, labels, most)
        result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
            states, head.weight, head.bias, labels.to(states.device), product, temperature, most, with_entropy
        )
        return result

    result: tuple[Tensor, Tensor] = of_all(states) if computed is None else computed(of_all, states)
    return result


def _product_of(head: nn.Linear, *, hooks_count: bool) -> _Product | None:
    """Return the function of states, weight and bias that a head is; None if it is more than that."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    if hasattr(head, "lora_scale") or (hooks_count and any(hooks)):
        return None
    products: dict[Any, _Product] = {nn.Linear.forward: functional.linear, float32_forward: float32_product}
    return products.get(getattr(head.forward, "__func__", None))


def _checkpointed(
    of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, labels: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    # Without checkpointing, autograd keeps the logits of every chunk for the backward pass.
    again = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    run: Any = again if torch.is_grad_enabled() else of_chunk
    parts = [run(*chunk) for chunk in zip(states.split(most), labels.split(most), strict=True)]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def logits_log_probs(
    logits: Tensor, labels: Tensor, *, temperature: float, chunk_tokens: int | None, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs of tokens from logits, ``(N, V)``, one chunk in float32 at a time; else as `head_log_probs`."""
    chunk_tokens = chunk_tokens or max(1, CHUNK_ELEMENTS // logits.shape[-1])
    result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, None, None, labels.to(logits.device), _given, temperature, chunk_tokens, with_entropy
    )
    return result


def _given(logits: Tensor, weight: None, bias: None) -> Tensor:
    return logits


@torch.no_grad()
def _head_makes_logits(head: nn.Linear, model: nn.Module, backbone: nn.Module, device: torch.device) -> bool:
    found: list[Tensor] = []

    def enlarge(_module: nn.Module, _inputs: object, output: Any) -> None:
        if (states := getattr(output, "last_hidden_state", None)) is not None:
            # Logits near 0, as of a model that is not trained yet, are in 16 bits the same under a cap.
            output.last_hidden_state = states * _FAR
            found.append(output.last_hidden_state)

    hook = backbone.register_forward_hook(enlarge)
    try:
        # Two tokens: one may be padding, with states of zero, whose logits a cap does not change.
        logits = model(input_ids=torch.tensor([[0, 1]], device=device)).logits
    finally:
        hook.remove()
    try:
        return bool(found) and bool(logits.any()) and torch.equal(head(found[0]).float(), logits.float())
    except RuntimeError:
        # The states of some models are of another dtype or size than the head takes.
        return False


def _of_chunk(
    logits: Tensor, labels: Tensor, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, normalizers and entropies of rows of logits, float32; without entropies ``(0,)``."""
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    normalizer = scaled.logsumexp(dim=-1)
    log_probs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizer
    entropy = normalizer.new_empty(0)
    if with_entropy:
        probs = (scaled - normalizer.unsqueeze(-1)).exp()
        entropy = torch.special.entr(probs).sum(dim=-1)
    return log_probs, normalizer, entropy


def _logits_gradient(logits: Tensor, temperature: float, saved: Sequence[Tensor], upstream: Sequence[Tensor]) -> Tensor:
    """Return the gradient of rows of logits, float32, in the memory of the logits, which are float32.

    Args:
        logits: Of the head, before the temperature.
        temperature: Divides them.
        saved: Labels, normalizers and entropies of the rows, without entropies ``(0,)``.
        upstream: Gradients of their log-probs and entropies.
    """
    (labels, normalizers, entropies), (of_log_probs, of_entropies) = saved, upstream
    scaled = logits if temperature == 1 else logits.div_(temperature)
    # In place, here and below: a chunk of logits is a large part of a step's memory.
    probs = scaled.sub_(normalizers.unsqueeze(-1)).exp_()
    slope = None
    if len(entropies):
        # dH/dx = -p (log p + H); xlogy keeps 0 log 0 at 0.
        slope = torch.special.xlogy(probs, probs) + probs * entropies.unsqueeze(-1)
    own = of_log_probs.unsqueeze(-1)
    gradient = probs.mul_(-own).scatter_add_(-1, labels.unsqueeze(-1), own)
    if slope is not None:
        gradient -= slope.mul_(of_entropies.unsqueeze(-1))
    return gradient if temperature == 1 else gradient.div_(temperature)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probs and entropies of rows of logits, of which one chunk is in float32 at a time, forward and backward.

    They are those of a head, of which no other chunk exists; without a weight the states are logits themselves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        product: _Product,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _of_chunk(product(chunk, weight, bias), its, temperature, with_entropy=with_entropy)
            for chunk, its in zip(states.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
        ]
        log_probs, normalizers, entropies = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, bias, labels, normalizers, entropies)
        ctx.product, ctx.temperature, ctx.chunk_tokens = product, temperature, chunk_tokens
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, *saved = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        operand = states if weight is None else weight
        of_states = operand.new_empty(states.shape) if wants_states else None
        # Summed in float32: of 37 chunks in bfloat16, the sum is three times as far from that of float64.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for start in range(0, len(states), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            of_rows = [[one[rows] for one in tensors] for tensors in (saved, upstream)]
            # Of given logits a copy: the gradient takes their place.
            gradient = _logits_gradient(
                ctx.product(states[rows], weight, bias).to(torch.float32, copy=weight is None),
                ctx.temperature,
                *of_rows,
            )
            if of_bias is not None:
                of_bias += gradient.sum(dim=0)
            gradient = gradient.to(operand.dtype)
            if of_states is not None and weight is not None:
                torch.mm(gradient, weight, out=of_states[rows])
            elif of_states is not None:
                of_states[rows] = gradient
            if of_weight is not None and weight.dtype == torch.float32:
                of_weight.addmm_(gradient.t(), states[rows])
            elif of_weight is not None:
                of_weight += gradient.t() @ states[rows]
            # Freed before the next chunk's logits exist.
            del gradient
        sums = (None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias))
        return of_states, *sums, *[None] * 5
