"""The spool: the next start restores the untrained rows of a stopped run once, through any kill."""

import dataclasses
import errno

import msgspec
import pytest
import torch

from pipeline.buffer.buffer import Buffer
from pipeline.buffer.spool import Spool
from pipeline.config.identity import identity_of, run_dir
from pipeline.config.schema import BufferConfig, Config, DaemonConfig, RolloutConfig, TrainerConfig
from pipeline.experience import codec
from pipeline.runtime.latest_checkpoint import Latest, checkpoints_dir, write_latest
from pipeline.runtime.messages import Credit, Drain, Hello, Lease, Published, Sealed, Ticket, WantTickets
from pipeline.storage import extent_file
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import DROP_REASONS, LAYOUT_VERSION
from pipeline.storage.tables import PromptRange
from tests.storage.test_ledger import DyingMemory, Killed
from tests.support import protocol
from tests.support.experiences import made_up
from tests.support.protocol import Counts
from tests.support.told import Told

LAYOUT = LedgerLayout(extents=16, rows_per_extent=4)
LIMITS = dataclasses.replace(protocol.LIMITS, max_staleness=2, row_bytes=4096)


class Start:
    """One start of a run: an arena of its own, and the state folder that outlives it."""

    def __init__(self, tmp_path, name, arena=None, limits=LIMITS, journal_interval_s=0.0):
        self.limits = limits
        self.state_dir = tmp_path / "state"
        self.arena_path = arena or tmp_path / name
        if arena is None:
            Arena.create(self.arena_path, payload_bytes=1 << 20, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
        self.arena = Arena(self.arena_path)
        self.ledger = Ledger(self.arena.ledger[:], LAYOUT)
        self.config = Config(
            daemon=DaemonConfig(state_dir=self.state_dir),
            rollout=RolloutConfig(num_generations=2),
            buffer=BufferConfig(journal_interval_s=journal_interval_s),
            trainer=TrainerConfig(max_steps=100),
        )
        self.spool = Spool(self.config, self.arena)
        self.sent, self.damaged, self.rolled = [], [], {}
        self.seals = 0

    def take_in(self):
        self.spool.take_in(self.ledger, 1.0, self.damaged.append)

    def serve(self):
        self.buffer = Buffer(
            self.ledger, ExtentAllocator(self.arena.payload_bytes), self.limits,
            lambda peer, message: self.sent.append(message), Counts(), workers=1,
        )  # fmt: skip

    def say(self, *messages):
        for message in messages:
            self.buffer.handle(message, 0.0)
        self.buffer.step(0.0)

    def heard(self, kind):
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found

    def seal(self, ticket, version=1, fingerprint=11):
        # Every roll-out is another, also that of a prompt that was rolled out before.
        self.seals += 1
        experience = made_up(rows=4, seed=self.seals)
        self.rolled[ticket.ticket] = experience
        encoded = codec.encode(experience, self.arena.extent(ticket.offset, ticket.nbytes))
        self.say(Sealed("worker-0", ticket.ticket, 4, encoded.nbytes, encoded.checksum, version, fingerprint))

    def close(self):
        self.ledger.close()
        self.arena.close()

    @property
    def snapshot_path_exists(self):
        return self.spool.snapshot_path.exists()

    @property
    def dropped(self):
        return {reason: n for reason, n in zip(DROP_REASONS, self.ledger.totals.dropped, strict=True) if n}

    @property
    def balanced(self):
        totals, ledger = self.ledger.totals, self.ledger
        return totals.sealed == totals.trained + sum(totals.dropped) + ledger.ready + ledger.leased

    def view(self):
        ledger, totals = self.ledger, self.ledger.totals
        rows = {
            (record.ticket, record.position, row)
            for record in ledger.sealed_extents()
            for row, item in enumerate(record.items)
            if item.state == 1
        }
        return rows, totals.position, totals.tickets, ledger.redo, totals.sealed, totals.spool


@pytest.fixture
def starts(tmp_path):
    """Makes starts, and closes them."""
    made = []

    def start(name, **options):
        made.append(Start(tmp_path, name, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def checkpoint(start, **changes):
    """Write the note of the trainer's last checkpoint."""
    folder = checkpoints_dir(start.config)
    folder.mkdir(parents=True, exist_ok=True)
    latest = Latest(identity_of(start.config), step=1, version=1, position=4, complete=False, path="")
    write_latest(folder, msgspec.structs.replace(latest, **changes))


def stopped(start):
    """A run stopped with sixteen rows undelivered, a batch of them leased, and two tickets cut; return the lease."""
    start.serve()
    start.say(Published(0, 10, 0), Published(1, 11, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 5))
    tickets = start.heard(Ticket)
    assert [ticket.position for ticket in tickets] == [0, 2, 4, 6, 8]
    for ticket in tickets[:4]:
        start.seal(ticket)
    start.say(Hello("trainer-0", 1), Credit("trainer-0", 1, 1))
    (lease,) = start.heard(Lease)
    start.say(Drain())
    assert start.buffer.finish(start.spool.write)
    return lease


def test_what_was_undelivered_comes_again_with_the_same_values(starts):
    first = starts("first")
    stopped(first)
    assert first.dropped == {"spooled": 16}
    assert first.balanced and first.ledger.ready == 0
    checkpoint(first)

    second = starts("second")
    second.take_in()
    second.serve()
    second.say(Published(1, 11, 0), Hello("trainer-0", 1), Credit("trainer-0", 1, 1))

    (lease,) = second.heard(Lease)
    assert [part.ticket for part in lease.parts] == [0, 1]
    readers = [
        (codec.ExtentReader(second.arena.extent(part.offset, part.nbytes), checksum=part.checksum), part.rows)
        for part in lease.parts
    ]
    expected = torch.cat([first.rolled[0].reward, first.rolled[1].reward])
    assert torch.equal(codec.gather_padded(readers).reward, expected)
    del readers
    assert second.ledger.totals.position == 12
    assert second.ledger.redo == [PromptRange(8, 4)], "the prompts of the tickets that were cut"
    assert second.balanced
    assert not first.spool.path.exists()


@pytest.mark.parametrize(
    ("saved", "undone"), [({}, []), ({"version": 0, "position": 0}, [PromptRange(0, 5), PromptRange(6, 6)])]
)
def test_rows_that_were_trained_do_not_come_again_and_prompts_are_if_no_checkpoint_has_them(starts, saved, undone):
    """A run that failed, or whose trainer was killed at the stop: its spool is of later weights than its checkpoint."""
    first = starts("first")
    first.serve()
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 3))
    for ticket in first.heard(Ticket):
        first.seal(ticket, 0, 10)
    first.say(Hello("trainer-0", 1), Credit("trainer-0", 1, 1))
    first.say(Published(1, 11, 1))
    # Half a ticket, as after a batch that is no multiple of a ticket.
    first.ledger.acknowledge(first.ledger.lease([(first.ledger.extents[2], [0, 1])]))
    first.say(Drain())
    first.buffer.finish(first.spool.write)
    checkpoint(first, **saved)

    second = starts("second")
    second.take_in()

    assert second.view()[0] == {(2, 4, 2), (2, 4, 3)}, "these come again by themselves"
    if undone:
        assert second.ledger.redo == undone, "undone, and those of the tickets that were cut"


def test_a_run_that_is_complete_leaves_no_spool(starts):
    first = starts("first")
    first.serve()
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 1))
    first.seal(first.heard(Ticket)[0], 0, 10)
    first.say(Drain(complete=True))

    assert first.buffer.complete
    assert first.buffer.finish(None)

    assert first.dropped == {"cleared": 4}
    assert not first.spool.path.exists()


@pytest.mark.parametrize("of_another", [True, False])
def test_a_spool_of_weights_that_no_checkpoint_of_the_run_has_is_removed(starts, of_another):
    first = starts("first")
    stopped(first)
    if of_another:
        checkpoint(first, identity="another")

    second = starts("second")
    second.take_in()

    assert second.view()[:4] == (set(), 0, 0, [])
    assert not first.spool.path.exists()


def test_the_rows_of_a_run_that_has_taken_more_than_max_steps_stay(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first, step=100)

    second = starts("second")
    second.take_in()

    assert second.ledger.ready == 16


def test_without_a_spool_prompts_go_on_from_the_checkpoint(starts):
    start = starts("first")
    checkpoint(start, position=40)

    start.take_in()

    assert start.ledger.totals.position == 40


def test_a_buffer_that_is_replaced_before_its_first_ticket_goes_on_with_the_round_of_the_spool(starts):
    first = starts("first")
    first.serve()
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 1))
    # No row outlives the stop: the ticket is cut.
    first.say(Drain())
    first.buffer.finish(first.spool.write)
    checkpoint(first, version=0)
    second = starts("second")
    second.take_in()

    third = starts("", arena=second.arena_path)
    third.take_in()

    assert third.ledger.totals.round_left == second.ledger.totals.round_left == 2


def test_a_buffer_of_a_run_that_began_anew_is_replaced_beside_a_damaged_record_of_its_checkpoint(starts):
    start = starts("first")
    start.serve()
    start.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 1))
    checkpoint(start)
    (checkpoints_dir(start.config) / "latest.json").write_text("{")
    start.spool = Spool(start.config.changed("trainer", resume="never"), start.arena)

    start.take_in()

    assert (start.ledger.totals.tickets, start.damaged) == (1, [])


def test_a_trainer_that_goes_on_from_an_earlier_checkpoint_gets_the_prompts_between_them(starts):
    start = starts("first")
    checkpoint(start, step=10, version=10, position=40)
    start.take_in()
    start.serve()

    start.say(Published(5, 15, 0, True, 20), Published(5, 15, 0, True, 20))

    assert start.ledger.totals.policy_version == 5
    assert start.ledger.redo == [PromptRange(20, 20)], "issued again before any others"


def test_rows_newer_than_the_weights_that_the_run_goes_on_from_are_rolled_back(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)

    second = starts("second")
    second.take_in()
    second.serve()
    second.say(Published(0, 10, 0))

    assert second.dropped == {"rolled_back": 16}
    assert second.ledger.redo == [PromptRange(0, 12)]


def test_no_batch_is_leased_before_the_trainer_says_which_version_it_has(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)

    second = starts("second")
    second.take_in()
    second.serve()
    second.say(Hello("trainer-0", 1), Credit("trainer-0", 1, 1))

    assert second.heard(Lease) == []


def assert_taken_in_once(starts, view, before=lambda: None, **options):
    """A buffer that is killed at any store of the taking-in leaves its successor the view of one that was not."""
    reference = starts("reference", **options)
    reference.take_in()
    stores, killed = 0, True
    while killed:
        before()
        dying = starts(f"killed-{stores}", **options)
        budget, journal = [stores], dying.ledger.memory.redo_log
        journal.memory = DyingMemory(journal.memory, budget)
        journal.marks = DyingMemory(journal.marks, budget)
        try:
            dying.take_in()
            killed = False
        except Killed:
            survivor = starts("", arena=dying.arena_path, **options)
            survivor.take_in()
            assert view(survivor) == view(reference), f"killed at store {stores}"
        journal.memory, journal.marks = journal.memory.memory, journal.marks.memory
        stores += 1
    assert stores > 20


def test_a_buffer_killed_at_any_store_of_the_taking_in_takes_every_row_in_once(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)
    saved = first.spool.path.read_bytes()

    assert_taken_in_once(starts, Start.view, lambda: first.spool.path.write_bytes(saved))


def test_a_buffer_is_replaced_on_a_disk_that_has_become_read_only(starts, monkeypatch):
    start = starts("first")
    start.serve()
    start.say(Published(0, 9, 0))

    def refused(path, missing_ok=False):
        # Also of a file that is not there.
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", refused)
    start.take_in()

    assert start.ledger.totals.policy_version == 0 and start.damaged == []


def test_a_spool_that_was_taken_in_and_not_yet_removed_is_not_taken_in_again(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)
    saved = first.spool.path.read_bytes()
    second = starts("second")
    second.take_in()
    before = second.view()
    for record in list(second.ledger.sealed_extents()):
        second.ledger.drop([(record, [0, 1, 2, 3])], "stale")
    first.spool.path.write_bytes(saved)

    third = starts("", arena=second.arena_path)
    third.take_in()

    assert third.ledger.ready == 0 and len(before[0]) == 16
    assert not first.spool.path.exists()


def test_an_arena_that_outlived_its_stop_takes_its_own_spool_in(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)

    again = starts("", arena=first.arena_path)
    again.take_in()

    assert again.ledger.ready == 16
    assert again.balanced
    assert again.ledger.totals.position == 12


def test_a_damaged_extent_costs_its_rows_and_its_prompts_come_again(starts):
    first = starts("first")
    stopped(first)
    checkpoint(first)
    file = extent_file.load(first.spool.path)
    data = bytearray(first.spool.path.read_bytes())
    data[file.starts[1] + 500] ^= 1
    first.spool.path.write_bytes(data)

    second = starts("second")
    # Of an earlier stop, whose spool was damaged too.
    folder, name = run_dir(second.config) / "quarantine", f"spool-{first.spool.path.name}"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"earlier")
    second.take_in()

    assert {ticket for ticket, _, _ in second.view()[0]} == {0, 2, 3}
    assert second.ledger.redo == [PromptRange(2, 2), PromptRange(8, 4)]
    assert second.damaged == [4]
    assert (folder / name).read_bytes() == b"earlier"
    kept = folder / name.replace(".", "-2.")
    assert {path.name for path in folder.iterdir()} == {name, kept.name} and kept.read_bytes() == data
    assert not first.spool.path.exists()


def test_rows_of_another_releases_layout_are_kept_unread_and_their_prompts_come_again(starts, monkeypatch, caplog):
    first = starts("first")
    monkeypatch.setattr("pipeline.buffer.spool.LAYOUT_VERSION", LAYOUT_VERSION - 1)
    stopped(first)
    checkpoint(first)
    monkeypatch.undo()
    rows = sum(len(extent.chosen) for extent in extent_file.load(first.spool.path).extents)

    second = starts("second")
    second.take_in()

    assert second.ledger.ready == 0
    assert second.ledger.redo == [PromptRange(0, 12)]
    assert second.damaged == [rows]
    assert (run_dir(second.config) / "quarantine" / f"spool-{first.spool.path.name}").exists()
    assert f"rows of another release's layout not taken in, their prompts come again: rows={rows}" in caplog.text


@pytest.mark.parametrize("cut", [0, 7, 1000, 6000])
def test_a_spool_that_was_cut_is_set_aside_and_the_run_starts(starts, cut):
    first = starts("first")
    stopped(first)
    checkpoint(first)
    first.spool.path.write_bytes(first.spool.path.read_bytes()[:cut])

    second = starts("second")
    second.take_in()

    assert second.damaged
    assert not first.spool.path.exists()
    assert second.ledger.totals.position in (4, 12), "the checkpoint's, or the spool's if that much could be read"


def test_rows_and_prompts_of_a_spool_that_cannot_be_written_stay_for_the_next_start(starts, caplog):
    first = starts("first")
    first.serve()
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 1))
    # Another ticket, of the next two prompts, is in flight then.
    first.seal(first.heard(Ticket)[0], 0, 10)
    run_dir(first.config).mkdir(parents=True)
    (run_dir(first.config) / "spool").write_text("in the way")
    first.say(Drain())

    assert not first.buffer.finish(first.spool.write)

    assert first.dropped == {}
    assert "the spool cannot be written, experiences stay in shared memory: rows=4" in caplog.text
    again = Ledger(first.arena.ledger, first.ledger.layout)
    assert (again.ready, again.totals.sealed, again.reserved) == (4, 4, 0)
    assert again.redo == [PromptRange(2, 2)], "as a spool would have had them"
    again.close()


def test_prompts_of_cut_tickets_outlive_a_buffer_that_is_killed_while_it_writes_the_spool(starts):
    first = starts("first")
    first.serve()
    first.say(Published(0, 10, 0), Hello("worker-0", 1), WantTickets("worker-0", 1, 2))
    first.seal(first.heard(Ticket)[0], 0, 10)
    first.say(Drain())

    def killed(*_):
        raise Killed

    with pytest.raises(Killed):
        first.buffer.finish(killed)
    second = starts("second", arena=first.arena_path)
    second.serve()
    second.say(Drain())
    assert second.buffer.finish(second.spool.write)
    third = starts("third")
    third.take_in()

    assert (third.ledger.redo, third.ledger.totals.position, third.ledger.ready) == ([PromptRange(2, 4)], 6, 4)


def test_each_piece_of_a_spool_that_is_written_or_brought_to_disk_is_progress(starts, monkeypatch):
    monkeypatch.setattr(extent_file, "_FLUSH_BYTES", 1)
    first = starts("first")
    told = Told()
    first.spool = Spool(first.config, first.arena, told)

    stopped(first)

    assert len(told.beats) == 2 * 4, "four extents"
