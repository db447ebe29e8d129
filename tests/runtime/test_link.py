"""Messages over a socket: whole, in order, and with an end that has a name."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pipeline.errors import DecodeError, LinkEndedError, TornMessageError
from pipeline.runtime import link
from pipeline.runtime.link import Link


class Text(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def ends(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> tuple[Link[Text], Link[Text]]:
    monkeypatch.setattr(link, "_MOST_BYTES", 6_000_000)
    ours, theirs = (Link(end, msgspec.msgpack.Decoder(Text)) for end in sockets)
    return ours, theirs


def test_messages_arrive_in_order_however_the_bytes_are_cut(ends: tuple[Link[Text], Link[Text]]) -> None:
    ours, theirs = ends
    sent = [Text("x" * size) for size in (0, 1, 1_000_000, 5)]
    received: list[Text] = []

    for message in sent:
        ours.post(message)
    while len(received) < len(sent):
        received += theirs.receive()
        ours.flush()

    assert received == sent


def test_two_ends_that_both_write_more_than_the_socket_holds_do_not_wait_for_each_other(
    ends: tuple[Link[Text], Link[Text]],
) -> None:
    long, both_write, received = Text("x" * 5_000_000), threading.Barrier(2, timeout=60), []

    def write_then_read(end: Link[Text]) -> None:
        both_write.wait()
        end.send(long)
        received.append(end.receive(60.0))

    threads = [threading.Thread(target=write_then_read, args=[end], daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert received == [[long]] * 2


def test_a_wait_for_messages_sends_what_was_posted(ends: tuple[Link[Text], Link[Text]]) -> None:
    ours, theirs = ends
    sent, received = [Text("x" * 1_000_000), Text("last")], list[Text]()

    def read_and_answer() -> None:
        while len(received) < len(sent):
            received.extend(theirs.receive(60.0))
        theirs.send(Text("all"))

    for message in sent:
        ours.post(message)
    reader = threading.Thread(target=read_and_answer, daemon=True)
    reader.start()

    assert ours.receive(30.0) == [Text("all")]
    reader.join(60)
    assert received == sent


@pytest.mark.parametrize("unread", ["", "x" * 1_000_000], ids=["nothing", "a large message"])
def test_messages_before_the_end_are_returned_and_then_the_end_is_raised(
    ends: tuple[Link[Text], Link[Text]], unread: str
) -> None:
    ours, theirs = ends
    if unread:
        ours.post(Text(unread))
    theirs.send(Text("last"))
    theirs.close()

    assert ours.receive(5.0) == [Text("last")]
    with pytest.raises(LinkEndedError):
        ours.receive(5.0)
    with pytest.raises(LinkEndedError):
        ours.send(Text("too late"))


def test_without_a_message_a_receive_ends_after_its_time(ends: tuple[Link[Text], Link[Text]]) -> None:
    assert ends[0].receive(0.01) == []


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"\x05\0\0\0ab", TornMessageError, "closed after 6 B of a message"),
        (struct.pack("<I", 6_000_001), DecodeError, "a message of 6,000,001 B is too large for a link: 6,000,000 B"),
        (b"\x01\0\0\0\xc1", DecodeError, "a message of 1 B on a link does not decode"),
    ],
)
def test_bytes_that_are_no_message_are_an_error_with_a_name(
    sockets: tuple[socket.socket, socket.socket],
    ends: tuple[Link[Text], Link[Text]],
    data: bytes,
    error: type[Exception],
    text: str,
) -> None:
    sockets[1].sendall(data)
    sockets[1].close()

    with pytest.raises(error, match=text):
        ends[0].receive(5.0)


def test_a_message_that_the_other_end_would_refuse_is_not_sent(ends: tuple[Link[Text], Link[Text]]) -> None:
    with pytest.raises(DecodeError, match="too large"):
        ends[0].post(Text("x" * 6_000_000))

    ends[0].send(Text("small"))
    assert ends[1].receive(5.0) == [Text("small")]
