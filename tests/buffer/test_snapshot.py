"""The buffer's snapshots: a machine crash costs the rows after the last one, and no row is trained twice."""

import concurrent.futures
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.buffer.snapshot import BufferSnapshot
from pipeline.config.identity import run_dir
from pipeline.config.schema import BufferConfig
from pipeline.experience import codec
from pipeline.runtime.messages import Credit, Drain, Hello, Lease, Published, Ticket, WantTickets
from pipeline.storage import extent_file
from pipeline.storage.tables import PromptRange
from tests.buffer.test_spool import LIMITS, Start, assert_taken_in_once, checkpoint, starts  # noqa: F401 - a fixture
from tests.support.told import Told

NEVER_S = 1e9


class Later(concurrent.futures.Executor):
    """An executor that runs its calls in this thread, when the test asks for it."""

    def __init__(self):
        self.waiting = []

    def submit(self, call, *arguments):
        future = concurrent.futures.Future()
        self.waiting.append((future, call, arguments))
        return future

    def run(self):
        for future, call, arguments in self.waiting:
            try:
                future.set_result(call(*arguments))
            except OSError as error:
                future.set_exception(error)
        self.waiting = []


def serving(start, *, interval_s=NEVER_S):
    """A run with sixteen rows of version 1, a batch of them leased, and tickets under way; return its journal."""
    start.serve()
    start.later, start.counted = Later(), []
    start.config = start.config.model_copy(update={"buffer": BufferConfig(journal_interval_s=interval_s)})
    start.snapshot = BufferSnapshot(start.config, start.arena, start.counted.append, executor=start.later)
    start.say(Published(0, 10, 0), Published(1, 11, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 5))
    start.tickets = start.heard(Ticket)
    for ticket in start.tickets[:4]:
        start.seal(ticket)
    start.say(Hello("trainer-0", 1), Credit("trainer-0", 1, 1))
    return start.snapshot


def write(start, now_s=0.0):
    """Begin a write and end it."""
    start.snapshot.step(start.buffer, now_s)
    start.later.run()
    start.snapshot.step(start.buffer, now_s)


def rewards(start, parts):
    readers = [
        (codec.ExtentReader(start.arena.extent(part.offset, part.nbytes), checksum=part.checksum), part.rows)
        for part in parts
    ]
    gathered = codec.gather_padded(readers).reward.clone()
    del readers
    return gathered


def test_what_was_held_comes_back_and_the_run_that_wrote_it_has_lost_nothing(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    before, books = first.view(), dataclasses.replace(first.ledger.totals)
    write(first)
    checkpoint(first, position=0, fingerprint=f"{11:016x}")
    assert (first.view(), first.ledger.totals) == (before, books)
    assert first.counted == [True]

    second = starts("second")
    second.take_in()
    second.serve()
    second.say(Published(1, 11, 0), Hello("trainer-0", 1), Credit("trainer-0", 1, 2))

    leases = second.heard(Lease)
    assert [[part.ticket for part in lease.parts] for lease in leases] == [[0, 1], [2, 3]]
    expected = torch.cat([first.rolled[ticket].reward for ticket in range(4)])
    assert torch.equal(torch.cat([rewards(second, lease.parts) for lease in leases]), expected)
    assert second.ledger.totals.position == 12
    assert second.ledger.redo == [PromptRange(8, 4)], "the prompts of the two tickets that were under way"
    assert second.balanced


def test_room_that_is_being_copied_is_not_used_for_other_rows(starts):  # noqa: F811
    first = starts("first")
    journal = serving(first)
    journal.step(first.buffer, 0.0)
    # Half of the listed rows are trained, dropped from the arena and overwritten before any copy.
    first.say(Published(2, 12, 1))
    first.say(WantTickets("worker-0", 1, 4))
    rolled = first.heard(Ticket)
    for ticket in rolled:
        first.seal(ticket, version=2, fingerprint=12)
    assert rolled
    first.later.run()
    journal.step(first.buffer, 0.0)
    freed = first.buffer.used_bytes

    second = starts("second")
    checkpoint(second, position=0, fingerprint=f"{11:016x}")
    second.take_in()
    second.serve()
    second.say(Published(1, 11, 0), Hello("trainer-0", 1), Credit("trainer-0", 1, 1))

    (lease,) = second.heard(Lease)
    expected = torch.cat([first.rolled[0].reward, first.rolled[1].reward])
    assert torch.equal(rewards(second, lease.parts), expected)
    assert freed == sum(-(-record.nbytes // 64) * 64 for record in first.ledger.extents.values())


def test_a_journal_older_than_the_checkpoint_is_removed_with_a_line(starts, caplog):  # noqa: F811
    first = starts("first")
    serving(first)
    write(first)
    first.say(Published(2, 12, 1))
    checkpoint(first, version=2, fingerprint=f"{12:016x}", position=4)

    second = starts("second")
    second.take_in()

    assert second.view()[:4] == (set(), 4, 0, [])
    assert "journal removed, its rows may be in the checkpoint: rows=16 version=1 checkpoint=2" in caplog.text
    assert not first.snapshot.path.exists()


def test_a_journal_of_weights_that_were_rolled_back_does_not_count_for_others_of_their_number(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    first.say(Published(2, 12, 1))
    write(first)
    # A trainer that lost its state goes back, trains the rest of the rows, and calls that version 2 again.
    first.say(Published(1, 11, 0, rollback=True), Published(2, 13, 2))
    checkpoint(first, version=2, fingerprint=f"{13:016x}", position=8)

    second = starts("second")
    second.take_in()

    assert second.view()[:4] == (set(), 8, 0, [])


def test_prompts_whose_training_is_undone_are_issued_again(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    checkpoint(first, version=1, fingerprint=f"{11:016x}", position=0)
    first.say(Published(2, 12, 1))
    write(first)

    second = starts("second")
    second.take_in()

    assert {ticket for ticket, _, _ in second.view()[0]} == {2, 3}
    assert second.ledger.redo == [PromptRange(0, 4), PromptRange(8, 8)], "trained since the checkpoint, and under way"
    assert second.ledger.totals.position == 16


def test_without_a_checkpoint_rows_of_version_0_are_kept_and_others_rolled_back(starts):  # noqa: F811
    first = starts("first")
    first.serve()
    first.later = Later()
    config = first.config.model_copy(update={"buffer": BufferConfig(journal_interval_s=1.0)})
    first.snapshot = BufferSnapshot(config, first.arena, lambda whole: None, executor=first.later)
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 2))
    old, new = first.heard(Ticket)
    first.seal(old, 0, 10)
    first.say(Published(1, 11, 0))
    first.seal(new, 1, 11)
    write(first)

    second = starts("second")
    second.take_in()
    second.serve()
    second.say(Published(0, 10, 0))

    assert {(ticket, position) for ticket, position, _ in second.view()[0]} == {(0, 0)}
    assert second.dropped == {"rolled_back": 4}
    assert second.ledger.redo == [PromptRange(2, 6)], "rolled back, and the two tickets under way"


def test_it_is_written_every_interval_and_as_soon_as_there_is_another_checkpoint(starts):  # noqa: F811
    first = starts("first")
    serving(first, interval_s=60.0)
    for now_s, noted, written in [(0.0, False, 1), (59.0, False, 1), (60.0, False, 2), (61.5, True, 3), (62.6, True, 4),
                                  (63.7, False, 4), (122.5, False, 4), (122.6, False, 5)]:  # fmt: skip
        if noted:
            checkpoint(first, step=int(now_s))
        write(first, now_s)
        assert len(first.counted) == written, now_s


def test_none_is_begun_while_one_is_written_or_before_there_is_a_version(starts):  # noqa: F811
    first = starts("first")
    journal = serving(first, interval_s=1.0)

    journal.step(first.buffer, 0.0)
    journal.step(first.buffer, 5.0)
    begun = len(first.later.waiting)
    unborn = starts("unborn")
    unborn.serve()
    journal.step(unborn.buffer, 0.0)

    assert begun == 1
    assert len(first.later.waiting) == 1


def test_a_disk_that_does_not_take_it_is_one_line_and_the_run_goes_on(starts, caplog):  # noqa: F811
    first = starts("first")
    serving(first, interval_s=1.0)
    run_dir(first.config).mkdir(parents=True)
    (run_dir(first.config) / "journal").write_text("in the way")

    for now_s in (0.0, 1.0, 2.0):
        write(first, now_s)
    (run_dir(first.config) / "journal").unlink()
    write(first, 3.0)

    assert first.counted == [False, False, False, True]
    assert caplog.text.count("journal not written") == 1
    assert first.snapshot.path.exists()
    assert not first.buffer._allocator.holds


def test_an_arena_in_which_the_run_went_on_does_not_get_its_journal(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    write(first)
    checkpoint(first, fingerprint=f"{11:016x}")
    for record in list(first.ledger.sealed_extents())[2:]:
        first.ledger.drop([(record, [0, 1, 2, 3])], "stale")
    before = first.view()

    again = starts("", arena=first.arena_path, journal_interval_s=1.0)
    again.take_in()

    assert again.view() == before
    assert again.snapshot_path_exists, "the machine may still crash before the next"


def test_a_journal_stays_until_the_next_one_replaces_it(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    write(first)
    checkpoint(first, position=0, fingerprint=f"{11:016x}")

    second, third = starts("second", journal_interval_s=1.0), starts("third", journal_interval_s=1.0)
    second.take_in()
    third.take_in()
    off = starts("off")
    off.take_in()

    assert len(second.view()[0]) == len(third.view()[0]) == len(off.view()[0]) == 16
    assert not off.snapshot_path_exists


def test_a_spool_is_newer_than_any_journal(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    write(first)
    first.say(Published(2, 12, 1), Drain())
    assert first.buffer.finish(first.spool.write)
    checkpoint(first, version=2, fingerprint=f"{12:016x}", position=4)

    second = starts("second", journal_interval_s=1.0)
    second.take_in()

    assert {ticket for ticket, _, _ in second.view()[0]} == {2, 3}
    assert not second.snapshot_path_exists


def test_a_buffer_killed_at_any_store_of_the_taking_in_takes_every_row_in_once(starts):  # noqa: F811
    first = starts("first")
    serving(first)
    write(first)
    checkpoint(first, position=0, fingerprint=f"{11:016x}")

    assert_taken_in_once(starts, lambda start: start.view()[:5], journal_interval_s=1.0)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_machine_that_crashes_at_any_call_of_the_write_has_one_journal_or_the_other(
    starts, tmp_path, monkeypatch, call  # noqa: F811
):  # fmt: skip
    first = starts("first")
    serving(first, interval_s=1.0)
    write(first)
    checkpoint(first, position=0, fingerprint=f"{11:016x}")
    first.seal(first.tickets[4])
    crashes, real = [], getattr(os, call)

    def crash(*arguments):
        for moment in ("before", "after"):
            copy = tmp_path / f"crash-{len(crashes)}"
            shutil.copytree(first.state_dir, copy / "state")
            crashes.append((moment, copy))
            if moment == "before":
                result = real(*arguments)
        return result

    monkeypatch.setattr(extent_file.os, call, crash)
    write(first, 2.0)
    monkeypatch.undo()

    rows = []
    for _, copy in crashes:
        start = Start(copy, "arena")
        start.take_in()
        rows.append(len(start.view()[0]))
        assert not list((copy / "state").rglob("*.new"))
        start.close()
    assert sorted(rows) == rows and set(rows) <= {16, 20}
    assert (call == "rename") == (rows[-1] == 20 and rows[0] == 16) or call == "fsync"


# Any run, and the machine crashes.

LOOSE = dataclasses.replace(LIMITS, max_staleness=100)


class Machine:
    """A run on a machine that crashes: the buffer is real, worker, trainer and disk are said.

    Attributes:
        path: Versions in force: fingerprint, the rows that are trained in them, and the checkpoint's position.
        latest: The last checkpoint's version, None before the first; `saved` is its `path`.
        kept: Content of the last whole snapshot at its start: rows by version, and the versions in force.
    """

    def __init__(self, folder):
        self.folder = folder
        self.lives = self.fingerprints = 0
        self.path = {0: (10, frozenset(), 0)}
        self.latest, self.saved = None, dict(self.path)
        self.kept = self.begun = None
        self.prompts_of, self.forgiven = {}, set()
        self.start = None
        self.boot()

    def boot(self):
        self.start = Start(self.folder, f"life-{self.lives}", limits=LOOSE, journal_interval_s=1.0)
        self.lives += 1
        self.start.seals = 1000 * self.lives
        self.start.take_in()
        version = max(self.path)
        self.start.serve()
        self.later, self.begun = Later(), None
        self.snapshot = BufferSnapshot(self.start.config, self.start.arena, lambda whole: None, executor=self.later)
        self.start.say(
            Published(version, self.path[version][0], 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 1)
        )
        self.start.say(Hello("trainer-0", 1), Credit("trainer-0", 1, 1))
        self.positions = {}

    def rows(self):
        return {
            (record.checksum, row): record.policy_version
            for record in self.start.ledger.sealed_extents()
            for row, item in enumerate(record.items)
            if item.state
        }

    def roll(self):
        for ticket in self.start.heard(Ticket):
            version = max(self.path)
            if version != self.start.ledger.totals.policy_version or len(self.start.ledger.extents) > 12:
                continue
            self.start.seal(ticket, version, self.path[version][0])
            record = self.start.ledger.extents[ticket.ticket]
            for row in range(record.rows):
                self.prompts_of[record.checksum, row] = record.position + row // 2
            self.start.say(WantTickets("worker-0", 1, 1))

    def train(self):
        self.positions |= {lease.lease: lease.position for lease in self.start.heard(Lease)}
        if out := self.start.ledger.leases:
            lease = min(out)
            rows = {(record.checksum, row) for record, chosen in out[lease] for row in chosen}
            version, self.fingerprints = max(self.path), self.fingerprints + 1
            trained = self.path[version][1]
            assert not trained & rows
            self.path[version + 1] = (100 + self.fingerprints, trained | rows, self.positions[lease])
            self.start.say(Published(version + 1, 100 + self.fingerprints, lease + 1))

    def save(self):
        self.latest, self.saved = max(self.path), dict(self.path)
        fingerprint, _, position = self.path[self.latest]
        checkpoint(self.start, version=self.latest, fingerprint=f"{fingerprint:016x}", position=position)

    def journal_begins(self):
        if self.begun is None:
            self.now_s = getattr(self, "now_s", 0.0) + 10.0
            self.snapshot.step(self.start.buffer, self.now_s)
            self.begun = (self.rows(), dict(self.path))

    def journal_ends(self):
        if self.begun is not None:
            self.later.run()
            self.snapshot.close(self.start.buffer)
            self.kept, self.begun = self.begun, None

    def roll_back(self):
        version, before = max(self.saved), max(self.path)
        if version != before:
            self.forgiven |= {self.prompts_of[row] for row in self.path[before][1] - self.saved[version][1]}
            self.path = dict(self.saved)
            self.start.say(Published(version, self.path[version][0], 0, rollback=True))

    def crash(self):
        self.start.close()
        self.path = dict(self.saved)
        version = max(self.path)
        fingerprint, trained, _ = self.path[version]
        self.boot()

        found = self.rows()
        assert not trained & found.keys(), "trained again"
        goes_with = self.kept is not None and (
            self.latest is None or (version in self.kept[1] and self.kept[1][version][0] == fingerprint)
        )
        expected = {row for row, wrote in self.kept[0].items() if wrote <= version} if goes_with else set()
        assert found.keys() == expected, "exactly the rows of the snapshot are restored"
        ledger = self.start.ledger
        again = {run.position + place for run in ledger.redo for place in range(run.prompts)}
        under_way = {record.position + place for record in ledger.reserved_extents() for place in range(record.prompts)}
        there = {self.prompts_of[row] for row in trained | found.keys()} | again | under_way | self.forgiven
        assert set(range(ledger.totals.position)) <= there, "a prompt is lost"
        assert self.start.balanced


EVENTS = ["roll", "train", "save", "journal_begins", "journal_ends", "roll_back", "crash"]


@given(
    st.lists(
        st.sampled_from([*EVENTS, "roll", "train", "roll", "journal_begins", "journal_ends"]), min_size=40, max_size=60
    )
)
def test_no_row_is_trained_twice_and_no_prompt_lost_whenever_the_machine_crashes(events):
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        for event in [*events, "crash"]:
            getattr(machine, event)()
        machine.start.close()


def test_a_journal_is_progress_only_while_its_end_is_waited_for(starts, monkeypatch):  # noqa: F811
    first = starts("first")
    serving(first)
    told = Told()
    first.snapshot = BufferSnapshot(
        first.config, first.arena, first.counted.append, executor=first.later, telemetry=told
    )
    write(first)
    assert (first.counted, told.beats) == ([True], []), "beside the loop, whose own silence is to be seen"
    first.snapshot.step(first.buffer, 2 * NEVER_S)
    monkeypatch.setattr(concurrent.futures, "wait", lambda futures: first.later.run())
    first.later.shutdown = lambda: None

    first.snapshot.close(first.buffer)

    assert (first.counted, len(told.beats)) == ([True, True], 4), "four extents"
