"""The buffer's loop, run for real in a thread: its sockets, its ledger, its turns."""

import itertools
import threading
import time

import pytest

from pipeline.buffer import process as buffer_process
from pipeline.buffer.sizing import checked_layout
from pipeline.config.schema import BufferConfig, Config, DaemonConfig
from pipeline.runtime.messages import Hello, Wait, WantTickets, Welcome
from pipeline.runtime.role import RoleContext
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, trainer_name, worker_name
from pipeline.runtime.workspace import Workspace
from pipeline.telemetry.slab import MetricsSlab, SlotName
from pipeline.trainer.connect import open_connection


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "instance"
    config = Config(
        daemon=DaemonConfig(runtime_dir=tmp_path / "run", state_dir=tmp_path / "state"),
        buffer=BufferConfig(arena_bytes=1 << 20),
    )
    workspace = Workspace.prepare(folder, config, checked_layout(config))
    MetricsSlab.create(workspace.metrics_path, [SlotName("buffer", 0)]).close()
    slab = MetricsSlab.attach(workspace.metrics_path)
    slab.begin("buffer")
    ready = threading.Event()
    context = RoleContext("buffer", 0, folder, slab.writer("buffer"), lambda report: ready.set())
    thread = threading.Thread(target=buffer_process.run, args=(config, context))
    thread.start()
    try:
        assert ready.wait(60)
        yield folder
    finally:
        context.stopping = True
        thread.join(60)
        slab.close()
    assert not thread.is_alive()


@pytest.fixture
def turns_s(monkeypatch):
    """Times at which the buffer has read the input of a turn: messages, or bytes that do not decode."""
    found, receive = [], Mailbox.receive

    def noted(mailbox, timeout_s):
        before = mailbox.received + mailbox.refused
        messages = receive(mailbox, timeout_s)
        if mailbox._name == BUFFER and mailbox.received + mailbox.refused > before:
            found.append(time.monotonic())
        return messages

    monkeypatch.setattr(Mailbox, "receive", noted)
    return found


def hear_welcomes(folder, hellos):
    """Wait until each hello of worker 0 is answered, beside the word with which a buffer begins."""
    mailbox, welcomes = Mailbox(folder, worker_name(0)), 0
    while welcomes < hellos + 1 and (heard := mailbox.receive(5.0)):
        welcomes += sum(isinstance(message, Welcome) for message in heard)
    mailbox.close()
    assert welcomes == hellos + 1


def assert_paced(turns_s):
    assert all(after - before >= 1e-3 for before, after in itertools.pairwise(turns_s))


def test_messages_that_come_fast_are_answered_together(folder, turns_s):
    outbox = Outbox(folder, BUFFER)

    for incarnation in range(1, 200):
        outbox.send(Hello(worker_name(0), incarnation))
        time.sleep(1e-4)

    hear_welcomes(folder, 199)
    outbox.close()
    assert_paced(turns_s)


def test_garbage_without_end_costs_no_more_turns_than_messages_do(folder, turns_s):
    outbox = Outbox(folder, BUFFER)
    outbox.send(Hello(worker_name(0), 1))

    for _ in range(200):
        outbox._socket.send(b"garbage")
        time.sleep(1e-4)
    outbox.send(Hello(worker_name(0), 2))

    hear_welcomes(folder, 2)
    outbox.close()
    assert_paced(turns_s)


def test_each_connection_right_after_a_close_is_welcomed(folder):
    # One in forty was not, before the connection repeated its `Hello`.
    for _ in range(100):
        with open_connection(folder, Config(), rank=0, prefetch=2) as connection:
            assert connection.session.await_buffer(10.0)


def test_a_turns_words_leave_for_trainers_before_workers(folder, monkeypatch):
    sent = []
    send_all = Outbox.send_all
    monkeypatch.setattr(
        Outbox, "send_all", lambda box, messages: (sent.append((box._peer, [*messages])), send_all(box, messages))
    )
    outbox, mailbox = Outbox(folder, BUFFER), Mailbox(folder, worker_name(0))

    # One multipart message: all of it is handled in one turn.
    outbox.send_all([Hello(worker_name(0), 5), WantTickets(worker_name(0), 5, 1), Hello(trainer_name(0), 6)])
    while not any(peer == worker_name(0) and isinstance(messages[-1], Wait) for peer, messages in sent):
        mailbox.receive(1.0)

    outbox.close()
    mailbox.close()
    assert [peer for peer, _ in sent if peer != BUFFER] == [trainer_name(0), worker_name(0)]
