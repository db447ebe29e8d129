"""Messages over real ZeroMQ sockets."""

import contextlib
import os
import stat

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DecodeError
from pipeline.runtime import messages
from pipeline.runtime.messages import Ack, Drain, ExtentRows, Faulty, Hello, Lease, Sealed
from pipeline.runtime.transport import Mailbox, Outbox, Traffic
from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import SLOTS, begun, value

EXAMPLES = [
    Hello("worker-0", 2**62, [1, 2]),
    Sealed("worker-0", 1, 2, 3, 2**64 - 1, 5, 2**63 - 1, 0),
    Faulty("worker-0", 1, "not_finite", "row 0: kl is nan", 2, 3, 2**64 - 1, 5, 2**63 - 1),
    Lease(1, 2, 3, [ExtentRows(0, 64, 7, 1, 4, [0, 1, 5])], 2),
    Drain(),
]


@pytest.fixture
def mailbox(tmp_path):
    box = Mailbox(tmp_path, "buffer")
    yield box
    box.close()


@pytest.fixture
def outbox(tmp_path, mailbox):
    box = Outbox(tmp_path, "buffer")
    yield box
    box.close()


def receive(mailbox, count):
    found = []
    while len(found) < count:
        came = mailbox.receive(5.0)
        assert came, f"{len(found)} of {count} messages came"
        found += came
    return found


def test_every_kind_of_message_arrives_as_it_was_in_order(mailbox, outbox):
    for message in EXAMPLES:
        outbox.send(message)

    assert receive(mailbox, len(EXAMPLES)) == EXAMPLES


def test_a_message_sent_before_the_receiver_exists_is_delivered(tmp_path):
    early = Outbox(tmp_path, "late")
    early.send(Ack("trainer-0", 1))
    late = Mailbox(tmp_path, "late")

    assert receive(late, 1) == [Ack("trainer-0", 1)]
    early.close()
    late.close()


def test_nothing_comes_within_the_time_given(mailbox):
    assert mailbox.receive(0.01) == []


def test_the_socket_is_private_and_gone_after_close(tmp_path, monkeypatch):
    # It is that of all threads: two that set it at once would leave it changed.
    monkeypatch.delattr(os, "umask")
    box = Mailbox(tmp_path, "buffer")
    path = tmp_path / "buffer.sock"
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0

    box.close()

    assert not path.exists()


def test_garbage_is_counted_and_does_not_stop_the_mail(tmp_path, mailbox):
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path / 'buffer.sock'}")
    for data in (b"", b"\xc1", b"\x93\xa5Hello", msgspec.msgpack.encode({"type": "Ack"})):
        socket.send(data)
    socket.send(messages.encode(Drain()))

    assert receive(mailbox, 1) == [Drain()]
    assert mailbox.refused == 4
    socket.close(linger=0)


def test_a_flood_of_garbage_is_one_line_in_the_log_and_does_not_hold_up_the_receiver(tmp_path, mailbox, caplog):
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path / 'buffer.sock'}")
    for _ in range(3000):
        socket.send(b"\xc1")
    calls = 0
    while mailbox.refused < 3000:
        assert mailbox.receive(0.2) == []
        calls += 1

    # Each call ends after a burst, so that the caller gets to its own work.
    assert calls >= 3
    assert [record.getMessage() for record in caplog.records] == [
        "message refused: to=buffer count=1 reason=message of 1 B does not decode: "
        "MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)"
    ]
    socket.close(linger=0)


def test_what_is_sent_received_and_refused_is_counted(tmp_path):
    with contextlib.closing(MetricsSlab.create(tmp_path / "metrics", SLOTS)) as slab:
        traffic = Traffic(begun(slab, "buffer"))
        box, out = Mailbox(tmp_path, "buffer", traffic), Outbox(tmp_path, "buffer", traffic)
        out.send(Drain())
        out._socket.send(b"\xc1\xc1")
        while box.received + box.refused < 2:
            box.receive(5.0)

        nbytes = len(messages.encode(Drain()))
        assert value(slab, "rlhfd_ipc_messages_total", channel="buffer", direction="sent") == 1
        assert value(slab, "rlhfd_ipc_bytes_total", channel="buffer", direction="sent") == nbytes
        assert value(slab, "rlhfd_ipc_messages_total", channel="buffer", direction="received") == 2
        assert value(slab, "rlhfd_ipc_bytes_total", channel="buffer", direction="received") == nbytes + 2
        assert value(slab, "rlhfd_ipc_drops_total", channel="buffer") == 1
        out.close()
        box.close()


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=5).map(lambda tail: b"\x91" * 5000 + tail)))
def test_random_bytes_never_crash_the_decoder(data):
    try:
        messages.decode(data)
    except DecodeError:
        pass


@settings(max_examples=1000)
@given(st.sampled_from(EXAMPLES), st.integers(0, 200), st.integers(0, 255))
def test_a_mutated_message_is_refused_or_is_another_whole_message(message, place, value):
    data = bytearray(messages.encode(message))
    data[place % len(data)] = value
    try:
        other = messages.decode(bytes(data))
    except DecodeError:
        return
    assert messages.decode(messages.encode(other)) == other
