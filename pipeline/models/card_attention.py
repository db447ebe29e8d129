"""Kernels of a card for causal attention of rows end to end, and the choice among those that are installed.

    flash-attn 3   module `flash_attn_interface`, FlashAttention's folder hopper/: Hopper
    flash-attn 4   module `flash_attn.cute`, package flash-attn-4: Hopper and later
    flash-attn 2   module `flash_attn`: Ampere and later
    torch varlen   `torch.nn.attention.varlen`

The first of them that is made for the card and passes a trial is taken. A package of kernels is built for one torch and
one CUDA: an installed one need not load, and the modules of flash-attn 2 and 4 share the folder `flash_attn`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]
"""Called with query, key and value, each ``(T, heads, size)``, the ``(B + 1,)`` int32 starts of the rows, the tokens of
the longest row, the factor of the scores, None for 1 / sqrt(size), and the tokens of a sliding window, the query's own
among them, None for whole rows; returns ``(T, heads, size)``."""

BY_ROWS: Final = "sdpa by rows"
"""The name of the way without a kernel of this module."""

_MOST_HEAD_SIZE: Final = 256
_TRIAL_LENGTHS: Final = (1, 70, 129)
_TRIAL_WINDOW: Final = 48
_TRIAL_HEADS: Final = (4, 2)
_TRIAL_PARTS: Final = ("output", "gradient of query", "gradient of key", "gradient of value")
_TRIAL_ERROR: Final = 0.02
"""Share of the largest value: 16-bit kernels differ from float32 by less than 0.01, a key too many by more than 0.1."""


class _Flash(NamedTuple):
    """A release of FlashAttention: its name, its module, and the generations of cards that it is made for."""

    name: str
    module: str
    oldest: int
    newest: int


_FLASH: Final = (
    _Flash("flash-attn 3", "flash_attn_interface", 9, 9),
    _Flash("flash-attn 4", "flash_attn.cute", 9, 99),
    _Flash("flash-attn 2", "flash_attn", 8, 99),
)
_TORCH: Final = "torch varlen"


@functools.cache
def kernel_of(device: torch.device, dtype: torch.dtype, head_size: int, slides: bool = False) -> str:
    """Return the name of the kernel for attention on a device; its first call tries kernels.

    Args:
        device: The device.
        dtype: The dtype of query, key and value.
        head_size: Size of the heads.
        slides: Whether layers slide a window, too.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_size > _MOST_HEAD_SIZE:
        return BY_ROWS
    generation, _ = torch.cuda.get_device_capability(device)
    return first_sound(candidates(generation), device, dtype, head_size, slides)


def candidates(generation: int) -> list[str]:
    """Return the names of the kernels for cards of a generation, the first number of their compute capability."""
    flash = [each.name for each in _FLASH if each.oldest <= generation <= each.newest and _is_installed(each.module)]
    return [*flash, *([_TORCH] if _is_installed("torch.nn.attention.varlen") else [])]


def first_sound(
    names: Sequence[str], device: torch.device, dtype: torch.dtype, head_size: int, slides: bool = False
) -> str:
    """Return the first kernel that passes the trial, `BY_ROWS` if none does; a warning names each that does not."""
    for name in names:
        fault = fault_of(name, device, dtype, head_size, slides)
        if fault is None:
            return name
        log.warning("attention kernel left out: kernel=%s reason=%s", name, fault)
    return BY_ROWS


def fault_of(name: str, device: torch.device, dtype: torch.dtype, head_size: int, slides: bool = False) -> str | None:
    """Compare outputs and gradients of a kernel with those of float32, on three rows.

    Args:
        name: A kernel of `candidates`.
        device: The card.
        dtype: The dtype of query, key and value.
        head_size: Size of the heads.
        slides: Whether it is tried with a sliding window, too.

    Returns:
        The fault in one line, None for a kernel that computes the same.
    """
    starts = torch.tensor([0, *torch.tensor(_TRIAL_LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    for window in (None, _TRIAL_WINDOW) if slides else (None,):
        with torch.inference_mode(False), torch.enable_grad():
            exact = _tried(_plain, torch.device("cpu"), torch.float32, head_size, starts, window)
            try:
                found = _tried(attend_by(name), device, dtype, head_size, starts, window)
            except Exception as error:  # noqa: BLE001 (foreign code, which compiles itself at its first call)
                return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for part, mine, its in zip(_TRIAL_PARTS, found, exact, strict=True):
            share = float((mine - its).abs().max() / its.abs().max())
            # Not a number is no share.
            if not share <= _TRIAL_ERROR:
                return f"its {part} differs from float32's by {share:.2g} of the largest value"
    return None


def attend_by(name: str) -> Kernel:
    """Return a kernel by its name, one of `candidates`.

    Raises:
        ImportError: If its package does not load.
        AttributeError: If the package has no such kernel.
    """
    if name == _TORCH:
        return _torch_kernel()
    (module,) = [each.module for each in _FLASH if each.name == name]
    attention = importlib.import_module(module).flash_attn_varlen_func

    def by_flash(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        # Tokens before the query's own, and after it.
        of_window: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
        found = attention(
            query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scaling, causal=True, **of_window,
        )  # fmt: skip
        # Some releases return the normalizers of the rows besides.
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return by_flash


def _torch_kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    # Here, since the kernel is traced in a compiled layer.
    grouped: dict[str, Any] = {"enable_gqa": True} if _takes_groups(varlen_attn) else {}

    def by_torch(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        # Tokens before the query's own, -1 for all, and after it.
        sizes = (-1 if window is None else window - 1, 0)
        if not grouped and (heads := query.shape[1] // key.shape[1]) > 1:
            key, value = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
        output = varlen_attn(
            query, key, value, starts, starts, longest, longest, scale=scaling, window_size=sizes, **grouped
        )
        assert isinstance(output, Tensor)
        return output

    return by_torch


@functools.cache
def _takes_groups(kernel: Callable[..., Any]) -> bool:
    """Return whether torch's kernel lets a KV head serve several heads; that of torch 2.11 and 2.12 does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # A package above it is not there.
        return False
    except Exception:  # noqa: BLE001 (foreign code: the package above it is imported, and does not load)
        # The trial fails by the same error, and names it.
        return True


def _tried(
    attend: Kernel, device: torch.device, dtype: torch.dtype, head_size: int, starts: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of query, key and value of made-up rows, float32 on the CPU."""
    draws = torch.Generator().manual_seed(0)
    tokens, (heads, kv_heads) = int(starts[-1]), _TRIAL_HEADS
    shapes = [(tokens, count, head_size) for count in (heads, kv_heads, kv_heads, heads)]
    # Rounded to the kernel's dtype, for the exact way too.
    drawn = [torch.randn(shape, generator=draws).to(torch.bfloat16) for shape in shapes]
    query, key, value, weights = (tensor.to(device=device, dtype=dtype) for tensor in drawn)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attend(query, key, value, starts.to(device), max(_TRIAL_LENGTHS), None, window)
    gradients = torch.autograd.grad((output * weights).sum(dtype=torch.float32), inputs)
    return tuple(tensor.detach().float().cpu() for tensor in (output, *gradients))


def _plain(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    outputs = []
    for start, end in pairwise(starts.tolist()):
        q, k, v = (tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(
            q, k, v, causal_mask(end - start, window, q.device), scale=scaling, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of a row, ``(length, length)`` bool: True where a query attends to a key."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)
