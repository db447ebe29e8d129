"""The process of a tracker, and the launcher that keeps it running beside the run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.samples import SampleWriter, folder_of
from pipeline.telemetry.slab import MetricsSlab
from pipeline.tracking.launcher import Trackers
from pipeline.tracking.process import follow
from pipeline.tracking.records import Progress, Record, read_progress, write_progress
from tests.support.daemon import wait_until
from tests.tracking.test_records import add, line, sample


class Kept:
    """A tracker that keeps what it gets; it may fail at a step."""

    def __init__(self, run_id: str = "", fails_at: int = -1) -> None:
        self.run_id = run_id or "new"
        self.steps: list[int] = []
        self.is_closed = False
        self._fails_at = fails_at

    def log(self, record: Record) -> None:
        if record.step == self._fails_at:
            raise RuntimeError("the server is gone")
        self.steps.append(record.step)

    def table(self, step: int, rows: Any) -> None:
        raise AssertionError("there are no samples")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Tabled(Kept):
    """A tracker that keeps the steps of its tables."""

    def table(self, step: int, rows: Any) -> None:
        self.steps.append(step)


def turns(*actions: Callable[[], None]) -> Callable[[float], bool]:
    """Return a wait that does an action a turn, then ends."""
    left = list(actions)

    def wait(_: float) -> bool:
        if left:
            left.pop(0)()
        return not left

    return wait


def test_a_successor_continues_the_same_run_and_the_rest_is_sent_at_the_end(tmp_path: Path) -> None:
    path, opened = tmp_path / "metrics.jsonl", []

    def open_with(tracker: Kept) -> Callable[[Progress, Path], Kept]:
        def open_one(progress: Progress, folder: Path) -> Kept:
            opened.append((progress.run_id, progress.step, folder))
            tracker.run_id = progress.run_id or "id-of-the-library"
            return tracker

        return open_one

    first, second = Kept(fails_at=3), Kept()
    add(path, line(1, 1.0))
    more = [lambda: add(path, line(2, 2.0)), lambda: add(path, line(3, 3.0))]
    with pytest.raises(RuntimeError, match="the server is gone"):
        follow(tmp_path, "wandb", open_with(first), wait=turns(*more, lambda: None))
    assert first.is_closed

    follow(tmp_path, "wandb", open_with(second), wait=turns(lambda: add(path, line(4, 4.0))))

    assert (first.steps, second.steps) == ([1, 2], [3, 4])
    folder = tmp_path / "tracking" / "wandb"
    assert opened == [("", -1, folder), ("id-of-the-library", 2, folder)]
    assert read_progress(tmp_path / "tracking" / "wandb.json").unix_s == 4.0


def test_the_place_in_a_long_backlog_is_kept_each_second(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", *(line(step, float(step)) for step in range(1, 101)))
    note, seconds = tmp_path / "tracking" / "wandb.json", itertools.count()
    first, second = Kept(fails_at=50), Kept()

    with pytest.raises(RuntimeError, match="the server is gone"):
        follow(tmp_path, "wandb", lambda *_: first, wait=turns(), clock=lambda: float(next(seconds)))
    assert read_progress(note).unix_s == 49.0
    follow(tmp_path, "wandb", lambda *_: second, wait=turns())

    assert first.steps + second.steps == list(range(1, 101))


def test_a_successor_notes_its_place_amid_the_lines_that_were_sent_before(tmp_path: Path) -> None:
    """Without a note for `daemon.hang_timeout_s` it is killed, and so is each of its successors."""
    add(tmp_path / "metrics.jsonl", *(line(step, float(step), name="x" * 4000) for step in range(1, 1001)))
    path, flushed = tmp_path / "tracking" / "wandb.json", []
    write_progress(path, Progress("id", 1000.0, 0.0, 1000))
    tracker, seconds = Kept(), itertools.count()
    tracker.flush = lambda: flushed.append(read_progress(path))  # type: ignore[method-assign]

    follow(tmp_path, "wandb", lambda *_: tracker, wait=lambda _: True, clock=lambda: float(next(seconds)))

    # 4 MB are read in pieces of one; each of both turns ends with a note.
    assert len(flushed) >= 2 + 3
    assert {(progress.unix_s, progress.step) for progress in flushed} == {(1000.0, 1000)}
    assert tracker.steps == []


def test_no_place_is_kept_between_lines_of_the_same_time(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", line(1, 1.0), line(2, 2.0), line(3, 2.0))
    seconds, second = itertools.count(), Kept()

    with pytest.raises(RuntimeError, match="the server is gone"):
        follow(tmp_path, "wandb", lambda *_: Kept(fails_at=3), wait=turns(), clock=lambda: float(next(seconds)))
    follow(tmp_path, "wandb", lambda *_: second, wait=turns())

    assert second.steps == [2, 3]


def test_samples_of_a_successor_have_the_step_of_the_last_line(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", line(7, 1.0))
    follow(tmp_path, "wandb", lambda *_: Kept(), wait=turns())
    writer = SampleWriter(folder_of(tmp_path), 0, 1 << 20)
    writer.write(sample(2.0, "2"))
    writer.close()
    successor = Tabled()

    follow(tmp_path, "wandb", lambda *_: successor, wait=turns())

    assert successor.steps == [7]


class Bench:
    """A launcher whose processes are short programs."""

    def __init__(self, folder: Path, program: str, **daemon: Any) -> None:
        self.config = Config.model_validate(
            {
                "daemon": {"state_dir": str(folder), "run_name": "r", "restart_delay_s": 2.0, **daemon},
                "metrics": {"tracker": ["tensorboard"]},
            }
        )
        self.slab = MetricsSlab.create(folder / "metrics", [SlotName("supervisor")])
        self.slab.begin("supervisor")
        self.now_s, self.program = 100.0, program
        self.launcher = Trackers(
            self.config, self.slab.writer("supervisor"), start=self._start, clock=lambda: self.now_s
        )
        self.note = run_dir(self.config) / "tracking" / "tensorboard.json"

    def _start(self, name: str, output: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", self.program]
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.launcher.tick()

    def ticks(self, seconds: int) -> None:
        """Tick once a second."""
        for _ in range(seconds):
            self.tick()

    def value(self, name: str) -> float | None:
        return MetricsReader(self.slab).read().value(name, tracker="tensorboard")

    def wait_ended(self) -> None:
        (pid,) = self.launcher.pids
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        wait_until(lambda: os.waitid(os.P_PID, pid, options), 60.0, "the tracker has ended")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(program: str, **daemon: Any) -> Bench:
        made.append(Bench(tmp_path, program, **daemon))
        return made[-1]

    yield make
    for each in made:
        each.launcher.close(0.0)
        each.slab.close()


def test_a_tracker_that_fails_is_started_again_later_and_later(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench("import sys; sys.exit('no such server')")

    def is_started() -> bool:
        one.tick()
        return bool(one.launcher.pids)

    one.tick()
    waits = []
    for _ in range(3):
        one.wait_ended()
        one.tick()
        assert one.launcher.pids == [] and one.value("rlhfd_tracker_up") == 0
        before_s = one.now_s
        wait_until(is_started, 60.0, "the tracker is started again", poll_s=0.0)
        waits.append(one.now_s - before_s)

    assert waits == [2.0, 4.0, 8.0]
    assert one.value("rlhfd_tracker_starts_total") == 4 and one.value("rlhfd_tracker_up") == 1
    assert "tracker tensorboard has ended (1), restart in 2.0 s, the run goes on: no such server" in caplog.text


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("ConnectionError: https://me:secret@host/api", "ConnectionError: https://***@host/api"),
        ("x" * 20_000 + " https://me:secret@host/api\nrefused", "the run goes on: refused"),
        ("https://me:secret" + "x" * 20_000 + "@host", "the run goes on: its last line is too long"),
        ("", "the run goes on: it printed nothing"),
    ],
    ids=["short", "behind a long line", "long", "none"],
)
def test_the_last_line_of_a_tracker_is_logged_without_passwords(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, printed: str, shown: str
) -> None:
    one = bench(f"import sys; sys.stdout.write({printed!r}); sys.exit(1)")
    one.tick()
    one.wait_ended()

    one.tick()

    assert shown in caplog.text and "secret" not in caplog.text and "xxx" not in caplog.text


def test_a_tracker_that_hangs_is_killed_and_started_again(bench: Callable[..., Bench]) -> None:
    one = bench("import time; time.sleep(1000)", hang_timeout_s=30.0)
    one.tick()
    (hung,) = one.launcher.pids
    one.note.write_text("{}")
    one.ticks(25)
    one.note.write_text("{} ")
    one.ticks(30)
    assert one.launcher.pids == [hung], "its note is new"

    one.ticks(2)
    one.wait_ended()
    one.ticks(4)

    assert hung not in one.launcher.pids and len(one.launcher.pids) == 1


def test_a_pause_of_the_supervisor_is_no_hang_of_a_tracker(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench("import time; time.sleep(1000)", hang_timeout_s=30.0)
    one.tick()

    # Both were stopped, as all of a virtual machine that is suspended.
    one.tick(1000.0)
    one.ticks(29)

    assert "hangs" not in caplog.text
    one.ticks(2)
    assert "hangs" in caplog.text


def test_a_reloaded_limit_holds_for_a_tracker_at_once(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    # None at first.
    one = bench("import time; time.sleep(1000)", hang_timeout_s=0.0)
    one.ticks(20)
    assert "hangs" not in caplog.text

    daemon = one.config.daemon.model_copy(update={"hang_timeout_s": 10.0})
    one.launcher.config = one.config.model_copy(update={"daemon": daemon})
    one.tick()

    assert "hangs" in caplog.text


def test_the_log_of_a_tracker_that_prints_for_weeks_is_bounded(bench: Callable[..., Bench]) -> None:
    one = bench("import sys, time; sys.stdout.write('x' * (2 << 20)); print('up', flush=True); time.sleep(1000)")
    one.tick()
    log = one.note.with_suffix(".log")
    wait_until(lambda: log.stat().st_size > 2 << 20, 60.0, "all is printed")

    one.tick()

    assert log.stat().st_size == 0


def test_at_the_end_a_tracker_gets_time_for_the_rest_and_one_that_hangs_is_killed(bench: Callable[..., Bench]) -> None:
    program = "import signal, sys, time; {}; print('up', flush=True); time.sleep(1000)"
    for handler, code in (("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
                          ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", -signal.SIGKILL)):  # fmt: skip
        one = bench(program.format(handler))
        one.tick()
        log = one.note.with_suffix(".log")
        wait_until(lambda log=log: "up" in log.read_text(), 60.0, "the tracker is up")
        child = one.launcher._slots[0].child
        assert child is not None

        one.launcher.close(10.0 if code == 7 else 0.2)

        assert child.returncode == code and one.launcher.pids == []
        log.unlink()
        (one.note.parents[3] / "metrics").unlink()


def test_without_trackers_there_is_nothing(tmp_path: Path) -> None:
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor")])
    slab.begin("supervisor")

    launcher = Trackers(Config(), slab.writer("supervisor"))
    launcher.tick()
    launcher.close()

    assert launcher.pids == [] and MetricsReader(slab).read().families["rlhfd_tracker_up"] == {}
    slab.close()
