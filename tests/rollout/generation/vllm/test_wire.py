"""The link between a worker and its engine's process, and the seeds of rows."""

import socket
import threading

import pytest

from pipeline.rollout.generation.interface import row_seed
from pipeline.rollout.generation.vllm import wire


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    worker, engine = wire.Link(ours, wire.reports), wire.Link(theirs, wire.orders)
    yield worker, engine
    worker.close()
    engine.close()


def test_messages_arrive_in_order_however_the_bytes_are_cut(ends):
    worker, engine = ends
    sent = [wire.Cancel([*range(count)]) for count in (0, 1, 200_000)] + [wire.Pause()]
    received = []

    def read():
        while len(received) < len(sent):
            received.extend(engine.receive(1.0))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for message in sent:
        worker.send(message)
    reader.join(60)

    assert received == sent


def test_two_ends_that_both_write_more_than_the_socket_holds_do_not_wait_for_each_other(ends):
    worker, engine = ends
    order, report = wire.Cancel([*range(500_000)]), wire.Failed("engine", "x" * 5_000_000)
    both_write = threading.Barrier(2, timeout=60)
    received = {}

    def write_then_read(name, end, message):
        both_write.wait()
        end.send(message)
        received[name] = end.receive(60.0)

    threads = [
        threading.Thread(target=write_then_read, args=arguments, daemon=True)
        for arguments in (("worker", worker, order), ("engine", engine, report))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert received == {"worker": [report], "engine": [order]}


def test_messages_before_the_end_are_returned_and_then_the_end_is_raised(ends):
    worker, engine = ends
    engine.send(wire.Paused())
    engine.close()

    assert worker.receive(5.0) == [wire.Paused()]
    with pytest.raises(EOFError):
        worker.receive(5.0)


def test_without_a_message_a_receive_ends_after_its_time(ends):
    worker, _ = ends

    assert worker.receive(0.01) == []


def test_no_two_rows_of_neighbouring_tickets_share_a_seed():
    """With seed + row, row 1 of ticket 7 would be row 0 of ticket 8."""
    seeds = [row_seed(ticket, row) for ticket in range(7, 71) for row in range(512)]

    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_is_that_of_splitmix64():
    # The generator's first output from state 0 and, from state 1234567, its first two (reference implementation).
    assert row_seed(0, 0) == 0xE220A8397B1DCDAF >> 1
    assert [row_seed(1234567, row) for row in range(2)] == [6457827717110365317 >> 1, 3203168211198807973 >> 1]
