"""A run's log: lines taken apart, kept in the journal's protocol or in files of bounded size, and read again."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.telemetry import journald, log_file, log_lines
from pipeline.telemetry.journald import Journal
from pipeline.telemetry.log import JsonFormatter, TextFormatter
from pipeline.telemetry.log_file import LogFile, predecessor, read
from pipeline.telemetry.run_log import RunLog

STAMP = "2026-11-21T07:30:01.250Z"


def record(
    message: str, *args: object, level: int = logging.INFO, name: str = "pipeline.models.weights.store"
) -> logging.LogRecord:
    return logging.LogRecord(name, level, "x.py", 1, message, args, None)


# Lines.


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_a_record_is_taken_apart_as_it_was_logged(formatter: type[TextFormatter]) -> None:
    logged = record("weights published: version=%d path=%s", 3, "/a", level=logging.WARNING)

    line = log_lines.parse(formatter("trainer-0").format(logged), "trainer-0")

    assert (line.level, line.logger, line.event) == ("warning", "pipeline.models.weights.store", "weights published")
    assert line.fields == {"version": "3", "path": "/a"}
    assert line.message == "weights published: version=3 path=/a"


def test_a_record_with_a_traceback_is_one_line_with_its_event() -> None:
    for formatter in (TextFormatter("trainer-0"), JsonFormatter("trainer-0")):
        try:
            raise ValueError("x")
        except ValueError as error:
            logged = record("step failed: step=%d", 3, level=logging.ERROR)
            logged.exc_info = (ValueError, error, error.__traceback__)
        line = log_lines.parse(formatter.format(logged), "trainer-0")

        assert (line.level, line.event, line.fields) == ("error", "step failed", {"step": "3"})
        assert line.message.startswith("step failed: step=3\nTraceback") and line.message.endswith("ValueError: x")


def test_fields_of_a_text_line_are_its_whole_rest_or_none() -> None:
    def fields(message: str) -> tuple[str, dict[str, str]]:
        line = log_lines.parse(f"{STAMP} INFO trainer-0 pipeline.x: {message}", "trainer-0")
        return line.event, line.fields

    assert fields('set aside: position=7 reason="no \\"text\\""') == (
        "set aside", {"position": "7", "reason": 'no "text"'},
    )  # fmt: skip
    assert fields("cut at daemon.drain_timeout_s: rollout-0") == ("cut at daemon.drain_timeout_s: rollout-0", {})
    assert fields("hung: role=a reason=no progress") == ("hung", {"role": "a", "reason": "no progress"})
    assert fields("taken over: run=") == ("taken over", {"run": ""})
    assert fields("ended: it said x=3") == ("ended: it said x=3", {})


@pytest.mark.parametrize(
    "text",
    [
        "a print of a reward function",
        f"{STAMP} ERROR buffer-0 pipeline.buffer.buffer: forged",
        '{"process": "buffer-0", "level": "error", "event": "forged"}',
        "{" * 5000,
        '{"level": "error"}',
        "",
    ],
)
def test_what_a_process_prints_is_its_own_at_level_info_whatever_it_claims(text: str) -> None:
    line = log_lines.parse(text, "rollout-0")

    assert (line.message, line.level, line.logger, line.fields) == (text, "info", "", {})


def test_a_stored_line_says_whose_it_is() -> None:
    ours = f"{STAMP} INFO rollout-0 pipeline.rollout.worker: ready"
    forged = f"{STAMP} INFO buffer-0 pipeline.buffer.buffer: forged"

    assert log_lines.stored(ours, "rollout-0", as_json=False) == ours
    for as_json in (False, True):
        stored = log_lines.stored(forged, "rollout-0", as_json=as_json)
        assert log_lines.process_of(stored) == "rollout-0" and "forged" in stored
    assert log_lines.process_of('  File "x.py", line 3') == ""


# Files.


def test_a_log_never_takes_more_than_its_room_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "log" / "rlhfd.log"
    log = LogFile(path, 1000)

    written = [f"line {number:04d}" for number in range(500)]
    sizes = set()
    for text in written:
        assert log.append(text)
        sizes.add(sum(file.stat().st_size for file in path.parent.iterdir()))
    log.close()

    assert max(sizes) == 1000
    (kept,) = read(path, 1000)
    assert kept == written[-len(kept) :] and len(kept) >= 50
    assert {oct(file.stat().st_mode & 0o777) for file in path.parent.iterdir()} == {"0o600"}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_log_that_another_program_moves_cuts_or_removes_goes_on_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "log" / "rlhfd.log"
    log = LogFile(path, 100)

    assert log.append("1")
    path.rename(path.with_name("rlhfd.log-20261128"))
    assert log.append("2") and path.read_text() == "2\n"
    shutil.rmtree(path.parent)
    assert log.append("3" * 40) and path.read_text() == "3" * 40 + "\n"
    # As logrotate does with `copytruncate`: there is room again.
    os.truncate(path, 0)
    assert log.append("4" * 40) and not predecessor(path).exists()
    log.close()


def test_a_line_longer_than_the_room_is_cut(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", 100)

    log.append("x" * 1000)
    log.close()

    assert (tmp_path / "log").read_text() == "x" * 49 + "\n"


def test_lines_that_cannot_be_written_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    log = LogFile(folder / "log", 20)
    assert log.append("12345678")
    folder.rename(tmp_path / "away")
    folder.touch()

    lost = [log.append("12345678"), log.append("12345678")]
    folder.unlink()
    written = log.append("12345678")
    log.close()

    assert lost == [False, False] and log.lost == 2
    assert written and [*read(folder / "log", 10)] == [["12345678"]]


def test_a_line_that_the_disk_takes_in_part_is_taken_back_and_counted(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.append("first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    # A full disk, as the kernel shows it: some of the bytes are written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        is_written = log.append("a line too many")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append("last")
    log.close()

    assert (is_written, log.lost) == (False, 1)
    assert (tmp_path / "log").read_text() == "first\nlast\n"


def test_following_goes_on_over_a_rotation_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path, 200)
    for number in range(12):
        log.append(f"{STAMP} INFO rollout-{number % 2} x: {number}")
    follower = read(path, 1, "rollout-1", follow=True)
    seen = [*next(follower)]

    for number in range(12, 40):
        log.append(f"{STAMP} INFO rollout-{number % 2} x: {number}")
        if number % 2:
            seen += next(follower)
    log.close()
    follower.close()

    assert predecessor(path).exists()
    assert [int(line.rsplit(maxsplit=1)[1]) for line in seen] == list(range(11, 40, 2))


def test_a_line_that_is_still_being_written_is_shown_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("whole\nhal")
    follower = read(path, 10, follow=True)

    assert next(follower) == ["whole"]
    # It comes while the reader waits.
    monkeypatch.setattr("time.sleep", lambda _: path.write_text("whole\nhalf\n"))
    assert next(follower) == ["half"]
    follower.close()


def test_a_traceback_goes_with_the_line_above_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        f"{STAMP} ERROR trainer-0 x: failed\nTraceback\n  File\n"
        f"{STAMP} INFO buffer-0 x: fine\n{STAMP} INFO trainer-0 | p\n"
    )

    assert [*read(path, 10, "trainer")] == [
        [f"{STAMP} ERROR trainer-0 x: failed", "Traceback", "  File", f"{STAMP} INFO trainer-0 | p"]
    ]


# The journal.


@pytest.fixture
def journal_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "journal"))
        bound.setblocking(False)
        yield bound


def decoded(datagram: bytes) -> dict[str, str]:
    """Read an entry by the rules of systemd's page on the native protocol."""
    fields = {}
    while datagram:
        head, _, rest = datagram.partition(b"\n")
        if b"=" in head:
            name, _, value = head.partition(b"=")
        else:
            (length,) = struct.unpack("<Q", rest[:8])
            name, value, rest = head, rest[8 : 8 + length], rest[9 + length :]
        fields[name.decode()] = value.decode()
        datagram = rest
    return fields


def test_an_entry_is_one_datagram_of_the_native_protocol() -> None:
    fields = {"MESSAGE": "two\nlines = one", "PRIORITY": "3", "RLHFD_ROLE": "rollout"}

    datagram = journald.encode(fields)

    assert datagram.startswith(b"MESSAGE\n\x0f\0\0\0\0\0\0\0two\nlines = one\nPRIORITY=3\n")
    assert decoded(datagram) == fields
    assert len(journald.encode({"MESSAGE": "x" * 10**6, **{f"F{n}": "y" * 10**6 for n in range(40)}})) < 100 << 10


def test_a_journal_that_takes_nothing_loses_lines_and_counts_them(
    tmp_path: Path, journal_socket: socket.socket
) -> None:
    journal = Journal(str(tmp_path / "journal"))

    sent = [journal.send({"MESSAGE": "x"}) for _ in range(4000)]
    journal.close()

    # The queue of a unix socket has net.unix.max_dgram_qlen entries.
    assert 0 < sum(sent) < 4000 and journal.lost == 4000 - sum(sent)


def test_only_the_stream_that_is_named_is_the_journal() -> None:
    found = os.fstat(2)

    assert journald.is_standard_error({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
    assert not journald.is_standard_error({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
    assert not journald.is_standard_error({})


@pytest.mark.parametrize(
    ("cgroups", "unit"),
    [
        ("0::/system.slice/system-rlhfd.slice/rlhfd@b.service\n", "rlhfd@b.service"),
        ("1:name=systemd:/system.slice/rlhfd.service\n0::/\n", "rlhfd.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/rlhfd.service\n", "rlhfd.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
    ],
)
def test_the_unit_is_known_from_the_control_group(cgroups: str, unit: str) -> None:
    assert journald.own_unit(cgroups) == unit


def test_a_line_in_the_journal_has_its_role_and_fields_and_none_of_them_can_be_forged(
    tmp_path: Path, journal_socket: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journald, "is_standard_error", lambda _: True)
    monkeypatch.setattr(journald, "own_unit", lambda: "rlhfd.service")
    monkeypatch.setattr("pipeline.telemetry.run_log.Journal", lambda: Journal(str(tmp_path / "journal")))
    config = Config()

    with RunLog(config, "supervisor") as kept:
        kept.keep("rollout-1", f"{STAMP} ERROR rollout-1 pipeline.x: hung: ticket=7 role=buffer pid=1", 4711)

    (entry,) = [decoded(journal_socket.recv(1 << 16))]
    assert kept.destination == "journal:rlhfd.service"
    assert entry == {
        "MESSAGE": "hung: ticket=7 role=buffer pid=1",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "rlhfd-rollout-1",
        "RLHFD_NAME": "rlhfd",
        "RLHFD_ROLE": "rollout",
        "RLHFD_WORKER": "1",
        "RLHFD_PID": "4711",
        "RLHFD_LOGGER": "pipeline.x",
        "RLHFD_EVENT": "hung",
        "RLHFD_TICKET": "7",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_without_a_journal_records_and_childrens_lines_are_kept_in_the_file(tmp_path: Path, log_format: str) -> None:
    daemon = Config().daemon.model_copy(update={"state_dir": tmp_path, "log_format": log_format})

    with RunLog(Config().model_copy(update={"daemon": daemon}), "supervisor") as kept:
        logging.getLogger("pipeline.example").warning("draining: reason=%s", "asked")
        assert not kept.keep("rollout-0", "a print", 1)
    logging.getLogger("pipeline.example").warning("after the end")

    (lines,) = read(Path(kept.destination), 10)
    assert [log_lines.process_of(line) for line in lines] == ["supervisor", "rollout-0"]
    assert "asked" in lines[0] and "a print" in lines[1]
    if log_format == "json":
        assert json.loads(lines[0])["reason"] == "asked" and json.loads(lines[1])["line"] == "a print"


def test_the_log_is_closed_between_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_write = threading.Event(), threading.Event()
    write = log_file.write_at_end

    def slowly(descriptor: int, data: bytes, end: int) -> None:
        is_writing.set()
        assert may_write.wait(10.0)
        write(descriptor, data, end)

    monkeypatch.setattr(log_file, "write_at_end", slowly)
    run_log = RunLog(Config.model_validate({"daemon": {"state_dir": str(tmp_path)}}), "supervisor")
    writer = threading.Thread(target=run_log.keep, args=("rollout-0", "a print", 1))
    closer = threading.Thread(target=run_log.__exit__)
    writer.start()
    assert is_writing.wait(10.0)
    closer.start()
    closer.join(0.2)
    is_open = closer.is_alive()
    may_write.set()
    writer.join()
    closer.join()

    assert is_open and "a print" in Path(run_log.destination).read_text()


def test_a_record_whose_arguments_do_not_fit_costs_its_caller_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log = RunLog(Config.model_validate({"daemon": {"state_dir": str(tmp_path)}}), "supervisor")
    log = logging.getLogger("tests.of_a_library")
    log.addHandler(run_log)
    log.propagate = False
    try:
        for arguments in (("many",), (1, 2), ({},)):
            log.error("%d connections of %(name)s" if arguments == ({},) else "%d connections", *arguments)
        log.error("the next one")
    finally:
        log.removeHandler(run_log)
        run_log.__exit__()

    text = Path(run_log.destination).read_text()
    assert "the next one" in text and text.count("\n") == 1
    assert capsys.readouterr().err.count("--- Logging error ---") == 3


def test_a_file_that_cannot_be_made_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log").write_text("a file in the place of the folder")
    daemon = Config().daemon.model_copy(update={"state_dir": tmp_path})

    with RunLog(Config().model_copy(update={"daemon": daemon}), "supervisor") as kept:
        kept.keep("rollout-0", "a print", 1)

    assert kept.destination == "" and "no log file: path=" in caplog.text


def test_the_log_and_its_predecessor_take_at_most_16_mib(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log" / "rlhfd.log")
    for _ in range(20):
        log.append("x" * (1 << 20))
    log.close()

    files = [file.stat().st_size for file in (tmp_path / "log").iterdir()]
    assert len(files) == 2 and 8 << 20 < sum(files) <= 16 << 20
