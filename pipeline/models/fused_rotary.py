"""Rotary positions of transformers' models in three kernels of a card for queries and for keys, in place of five.

A token step of decoding is bound by the number of its kernels, of which ten in a layer rotate queries and keys. With
the halves of a vector exchanged and the sign in the sine, which is set once a pass, six are left. The product with the
sine is not rounded before the sum.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

_NAME: Final = "apply_rotary_pos_emb"
_ARGUMENTS: Final = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_IS_FUSED: Final = "rlhfd_is_fused"
_SIGNED: Final = "rlhfd_signed"
_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest difference of a number of about 1 that rounding explains, by dtype."""

log = logging.getLogger(__name__)

_Rotary = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(models: Iterable[nn.Module], device: torch.device) -> int:
    """Have the families of models rotate by fewer kernels on a card; return the number of families that do so now.

    The function of a family is exchanged for all of its models in this process, if a trial gives what it gives. On a
    CPU, in a compiled layer, and of vectors that are rotated in part it is called as before.

    Args:
        models: The models.
        device: Their device.
    """
    if device.type == "cpu":
        return 0
    names = {type(module).__module__ for model in models for module in model.modules()}
    fused = 0
    for source in (sys.modules[name] for name in sorted(names)):
        rotary: Any = getattr(source, _NAME, None)
        if rotary is not None and not hasattr(rotary, _IS_FUSED) and _rotates_halves(rotary):
            setattr(source, _NAME, _fused(rotary))
            fused += 1
            log.info("positions are rotated by fewer kernels: family=%s", source.__name__.rpartition(".")[2])
    return fused


def _fused(as_before: _Rotary) -> _Rotary:
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
