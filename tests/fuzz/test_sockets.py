"""A daemon that trains while everything that it listens on is told nonsense."""

import contextlib
import random
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from pipeline import messages
from tests.daemon import SMALL, Daemon, task, total
from tests.fuzz.mutation import KINDS, damaged, forged, wrong_types

__all__ = ["task"]
pytestmark = [pytest.mark.fuzz, pytest.mark.integration, pytest.mark.timeout(1200)]

_SHORT, _SHORT_S = {"mail": 4_000, "clients": 300}, 10.0
_FULL, _FULL_S = {"mail": 1_000_000, "clients": 1_000_000}, 200.0
_MOST_GROWTH_BYTES = 24 << 20
# No peer of the instance, for whoever has this user's rights may speak in a peer's name: that is trusted.
_NOBODIES = ("worker-99999999999", "trainer-99999999999", "trainer-x", "worker-", "buffer")
_TRUSTED = (messages.Drain, messages.Published)
_CONTROL = (b'{"command": "status"}\n', b'{"command": ["why"]}\n')
_HTTP = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
    b'POST /healthz HTTP/1.1\r\nContent-Length: 7\r\n\r\n{"a":1}',
)


class Attack:
    """Nonsense to one socket, in a thread of its own, until it was `most` times or the time is up."""

    def __init__(self, path, tell, most, seed, until_s):
        self.name = path
        self.sent = 0
        self.took_s = 0.0
        self._tell, self._most, self._rng, self._until_s = tell, most, random.Random(seed), until_s
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        started_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            tell = self._tell(stack, self.name)
            while self.sent < self._most and time.monotonic() < self._until_s:
                self.sent += tell(self._rng)
        self.took_s = time.monotonic() - started_s

    def join(self):
        self._thread.join()


def mail(stack, path):
    """Messages to a ZeroMQ socket: not messages at all, damaged, of wrong types, or absurd."""
    connection = zmq.Context.instance().socket(zmq.PUSH)
    connection.setsockopt(zmq.SNDHWM, 1000)
    connection.setsockopt(zmq.SNDTIMEO, 1000)
    stack.callback(connection.close, linger=5000)
    connection.connect(f"ipc://{path}")
    kinds = [kind for kind in KINDS if kind not in _TRUSTED]

    def tell(rng):
        choice = rng.random()
        if choice < 0.3:
            # With no version that could be: one that could is a trainer's word.
            data = messages.encode(forged(rng, rng.choice([*kinds, messages.Published]), _NOBODIES, (-1, 2**63)))
        elif choice < 0.5:
            data = wrong_types(rng, rng.choice(kinds))
        else:
            data = damaged(rng, messages.encode(forged(rng, rng.choice(kinds), _NOBODIES, (-1, 2**63))))
        try:
            connection.send(data)
        except zmq.Again:
            return 0
        return 1

    return tell


def client(address, requests):
    """Requests to a stream socket, each on a connection of its own."""

    def connected(stack, path):
        def tell(rng):
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(5.0)
                connection.connect(address)
                connection.sendall(damaged(rng, rng.choice(requests)))
                if rng.random() < 0.8:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
            return 1

        return tell

    return connected


def test_no_socket_can_be_talked_into_a_crash(tmp_path, task, request, say):
    in_full = request.config.getoption("--fuzz")
    (most, time_s) = (_FULL, _FULL_S) if in_full else (_SHORT, _SHORT_S)
    seed = request.config.getoption("randomly_seed", 0)
    with Daemon(tmp_path, *SMALL, "daemon.progress_timeout_s=0", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(5)
        port, pids, lines, step = (
            int(daemon.url.rpartition(":")[2]),
            daemon.pids(),
            daemon.errors.count("\n"),
            daemon.status()["step"],
        )
        memory = {name: anonymous_bytes(pid) for name, pid in pids.items()}
        before = daemon.metrics()

        until_s = time.monotonic() + time_s
        sockets = sorted(path for path in daemon.shm_dir.glob("*.sock") if path.name != "control.sock")
        attacks = [Attack(path, mail, most["mail"], seed, until_s) for path in sockets]
        control = client(str(daemon.shm_dir / "control.sock"), _CONTROL)
        attacks += [
            Attack(Path("control"), control, most["clients"], seed, until_s),
            Attack(Path("http"), client(("127.0.0.1", port), _HTTP), most["clients"], seed, until_s),
        ]
        for attack in attacks:
            attack.join()

        assert [path.name for path in sockets] == ["buffer.sock", "trainer-0.sock", "worker-0.sock"]
        told = {attack.name.name: attack.sent for attack in attacks}
        daemon.wait_until(lambda: heard(daemon, before, "buffer") >= told["buffer.sock"], "all mail is read")
        peers = told["trainer-0.sock"] + told["worker-0.sock"]
        daemon.wait_until(lambda: heard(daemon, before, "peer") >= peers, "all mail is read")
        daemon.wait_step(daemon.status()["step"] + 3)
        after, grown = daemon.metrics(), {name: anonymous_bytes(pid) - memory[name] for name, pid in pids.items()}
        figures = " ".join(f"{a.name.name}={a.sent:,} ({a.sent / a.took_s:,.0f}/s)" for a in attacks)
        say(f"told {figures}; memory grew by { ({name: f'{n >> 10:,} KiB' for name, n in grown.items()}) }")

        assert daemon.pids() == pids
        assert total(after, "rlhfd_items_unaccounted") == 0
        refused = total(after, "rlhfd_ipc_drops_total") - total(before, "rlhfd_ipc_drops_total")
        assert refused > sum(told[path.name] for path in sockets) // 4
        assert max(grown.values()) < _MOST_GROWTH_BYTES, grown
        steps = daemon.status()["step"] - step
        assert daemon.errors.count("\n") - lines < 3 * steps + 30, daemon.errors[-4000:]


def heard(daemon, before, channel):
    now = daemon.metrics()
    labels = {"channel": channel, "direction": "received"}
    return total(now, "rlhfd_ipc_messages_total", **labels) - total(before, "rlhfd_ipc_messages_total", **labels)


def anonymous_bytes(pid):
    """Memory of its own, shared memory and files left out."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10
