"""The control socket's server, beside a loop that is late."""

import asyncio
import errno
import json
import socket
import time

import pytest

from pipeline.errors import ConfigError
from pipeline.runtime import control
from pipeline.runtime.pause import Pause

_TIMEOUT_S = 0.2


async def handler(request):
    return {"heard": request["command"]}


def served(path, client, handler=handler):
    """Return the answer that `client`, a function of the connected socket, makes the server give."""

    async def run():
        server = await control.serve_control(path, handler)
        try:
            with socket.socket(socket.AF_UNIX) as connected:
                connected.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connected, str(path))
                await client(connected)
                async with asyncio.timeout(60):
                    return json.loads(await loop.sock_recv(connected, 1 << 16))
        finally:
            server.close()

    return asyncio.run(run())


def test_a_request_that_arrives_while_the_loop_is_busy_for_the_whole_time_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_CLIENT_TIMEOUT_S", _TIMEOUT_S)

    async def client(connected):
        # The server waits for the line before the loop is busy.
        await asyncio.sleep(_TIMEOUT_S / 4)
        connected.send(b'{"command": "status"}\n')
        time.sleep(2 * _TIMEOUT_S)  # As a fork that is not answered does.

    assert served(tmp_path / "control.sock", client) == {"heard": "status"}


def test_a_command_that_shared_memory_has_no_room_for_is_answered_with_that_and_logged_as_no_pause(tmp_path, caplog):
    caplog.set_level("INFO")
    # Nobody may make a file there.
    pause = Pause(tmp_path / "gone")

    async def paused(request):
        return {"in_force": await pause.turn(True, lambda: True)}

    async def client(connected):
        connected.send(b'{"command": "pause"}\n')

    answer = served(tmp_path / "control.sock", client, paused)

    assert answer == {"error": f"[Errno 2] No such file or directory: '{tmp_path / 'gone' / 'paused'}'"}
    assert "paused" not in caplog.text


def test_a_client_that_sends_no_line_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_CLIENT_TIMEOUT_S", _TIMEOUT_S)

    async def client(connected):
        connected.send(b'{"command"')

    answer = served(tmp_path / "control.sock", client)

    assert answer == {"error": "no request of one JSON line: none within 0.2 s"}


def test_a_client_that_sees_the_socket_is_never_refused(tmp_path, monkeypatch):
    path, start = tmp_path / "control.sock", asyncio.start_unix_server

    async def late(*arguments, **keywords):
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(str(path))
        return await start(*arguments, **keywords)

    async def client(connected):
        connected.send(b'{"command": "status"}\n')

    monkeypatch.setattr(asyncio, "start_unix_server", late)

    assert served(path, client) == {"heard": "status"}
    assert [*tmp_path.iterdir()] == [path]


def test_shared_memory_without_room_for_the_socket_is_refused_with_its_path(tmp_path, monkeypatch):
    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "chmod", full)

    with pytest.raises(ConfigError, match=rf"the control socket of 4,096 B does not fit: .* on {tmp_path}"):
        asyncio.run(control.serve_control(tmp_path / "control.sock", handler))
