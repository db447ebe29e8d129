"""Malformed messages to one socket, from a process: `python -m tests.fuzz.sender KIND ADDRESS MOST SEED TIME_S`.

Processes, because threads would wait for one another's interpreter at each answer: 300 a second on any socket. Prints
the number of messages that the receiver has read or will read: messages cut off before are not counted.
"""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from pipeline.runtime import messages
from tests.fuzz.mutation import damaged, forged, wrong_types

# No peer of the instance: a process with this user's rights may send in a peer's name, and is trusted.
_NOBODIES = ("worker-99999999999", "trainer-99999999999", "trainer-x", "worker-", "buffer")
_TRUSTED = (messages.Drain, messages.Published)
_UNTRUSTED = [kind for kind in messages.KINDS if kind not in _TRUSTED]
_CONTROL = (b'{"command": "status"}', b'{"command": ["why"]}', b'{"command": "stop!", "timeout_s": 1e9}')
_LINES = 200
_PATHS = (
    "/healthz",
    "/readyz",
    "/healthz?a=%00",
    "/../../etc/passwd",
    "/metrics/",
    "/",
    "/page.js",
    "/api/live?after_s=1e12",
    "/api/live?after_s=nan",
    "/api/live?after_s=-1e999&after_s=x",
    "/api/samples?cursor=%00.-9",
    "/api/samples?cursor=",
    "/%ff%fe",
    "//",
    "/" + "x" * 3000,
    "*",
)
_HTTP = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
    b'POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{"a":1}',
    b"PUT /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
_HOSTS = ("x", "127.0.0.1", "[::1]:9", "localhost", "]:[", "")
_HTTP_ANSWER = b"HTTP/1.1 "
_REQUESTS = 20
_CONNECTIONS = 32


def mail(path: str) -> Callable[[random.Random], int]:
    """Messages to a ZeroMQ socket: not messages at all, damaged, of wrong types, or absurd."""
    connection = zmq.Context.instance().socket(zmq.PUSH)
    connection.setsockopt(zmq.SNDHWM, 1000)
    connection.setsockopt(zmq.SNDTIMEO, 1000)
    connection.connect(f"ipc://{path}")

    def tell(rng: random.Random) -> int:
        choice = rng.random()
        if choice < 0.3:
            # With no version that could be: one that could is a trainer's word.
            data = messages.encode(forged(rng, rng.choice([*_UNTRUSTED, messages.Published]), _NOBODIES, (-1, 2**63)))
        elif choice < 0.5:
            data = wrong_types(rng, rng.choice(_UNTRUSTED))
        else:
            data = damaged(rng, messages.encode(forged(rng, rng.choice(_UNTRUSTED), _NOBODIES, (-1, 2**63))))
        try:
            connection.send(data)
        except zmq.Again:
            return 0
        return 1

    return tell


def control(path: str) -> Callable[[random.Random], int]:
    """Lines to the control socket, many a connection; the last one of a connection is cut short."""

    def tell(rng: random.Random) -> int:
        lines = [_control_line(rng).replace(b"\n", b"\r") + b"\n" for _ in range(_LINES)]
        cut = damaged(rng, _CONTROL[0])[:1000].replace(b"\n", b"\r") or b"{"
        return _talk([_opened(socket.AF_UNIX, path)], [b"".join(lines) + cut], [0])[0].count(b"\n")

    return tell


def _control_line(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return damaged(rng, rng.choice(_CONTROL))
    command = rng.choice(
        ("stop ", "", "statuses", None, 2**64 - 1, -1.5, [], {}, {"command": "stop"}, "\0", "x" * 5000)
    )
    return msgspec.json.encode({rng.choice(("command", "Command", "")): command, "fields": [rng.random()]})


def http(address: str) -> Callable[[random.Random], int]:
    """Requests to the HTTP server, on several connections at once: absurd ones, and behind them a damaged one."""
    host, _, port = address.rpartition(":")

    def tell(rng: random.Random) -> int:
        sent = [[_http_request(rng) for _ in range(rng.randrange(_REQUESTS))] for _ in range(_CONNECTIONS)]
        for requests in sent:
            requests.append(damaged(rng, rng.choice(_HTTP)))
        opened = [_opened(socket.AF_INET, (host, int(port))) for _ in sent]
        # A server that sees the end of a connection answers nothing that is still open.
        answers = _talk(opened, [b"".join(requests) for requests in sent], [len(requests) - 1 for requests in sent])
        # The damaged one is read to where its damage shows, and may have no answer.
        return sum(
            min(answer.count(_HTTP_ANSWER) + 1, len(requests)) for answer, requests in zip(answers, sent, strict=True)
        )

    return tell


def _http_request(rng: random.Random) -> bytes:
    """A well-formed request, after which the connection is good for another one."""
    method = rng.choice(("GET", "HEAD", "POST", "DELETE", "OPTIONS", "X" * 200))
    path = "/metrics" if rng.random() < 0.005 else rng.choice(_PATHS)
    value = "".join(chr(rng.randrange(0x21, 0x7F)) for _ in range(rng.randrange(60)))
    name = rng.choice(("Accept", "Authorization", "Cookie", "Accept-Encoding", "X-Forwarded-For", "X" * 100))
    body = rng.randbytes(rng.randrange(64)) if rng.random() < 0.2 else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: {rng.choice(_HOSTS)}\r\n{name}: {value}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def _opened(family: socket.AddressFamily, address: Any) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(20.0)
    with contextlib.suppress(OSError):
        connection.connect(address)
    return connection


def _talk(connections: list[socket.socket], data: list[bytes], awaited: list[int]) -> list[bytes]:
    """Say all of it, each part on its connection; hear so many answers of each, then all until its end."""
    for connection, part in zip(connections, data, strict=True):
        with contextlib.suppress(OSError):
            connection.sendall(part)
    answers = []
    for connection, number in zip(connections, awaited, strict=True):
        heard = bytearray()
        with contextlib.suppress(OSError), connection:
            while heard.count(_HTTP_ANSWER) < number and (read := connection.recv(1 << 18)):
                heard += read
            connection.shutdown(socket.SHUT_WR)
            while read := connection.recv(1 << 18):
                heard += read
        answers.append(bytes(heard))
    return answers


def main(kind: str, address: str, most: int, seed: int, time_s: float) -> None:
    """Say nonsense until it was `most` times or the time is up."""
    tell = {"mail": mail, "control": control, "http": http}[kind](address)
    rng, sent, started_s = random.Random(seed), 0, time.monotonic()
    while sent < most and time.monotonic() - started_s < time_s:
        sent += tell(rng)
    # Queued messages still leave.
    zmq.Context.instance().destroy(linger=60_000)
    sys.stdout.write(f"{sent} {time.monotonic() - started_s}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
