"""Instances for tests: a process that holds a runtime directory, and a control server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.runtime import control
from pipeline.runtime.lock import InstanceRecord

HOLD = """
import sys
from pathlib import Path
from pipeline.runtime.lock import InstanceLock
with InstanceLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

# Answers "status", ends on "stop" unless it is told to be deaf to it; "failing" leaves its shared memory.
SERVE = """
import asyncio, os, shutil, sys
from pathlib import Path
from pipeline.runtime.control import serve_control
from pipeline.runtime.lock import InstanceLock, InstanceRecord
folder = Path(sys.argv[1])
shm_dir = folder / "shm"

async def serve():
    stopped = asyncio.Event()
    async def answer(request):
        if request["command"] == "stop" and "deaf" not in sys.argv:
            stopped.set()
        return {"state": "ready", "pid": os.getpid(), "reward_trend": 0.5, "reward_since_step": 7}
    shm_dir.mkdir(exist_ok=True)
    server = await serve_control(shm_dir / "control.sock", answer)
    InstanceRecord(os.getpid(), str(shm_dir)).write(folder)
    print("held", flush=True)
    await stopped.wait()
    server.close()
    if "failing" not in sys.argv:
        shutil.rmtree(shm_dir)

with InstanceLock(folder):
    asyncio.run(serve())
"""


@contextlib.contextmanager
def process(runtime_dir: Path, code: str = HOLD, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the runtime directory: `HOLD` until its input is closed, `SERVE` until told to stop."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(runtime_dir), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def record(runtime_dir: Path, *, pid: int | None = None) -> InstanceRecord:
    """The record of an instance whose control socket is in the runtime directory too."""
    return InstanceRecord(pid or os.getpid(), str(runtime_dir), "http://127.0.0.1:9477")


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with the request."""
    return {"echo": request}


@contextlib.contextmanager
def serving(
    folder: Path, handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] = echo
) -> Iterator[InstanceRecord]:
    """A control server in a thread of its own."""
    ready, loop, stopping = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await control.serve_control(folder / control.CONTROL_SOCKET, handler)
        ready.set()
        await stopping.wait()
        server.close()
        # A task that still serves a client ends with the client, or at its own deadline.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=10)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield record(folder)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
