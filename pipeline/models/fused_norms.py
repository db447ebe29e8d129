"""RMSNorm of transformers' models in one kernel on a card, in place of eight.

A token step of decoding is bound by the number of its kernels, and so is a training pass of some thousand tokens. Of 46
operations of a Qwen2 layer in a token step 16 are those of its two norms. torch's operator computes in float32, too,
and rounds once, after the weight, where transformers' module rounds before it and after it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTH: Final = 16
_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest relative difference of a number that rounding explains, by dtype."""
_EPSILONS: Final = ("variance_epsilon", "eps")
_IS_FUSED: Final = "rlhfd_is_fused"

log = logging.getLogger(__name__)


def fuse_norms(models: Iterable[nn.Module], device: torch.device) -> int:
    """Have the RMSNorm modules of models call torch's operator, if they are on a card; return their number.

    A module is changed if its class computes what the operator does, in a trial with weights of its own. On a CPU the
    operator is made of the same operations, and nothing is changed.

    Args:
        models: Models, changed in place; whole, sharded or streamed.
        device: Their device.
    """
    if device.type == "cpu":
        return 0
    total = 0
    for model in models:
        norms = 0
        for module in model.modules():
            kind, epsilon = cast("Any", type(module)), _epsilon(module)
            if _is_fusible(kind, epsilon, _names(module)):
                # Of the module itself: hooks, copies and names of its parameters stay.
                module.__class__ = _fused(kind, epsilon)
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
def _fused(kind: type[nn.Module], epsilon: str) -> type[nn.Module]:
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
