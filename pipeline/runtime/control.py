"""The control socket: commands to a running instance and their answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import RlhfdError, UnreachableError
from pipeline.runtime.lock import InstanceRecord
from pipeline.runtime.signals import refuse_stopped, waits_for_disk
from pipeline.storage.arena import PAGE_BYTES
from pipeline.storage.files import UNREADABLE, no_room

CONTROL_SOCKET = "control.sock"
_REQUEST_BYTES = 64 << 10
_ANSWER_BYTES = 16 << 20
_CLIENT_TIMEOUT_S = 5.0
_ARRIVED_TIMEOUT_S = 0.1
_CLIENTS = 16
_TOO_MANY = "too many clients"
_RETRY_S = 0.02
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def serve_control(path: Path, handler: Handler) -> asyncio.AbstractServer:
    """Answer requests on the control socket until the server is closed.

    Clients of other users, except root, are refused; a client that is slow, sends too much or never reads is
    disconnected.

    Args:
        path: Path of the socket, mode 0600; a socket of a dead process is replaced.
        handler: Returns the answer to a request; an `RlhfdError` or `OSError` becomes the answer ``{"error": ...}``.

    Raises:
        ConfigError: If there is no room for the socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # It gets its name once it listens: a client that sees it is never refused.
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        listener.bind(str(new))
        new.chmod(0o600)
        listener.listen()
        new.replace(path)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise no_room(path.parent, PAGE_BYTES, "the control socket") from error
        raise
    clients = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            if refusal := _TOO_MANY if clients > _CLIENTS else _refusal(writer):
                await _send(writer, {"error": refusal})
            else:
                await _serve_client(reader, writer, handler)
        except (OSError, TimeoutError) as error:
            log.debug("control client lost: %s", error)
        finally:
            clients -= 1
            await _close(writer)

    return await asyncio.start_unix_server(serve, sock=listener, limit=_REQUEST_BYTES)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(_CLIENT_TIMEOUT_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


def _refusal(writer: asyncio.StreamWriter) -> str:
    """Return the reason to refuse this client, "" if it is accepted."""
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
    )
    pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    if uid in (0, os.geteuid()):
        return ""
    log.warning("control client refused: pid=%d uid=%d", pid, uid)
    return f"uid {uid} may not control this instance"


async def _serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    """Answer line by line until the client disconnects, pauses or sends no whole line."""
    answered, problem = False, ""
    while not problem:
        try:
            answer = await _answer(await _line(reader), handler)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return
            problem = f"it ends after {len(error.partial):,} B"
        except asyncio.LimitOverrunError:
            problem = f"more than {_REQUEST_BYTES:,} B"
        except TimeoutError:
            if answered:
                return
            problem = f"none within {_CLIENT_TIMEOUT_S:g} s"
        await _send(writer, {"error": f"no request of one JSON line: {problem}"} if problem else answer)
        answered = True
        # Other clients get their turn beside one that sends requests without a pause.
        await asyncio.sleep(0)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line.

    Raises:
        TimeoutError: If the client has not sent one in time.
    """
    try:
        async with asyncio.timeout(_CLIENT_TIMEOUT_S):
            return await reader.readuntil(b"\n")
    except TimeoutError:
        # The time may be that of the loop, which waited for a fork: a line that has arrived meanwhile is taken.
        async with asyncio.timeout(_ARRIVED_TIMEOUT_S):
            return await reader.readuntil(b"\n")


async def _answer(line: bytes, handler: Handler) -> dict[str, Any]:
    try:
        request = msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE as error:
        return {"error": f"no request of one JSON line: {error}"}
    try:
        return await handler(request)
    except (RlhfdError, OSError) as error:
        # As of `rlhfd pause` where shared memory is full: the client would get no answer, and the log no line.
        return {"error": str(error)}


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
    async with asyncio.timeout(_CLIENT_TIMEOUT_S):
        await writer.drain()


def request(record: InstanceRecord, command: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
    """Send a request to a running instance over its control socket, and return the answer.

    Args:
        record: The instance.
        command: ``"status"``, ``"stop"``, ...
        timeout_s: Most time until the whole answer has arrived.
        fields: Further fields of the request, by name.

    Returns:
        The answer's fields.

    Raises:
        StoppedError: If a signal has stopped it.
        UnreachableError: If it does not answer in time, or not with one JSON line, or has too many clients.
        RlhfdError: If it answers with an error.
    """
    refuse_stopped(record.pid)
    deadline = time.monotonic() + timeout_s
    path = Path(record.shm_dir) / CONTROL_SOCKET
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
            _connect(client, path, deadline)
            try:
                client.sendall(msgspec.json.encode({"command": command, **fields}) + b"\n")
            except BrokenPipeError:
                # A refusal does not wait for the request: its reason may be here, and the other end closed.
                if not (line := _read_line(client, deadline)):
                    raise
            else:
                line = _read_line(client, deadline)
        answer = msgspec.json.decode(line, type=dict[str, Any])
    except TimeoutError:
        refuse_stopped(record.pid)
        cause = ": it waits in the kernel (state D), as for a disk that does not answer"
        raise UnreachableError(
            f"pid {record.pid} does not answer within {timeout_s:g} s{cause if waits_for_disk(record.pid) else ''}"
        ) from None
    except OSError as error:
        raise UnreachableError(f"pid {record.pid} cannot be reached at {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise UnreachableError(f"pid {record.pid} answers with no JSON line: {error}") from error
    if "error" in answer:
        raise (UnreachableError if answer["error"] == _TOO_MANY else RlhfdError)(str(answer["error"]))
    return answer


def _connect(client: socket.socket, path: Path, deadline: float) -> None:
    while True:
        client.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            return client.connect(str(path))
        except BlockingIOError:  # the kernel's queue of waiting clients is full
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(_RETRY_S)


def _read_line(client: socket.socket, deadline: float) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= _ANSWER_BYTES:
        client.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (part := client.recv(1 << 16)):
            break
        line += part
    return bytes(line)
