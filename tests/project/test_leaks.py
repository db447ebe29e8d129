"""The leak check of every test: the leaks that it must find, and the things that it must ignore."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.runtime.lock import shm_directory
from tests import conftest
from tests.support.leaks import Holdings, open_cuda

# Starts a child of its own, tells its pid and dies: an orphan remains.
ORPHANING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""
SLEEPING = "import time; print(flush=True); time.sleep(60)"
SLEEPING_RETITLED = (
    "import setproctitle, time; setproctitle.setproctitle('retitled'); print(flush=True); time.sleep(60)"
)


def leaks_of(before: Holdings, *own: Path, **settings: Any) -> list[str]:
    """Return what is left, of shared memory that of the test alone: another worker's tests of leaks have theirs."""
    own_lines = [f"shared memory is left: {path}" for path in own]
    leaks = before.leaks(**settings)
    return [leak for leak in leaks if leak in own_lines or not leak.startswith("shared memory is left: ")]


def orphan(program: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", ORPHANING, program]))


@pytest.fixture
def segment() -> Path:
    return Path(f"/dev/shm/rlhfd-leaks-{uuid.uuid4().hex}")


def test_a_running_child_is_found_and_killed() -> None:
    before = Holdings.now()
    with subprocess.Popen([sys.executable, "-c", SLEEPING], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        # Amid exec a process has no command line yet.
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        leaks = leaks_of(before, grace_s=0.0, descriptors=False)

    assert leaks == [f"process {child.pid} is still running: {sys.executable} -c {SLEEPING}"]


@pytest.mark.parametrize("program", [SLEEPING, SLEEPING_RETITLED])
def test_an_orphan_is_found_and_killed(program: str) -> None:
    before = Holdings.now()
    pid = orphan(program)

    assert [leak.split(" is ")[0] for leak in leaks_of(before, grace_s=0.0)] == [f"process {pid}"]
    assert leaks_of(before) == []


def test_what_a_process_that_was_there_before_has_started_is_its_own_to_end() -> None:
    code = (
        "import subprocess, sys; input(); "
        + ORPHANING.strip().replace("\n", "; ")
        + "; input(); child.kill(); child.wait()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, SLEEPING], text=True, bufsize=1, **pipes) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        before = Holdings.now()
        parent.stdin.write("\n")
        pid = int(parent.stdout.readline())

        assert pid not in before.pids and leaks_of(before, grace_s=0.0) == []

        parent.stdin.write("\n")


def test_a_process_that_ends_within_the_grace_is_no_leak() -> None:
    before = Holdings.now()
    with subprocess.Popen(["sleep", "0.2"]):
        assert leaks_of(before) == []


def test_a_segment_is_found_until_it_is_unlinked(segment: Path) -> None:
    before = Holdings.now()
    segment.mkdir()
    found = leaks_of(before, segment, grace_s=0.0)
    segment.rmdir()

    assert found == [f"shared memory is left: {segment}"]
    assert leaks_of(before, segment) == []


def test_a_segment_of_a_runtime_directory_is_its_own_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = Holdings.now()
    own, other = tmp_path / "run", tmp_path / "pytest-of-somebody" / "pytest-7" / "popen-gw3" / "test_one0" / "run"
    for folder in (own, other):
        folder.mkdir(parents=True)
        shm_directory(folder).mkdir()
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        found = leaks_of(before, shm_directory(own), shm_directory(other), grace_s=0.0)
        # This session's own folder lies among those of all sessions.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp().parents[1]))
        found_in_place = leaks_of(before, shm_directory(own), shm_directory(other), grace_s=0.0)
    finally:
        for folder in (own, other):
            shm_directory(folder).rmdir()

    assert found == [f"shared memory is left: {shm_directory(own)}"]
    assert f"shared memory is left: {shm_directory(own)}" in found_in_place


def test_a_segment_held_by_a_stranger_is_not_ours(segment: Path) -> None:
    holding = "import sys; held = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"
    before = Holdings.now()
    # Neither our child nor marked: like a daemon running beside the tests.
    stranger = subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-c", holding, str(segment)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath},
    )
    with stranger:
        assert stranger.stdout and stranger.stdin
        stranger.stdout.readline()
        # setsid, a child of ours, ends at the fork, before or after the line.
        stranger.wait()
        leaks = leaks_of(before, segment, grace_s=0.0, descriptors=False)
        stranger.stdin.close()
        assert stranger.stdout.read() == b""
    segment.unlink()

    assert leaks == []


def test_an_open_file_descriptor_is_found_until_it_is_closed() -> None:
    before = Holdings.now()
    reading, writing = os.pipe()
    found = leaks_of(before, grace_s=0.0)
    os.close(reading)
    os.close(writing)

    assert [leak.split(":")[0] for leak in found] == [
        f"file descriptor {number} is still open" for number in (reading, writing)
    ]
    assert leaks_of(before) == []


def test_a_variable_that_is_set_changed_or_removed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLHFD_CHANGED", "RLHFD_REMOVED"):
        monkeypatch.setenv(name, "before")
    before = Holdings.now()

    monkeypatch.setenv("RLHFD_SET", "after")
    monkeypatch.setenv("RLHFD_CHANGED", "after")
    monkeypatch.delenv("RLHFD_REMOVED")

    assert leaks_of(before) == [
        "variable RLHFD_CHANGED is 'after', it was 'before'",
        "variable RLHFD_REMOVED is None, it was 'before'",
        "variable RLHFD_SET is 'after', it was None",
    ]


def test_a_changed_umask_is_found() -> None:
    before = Holdings.now()
    former = os.umask(0o77)
    try:
        assert leaks_of(before) == [f"umask is 0077, it was {former:04o}"]
    finally:
        os.umask(former)


def test_what_cuda_keeps_open_is_no_leak_of_the_test_that_uses_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library in CUDA's place that opens a pipe at its first use."""
    pipes: list[tuple[int, int]] = []
    monkeypatch.setattr(conftest, "open_cuda", lambda: pipes.append(os.pipe()))
    request = SimpleNamespace(node=SimpleNamespace(get_closest_marker=lambda name: name == "gpu"))

    check = conftest._test_leaves_nothing.__wrapped__(request, None)
    next(check)
    assert len(pipes) == 1
    assert next(check, "passed") == "passed"

    for number in pipes[0]:
        os.close(number)


@pytest.mark.gpu
def test_a_second_use_of_cuda_opens_no_descriptor_of_unknown_owner() -> None:
    before = Holdings.now()

    open_cuda.__wrapped__()

    assert leaks_of(before, grace_s=0) == []
