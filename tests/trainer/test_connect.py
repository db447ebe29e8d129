"""Connections over ZeroMQ that fail halfway hold nothing: the next attempt of the same process succeeds."""

import contextlib
import os
import shutil

import pytest

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, LedgerError, UnreachableError
from pipeline.runtime.messages import Hello, Lease
from pipeline.runtime.transport import BUFFER, Mailbox
from pipeline.storage.arena import Arena
from pipeline.trainer import connect as connecting
from pipeline.trainer.connect import lock_rank, open_connection
from pipeline.trainer.session import BufferSession
from tests.support.protocol import HOUSE_LAYOUT

EXTERNAL = Config.model_validate({"trainer": {"kind": "external"}})


@pytest.fixture
def folder(tmp_path):
    Arena.create(
        tmp_path / "arena", payload_bytes=1 << 16, ledger_bytes=HOUSE_LAYOUT.nbytes, layout=HOUSE_LAYOUT.identity
    )
    return tmp_path


def is_free(folder):
    os.close(lock_rank(folder, 0))
    return not (folder / "trainer-0.sock").exists()


def test_a_rank_whose_connection_fails_is_not_connected(folder):
    (folder / "metrics").write_bytes(b"of another release")
    for _ in range(2):
        with pytest.raises(LedgerError) as raised:
            open_connection(folder, EXTERNAL, rank=0, prefetch=2)
        assert "is connected already" not in str(raised.value)

    assert is_free(folder)


def test_a_rank_whose_wait_for_the_buffer_is_interrupted_is_not_connected(folder, monkeypatch):
    class Interrupted(Exception):
        pass

    def interrupt(session, timeout_s):
        raise Interrupted

    opened = open_connection(folder, Config(), rank=0, prefetch=2)
    record = type("Record", (), {"world_size": 1, "shm_dir": str(folder)})
    (folder / "config.json").write_text(EXTERNAL.model_dump_json())
    monkeypatch.setattr(BufferSession, "await_buffer", interrupt)
    monkeypatch.setattr(connecting, "find", lambda path: record)
    monkeypatch.setattr(connecting, "open_connection", lambda *arguments, **options: opened)
    monkeypatch.setattr(connecting, "PublishCheck", lambda path: None)
    monkeypatch.setattr(
        connecting.Workspace, "open", lambda path: type("Place", (), {"config_path": folder / "config.json"})
    )

    with pytest.raises(Interrupted):
        connecting.connect(folder)

    assert is_free(folder)


def test_a_child_of_a_connected_rank_neither_holds_nor_ends_the_connection(folder):
    """As a worker of a data loader, which may outlive the rank."""
    connection = open_connection(folder, Config(), rank=0, prefetch=2)
    reads, writes = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException), connection:
            os.read(reads, 1)
        os._exit(0)
    try:
        with pytest.raises(ConfigError, match="trainer rank 0 is connected already"):
            lock_rank(folder, 0)
        connection.close()
        assert is_free(folder), "the child lives"
        with open_connection(folder, Config(), rank=0, prefetch=2):
            os.write(writes, b".")
            assert os.waitpid(child, 0)[1] == 0
            assert (folder / "trainer-0.sock").exists()
    finally:
        os.close(writes)
        os.close(reads)


def test_a_rank_that_could_get_no_batch_is_refused(folder):
    for prefetch in (0, 1.5):
        with pytest.raises(ConfigError, match=f"prefetch is {prefetch}, not 1, 2 or more"):
            connecting.connect(folder, prefetch=prefetch)


def test_a_trainer_of_a_daemon_that_has_ended_neither_tells_nor_ends_anything_of_the_next_one(tmp_path):
    """Both have the same runtime directory, so their folders and sockets have the same names."""

    def started():
        folder = tmp_path / "instance"
        folder.mkdir()
        size = HOUSE_LAYOUT.nbytes
        Arena.create(folder / "arena", payload_bytes=1 << 16, ledger_bytes=size, layout=HOUSE_LAYOUT.identity)
        return folder, Mailbox(folder, BUFFER)

    folder, buffer = started()
    old = open_connection(folder, Config(), rank=0, prefetch=2)
    assert [type(message) for message in buffer.receive(5.0)] == [Hello]
    # A step that takes longer than the daemon waits for at its end.
    old.session.hold(Lease(0, 3, 1, []))
    buffer.close()
    shutil.rmtree(folder)
    folder, buffer = started()
    with contextlib.closing(buffer), open_connection(folder, Config(), rank=0, prefetch=2) as new:
        assert [type(message) for message in buffer.receive(5.0)] == [Hello]

        with pytest.raises(UnreachableError, match="the daemon of this connection has ended"):
            old.take(timeout_s=None)
        old.close()

        assert buffer.receive(1.0) == []
        assert (folder / "trainer-0.sock").exists() and not new.session.draining
