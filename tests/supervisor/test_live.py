from __future__ import annotations

import fcntl
import io
import os
import random
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pipeline.supervisor.live import LiveView, evaluation_text, line, panel, sparkline
from pipeline.supervisor.pace import RateWindow, Steps
from tests.support.slabs import ROOT

STATUS: dict[str, Any] = {
    "state": "ready",
    "algorithm": "grpo",
    "model": "builtin:sort-digits",
    "step": 45,
    "max_steps": 150,
    "reward_mean": 0.8125,
    "reward_history": [0.4, 0.5, 0.6, 0.8125],
    "tokens_per_s": 1234.4,
    "buffer": {"ready_items": 256, "capacity_items": 512},
    "staleness_mean_versions": 0.75,
    "policy_version": 45,
    "processes": [
        {"role": "rollout", "state": "ready"}, {"role": "rollout", "state": "starting"}, {"role": "buffer"},
    ],
    "metrics_url": "http://127.0.0.1:9477",
    "learning": {"loss": -0.012345678, "kl": 0.0005, "entropy": 1.5, "response_length": 12.34, "clipped": 0.03125},
}  # fmt: skip
LINE = (
    "state=ready step=45/150 reward_mean=0.8125 tokens_per_s=1234 buffer_items=256/512 staleness_mean=0.75 "
    "policy_version=45 workers=1/2 loss=-0.01235 kl=0.0005 entropy=1.5 response_length=12.3 clipped=0.0312 "
    "gradient_norm=-"
)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal:
    """A pseudo-terminal of 24 lines of 80 columns; `screen` is the output since its last call."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._master, False)
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")

    def screen(self) -> str:
        written = b""
        try:
            while chunk := os.read(self._master, 65536):
                written += chunk
        except BlockingIOError:
            pass
        return written.decode()

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        self.stream.close()
        if self._master >= 0:
            os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_without_a_standard_output_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    view = LiveView()
    view.start()
    view.update(STATUS)
    view.stop()

    assert view.is_gone and view._stream.getvalue() == ""  # type: ignore[attr-defined]


def step(number: int) -> dict[str, Any]:
    return STATUS | {"step": number}


def rendered(status: dict[str, Any], encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=80)
    console.print(panel(status, ascii_only=console.options.ascii_only))
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding)


def test_line_is_keys_and_values() -> None:
    assert line(STATUS) == LINE


def test_line_shows_what_is_not_known_as_a_dash() -> None:
    assert line({"state": "starting", "processes": STATUS["processes"][1:]}) == (
        "state=starting step=0 reward_mean=- tokens_per_s=- buffer_items=0 staleness_mean=- "
        "policy_version=- workers=0/1 loss=- kl=- entropy=- response_length=- clipped=- gradient_norm=-"
    )


def test_pipe_gets_a_line_a_second_at_most_and_none_without_a_step() -> None:
    stream, now = io.StringIO(), FakeClock()
    view = LiveView(stream, clock_s=now)
    view.start()

    for number in range(41):
        view.update(step(number // 8))
        now.now_s += 0.25
    view.stop()

    steps = [text.split()[1] for text in stream.getvalue().splitlines()]
    assert steps == ["step=0/150", "step=1/150", "step=2/150", "step=3/150", "step=4/150", "step=5/150"]

    fast = io.StringIO()
    view = LiveView(fast, clock_s=now)
    for number in range(9):
        view.update(step(number))
        now.now_s += 0.25

    assert [text.split()[1] for text in fast.getvalue().splitlines()] == ["step=0/150", "step=4/150", "step=8/150"]


def test_pipe_gets_a_change_of_state_at_once() -> None:
    stream = io.StringIO()
    view = LiveView(stream, clock_s=FakeClock())

    view.update(STATUS | {"state": "starting"})
    view.update(STATUS)

    first, second = stream.getvalue().splitlines()
    assert first.startswith("state=starting ")
    assert first.endswith(" algorithm=grpo model=builtin:sort-digits metrics=http://127.0.0.1:9477")
    assert second == LINE


def test_pipe_gets_a_line_a_minute_though_nothing_happens() -> None:
    stream, now = io.StringIO(), FakeClock()
    view = LiveView(stream, clock_s=now)

    for _ in range(121):
        view.update(STATUS)
        now.now_s += 1

    assert len(stream.getvalue().splitlines()) == 3


def test_last_snapshot_is_shown_at_the_end() -> None:
    stream = io.StringIO()
    view = LiveView(stream, clock_s=FakeClock())
    view.update(step(1))
    view.update(step(2))

    view.stop()

    assert [text.split()[1] for text in stream.getvalue().splitlines()] == ["step=1/150", "step=2/150"]


def test_stream_that_cannot_hold_a_character_gets_its_escape() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = LiveView(stream, clock_s=FakeClock())

    view.update(STATUS | {"model": "/models/größe"})

    assert isinstance(stream.buffer, io.BytesIO)
    assert rb"model=/models/gr\xf6\xdfe" in stream.buffer.getvalue()


def test_panel_shows_every_value() -> None:
    text = rendered(STATUS)

    for shown in (
        "rlhfd ready grpo builtin:sort-digits",
        "45 / 150",
        "▁▃▄█",
        "0.812",
        "1,234 /s",
        "256 / 512 ready",
        "0.75 versions",
        "version 45",
        "1 / 2 ready",
        "http://127.0.0.1:9477",
    ):
        assert shown in text


def test_panel_takes_no_name_for_markup() -> None:
    text = rendered(STATUS | {"model": "/models/[bold]x[/nope]", "metrics_url": "[/] [red]"})

    assert "/models/[bold]x[/nope]" in text
    assert "[/] [red]" in text


def test_panel_of_an_ascii_terminal_is_ascii() -> None:
    assert rendered(STATUS, encoding="ascii").isascii()


def test_panel_without_bounds_has_no_bars() -> None:
    text = rendered({"state": "ready", "step": 1234, "buffer": {"ready_items": 7}})

    assert "1,234" in text and "7 ready" in text
    assert "━" not in text


def test_terminal_gets_the_panel_and_its_cursor_back(terminal: Terminal) -> None:
    view = LiveView(terminal.stream, clock_s=FakeClock())

    view.start()
    view.update(STATUS)
    shown = terminal.screen()
    view.stop()

    assert "\x1b[?25l" in shown and "45 / 150" in shown
    assert "\x1b[?25h" in terminal.screen()


def test_the_panel_leaves_room_for_the_echo_of_two_interrupts(terminal: Terminal) -> None:
    view = LiveView(terminal.stream, clock_s=FakeClock())

    view.start()
    view.update(STATUS)

    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.screen())
    view.stop()
    # An echo beyond the last column goes to the next line, and leaves a border of the panel on the screen.
    assert "╰" in written
    assert max(map(len, written.splitlines())) + len("^C^C") <= 80


def test_terminal_is_redrawn_four_times_a_second_at_most(terminal: Terminal) -> None:
    now = FakeClock()
    view = LiveView(terminal.stream, clock_s=now)
    view.start()
    redrawn = 0

    for number in range(100):
        view.update(step(number))
        redrawn += "/ 150" in terminal.screen()
        now.now_s += 0.01

    assert redrawn == 4
    view.stop()
    assert "99 / 150" in terminal.screen()


def test_line_of_a_child_appears_above_the_panel(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    view = LiveView(terminal.stream, clock_s=FakeClock())
    view.start()
    view.update(STATUS)
    terminal.screen()

    view.log("rollout-0 says hello")

    shown = terminal.screen()
    assert 0 <= shown.index("rollout-0 says hello") < shown.index("45 / 150")
    view.stop()


def test_standard_error_that_is_a_file_keeps_its_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    view = LiveView(terminal.stream, clock_s=FakeClock())
    view.start()

    view.log("rollout-0 says hello")
    view.stop()

    assert file.getvalue() == "rollout-0 says hello\n"
    assert "hello" not in terminal.screen()


def test_dumb_terminal_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    view = LiveView(terminal.stream, clock_s=FakeClock())

    view.start()
    view.update(STATUS)

    assert terminal.screen().startswith(LINE)


def test_terminal_that_hangs_up_silences_the_view(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    now = FakeClock()
    view = LiveView(terminal.stream, clock_s=now)
    view.start()

    terminal.hang_up()
    for number in range(3):
        now.now_s += 1
        view.update(step(number))
    view.stop()

    assert [record.getMessage() for record in caplog.records if record.name == "pipeline.supervisor.live"] == [
        "output is gone, the run goes on: error=[Errno 5] Input/output error"
    ]


def test_pipe_that_nobody_reads_does_not_block() -> None:
    reader, writer = os.pipe()
    now = FakeClock()
    with os.fdopen(writer, "w") as stream:
        view = LiveView(stream, clock_s=now)
        for number in range(2000):
            now.now_s += 1
            view.update(step(number))

        os.set_blocking(reader, False)
        read = b""
        while len(chunk := os.read(reader, 65536)) == 65536:
            read += chunk
        assert (read + chunk).count(b"\n") > 100
        os.close(reader)
        view.stop()


def test_reader_that_leaves_changes_neither_the_run_nor_its_exit_code() -> None:
    code = """
import sys
from pipeline.supervisor.live import LiveView
now_s = 0.0
view = LiveView(clock_s=lambda: now_s)
sys.stdin.readline()
for step in range(100):
    now_s += 1
    view.update({"state": "ready", "step": step})
view.stop()
sys.exit(7)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        errors = process.stderr.read()

        assert process.wait(timeout=60) == 7
        assert errors.count(b"output is gone, the run goes on") == 1
        assert b"Traceback" not in errors and b"Exception ignored" not in errors


def test_steps_that_a_rollback_undid_are_neither_shown_nor_in_the_rewards() -> None:
    steps = Steps(512)
    for step in (1, 2, 3, 4):
        steps.add(step, step, step / 10)
    # The trainer died, its successor went back to step 2 and has taken no step.
    steps.add(None, 4, None)
    assert steps.step == 4
    steps.add(2, 4, None)
    assert (steps.step, [*steps.rewards]) == (2, [(1, 0.1), (2, 0.2)])

    steps.add(3, 5, 0.7)
    steps.add(4, 6, 0.8)

    assert (steps.step, [*steps.rewards]) == (4, [(1, 0.1), (2, 0.2), (3, 0.7), (4, 0.8)])
    steps.add(0, 6, None)
    assert (steps.step, [*steps.rewards]) == (0, [])


def test_rate_is_the_increase_over_the_window() -> None:
    window = RateWindow(60.0)

    for second in range(0, 200, 5):
        window.add(second, 10.0 * min(second, 150))

    # At 195 s the window begins at 135 s: 150 tokens in 60 s.
    assert window.rate() == 150 / 60


def test_rate_of_a_young_run_is_over_the_time_that_passed() -> None:
    window = RateWindow(60.0)

    assert window.rate() is None
    window.add(0.0, 0.0)
    assert window.rate() is None
    window.add(2.0, 100.0)
    assert window.rate() == 50.0


def test_rate_after_a_gap_longer_than_the_window_is_not_known() -> None:
    window = RateWindow(60.0)
    window.add(0.0, 0.0)

    window.add(61.0, 100.0)

    assert window.rate() is None


def prometheus_rate(samples: list[tuple[float, float]], now_s: float, range_s: float) -> float:
    """Prometheus' extrapolatedRate for a counter without resets, as its documentation and source describe it."""
    inside = [(at, value) for at, value in samples if now_s - range_s <= at <= now_s]
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    sampled_s = last_s - first_s
    spacing_s = sampled_s / (len(inside) - 1)
    to_start_s, to_end_s = first_s - (now_s - range_s), now_s - last_s
    if last > first >= 0:
        to_start_s = min(to_start_s, sampled_s * first / (last - first))
    stretched_s = sampled_s
    for edge_s in (to_start_s, to_end_s):
        stretched_s += edge_s if edge_s < spacing_s * 1.1 else spacing_s / 2
    return (last - first) * stretched_s / sampled_s / range_s


@given(st.randoms(use_true_random=False), st.integers(241, 500))
def test_rate_equals_prometheus_once_the_window_is_full(rng: random.Random, ticks: int) -> None:
    window, total = RateWindow(60.0), 1e6
    samples = []
    for tick in range(ticks):
        total += rng.randrange(1000)
        samples.append((tick * 0.25, total))
        window.add(*samples[-1])

    assert window.rate() == pytest.approx(prometheus_rate(samples, samples[-1][0], 60.0))


def test_sparkline_spans_its_blocks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 0], 8) == "█▁"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([3, 3, 3], 8) == "▄▄▄"
    assert sparkline([], 8) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_sparkline_never_exceeds_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_the_panel_shows_the_last_evaluation_and_the_progress_of_the_next() -> None:
    evaluation = {
        "version": 40, "k": 4, "pass_at_1": 0.4531, "pass_at_k": 0.8125, "reward_mean": 0.45, "done": 96,
        "prompts": 500, "response_length_mean_tokens": 6.25,
    }  # fmt: skip
    shown = (
        "version 40: pass@1 0.4531, pass@4 0.8125, reward 0.4500, length 6.2 tokens; 96 of 500 prompts of an evaluation"
    )

    assert evaluation_text(evaluation) == shown
    assert evaluation_text({**evaluation, "k": 1}) == shown.replace(" pass@4 0.8125,", "")
    assert evaluation_text({"version": None, "done": 0, "prompts": 0}) == "not evaluated yet"
    console = Console(file=io.StringIO(), width=200)
    console.print(panel(STATUS | {"evaluation": evaluation}))
    console.print(panel(STATUS))
    assert console.file.getvalue().count(shown) == 1  # type: ignore[attr-defined]
