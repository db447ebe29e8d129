"""Parts of transformers' models by fewer kernels of a card.

A token step of decoding is bound by the number of its kernels, and so is a training pass of some thousand tokens. Of 46
operations of a Qwen2 layer in a token step 16 are those of its two norms, and ten rotate queries and keys.

- RMSNorm is one kernel in place of eight. torch's operator computes in float32, too, and rounds once, after the weight,
  where transformers' module rounds before it and after it.
- Rotary positions are three kernels for queries and for keys, in place of five. With the halves of a vector exchanged
  and the sign in the sine, which is set once a pass, six are left. The product with the sine is not rounded before the
  sum.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest difference that rounding explains, relative or of a number of about 1, by dtype."""
_IS_FUSED: Final = "rlhfd_is_fused"
_WIDTH: Final = 16
_EPSILONS: Final = ("variance_epsilon", "eps")
_ROTARY: Final = "apply_rotary_pos_emb"
_ARGUMENTS: Final = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_SIGNED: Final = "rlhfd_signed"

log = logging.getLogger(__name__)

_Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse(models: Iterable[nn.Module], device: torch.device) -> None:
    """Have norms and rotary positions of models run by fewer kernels, if they are on a card.

    On a CPU each is made of the same operations, and nothing is changed.

    Args:
        models: Models, changed in place; whole, sharded or streamed.
        device: Their device.
    """
    if device.type != "cpu":
        models = list(models)
        fuse_norms(models)
        fuse_rotary(models)


def fuse_norms(models: Iterable[nn.Module]) -> int:
    """Have the RMSNorm modules of models call torch's operator; return their number.

    A module is changed if its class computes what the operator does, in a trial with weights of its own.
    """
    total = 0
    for model in models:
        norms = 0
        for module in model.modules():
            kind, epsilon = cast("Any", type(module)), _epsilon(module)
            if _is_fusible(kind, epsilon, _names(module)):
                # Of the module itself: hooks, copies and names of its parameters stay.
                module.__class__ = _fused_norm(kind, epsilon)
                norms += 1
        if norms:
            log.info("norms are one operator: model=%s norms=%d", type(model).__name__, norms)
        total += norms
    return total


def _epsilon(module: nn.Module) -> str:
    """Return the name of the attribute with the number that is added to the variance; empty if there is none."""
    return next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), "")


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset({*module._parameters, *module._buffers, *module._modules})


@functools.cache
def _is_fusible(kind: type[nn.Module], epsilon: str, names: frozenset[str]) -> bool:
    """Return whether modules of a class compute a root-mean-square norm with a weight, as torch's operator does."""
    if not epsilon or names != {"weight"} or "RMSNorm" not in kind.__name__ or hasattr(kind, _IS_FUSED):
        return False
    if len(inspect.signature(kind.forward).parameters) != 2:
        # A gated norm computes a plain one where it gets no gate, as in the trial.
        return False
    draws = torch.Generator().manual_seed(0)
    weight, rows = (1.0 + 0.5 * torch.randn(shape, generator=draws) for shape in ((_WIDTH,), (4, _WIDTH)))
    return all(_computes_alike(kind, epsilon, weight.to(dtype), rows.to(dtype)) for dtype in _TOLERANCE)


def _computes_alike(kind: type[nn.Module], epsilon: str, weight: Tensor, rows: Tensor) -> bool:
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.weight = nn.Parameter(weight)
    setattr(module, epsilon, 1e-3)
    try:
        with torch.no_grad():
            found = module(rows)
    except (AttributeError, TypeError, RuntimeError):
        # It needs more than a weight.
        return False
    expected = functional.rms_norm(rows, weight.shape, weight, 1e-3)
    if not isinstance(found, Tensor) or found.dtype != rows.dtype or found.shape != rows.shape:
        return False
    return bool(torch.allclose(found.float(), expected.float(), rtol=_TOLERANCE[rows.dtype], atol=1e-6))


@functools.cache
def _fused_norm(kind: type[nn.Module], epsilon: str) -> type[nn.Module]:
    """Return a class of modules that call the operator, with the name and all else of another class."""
    as_before: Any = kind.forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype:
            # Of a weight in float32 the result is one, too.
            result: Tensor = as_before(self, hidden_states)
            return result
        return functional.rms_norm(hidden_states, weight.shape, weight, getattr(self, epsilon))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, _IS_FUSED: True})


def fuse_rotary(models: Iterable[nn.Module]) -> int:
    """Have the families of models rotate by fewer kernels on a card; return the number of families that do so now.

    The function of a family is exchanged for all of its models in this process, if a trial gives what it gives. On a
    CPU, in a compiled layer, and of vectors that are rotated in part it is called as before.
    """
    names = {type(module).__module__ for model in models for module in model.modules()}
    fused = 0
    for source in (sys.modules[name] for name in sorted(names)):
        rotary: Any = getattr(source, _ROTARY, None)
        if rotary is not None and not hasattr(rotary, _IS_FUSED) and _rotates_halves(rotary):
            setattr(source, _ROTARY, _fused_rotary(rotary))
            fused += 1
            log.info("positions are rotated by fewer kernels: family=%s", source.__name__.rpartition(".")[2])
    return fused


def _fused_rotary(as_before: _Rotary) -> _Rotary:
    @functools.wraps(as_before)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or not q.is_cuda or not _are_alike(q, k, cos, sin):
            return as_before(q, k, cos, sin, unsqueeze_dim)
        return rotated(q, k, cos, sin, unsqueeze_dim)

    setattr(rotary, _IS_FUSED, True)
    return rotary


def _are_alike(*tensors: Tensor) -> bool:
    """Return whether whole vectors are rotated, by numbers of their own dtype."""
    return len({(tensor.shape[-1], tensor.dtype) for tensor in tensors}) == 1


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return queries and keys, each ``x cos + (-x2, x1) sin`` of its halves x1 and x2; arguments: transformers'."""
    signed: Tensor | None = getattr(sin, _SIGNED, None)
    if signed is None:
        first, second = sin.chunk(2, dim=-1)
        signed = torch.cat((-first, second), dim=-1)
        # All layers of a pass get the same tensor.
        setattr(sin, _SIGNED, signed)
    cos, signed = cos.unsqueeze(unsqueeze_dim), signed.unsqueeze(unsqueeze_dim)
    return _one(q, cos, signed), _one(k, cos, signed)


def _one(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), signed)


@functools.cache
def _rotates_halves(rotary: _Rotary) -> bool:
    """Return whether a function computes what `rotated` does."""
    if list(inspect.signature(rotary).parameters) != _ARGUMENTS:
        return False
    draws = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=draws) for shape in ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8))]
    for dtype, tolerance in _TOLERANCE.items():
        q, k, cos, sin = (tensor.to(dtype) for tensor in drawn)
        try:
            found = rotary(q, k, cos, sin)
        except (AttributeError, TypeError, RuntimeError):
            return False
        for mine, its in zip(rotated(q, k, cos, sin), found, strict=True):
            if its.dtype != dtype or its.shape != mine.shape:
                return False
            if not torch.allclose(mine.float(), its.float(), rtol=tolerance, atol=2 * tolerance):
                return False
    return True
