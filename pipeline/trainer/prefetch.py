"""Leased batches copied out of the arena; for a GPU, the next batch is copied while the current one is trained.

The copy to a GPU is made from page-locked memory on a stream of its own, so that neither the trainer nor the GPU's
computation waits for it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch

from pipeline.config.losses import log_probs_by
from pipeline.config.schema import Config
from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows, ragged_rows
from pipeline.experience.types import Experience
from pipeline.runtime.messages import ExtentRows, Lease
from pipeline.storage.arena import Arena

_REFERENCE = "base_action_log_probs"
_LOG_PROBS = "action_log_probs"
_CUT = "info.cut"
_NOT_TRAINED = ("kl", "action_entropy")
"""Fields with a value an action that statistics alone use."""


class Fetched(NamedTuple):
    """The batch of a lease, or, if extents are damaged, their tickets with the reasons.

    Attributes:
        content: The rows of the batch, padded on the left if that was asked for; None if an extent is damaged.
        damaged: Reason by ticket, for each damaged extent.
        copied: Event at the end of the copy to a GPU; None without such a copy.
    """

    content: RaggedRows | Experience | None
    damaged: Mapping[int, str]
    copied: torch.cuda.Event | None = None


class _Begun(NamedTuple):
    """A batch that is gathered in the background."""

    lease: int
    device: torch.device
    padded: bool
    made: concurrent.futures.Future[Fetched]


class Gathering(NamedTuple):
    """The way in which the rows of leases are gathered.

    All rows of a batch have the same fields, but rows of a time with another configuration, from a spool or from before
    a restart, may have other fields than the present ones. An extent without a field that the trainer needs is reported
    as damaged; a field that it does not need is left out of a batch in which an extent lacks it.

    Attributes:
        ahead: Whether the next batch is gathered in the background; None for yes on a GPU, where the copy runs beside
            the computation, and no on a CPU, where the copy would take cores from the computation.
        needs_reference: Whether the log-probs of the reference are needed; not if the trainer computes them.
        needs_log_probs: Whether those of the policy that sampled are needed; not if the trainer computes them.
        needs_cut: Whether it is needed that rows tell whether their response was cut.
    """

    ahead: bool | None = None
    needs_reference: bool = False
    needs_log_probs: bool = False
    needs_cut: bool = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the way of a configuration's trainer."""
        is_external = config.trainer.kind == "external"
        return cls(
            # An external trainer may use all fields that the workers write.
            needs_reference=config.reference_on == "worker" and (config.trainer_kl_coef > 0 or is_external),
            needs_log_probs=log_probs_by(config) != "trainer",
            needs_cut=config.trainer.mask_cut_responses,
        )


class FoundRows(NamedTuple):
    """Rows of leases in their extents, or, if extents are damaged, their tickets with the reasons.

    Attributes:
        chosen: The extents with the indices of the rows, in batch order; not to be used if one is damaged.
        damaged: Reason by ticket, for each damaged extent.
    """

    chosen: codec.Extents
    damaged: Mapping[int, str]


class RowSource(Protocol):
    """The place of the rows of leases: the arena, or on another machine the rank's gateway."""

    def find(self, parts: Sequence[ExtentRows]) -> FoundRows:
        """Return the rows of a lease; they stay where they are until the version that includes them."""


class ArenaRows:
    """The rows in an arena that is mapped with its payload.

    Args:
        arena: The arena.
        gathering: The fields that a batch needs.
    """

    def __init__(self, arena: Arena, gathering: Gathering) -> None:
        self._arena = arena
        self._gathering = gathering

    def find(self, parts: Sequence[ExtentRows]) -> FoundRows:
        """Return the rows of a lease, whose extents are checked."""
        readers, damaged = [], {}
        for part in parts:
            memory = self._arena.extent(part.offset, part.nbytes)
            try:
                readers.append(codec.ExtentReader(memory, checksum=part.checksum))
            except DecodeError as error:
                damaged[part.ticket] = str(error)
        damaged = damaged or self._without_needed_field(parts, readers)
        return FoundRows([(reader, part.rows) for reader, part in zip(readers, parts, strict=False)], damaged)

    def _without_needed_field(self, parts: Sequence[ExtentRows], readers: list[codec.ExtentReader]) -> dict[int, str]:
        """Return the extents that lack a needed field, the reason by ticket; leave others out if one lacks them."""
        gathering = self._gathering
        for name, is_needed, problem in (
            (
                _REFERENCE,
                gathering.needs_reference,
                "its rows have no log-probs of the reference model: no KL weight was above 0, "
                'or model.reference_device was "trainer"',
            ),
            (
                _LOG_PROBS,
                gathering.needs_log_probs,
                'its rows have no log-probs of the policy: rollout.log_probs was "trainer", '
                'as it is by default with trainer.policy_loss = "reinforce"',
            ),
            (
                _CUT,
                gathering.needs_cut,
                "its rows do not say whether responses were cut: trainer.mask_cut_responses was false",
            ),
        ):
            has_field = [name in reader.rows.named for reader in readers]
            if all(has_field):
                continue
            if is_needed:
                parts_found = zip(parts, has_field, strict=True)
                return {part.ticket: problem for part, found in parts_found if not found}
            for reader in readers:
                reader.leave_out(name)
        return _without_unlike_fields(parts, readers)


def _without_unlike_fields(parts: Sequence[ExtentRows], readers: list[codec.ExtentReader]) -> dict[int, str]:
    """Return the extents that have another form of a trained field than the newest one, the reason by ticket.

    The newest one is of the present configuration: were it refused, the next batches would have the older rows again.
    The log-probs of the engine are such a field: without them a row would be trained without its correction. Other
    fields that not all extents have alike, as the columns of reward functions that were changed, are left out.
    """
    of_first = readers[0].rows.fields
    if all(reader.rows.fields == of_first for reader in readers):
        return {}
    newest = max(range(len(parts)), key=lambda number: (parts[number].policy_version, parts[number].ticket))
    for name in sorted({name for reader in readers for name in reader.rows.named}):
        forms = [reader.rows.named.get(name) for reader in readers]
        if forms.count(forms[0]) == len(forms):
            continue
        if name.startswith("info.") or name in _NOT_TRAINED:
            for reader in readers:
                reader.leave_out(name)
            continue
        pairs = zip(parts, forms, strict=True)
        return {
            part.ticket: f"its rows have {name} in another form than the newest rows of the batch, or only one has it"
            for part, form in pairs
            if form != forms[newest]
        }
    return {}


class Prefetcher:
    """Gathers the batches of leases; used by one thread.

    Args:
        rows: The place of the rows; an arena is mapped with its payload.
        gathering: The way in which they are gathered.
    """

    def __init__(self, rows: Arena | RowSource, gathering: Gathering = Gathering()) -> None:  # noqa: B008 - immutable
        self._rows = ArenaRows(rows, gathering) if isinstance(rows, Arena) else rows
        self._gathering = gathering
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._next: _Begun | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def wants_next(self, device: torch.device) -> bool:
        """Return whether to begin the next batch for this device now."""
        ahead = self._gathering.ahead
        return self._next is None and (device.type == "cuda" if ahead is None else ahead)

    def begin(self, lease: Lease, device: torch.device, *, padded: bool = False) -> None:
        """Begin to gather the next batch in the background; one at a time."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rlhfd-copy")
        made = self._thread.submit(self._make, lease.parts, device, padded)
        self._next = _Begun(lease.lease, device, padded, made)

    def take(self, lease: Lease, device: torch.device, *, padded: bool = False) -> Fetched:
        """Return the batch of a lease, begun before or not, ready for use on this thread's stream.

        Args:
            lease: The lease.
            device: Device of the tensors.
            padded: Whether the batch is an `Experience`, padded on the left, in place of `RaggedRows`.

        Raises:
            FieldError: If extents of one batch have different fields.
        """
        begun, self._next = self._next, None
        if begun is not None and begun[:3] == (lease.lease, device, padded):
            fetched = begun.made.result()
        else:
            _wait_for(begun)
            fetched = self._make(lease.parts, device, padded)
        return self._on_this_stream(fetched, device)

    def gather(self, parts: Sequence[ExtentRows], device: torch.device) -> RaggedRows:
        """Return rows of any leases as one batch, ready for use on this thread's stream; a batch begun is kept.

        Raises:
            DecodeError: If an extent is damaged, or has not the fields that a batch needs.
            FieldError: If the extents have different fields.
        """
        _wait_for(self._next)
        fetched = self._on_this_stream(self._make(parts, device, padded=False), device)
        if fetched.content is None:
            raise DecodeError(f"rows of the ranks' batches cannot be gathered, the reason by ticket: {fetched.damaged}")
        return ragged_rows(fetched.content)

    def _on_this_stream(self, fetched: Fetched, device: torch.device) -> Fetched:
        if fetched.copied is not None and fetched.content is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(fetched.copied)
            # The memory belongs to the copy stream: its allocator must not reuse it while this stream reads it.
            fetched.content.record_stream(stream)
        return fetched

    def discard(self) -> None:
        """Discard the batch begun; once this returns nothing reads the arena."""
        begun, self._next = self._next, None
        _wait_for(begun)

    def close(self) -> None:
        """Discard the batch begun and end the thread."""
        self.discard()
        if self._thread is not None:
            self._thread.shutdown()

    def _make(self, parts: Sequence[ExtentRows], device: torch.device, padded: bool) -> Fetched:
        chosen, damaged = self._rows.find(parts)
        if damaged:
            return Fetched(None, damaged)
        versions = np.repeat([part.policy_version for part in parts], [len(part.rows) for part in parts])
        content: RaggedRows | Experience
        if padded:
            content = codec.gather_padded(chosen, pin_memory=device.type == "cuda")
            content.info = {**(content.info or {}), "policy_version": torch.from_numpy(versions)}
        else:
            content = codec.gather(chosen, pin_memory=device.type == "cuda").with_info("policy_version", versions)
        if device.type != "cuda":
            return Fetched(_moved(content, device), {})
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            # The page-locked tensors return to torch's allocator, which keeps them until the copies are complete.
            return Fetched(_moved(content, device), {}, self._streams[device].record_event())


def _moved(content: RaggedRows | Experience, device: torch.device) -> RaggedRows | Experience:
    """Return a batch on a device; its rows without padding stay on the CPU besides, for digest and metrics."""
    if device.type == "cpu":
        return content
    if isinstance(content, RaggedRows):
        return content.to_device(device, non_blocking=True)
    content.to_device(device, non_blocking=True)
    return content


def _wait_for(begun: _Begun | None) -> None:
    if begun is not None:
        concurrent.futures.wait([begun.made])
