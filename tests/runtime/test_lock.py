"""One instance a runtime directory, found by its record, controlled over its socket, beside any other clients."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.errors import ConfigError, NotRunningError, RlhfdError, UnreachableError
from pipeline.runtime import control
from pipeline.runtime import lock as instance_lock
from pipeline.runtime.lock import InstanceLock, InstanceRecord, SharedMemoryLock, StateLock
from pipeline.storage.files import NO_LOCKS
from tests.support.instances import process, record, serving


class TestSharedMemoryLock:
    def test_the_folder_that_is_there_now_is_held_against_every_other_process(self, tmp_path: Path) -> None:
        folder = tmp_path / "shared"
        with SharedMemoryLock(folder) as first:
            assert not folder.exists()
            folder.mkdir()
            first.hold()
            first.hold()
            with pytest.raises(ConfigError, match="in use by an instance of another container"):
                SharedMemoryLock(folder).hold()
            folder.rmdir()
            folder.mkdir()
            first.hold()
            with pytest.raises(ConfigError, match="in use by an instance of another container"):
                SharedMemoryLock(folder).hold()

        with SharedMemoryLock(folder):
            pass


class TestLock:
    def test_second_instance_is_refused_and_told_who_holds_the_directory(self, tmp_path: Path) -> None:
        with process(tmp_path) as child, pytest.raises(ConfigError, match=f"is in use by pid {child.pid}$"):
            InstanceLock(tmp_path).__enter__()

    @pytest.mark.parametrize("is_state", [False, True])
    def test_a_lock_whose_file_was_removed_is_taken_again_in_a_folder_made_anew(
        self, tmp_path: Path, is_state: bool
    ) -> None:
        folder = tmp_path / "instance"
        with StateLock(folder, tmp_path / "run", "a-run") if is_state else InstanceLock(folder) as lock:
            assert not lock.retake(), "its file is there"
            shutil.rmtree(folder)
            assert instance_lock.holder(folder) is None

            assert lock.retake()
            assert instance_lock.holder(folder) == os.getpid()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert not lock.retake()

            shutil.rmtree(folder)
            with process(folder) as other, pytest.raises(ConfigError, match=f"is in use by pid {other.pid}$"):
                lock.retake()

            shutil.rmtree(folder)
            folder.touch()
            with pytest.raises(ConfigError, match=rf"daemon.\w+_dir: cannot use {folder}: "):
                lock.retake()
            folder.unlink()
            assert lock.retake()
        assert not (folder / "lock").exists()

    def test_lock_of_a_killed_instance_is_taken_over(self, tmp_path: Path) -> None:
        with process(tmp_path) as child:
            child.kill()
            child.wait()
            assert (tmp_path / "lock").exists()

            with InstanceLock(tmp_path):
                assert instance_lock.holder(tmp_path) == os.getpid()

    def test_lock_is_free_again_after_the_context(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path):
            pass

        assert instance_lock.holder(tmp_path) is None
        with InstanceLock(tmp_path):
            pass

    @pytest.mark.parametrize("number", NO_LOCKS)
    def test_without_file_locks_a_state_directory_is_used_with_a_warning_and_a_runtime_directory_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
    ) -> None:
        def flock(descriptor: int, kind: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        state, runtime = tmp_path / "state", tmp_path / "run"

        with StateLock(state, runtime, "a-run"):
            assert (state / "lock").read_text().splitlines() == [str(os.getpid()), str(runtime), "a-run"]
            assert instance_lock.user_of(state) is None
        assert not (state / "lock").exists()
        with pytest.raises(ConfigError) as refused:
            InstanceLock(runtime).__enter__()

        assert [record.getMessage() for record in caplog.records] == [
            f"daemon.state_dir: {state} cannot be locked ({os.strerror(number)}), so nothing keeps a second instance "
            "out of it"
        ]
        assert str(refused.value) == (
            f"daemon.runtime_dir: {runtime} cannot be locked ({os.strerror(number)}): choose a folder on a local disk"
        )

    def test_another_error_of_a_lock_is_told_with_its_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flock(descriptor: int, kind: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(fcntl, "flock", flock)

        with pytest.raises(ConfigError, match=r"daemon\.state_dir: .* cannot be locked \(Input/output error\)"):
            StateLock(tmp_path, tmp_path, "a-run").__enter__()

    def test_clean_end_leaves_no_lock_file(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path):
            assert (tmp_path / "lock").exists()

        assert not list(tmp_path.iterdir())

    def test_end_leaves_the_lock_of_another_in_a_directory_that_was_made_anew(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path / "run"):
            (tmp_path / "run").rename(tmp_path / "gone")
            other = InstanceLock(tmp_path / "run")
            other.__enter__()

        assert instance_lock.holder(tmp_path / "run") == os.getpid()
        other.__exit__(None, None, None)

    def test_lock_file_that_its_holder_removes_meanwhile_is_not_taken_for_the_lock(self, tmp_path: Path) -> None:
        lock = tmp_path / "lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def end() -> None:
            lock.unlink()
            os.close(descriptor)

        ended = threading.Timer(0.1, end)
        ended.start()
        with InstanceLock(tmp_path):
            ended.join()
            assert instance_lock.holder(tmp_path) == os.getpid()

    def test_start_survives_somebody_looking_at_the_lock(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        looked = threading.Timer(0.1, os.close, (descriptor,))
        looked.start()

        with InstanceLock(tmp_path):
            looked.join()

    def test_lock_is_not_inherited_by_a_started_program(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
        with child:
            # The kernel closes descriptors that are not inherited a moment after Popen returns.
            assert instance_lock.wait_until_released(tmp_path, 5)
            assert child.poll() is None
            child.kill()

    def test_directory_and_lock_are_for_the_owner_alone(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path / "a" / "run"):
            assert stat.S_IMODE((tmp_path / "a" / "run").stat().st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "a" / "run" / "lock").stat().st_mode) == 0o600

    def test_directory_that_everybody_can_write_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)

        with pytest.raises(ConfigError, match="can be written by everybody"):
            InstanceLock(tmp_path).__enter__()

    def test_lock_that_is_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("content")
        (tmp_path / "lock").symlink_to(tmp_path / "precious")

        with pytest.raises(ConfigError, match="cannot use"):
            InstanceLock(tmp_path).__enter__()

        assert (tmp_path / "precious").read_text() == "content"

    def test_file_in_place_of_the_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run").touch()

        with pytest.raises(ConfigError, match="cannot use"):
            InstanceLock(tmp_path / "run").__enter__()

    def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_no_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(ConfigError, match=f"^daemon.runtime_dir: cannot use {tmp_path}: No space left on"):
                InstanceLock(tmp_path).__enter__()

        assert not any(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before
        with InstanceLock(tmp_path) as lock:
            (tmp_path / "lock").unlink()
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full)
                with pytest.raises(ConfigError, match="No space left"):
                    lock.retake()
            assert lock.retake(), "it is tried again"


class TestFind:
    def test_running_instance_is_found(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path):
            record(tmp_path).write(tmp_path)

            assert instance_lock.find(tmp_path) == record(tmp_path)

    @pytest.mark.parametrize("name", ["missing", "file/below", "."])
    def test_directory_without_a_lock_is_not_running(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").touch()

        with pytest.raises(NotRunningError, match="no instance runs in"):
            instance_lock.find(tmp_path / name)

    def test_what_a_killed_instance_has_left_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instance_lock, "_SHM", tmp_path / "shm")
        left = instance_lock.shm_directory(tmp_path)
        left.mkdir(parents=True)
        (left / "run.json").touch()

        with pytest.raises(NotRunningError, match=f"{tmp_path}; one was killed, and has left {left} to the next start"):
            instance_lock.find(tmp_path)

    def test_record_of_a_killed_instance_is_not_running(self, tmp_path: Path) -> None:
        with process(tmp_path) as child:
            record(tmp_path, pid=child.pid).write(tmp_path)
            child.kill()
            child.wait()

            with pytest.raises(NotRunningError):
                instance_lock.find(tmp_path)

    def test_instance_without_a_record_yet_is_starting(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path), pytest.raises(UnreachableError, match="it starts or ends"):
            instance_lock.find(tmp_path)

    def test_record_of_a_dead_one_is_not_taken_for_the_one_that_starts(self, tmp_path: Path) -> None:
        record(tmp_path, pid=os.getpid() + 1).write(tmp_path)

        with InstanceLock(tmp_path), pytest.raises(UnreachableError, match="it starts or ends"):
            instance_lock.find(tmp_path)

    def test_torn_record_is_an_error_that_names_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "instance.json").write_text('{"pid": 1')

        with InstanceLock(tmp_path), pytest.raises(UnreachableError, match=r"instance\.json is no record"):
            instance_lock.find(tmp_path)


class TestRecord:
    def test_record_is_for_the_owner_alone_and_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        record(tmp_path).write(tmp_path)
        record(tmp_path, pid=7).write(tmp_path)

        assert InstanceRecord.read(tmp_path).pid == 7
        assert [path.name for path in tmp_path.iterdir()] == ["instance.json"]
        assert stat.S_IMODE((tmp_path / "instance.json").stat().st_mode) == 0o600

    def test_what_a_kill_left_of_a_record_goes_with_the_next_one_and_with_its_end(self, tmp_path: Path) -> None:
        half = tmp_path / ".instance.json.new"
        half.write_text('{"pid": 1')

        record(tmp_path).write(tmp_path)

        assert [path.name for path in tmp_path.iterdir()] == ["instance.json"]
        half.write_text('{"pid": 1')
        InstanceRecord.remove(tmp_path)
        assert not any(tmp_path.iterdir())

    def test_one_that_cannot_be_written_is_a_refusal_of_the_start_that_names_the_key(self, tmp_path: Path) -> None:
        # In the way of the file that is renamed, as a full disk is.
        (tmp_path / ".instance.json.new").mkdir()

        with pytest.raises(ConfigError, match=f"^daemon.runtime_dir: cannot use {tmp_path}: Is a directory$"):
            record(tmp_path).write(tmp_path)

    def test_removing_twice_is_harmless(self, tmp_path: Path) -> None:
        record(tmp_path).write(tmp_path)

        InstanceRecord.remove(tmp_path)
        InstanceRecord.remove(tmp_path)

        with pytest.raises(FileNotFoundError):
            InstanceRecord.read(tmp_path)

    def test_on_a_disk_that_has_become_read_only_it_stays_and_the_run_ends_in_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(path: Path, missing_ok: bool = False) -> None:
            # Also of a file that is not there.
            raise OSError(errno.EROFS, "Read-only file system", str(path))

        record(tmp_path).write(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refused)
            InstanceRecord.remove(tmp_path)

        assert InstanceRecord.read(tmp_path) == record(tmp_path)

    def test_record_of_a_newer_version_with_more_fields_is_read(self, tmp_path: Path) -> None:
        fields = msgspec.to_builtins(record(tmp_path)) | {"colour": "green"}
        (tmp_path / "instance.json").write_bytes(msgspec.json.encode(fields))

        assert InstanceRecord.read(tmp_path) == record(tmp_path)


class TestSharedMemoryDirectory:
    def test_every_way_to_name_a_directory_gives_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "run")
        monkeypatch.chdir(tmp_path)

        directory = instance_lock.shm_directory(tmp_path / "run")

        assert directory == instance_lock.shm_directory("run") == instance_lock.shm_directory("x/../run/")
        assert directory == instance_lock.shm_directory(Path("link"))
        assert directory != instance_lock.shm_directory("other")

    def test_name_has_the_user_and_stays_short(self, tmp_path: Path) -> None:
        directory = instance_lock.shm_directory(tmp_path / ("long/" * 100))

        assert directory.parent == Path("/dev/shm")
        assert directory.name.startswith(f"rlhfd-{os.geteuid()}-") and len(directory.name.rpartition("-")[2]) == 10


class TestTerminate:
    def test_holder_gets_sigterm(self, tmp_path: Path) -> None:
        with process(tmp_path) as child:
            instance_lock.terminate(tmp_path)

            assert child.wait() == -signal.SIGTERM
            assert instance_lock.wait_until_released(tmp_path, 0)

    def test_process_that_got_a_dead_holders_pid_is_left_alone(self, tmp_path: Path) -> None:
        innocent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with innocent, InstanceLock(tmp_path):
            (tmp_path / "lock").write_text(f"{innocent.pid}\n")

            with pytest.raises(NotRunningError):
                instance_lock.terminate(tmp_path)

            assert innocent.poll() is None
            innocent.kill()

    def test_nobody_there_is_not_running(self, tmp_path: Path) -> None:
        with pytest.raises(NotRunningError):
            instance_lock.terminate(tmp_path)

    def test_wait_ends_at_its_deadline(self, tmp_path: Path) -> None:
        with InstanceLock(tmp_path):
            assert not instance_lock.wait_until_released(tmp_path, 0.05)


def knock(folder: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(folder / control.CONTROL_SOCKET))
    return client


def answer_to(folder: Path, sent: bytes, *, end: bool = False) -> dict[str, Any]:
    with knock(folder) as client:
        client.sendall(sent)
        if end:
            client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answers:
            return msgspec.json.decode(answers.readline(), type=dict[str, Any])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CLIENT_TIMEOUT_S", 0.2)


class TestControl:
    def test_command_and_fields_reach_the_handler(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server:
            assert control.request(server, "stop", 5, now=True) == {"echo": {"command": "stop", "now": True}}

    def test_large_answer_arrives_whole(self, tmp_path: Path) -> None:
        async def much(request: dict[str, Any]) -> dict[str, Any]:
            return {"text": "x" * 3_000_000}

        with serving(tmp_path, much) as server:
            assert len(control.request(server, "status", 10)["text"]) == 3_000_000

    def test_error_of_the_handler_is_raised_at_the_client(self, tmp_path: Path) -> None:
        async def refuse(request: dict[str, Any]) -> dict[str, Any]:
            raise ConfigError("not now")

        with serving(tmp_path, refuse) as server, pytest.raises(RlhfdError, match=r"^not now$"):
            control.request(server, "reload", 5)

    def test_socket_is_for_the_owner_alone_and_replaces_a_dead_ones(self, tmp_path: Path) -> None:
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(tmp_path / control.CONTROL_SOCKET))
        dead.close()

        with serving(tmp_path) as server:
            assert stat.S_IMODE((tmp_path / control.CONTROL_SOCKET).stat().st_mode) == 0o600
            assert control.request(server, "status", 5)

    @pytest.mark.parametrize(
        "sent",
        [
            b"\n",
            b"not json\n",
            b"[1, 2]\n",
            b'"text"\n',
            b"\xff\xfe\x00\n",
            b"{" * 5000 + b"\n",
            b'{"a":' * 5000 + b"\n",
            b'{"command": "\xff"}\n',
            b"x" * 200_000 + b"\n",
        ],
        ids=["empty", "text", "list", "string", "binary", "nested", "deep", "ill-formed", "too long"],
    )
    def test_bad_request_is_answered_with_an_error(self, tmp_path: Path, sent: bytes) -> None:
        with serving(tmp_path):
            try:
                assert answer_to(tmp_path, sent)["error"].startswith("no request of one JSON line")
            except ConnectionError:
                # With bytes of the request still unread, the kernel may throw the answer away.
                assert len(sent) > 65536

    def test_lines_of_one_connection_are_answered_in_turn_whatever_is_between_them(self, tmp_path: Path) -> None:
        with serving(tmp_path), knock(tmp_path) as client:
            client.sendall(b'{"a": 1}\nnonsense\n' + b'{"b": 2}\n{"c"')
            client.shutdown(socket.SHUT_WR)

            with client.makefile("rb") as answers:
                told = [msgspec.json.decode(line, type=dict[str, Any]) for line in answers]

        assert [told[0], told[2]] == [{"echo": {"a": 1}}, {"echo": {"b": 2}}]
        assert told[1]["error"].startswith("no request of one JSON line")
        assert told[3] == {"error": "no request of one JSON line: it ends after 4 B"}
        assert len(told) == 4

    def test_half_a_request_is_answered_with_an_error(self, tmp_path: Path) -> None:
        with serving(tmp_path):
            assert "error" in answer_to(tmp_path, b'{"command"', end=True)

    @pytest.mark.usefixtures("impatient")
    def test_silent_client_is_cut_off_and_holds_nobody_up(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server, knock(tmp_path) as silent:
            assert control.request(server, "status", 5)

            assert b"error" in silent.recv(1000)
            assert silent.recv(1000) == b""

    @pytest.mark.usefixtures("impatient")
    def test_client_that_never_reads_is_cut_off(self, tmp_path: Path) -> None:
        async def much(request: dict[str, Any]) -> dict[str, Any]:
            return {"text": "x" * 3_000_000}

        with serving(tmp_path, much) as server, knock(tmp_path) as deaf:
            deaf.sendall(b"{}\n")
            assert control.request(server, "status", 10)

            deadline = time.monotonic() + 10
            while True:
                try:
                    # Sending fails as soon as the other end is closed.
                    deaf.sendall(b"\n")
                except ConnectionError:
                    break
                assert time.monotonic() < deadline

    def test_crowd_of_clients_is_refused_and_the_server_lives_on(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server:
            with contextlib.ExitStack() as crowd:
                for _ in range(40):
                    crowd.enter_context(knock(tmp_path))
                # As where it does not answer in time (exit 4): `rlhfd top` asks again.
                with pytest.raises(UnreachableError, match="too many clients"):
                    control.request(server, "status", 5)

            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                with contextlib.suppress(RlhfdError):
                    assert control.request(server, "status", 5)
                    return
            pytest.fail("still too many clients")

    @pytest.mark.parametrize("reason", ["too many clients", ""], ids=["refused", "gone"])
    def test_an_end_that_closes_before_the_request_is_sent(
        self, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connect, closed = control._connect, threading.Event()

        def refuse(listener: socket.socket) -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(msgspec.json.encode({"error": reason}) + b"\n" if reason else b"")
            closed.set()

        def connect_and_wait(*arguments: Any) -> None:
            connect(*arguments)
            assert closed.wait(10)

        monkeypatch.setattr(control, "_connect", connect_and_wait)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / control.CONTROL_SOCKET))
            listener.listen()
            refusing = threading.Thread(target=refuse, args=(listener,))
            refusing.start()
            with pytest.raises(RlhfdError, match=reason or "cannot be reached at .*: Broken pipe"):
                control.request(record(tmp_path), "status", 5)
            refusing.join()

    def test_other_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving(tmp_path) as server:
            if os.geteuid():
                monkeypatch.setattr(instance_lock.os, "geteuid", lambda: os.getuid() + 1)
                with pytest.raises(RlhfdError, match=r"uid \d+ may not control"):
                    control.request(server, "stop", 5)
                return
            descriptor = os.open(tmp_path, os.O_PATH)
            (tmp_path / control.CONTROL_SOCKET).chmod(0o666)
            code = (
                "import socket; client = socket.socket(socket.AF_UNIX);"
                f"client.connect('/proc/self/fd/{descriptor}/{control.CONTROL_SOCKET}');"
                "print(client.recv(1000))"
            )
            tmp_path.chmod(0o755)
            told = subprocess.run(
                ["/usr/bin/env", "python3", "-c", code], user=65534, pass_fds=[descriptor], capture_output=True, cwd="/"
            )
            os.close(descriptor)

            assert b"uid 65534 may not control" in told.stdout, told.stderr


class TestRequest:
    def test_missing_socket_is_unreachable(self, tmp_path: Path) -> None:
        with pytest.raises(UnreachableError, match="cannot be reached"):
            control.request(record(tmp_path), "status", 5)

    def test_server_that_never_answers_is_unreachable_in_time(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / control.CONTROL_SOCKET))
            listener.listen()

            with pytest.raises(UnreachableError, match=r"does not answer within 0.1 s"):
                control.request(record(tmp_path), "status", 0.1)

    def test_server_whose_queue_is_full_is_unreachable_in_time(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as queue:
            listener.bind(str(tmp_path / control.CONTROL_SOCKET))
            listener.listen(0)
            queue.enter_context(knock(tmp_path))

            with pytest.raises(UnreachableError, match="does not answer within"):
                control.request(record(tmp_path), "status", 0.1)

    @pytest.mark.parametrize("sent", [b"", b"nonsense\n", b"[]\n", b'{"half":'])
    def test_answer_that_is_no_json_line_is_unreachable(self, tmp_path: Path, sent: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / control.CONTROL_SOCKET))
            listener.listen()

            def serve() -> None:
                client, _ = listener.accept()
                with client:
                    client.recv(1000)
                    client.sendall(sent)

            thread = threading.Thread(target=serve)
            thread.start()

            with pytest.raises(UnreachableError, match="no JSON line"):
                control.request(record(tmp_path), "status", 5)
            thread.join()
