"""The wire between a trainer rank on another machine and its gateway."""

import logging
import pickle
import socket
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, DecodeError, FieldError
from pipeline.experience import codec
from pipeline.prompts.rows import row_of
from pipeline.runtime.messages import Ack, Drain, ExtentRows
from pipeline.runtime.transport import Outbox, trainer_name
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.telemetry.carried_records import CarriedRecords
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.meeting import Meeting
from pipeline.trainer.prefetch import ArenaRows, Gathering, Prefetcher
from pipeline.trainer.remote import Downward, FoundExtent, RankSpec, RemoteRank, Wire, in_one_extent
from tests.support.daemon import wait_until
from tests.support.experiences import made_up

CPU = torch.device("cpu")
LAYOUT = LedgerLayout(extents=4, rows_per_extent=4)


class Shelf:
    """An arena of four extents of four rows."""

    def __init__(self, folder):
        Arena.create(folder / "arena", payload_bytes=1 << 16, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
        self.arena = Arena(folder / "arena")
        self.rows = ArenaRows(self.arena, Gathering())
        self.parts = []
        for number in range(4):
            encoded = codec.encode(made_up(rows=4, seed=number), self.arena.extent(number << 14, 1 << 14))
            self.parts.append(
                ExtentRows(number << 14, encoded.nbytes, encoded.checksum, 3 + number, number, [0, 1, 2, 3])
            )

    def some(self, number, *rows):
        part = self.parts[number]
        return ExtentRows(part.offset, part.nbytes, part.checksum, part.policy_version, number, [*rows])


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.arena.close()


class Far:
    """A rank's end of a wire, served by a thread as its gateway serves it."""

    def __init__(self, folder, answer):
        self.wire = Wire()
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("trainer", 1)])
        self.slab.begin("trainer", 1)
        self.slab.writer("trainer", 1)
        self.answer = answer
        self.ends = threading.Event()
        self.messages = []
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def collect(self, timeout_s=0.01):
        return self.wire.collect(self.slab, 1, CarriedRecords(), timeout_s)

    def serve(self):
        while not self.ends.is_set():
            upward = self.collect()
            self.messages += upward.messages
            for question in upward.questions:
                self.wire.deliver(Downward(found={question.number: self.answer(*question.arguments)}))

    def close(self):
        self.ends.set()
        self.thread.join()
        self.slab.close()


@pytest.fixture
def far(tmp_path):
    made = []

    def new(answer):
        made.append(Far(tmp_path, answer))
        return made[-1]

    yield new
    for one in made:
        one.close()


def test_a_rank_far_away_gathers_the_rows_of_a_lease_that_one_here_gathers(shelf, far):
    parts = [shelf.some(2, 3, 1), shelf.some(0, 0), shelf.some(3, 0, 1, 2, 3)]
    here = Prefetcher(shelf.arena).gather(parts, CPU)
    sent = []

    def answer(wanted):
        sent.append(in_one_extent(shelf.rows, wanted))
        return sent[-1]

    there = Prefetcher(far(answer).wire, Gathering(ahead=True)).gather(parts, CPU)

    assert there.named.keys() == here.named.keys()
    assert there.lengths == here.lengths and there.counts == here.counts
    for name in here.columns:
        assert (there.columns[name] == here.columns[name]).all(), name
    assert there.columns["info.policy_version"].tolist() == [5] * 2 + [3] + [6] * 4
    # Seven rows travel, not the twelve of their extents.
    whole = sum(shelf.parts[number].nbytes for number in (0, 2, 3))
    assert sent[0].extent.nbytes < 0.75 * whole


def test_what_is_damaged_in_the_arena_is_named_far_away_as_it_is_here(shelf, far):
    shelf.arena.extent(1 << 14, 1 << 14)[200:400] = bytes(200)
    rank = Prefetcher(far(lambda wanted: in_one_extent(shelf.rows, wanted)).wire)

    with pytest.raises(DecodeError, match=r"\{1: .*its checksum is not the one it was sealed with"):
        rank.gather([shelf.some(0, 0), shelf.some(1, 0)], CPU)


def test_bytes_that_change_on_the_way_are_found(shelf, far):
    def answer(wanted):
        found = in_one_extent(shelf.rows, wanted)
        found.extent[300] ^= 1
        return found

    with pytest.raises(DecodeError, match="its checksum is not the one"):
        Prefetcher(far(answer).wire).gather([shelf.some(0, 0)], CPU)


def test_an_error_of_the_gateway_is_raised_far_away(far, shelf):
    rank = Prefetcher(far(lambda wanted: FieldError("extents differ")).wire)

    with pytest.raises(FieldError, match="extents differ"):
        rank.gather([shelf.some(0, 0)], CPU)


def test_messages_arrive_in_order_both_ways_and_once(far):
    end = far(lambda wanted: FoundExtent(None, 0, 0, {}))
    assert end.wire.receive(0.0) == []

    for lease in range(50):
        end.wire.send(Ack("trainer-1", lease))
        end.wire.deliver(Downward(messages=[Drain()]))

    assert end.wire.receive(1.0) == [Drain()] * 50
    assert end.wire.receive(0.0) == []
    wait_until(lambda: len(end.messages) == 50, 5.0, "the gateway has them")
    assert [message.lease for message in end.messages] == [*range(50)]


@pytest.fixture
def rank_of():
    """Makes a rank on another machine, by a configuration."""
    handlers = logging.getLogger().handlers[:]
    yield lambda config: RemoteRank(
        RankSpec(
            config=config.model_dump_json(), rank=1, generation=1, meeting=Meeting("127.0.0.1", 1, "cpu"),
            slots=[SlotName("supervisor", 0), SlotName("trainer", 1)], started_s=0.0,
        )
    )  # fmt: skip
    logging.getLogger().handlers[:] = handlers


def test_an_error_of_a_rank_far_away_names_its_machine_and_keeps_its_class(monkeypatch, rank_of):
    """It arrives as Ray sends it, pickled: of prompts that are others there."""
    monkeypatch.setattr(RemoteRank, "_run", lambda self: row_of({"question": "2 + 2"}, "prompts.jsonl:1"))

    error = pickle.loads(pickle.dumps(rank_of(Config()).run()))

    told = f'on {socket.gethostname()}: prompts.jsonl:1:1: no key "prompt" among question, did you mean "question"?'
    assert isinstance(error, ConfigError) and str(error) == error.bare == told


def test_a_rank_leaves_no_file_whoever_kills_it_and_takes_each_configuration_once(tmp_path, monkeypatch, rank_of):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (Config.model_validate({"daemon": {"hang_timeout_s": time_s}}) for time_s in (7.0, 8.0))
    rank = rank_of(first)

    assert not [*tmp_path.iterdir()]
    context = rank._context
    assert context.reloaded() == first and context.reloaded() is None
    rank.deliver(Downward(config=second.model_dump_json()))
    assert context.reloaded() == second and context.reloaded() is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.needs("ray")
def test_an_error_in_carrying_the_buffers_messages_ends_the_gateway(shelf, tmp_path, monkeypatch):
    """Else the rank would wait for a lease without end."""
    gateways = pytest.importorskip("pipeline.trainer.ray")
    delivered, deadline_s = threading.Event(), time.monotonic() + 30.0

    def deliver(downward):
        delivered.set()
        raise ValueError("not carried")

    def wait(references, timeout):
        assert time.monotonic() < deadline_s, "the gateway goes on without the messages"
        delivered.wait(timeout)
        return [], references

    actor = SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda: None) for name in ("run", "collect")},
        deliver=SimpleNamespace(remote=deliver),
    )
    monkeypatch.setattr(gateways, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(gateways, "found_meeting", lambda *_: None)
    monkeypatch.setattr(gateways._Gateway, "_placed", lambda *_: actor)
    monkeypatch.setattr(gateways.ray, "kill", lambda actor: None)
    monkeypatch.setattr(gateways.ray, "wait", wait)
    context = SimpleNamespace(
        index=1, folder=tmp_path, generation=1, report=lambda told: None, reloaded=lambda: None, stopping=False
    )
    outbox = Outbox(tmp_path, trainer_name(1))
    outbox.send(Drain())

    try:
        with pytest.raises(ValueError, match="not carried"):
            gateways._Gateway(Config(), context, 0.0).run()
    finally:
        outbox.close()
