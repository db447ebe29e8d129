"""The size of a forward or backward pass: rows are cut into parts by tokens, and by halves where the device is full.

A pass over R rows of width S holds activations of R x S tokens, and without a bound a batch of long rows needs more
than a card has, or one call that takes longer than the hang timeout on a CPU. A default follows from the device and
the model alone, so that each process of a run cuts the same rows in the same way.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from pipeline.errors import DeviceMemoryError
from pipeline.models.device import free_cached
from pipeline.progress import Telemetry

_GPU_TOKENS = {False: 16_384, True: 8_192}
"""Most tokens of a pass on a GPU, without and with a backward pass. Without checkpointing 0.5 B parameters save 1.6 MB
a token (13 GB), 1.5 B 3.3 MB (27 GB), beside 10 and 31 GB of weights, gradients and optimizer: both fit 80 GB."""

_GPU_TOKENS_CHECKPOINTED = 16_384
"""The same with a backward pass and checkpointed layers, which save a hidden state a layer, and one layer: 0.5 B
parameters 0.1 MB a token (2 GB), 7 B 0.5 MB (8 GB)."""

_CPU_TOKENS = {False: 4_096, True: 2_048}
_CPU_OPERATIONS = 2**40
"""Most floating-point operations of a pass on a CPU: about a minute on one slow core, and so a heartbeat a minute."""

_CPU_ROWS = 48
"""On a CPU parts of 48 rows are a third faster than the whole batch: less padding, and they stay in the cache."""

_MOST_PADDING = 0.1
"""Largest share of padding in a pass that is filled by tokens, before its width is rounded up."""

_REPEATED = 8
"""Tokens of a prompt that is computed once already that count as one: each row keeps their keys and values, 2 hidden
sizes a token and layer at most, of the about 20 that a computed token keeps for the backward pass."""

_GPU_WIDTH_MULTIPLE = 64

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def default_tokens(model: nn.Module, device: torch.device, *, backward: bool, checkpointed: bool = False) -> int:
    """Return the most tokens of one pass of a model on a device.

    Args:
        model: The model whose parameters count: 2 operations each a token, 6 with a backward pass.
        device: The model's.
        backward: Whether a backward pass follows, for which activations are kept.
        checkpointed: Whether the backward pass computes layers again, and few activations are kept.

    Returns:
        At least 1.
    """
    if device.type != "cpu":
        return _GPU_TOKENS_CHECKPOINTED if checkpointed else _GPU_TOKENS[backward]
    operations = sum(parameter.numel() for parameter in model.parameters()) * (6 if backward else 2)
    return min(_CPU_TOKENS[backward], max(1, _CPU_OPERATIONS // max(1, operations)))


def width_multiple(device: torch.device, given: int | None) -> int:
    """Return the multiple to which the widths of passes are rounded up.

    Kernels and the allocator's blocks are chosen by shape: fewer shapes are prepared on a GPU.

    Args:
        device: The device of the passes.
        given: Another multiple than the device's.
    """
    return given or (1 if device.type == "cpu" else _GPU_WIDTH_MULTIPLE)


def training_size(
    model: nn.Module,
    device: torch.device,
    *,
    rows: int | None,
    tokens: int | None,
    packed: bool = False,
    checkpointed: bool = False,
    telemetry: Telemetry,
) -> PassSize:
    """Return the bound of a trainer's micro-batches.

    Args:
        model: The actor.
        device: Device of the trainer.
        rows: `trainer.micro_batch_size`.
        tokens: `trainer.micro_batch_tokens`.
        packed: `trainer.packing`.
        checkpointed: Whether its activations are checkpointed.
        telemetry: Counts each time that the bound is halved.

    Returns:
        A bound of tokens and padding, unless rows are configured or the device is a CPU: there a bound of rows.
    """
    key = "trainer.micro_batch_size" if tokens is None else "trainer.micro_batch_tokens"
    by_tokens = tokens is not None or (rows is None and (packed or device.type != "cpu"))
    default = None if rows else default_tokens(model, device, backward=True, checkpointed=checkpointed)
    return PassSize(
        key,
        most_rows=None if by_tokens else rows or _CPU_ROWS,
        most_tokens=tokens or default,
        most_padding=_MOST_PADDING if by_tokens and not packed else None,
        packed=packed,
        telemetry=telemetry,
    )


@dataclasses.dataclass(eq=False)
class PassSize:
    """The bound of the passes of one model, halved for good when a pass runs out of the device's memory.

    Attributes:
        key: The configuration keys that lower the bound, for the error.
        most_rows: Most rows of a pass; None for no bound.
        most_tokens: Most tokens of a pass, padding included, now; None for no bound. A longer row is a pass of its own.
        most_padding: Largest share of padding in a pass; None for no bound.
        packed: Whether rows are packed: a pass then has the tokens of its rows, and no padding.
        telemetry: Told of each part of `run`; counts each time that the bound is halved.
    """

    key: str
    _: dataclasses.KW_ONLY
    most_rows: int | None = None
    most_tokens: int | None = None
    most_padding: float | None = None
    packed: bool = False
    telemetry: Telemetry = Telemetry.none()

    def largest(self, longest: int) -> int:
        """Return the most tokens of a pass whose rows have some tokens at most."""
        bounds = [self.most_tokens, None if self.most_rows is None else self.most_rows * longest]
        return max(longest, min((bound for bound in bounds if bound is not None), default=longest))

    def parts(
        self, lefts: Sequence[int], rights: Sequence[int], groups: Sequence[int] | None = None
    ) -> Iterator[slice]:
        """Yield consecutive rows in parts within the bound; a change of the bound counts from the next part on.

        Args:
            lefts: Columns of each row to the left of a common column, such as the tokens of its prompt.
            rights: Columns of each row from there on. A part is as wide as its largest of both.
            groups: The group of each row, if the lefts of neighbours of one group are computed once in a part, without
                any padding; an eighth of each further one counts. None if each row is computed whole.
        """
        first = 0
        while first < len(lefts):
            end = self._end(first, lefts, rights, groups)
            yield slice(first, end)
            first = end

    def run(
        self,
        lefts: Sequence[int],
        rights: Sequence[int],
        step: Callable[[slice], None],
        groups: Sequence[int] | None = None,
    ) -> None:
        """Call `step` for each part of `parts`, and tell the progress; a part without memory is run again in halves.

        Raises:
            DeviceMemoryError: If a single row does not fit.
        """
        first = 0
        while first < len(lefts):
            part = slice(first, self._end(first, lefts, rights, groups))
            if _fits(step, part):
                first = part.stop
                self.telemetry.progress(rows_done=first, rows=len(lefts))
            else:
                rows, width = part.stop - first, max(lefts[part]) + max(rights[part])
                if groups is not None:
                    width = -(-tokens_once(part, lefts, rights, groups) // rows)
                self.halve(rows, width)

    def halve(self, rows: int, width: int) -> None:
        """Lower the bound to half the tokens of a pass that ran out of memory, and release the memory it held.

        Call it outside the handler of the error, whose traceback holds the tensors of the pass.

        Raises:
            DeviceMemoryError: If the pass was of one row.
        """
        release_memory()
        if rows == 1:
            raise DeviceMemoryError(
                f"the device has no memory for one row of {width:,} tokens: lower rollout.max_length, "
                f"or choose a smaller model or model.dtype = bfloat16 ({self.key} is 1 row already)"
            )
        # A pass whose width was rounded up has more tokens than the bound by which it was cut.
        self.most_tokens = min(rows * width, self.most_tokens or rows * width) // 2
        self.telemetry.count("out_of_memory", "pass")
        log.warning("out of device memory, passes are halved from now on: rows=%d tokens=%d most_tokens=%d key=%s",
                    rows, rows * width, self.most_tokens, self.key)  # fmt: skip

    def _end(self, first: int, lefts: Sequence[int], rights: Sequence[int], groups: Sequence[int] | None) -> int:
        end, left, right, real = first, lefts[first], rights[first], 0
        while end < len(lefts) and (self.most_rows is None or end - first < self.most_rows):
            left, right = max(left, lefts[end]), max(right, rights[end])
            repeated = groups is not None and end > first and groups[end] == groups[end - 1]
            real += lefts[end] // (_REPEATED if repeated else 1) + rights[end]
            tokens = (end + 1 - first) * (left + right) if groups is None else real
            if end > first and not self._admits(tokens, real):
                break
            end += 1
        return end

    def _admits(self, tokens: int, real: int) -> bool:
        """Return whether a pass of so many tokens, of which some are real, is within the bounds."""
        if self.packed:
            return self.most_tokens is None or real <= self.most_tokens
        if self.most_tokens is not None and tokens > self.most_tokens:
            return False
        return self.most_padding is None or tokens - real <= self.most_padding * tokens


def tokens_once(part: slice, lefts: Sequence[int], rights: Sequence[int], groups: Sequence[int]) -> int:
    """Return the tokens of a part in which the lefts of neighbours of one group are computed once."""
    once = (lefts[row] for row in range(part.start, part.stop) if row == part.start or groups[row] != groups[row - 1])
    return sum(once) + sum(rights[part])


def _fits(step: Callable[[slice], None], part: slice) -> bool:
    try:
        step(part)
    except torch.OutOfMemoryError:
        return False
    return True


class RowBound:
    """The rows that are generated at once, halved for good when a call runs out of the device's memory.

    Args:
        telemetry: Counts each time that the bound is halved.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._most_rows: int | None = None

    def run(self, rows: int, most_rows: int | None, call: Callable[[int | None], Result]) -> Result:
        """Return the result of a call, repeated with half the rows as often as it runs out of memory.

        Args:
            rows: Rows in all.
            most_rows: The configured bound; None for none.
            call: Called with the bound, None for none.

        Raises:
            DeviceMemoryError: If one row at a time does not fit.
        """
        while True:
            bounds = [bound for bound in (most_rows, self._most_rows) if bound is not None]
            try:
                return call(min(bounds, default=None))
            except torch.OutOfMemoryError:
                # Halved after this block: the traceback of the error holds the tensors of the call.
                pass
            self._halve(min([rows, *bounds]))

    def _halve(self, rows: int) -> None:
        release_memory()
        if rows == 1:
            raise DeviceMemoryError(
                "the device has no memory to generate one row: lower rollout.max_length, or choose a smaller model or "
                "model.dtype = bfloat16 (rollout.inference_batch_size is 1 row already)"
            )
        self._most_rows = rows // 2
        self._telemetry.count("out_of_memory", "generate")
        log.warning("out of device memory, fewer rows are generated at once from now on: rows=%d most_rows=%d "
                    "key=rollout.inference_batch_size", rows, rows // 2)  # fmt: skip


class HoldsMemory(Protocol):
    """An object with memory that it can make anew."""

    def release(self) -> None:
        """Give the memory back; called between two uses of it."""


_holders: WeakSet[HoldsMemory] = WeakSet()


def released_when_full(holder: HoldsMemory) -> None:
    """Have an object give its memory back each time that a pass of this process runs out of memory."""
    _holders.add(holder)


def release_memory() -> None:
    """Return free memory to the GPU: that of `released_when_full`, and the free blocks of the allocator.

    Blocks of other sizes can then be made of it.
    """
    for holder in list(_holders):
        holder.release()
    free_cached()
