"""The kernels among which torch's fused attention chooses in a pass of this library: all but cuDNN's.

cuDNN's kernel gives gradients of NaN where rows are padded (H200, torch 2.11, bfloat16), by which a step is lost, and
it plans each new shape of a batch. torch takes it first on newer cards. So every pass is computed without it, and so is
the backward pass, in which checkpointed layers are computed again and choose a kernel again.

The choice is one of the process (`torch.backends.cuda`), so passes of several threads share it: the first one stores
the caller's choice, the last one restores it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")

_OTHERS: Final = ("flash", "mem_efficient", "math")

_lock = threading.Lock()
_passes = 0
_choice: dict[str, bool] = {}
"""The caller's choice, of what a pass has changed."""


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Compute the attention of a pass without cuDNN's kernel; on exit the caller's choice of kernels holds again.

    If the caller has forbidden all others, they are allowed meanwhile.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def chooses_kernels(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return a function whose passes, and the backward pass through its result, are without cuDNN's attention.

    Args:
        function: Returns a tensor, or a list or tuple of tensors and other objects.
    """

    @functools.wraps(function)
    def chosen(*arguments: P.args, **keywords: P.kwargs) -> Result:
        with without_cudnn_attention():
            result = function(*arguments, **keywords)
        for tensor in _differentiable(result):
            tensor.register_hook(_enter_backward)
        return result

    return chosen


def _differentiable(result: Any) -> Iterable[Tensor]:
    parts = result if isinstance(result, list | tuple) else (result,)
    return (part for part in parts if isinstance(part, Tensor) and part.requires_grad)


def _enter_backward(_gradient: Tensor) -> None:
    """Keep cuDNN's attention out from the first gradient of a result until the backward pass ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(_Backward())


class _Backward:
    """A backward pass; a pass that raises calls nothing at its end, but drops this object."""

    def __init__(self) -> None:
        _enter()
        self._leave = weakref.finalize(self, _leave)

    def __call__(self) -> None:
        self._leave()


def _enter() -> None:
    global _passes
    with _lock:
        _passes += 1
        if _passes == 1:
            kernels = torch.backends.cuda
            allowed = {name: getattr(kernels, f"{name}_sdp_enabled")() for name in ("cudnn", *_OTHERS)}
            if allowed.pop("cudnn"):
                _change("cudnn", True, False)
                if not any(allowed.values()):
                    for name in _OTHERS:
                        _change(name, False, True)


def _leave() -> None:
    global _passes
    with _lock:
        _passes -= 1
        if not _passes:
            for name, enabled in _choice.items():
                getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
            _choice.clear()


def _change(name: str, before: bool, now: bool) -> None:
    _choice[name] = before
    getattr(torch.backends.cuda, f"enable_{name}_sdp")(now)
