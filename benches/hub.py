"""The minimum cost of ZeroMQ for a process in the buffer's place: the same messages received and sent, without work.

    python -m benches.hub FOLDER     serves sockets in FOLDER until it is killed

An append is one message to the hub and two back; every second append is followed by one to the trainer, which
acknowledges.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

# Bytes of `Sealed`, `Settled` with `Ticket`, `Lease` and `Ack` of two appends of 8 rows.
_SEALED, _SETTLED, _TICKET, _LEASE, _ACK = 64, 24, 64, 320, 24


def share(rate_per_s: float, seconds: float) -> float:
    """Return the hub's share of a core at `rate_per_s` appends per second."""
    with tempfile.TemporaryDirectory(prefix="rlhfd-hub-") as folder:
        hub = subprocess.Popen([sys.executable, "-m", "benches.hub", folder])
        context, ended = zmq.Context(), threading.Event()
        trainer = threading.Thread(target=_acknowledge, args=(context, folder, ended))
        try:
            worker, to_hub = _listening(context, folder, "worker"), _connected(context, folder, "hub")
            trainer.start()
            _append(to_hub, worker)
            began_s, before_s, count = time.monotonic(), _cpu_s(hub.pid), 0
            while (now_s := time.monotonic()) - began_s < seconds:
                time.sleep(max(0.0, began_s + count / rate_per_s - now_s))
                _append(to_hub, worker)
                count += 1
            return (_cpu_s(hub.pid) - before_s) / (time.monotonic() - began_s)
        finally:
            hub.kill()
            hub.wait()
            ended.set()
            trainer.join()
            # A thread closes its own sockets.
            context.destroy(linger=0)


def _append(to_hub: zmq.Socket[bytes], worker: zmq.Socket[bytes]) -> None:
    to_hub.send(bytes(_SEALED))
    worker.recv_multipart()


def _acknowledge(context: zmq.Context[zmq.Socket[bytes]], folder: str, ended: threading.Event) -> None:
    with _listening(context, folder, "trainer") as leases, _connected(context, folder, "hub") as to_hub:
        while not ended.is_set():
            if leases.poll(50):
                leases.recv()
                to_hub.send(bytes(_ACK))
        to_hub.setsockopt(zmq.LINGER, 0)


def _listening(context: zmq.Context[zmq.Socket[bytes]], folder: str, name: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{folder}/{name}.sock")
    return socket


def _connected(context: zmq.Context[zmq.Socket[bytes]], folder: str, name: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/{name}.sock")
    return socket


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _serve(folder: str) -> None:
    context = zmq.Context.instance()
    mail, worker = _listening(context, folder, "hub"), _connected(context, folder, "worker")
    trainer, appends, parent = _connected(context, folder, "trainer"), 0, os.getppid()
    while os.getppid() == parent:
        if not mail.poll(1000) or len(mail.recv()) == _ACK:
            continue
        worker.send_multipart([bytes(_SETTLED), bytes(_TICKET)], zmq.NOBLOCK)
        appends += 1
        if appends % 2 == 0:
            trainer.send(bytes(_LEASE), zmq.NOBLOCK)


if __name__ == "__main__":
    _serve(sys.argv[1])
