"""The slab: the metrics of every process of an instance in one shared-memory file, one writer a slot, no lock.

    offset 0     header: magic, layout, size, then the slots' names as JSON; padded to a page
    per slot     control      incarnation, folded, pid u64 | beat, working_on, deadline, in_collective f64 (`Progress`)
                 activity     turn u64, then two halves of u64: activity | since in ns | spent in ns; shown u64
                 live         float64 words: counters, histograms and gauges of the process that runs now
                 base 0, 1    the same words, for the processes of this slot that died
    at the end   conservation: sequence u64, then two halves; the last bit of `sequence` selects the valid half

A word is NaN until a process binds it: such a series is absent, which is not 0. A slot's process counts as live while
``incarnation > folded >> 1``; the last bit of `folded` selects the valid base.

    step                process and time                       order of stores
    begin               supervisor, before it starts a child   live words NaN, then `incarnation` + 1
    write               the child                              one word; a histogram's bucket, then its sum
    fold                supervisor, after it reaped the child  base + live into the other base, then `folded`
    publish_group       the buffer                             the other half, then `sequence` + 1
    leave               the child                              `turn` + 1, which is odd then
    enter               the child                              counter of the activity that ends, other half, `turn` + 1
    read                supervisor                             `shown`

`folded` is one aligned 8-byte store with two effects: it selects the new base and marks the live words as dead. A
supervisor killed before this store has folded nothing; killed after it, everything. A repeated fold counts nothing
twice. So no counter falls or counts twice after any kill. A child killed between the two stores of an observation has
counted it without adding to the sum.

Times are CLOCK_MONOTONIC's. The present activity counts up without any write: the half that the last bit of
``turn >> 1`` selects stands for ``spent + (now - since)`` seconds of its activity, and the counter's own word is
ignored. So no reader sees a torn change. A process makes `turn` odd before it reads the clock for the end of an
activity; until `turn` is even again readers count up to `shown`, the time of the last reading that found it even. So no
reader counts an activity beyond its end, however long the process waits for a processor in between. For a dead process
`fold` counts up to the time of its call; the next supervisor counts up to the last heartbeat of its predecessor, which
writes one after each reading that it shows.

Each process relies on the store order of x86-64: the stores of another process are seen in the order of their making.
"""

from __future__ import annotations

import array
import errno
import hashlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import DeadlineError, FieldError, LedgerError
from pipeline.storage.files import no_room, replacing
from pipeline.storage.truncation import survive
from pipeline.telemetry.metrics import ACTIVITIES, BUFFER, CONSERVATION_WORDS, START, Conservation, Progress, SlotName
from pipeline.telemetry.writer import LINE_WORDS, WORD_BYTES, Merge, MetricWriter, SlotLayout

PAGE_BYTES = 4096
_MAGIC = b"rlhfd-metrics\x00\x00\x03"
_HEADER = struct.Struct("<16s8sQQ")
_CONTROL_WORDS = 2 * LINE_WORDS
_INCARNATION, _FOLDED, _PID, _BEAT, _WORKING_ON, _DEADLINE, _IN_COLLECTIVE = range(7)
_TURN = LINE_WORDS
_HALF_WORDS = 3
_SHOWN = _TURN + 1 + 2 * _HALF_WORDS
_GROUP_HALF_WORDS = -(-CONSERVATION_WORDS // LINE_WORDS) * LINE_WORDS
_READ_ATTEMPTS = 1000


class SlabLayout:
    """Offsets of all parts of a slab with these slots, in words of 8 bytes.

    Attributes:
        header: The header's bytes; two slabs have the same layout only if these are equal.
        control_at: Offset of each slot's control words; its live words and bases follow.
        group_at: Offset of the conservation block.
        nbytes: Size of the file.
    """

    def __init__(self, slots: Sequence[SlotName]) -> None:
        self.slots = tuple(SlotName(*slot) for slot in slots)
        self.of_role = {role: SlotLayout(role, self.slots) for role in dict.fromkeys(slot.role for slot in self.slots)}
        self.index = {slot: index for index, slot in enumerate(self.slots)}
        description = json.dumps(self.slots).encode()
        word = -(-(_HEADER.size + len(description)) // PAGE_BYTES) * PAGE_BYTES // WORD_BYTES
        self.control_at = []
        for slot in self.slots:
            self.control_at.append(word)
            word += _CONTROL_WORDS + 3 * self.of_role[slot.role].words
        self.group_at = word
        self.nbytes = (word + LINE_WORDS + 2 * _GROUP_HALF_WORDS) * WORD_BYTES
        self.header = _HEADER.pack(_MAGIC, self._identity(), self.nbytes, len(description)) + description

    @classmethod
    def of_header(cls, start: bytes) -> SlabLayout:
        """Return the layout of the slab that starts with these bytes, at least one page.

        Raises:
            LedgerError: If another version of this code made the slab.
        """
        magic, _, _, described = _HEADER.unpack_from(start)
        if magic != _MAGIC:
            raise LedgerError("no metrics slab of this version")
        try:
            layout = cls([SlotName(*slot) for slot in json.loads(start[_HEADER.size : _HEADER.size + described])])
        except (ValueError, TypeError) as error:
            raise LedgerError("a metrics slab with a torn header") from error
        if not start.startswith(layout.header):
            raise LedgerError("a metrics slab of another catalogue")
        return layout

    def live(self, index: int) -> slice:
        """Return the words of the live process of this slot."""
        words = self.of_role[self.slots[index].role].words
        start = self.control_at[index] + _CONTROL_WORDS
        return slice(start, start + words)

    def base(self, index: int, half: int) -> slice:
        """Return the words of one of the slot's bases."""
        live = self.live(index)
        words = live.stop - live.start
        return slice(live.stop + half * words, live.stop + (half + 1) * words)

    def group(self, half: int) -> slice:
        """Return the words of one half of the conservation block."""
        start = self.group_at + LINE_WORDS + half * _GROUP_HALF_WORDS
        return slice(start, start + CONSERVATION_WORDS)

    def _identity(self) -> bytes:
        """Return a digest of the meaning of the words: every series of every role, in order."""
        series = {
            role: [(cell.metric.name, cell.metric.kind, cell.metric.buckets, cell.labels) for cell in layout.cells]
            for role, layout in self.of_role.items()
        }
        return hashlib.sha256(repr((series, CONSERVATION_WORDS)).encode()).digest()[:8]


class SlotState(NamedTuple):
    """The slot of a process on another machine at one time, by `SlotWriter.state`; clocks of machines differ.

    Attributes:
        words: Its live words.
        silent_s: Time since its last heartbeat.
        working_on: The lease in work, -1 for none.
        in_collective: Whether it waits in a collective.
        activity: Its activity, empty for none.
        entered_ns: Time since the begin of that activity.
        spent_ns: Time that it has spent on that activity in all.
    """

    words: bytes
    silent_s: float
    working_on: int
    in_collective: bool
    activity: str
    entered_ns: int
    spent_ns: int


class SlotWriter(MetricWriter):
    """A process's own slot in the slab."""

    def __init__(self, slab: MetricsSlab, index: int) -> None:
        layout = slab.layout
        name = layout.slots[index]
        super().__init__(name, layout.of_role[name.role], slab.floats, layout.live(index).start)
        self._slab = slab
        self._live = layout.live(index)
        self._control_at = layout.control_at[index]
        self._beat_at = self._control_at + _BEAT

    def beat(self) -> None:
        """Write a heartbeat: from the main loop, and from within long work."""
        self._slab.floats[self._beat_at] = time.monotonic()

    def work_on(self, number: int = -1, deadline_s: float = 0.0) -> None:
        """Show the ticket or lease in work, -1 for none, and the time at which it is due."""
        self._slab.floats[self._control_at + _DEADLINE] = deadline_s
        self._slab.floats[self._control_at + _WORKING_ON] = float(number)
        self.beat()

    def set_in_collective(self, waits: bool) -> None:
        """Show whether the process waits in a collective for the other ranks."""
        self._slab.floats[self._control_at + _IN_COLLECTIVE] = float(waits)
        self.beat()

    def leave(self) -> None:
        """Stop the present activity for readers, before the clock is read for its end; `enter` follows."""
        self._slab.words[self._control_at + _TURN] |= 1

    def enter(self, activity: str, since_ns: int, spent_ns: int) -> None:
        """Show the activity from `since_ns` on, and the total time spent on it before."""
        self._slab._show_activity(self._control_at, activity, since_ns, spent_ns)
        self._slab.floats[self._beat_at] = since_ns / 1e9

    def started_ns(self) -> int | None:
        """Return the start time of the process; None if `begin` set none, or another activity was entered."""
        activity, since_ns, spent_ns = self._slab._activity(self._control_at)
        return since_ns if activity == 1 + ACTIVITIES.index(START) and not spent_ns else None

    @property
    def slots(self) -> tuple[SlotName, ...]:
        """All slots of the slab."""
        return self._slab.layout.slots

    def state(self) -> SlotState:
        """Return the present state of this slot, for `show` of a process on another machine."""
        slab, name = self._slab, self.name
        activity, since_ns, spent_ns = slab._activity(self._control_at)
        words = bytes(slab.floats[self._live].cast("B"))
        now_ns, progress = time.monotonic_ns(), slab.progress(*name)
        entered_ns = now_ns - since_ns
        return SlotState(
            words,
            now_ns / 1e9 - progress.beat_s,
            progress.working_on,
            progress.in_collective,
            ACTIVITIES[activity - 1] if activity else "",
            entered_ns,
            spent_ns + entered_ns,
        )

    def show(self, state: SlotState) -> None:
        """Make this slot that of a process on another machine, whose slab has the same slots.

        Series that the other process has not bound stay this one's. Its activity counts up to the time of its state and
        not to that of a reading, so that no total is ahead of it and falls at the next state.
        """
        slab, at = self._slab, self._live.start
        for word, value in enumerate(memoryview(state.words).cast("d")):
            if value == value:
                slab.floats[at + word] = value
        slab.floats[self._control_at + _WORKING_ON] = float(state.working_on)
        slab.floats[self._control_at + _IN_COLLECTIVE] = float(state.in_collective)
        if state.activity:
            since_ns = max(time.monotonic_ns() - state.entered_ns, slab.words[self._control_at + _SHOWN])
            slab._show_activity(self._control_at, state.activity, since_ns, state.spent_ns, is_left=True)
        slab.floats[self._beat_at] = time.monotonic() - state.silent_s

    def publish_group(self, block: Conservation) -> None:
        """Replace the conservation block as a whole. Only the buffer may; its last block stays when it dies."""
        if self.name.role != BUFFER:
            raise FieldError(f"the conservation block is the buffer's, not the {self.name.role}'s")
        words, layout = self._slab.words, self._slab.layout
        sequence = words[layout.group_at] + 1
        self._slab.floats[layout.group(sequence & 1)] = _doubles(block.to_words())
        words[layout.group_at] = sequence


def _fill(descriptor: int, layout: SlabLayout) -> None:
    """Write a slab in which all series are absent."""
    content = array.array("d", [math.nan]) * (layout.nbytes // WORD_BYTES)
    for start, length in [*((at, _CONTROL_WORDS) for at in layout.control_at), (layout.group_at, LINE_WORDS)]:
        content[start : start + length] = array.array("d", bytes(length * WORD_BYTES))
    os.posix_fallocate(descriptor, 0, layout.nbytes)
    os.pwrite(descriptor, content, 0)
    os.pwrite(descriptor, layout.header, 0)


class MetricsSlab:
    """A mapping of the slab's file; owns the mapping, not the file.

    Attributes:
        layout: Offsets of all parts.
        floats: The file as float64 words.
        words: The file as unsigned 64-bit words.
    """

    def __init__(self, layout: SlabLayout, mapping: mmap.mmap) -> None:
        self.layout = layout
        self._map = mapping
        self._bytes = memoryview(mapping)
        self.floats = self._bytes.cast("d")
        self.words = self._bytes.cast("Q")
        self._mergers: dict[int, tuple[int, Merge]] = {}

    @classmethod
    def create(cls, path: Path, slots: Sequence[SlotName]) -> MetricsSlab:
        """Make a new slab of mode 0600 with all series absent, in place of any existing one.

        Args:
            path: Path of the file; its folder belongs to this instance alone.
            slots: The processes that have a slot, the supervisor first.

        Raises:
            ConfigError: If the file system has no room for it.
        """
        layout = SlabLayout(slots)
        try:
            with replacing(path) as descriptor:
                _fill(descriptor, layout)
                mapped = mmap.mmap(descriptor, layout.nbytes)
            return cls(layout, mapped)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise no_room(path.parent, layout.nbytes, "a metrics slab") from error

    @classmethod
    def attach(cls, path: Path) -> MetricsSlab:
        """Map an existing slab.

        Raises:
            LedgerError: If the file is no slab, or a slab of another catalogue.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < PAGE_BYTES:
                raise LedgerError(f"{path} holds {size_bytes:,} B, no metrics slab")
            try:
                layout = SlabLayout.of_header(os.pread(descriptor, size_bytes, 0))
            except LedgerError as error:
                raise LedgerError(f"{path} is {error}") from error
            if size_bytes < layout.nbytes:
                raise LedgerError(f"{path} holds {size_bytes:,} B, its header says {layout.nbytes:,} B")
            return cls(layout, mmap.mmap(descriptor, layout.nbytes))
        finally:
            os.close(descriptor)

    @classmethod
    def reopen(cls, path: Path, slots: Sequence[SlotName]) -> MetricsSlab:
        """Return the slab of a starting supervisor: its predecessor's with all counters kept, or a new one.

        With other slots than the predecessor's, as with another number of workers, it is a new one that has its
        counters. No process of the predecessor's instance may be alive.
        """
        try:
            slab = cls.attach(path)
        except (FileNotFoundError, LedgerError):
            return cls.create(path, slots)
        # All processes ended with their supervisor; its last heartbeat is the time of the last reading that was shown.
        ended_ns = int(slab.progress(*slots[0]).beat_s * 1e9)
        for slot in slab.layout.slots:
            slab.fold(*slot, until_ns=ended_ns)
        if slab.layout.slots == tuple(slots):
            return slab
        anew = cls.create(path, slots)
        anew._take_over(slab)
        slab.close()
        return anew

    def begin(self, role: str, worker: int = 0, *, activity: str = "") -> int:
        """Fold the slot's last process, prepare the slot for a new one and return its incarnation.

        Args:
            role: The slot's role.
            worker: The slot's number.
            activity: Activity of the process from now on, until its own code enters another one; empty: none.
        """
        self.fold(role, worker)
        index = self._index(role, worker)
        control = self.layout.control_at[index]
        live = self.layout.live(index)
        self.floats[live] = _doubles([math.nan] * (live.stop - live.start))
        self.words[control + _PID] = 0
        self.floats[control + _BEAT : control + _CONTROL_WORDS] = _doubles([0.0, -1.0, *[0.0] * (_CONTROL_WORDS - 5)])
        if activity:
            self._show_activity(control, activity, time.monotonic_ns(), 0)
        self.words[control + _INCARNATION] += 1
        return self.words[control + _INCARNATION]

    def writer(self, role: str, worker: int = 0) -> SlotWriter:
        """Return this process's writer.

        Raises:
            LedgerError: If the supervisor has not begun the slot.
        """
        index = self._index(role, worker)
        if not self.is_live(role, worker):
            raise LedgerError(f"the metrics slot of {role} {worker} was not begun")
        self.words[self.layout.control_at[index] + _PID] = os.getpid()
        return SlotWriter(self, index)

    def fold(self, role: str, worker: int = 0, *, until_ns: int | None = None) -> None:
        """Add a dead process's counts to the slot's base and remove its gauges.

        Allowed only after the process was reaped; a repeated fold changes nothing.

        Args:
            role: The slot's role.
            worker: The slot's number.
            until_ns: Monotonic end of its last activity, None for now.
        """
        index = self._index(role, worker)
        control = self.layout.control_at[index]
        incarnation, folded = self.words[control + _INCARNATION], self.words[control + _FOLDED]
        if incarnation <= folded >> 1:
            return
        other = 1 - (folded & 1)
        layout = self.layout.of_role[role]
        until_ns = time.monotonic_ns() if until_ns is None else until_ns
        kept = layout.merge(layout.merge(self._base(index, folded), self._live(index, until_ns)), None)
        self.floats[self.layout.base(index, other)] = _doubles(kept)
        self.words[control + _FOLDED] = incarnation << 1 | other

    def is_live(self, role: str, worker: int = 0) -> bool:
        """Return whether the slot has begun and is not folded."""
        control = self.layout.control_at[self._index(role, worker)]
        return self.words[control + _INCARNATION] > self.words[control + _FOLDED] >> 1

    def pid(self, role: str, worker: int = 0) -> int:
        """Return the pid of the writer, 0 before it has attached."""
        return self.words[self.layout.control_at[self._index(role, worker)] + _PID]

    def progress(self, role: str, worker: int = 0) -> Progress:
        """Return the progress of the slot's process; after its death the last one, until `begin`."""
        index = self._index(role, worker)
        control = self.layout.control_at[index]
        activity, since_ns, _ = self._activity(control)
        beat_s, working_on, deadline_s, in_collective = self.floats[control + _BEAT : control + _IN_COLLECTIVE + 1]
        name = ACTIVITIES[activity - 1] if activity else ""
        return Progress(beat_s, name, since_ns / 1e9, int(working_on), deadline_s, bool(in_collective))

    def read(self, index: int) -> Sequence[float]:
        """Return the totals of the slot with this index, dead processes included; a concurrent fold has no effect."""
        control = self.layout.control_at[index]
        for _ in range(_READ_ATTEMPTS):
            incarnation, folded = self.words[control + _INCARNATION], self.words[control + _FOLDED]
            live = self._live(index, None) if incarnation > folded >> 1 else None
            merge = self._merger(index, folded)
            if (incarnation, folded) == (self.words[control + _INCARNATION], self.words[control + _FOLDED]):
                # Processes of most slots never died; with 64 workers this saves a fifth of a scrape.
                return live if live is not None and not folded else merge(live)
        raise DeadlineError(f"metrics slot {index} changed hands during {_READ_ATTEMPTS:,} reads")

    def conservation(self) -> Conservation | None:
        """Return the buffer's last block, whole; None before the first."""
        at = self.layout.group_at
        for _ in range(_READ_ATTEMPTS):
            sequence = self.words[at]
            block = self.floats[self.layout.group(sequence & 1)].tolist()
            # The half that was read is written again only after the next flip.
            if self.words[at] == sequence:
                return Conservation.from_words(block) if sequence else None
        raise DeadlineError(f"the conservation block changed during {_READ_ATTEMPTS:,} reads")

    def survive_truncation(self) -> None:
        """Let this process outlive another program's truncation of the file; see `pipeline.storage.truncation`."""
        self._map_again = survive(self._map)

    def restore(self, path: Path) -> None:
        """Make a truncated file a slab again, with all series absent; `survive_truncation` came before.

        Processes that live go on writing to it, and are read once they begin again.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _fill(descriptor, self.layout)
            self._map_again(descriptor)
        finally:
            os.close(descriptor)
        self._mergers.clear()

    def close(self) -> None:
        """Unmap; a handle used afterwards raises ValueError."""
        for view in (self.floats, self.words, self._bytes):
            view.release()
        self._map.close()

    def _take_over(self, before: MetricsSlab) -> None:
        """Take the totals of a slab with other slots, all of which are folded.

        The first slot of a role takes those of slots that are gone, but for series with a label of their slot.
        """
        for index, slot in enumerate(before.layout.slots):
            heir = (
                slot if slot in self.layout.index else next((s for s in self.layout.slots if s.role == slot.role), None)
            )
            if heir is None:
                continue
            self.begin(*heir)
            totals, at = before.read(index), self.layout.live(self._index(*heir)).start
            series = self.layout.of_role[slot.role].by_series
            for metric, labels, start in before.layout.of_role[slot.role].cells:
                cell = series.get((metric.name, labels))
                if cell is not None and (heir == slot or not metric.is_own("worker")):
                    words = _doubles([*totals[start : start + metric.words]])
                    self.floats[at + cell.start : at + cell.start + metric.words] = words
            self.fold(*heir)

    def _show_activity(
        self, control: int, activity: str, since_ns: int, spent_ns: int, *, is_left: bool = False
    ) -> None:
        """Store an activity so that no reader sees it torn; `is_left`: readers do not count it up."""
        turn = (self.words[control + _TURN] | 1) + 1
        half = _half(control, turn)
        self.words[half] = 1 + ACTIVITIES.index(activity)
        self.words[half + 1], self.words[half + 2] = since_ns, spent_ns
        self.words[control + _TURN] = turn | is_left

    def _index(self, role: str, worker: int) -> int:
        index = self.layout.index.get(SlotName(role, worker))
        if index is None:
            raise FieldError(f"the metrics slab has no slot for {role} {worker}")
        return index

    def _live(self, index: int, until_ns: int | None) -> list[float]:
        """Return the live words, the present activity counted up to a time; None: as far as readers may show it now."""
        # The clock first: time that the process spends after this reading must not count twice.
        now_ns = time.monotonic_ns()
        control = self.layout.control_at[index]
        for _ in range(_READ_ATTEMPTS):
            turn = self.words[control + _TURN]
            activity, since_ns, spent_ns = self._activity(control)
            live: list[float] = [*self.floats[self.layout.live(index)].tolist()]
            if self.words[control + _TURN] == turn:
                break
        else:
            raise DeadlineError(f"metrics slot {index} changed its activity during {_READ_ATTEMPTS:,} reads")
        if until_ns is None:
            if not turn & 1:
                self.words[control + _SHOWN] = now_ns
            until_ns = self.words[control + _SHOWN]
        if activity:
            at = self.layout.of_role[self.layout.slots[index].role].activities[activity - 1]
            # The same formula as in the process, so that the total never falls by a bit.
            live[at] = (spent_ns + max(0, until_ns - since_ns)) / 1e9
        return live

    def _activity(self, control: int) -> tuple[int, int, int]:
        for _ in range(_READ_ATTEMPTS):
            turn = self.words[control + _TURN]
            half = _half(control, turn)
            activity, since_ns, spent_ns = self.words[half : half + _HALF_WORDS].tolist()
            # The half that was read is written again only after the next flip.
            if self.words[control + _TURN] == turn:
                return activity, since_ns, spent_ns
        raise DeadlineError(f"a metrics slot changed its activity during {_READ_ATTEMPTS:,} reads")

    def _merger(self, index: int, folded: int) -> Merge:
        """Return the function that adds live words to this base; each base has its own value of `folded`."""
        known = self._mergers.get(index)
        if known is None or known[0] != folded:
            layout = self.layout.of_role[self.layout.slots[index].role]
            known = self._mergers[index] = folded, layout.merger(self._base(index, folded))
        return known[1]

    def _base(self, index: int, folded: int) -> Sequence[float]:
        return self.floats[self.layout.base(index, folded & 1)].tolist()


def _half(control: int, turn: int) -> int:
    """Return the offset of the half that is valid at a value of `turn`."""
    return control + _TURN + 1 + _HALF_WORDS * (turn >> 1 & 1)


def _doubles(values: list[float]) -> memoryview[float]:
    return memoryview(array.array("d", values))
