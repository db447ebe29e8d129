"""The output of `rlhfd start`: a live panel on a terminal, one line a step on any other stream.

A run outlives its viewers. Output that cannot be written now is left out, and after the loss of a terminal or pipe no
more is written; neither stops the supervisor's loop.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TextIO

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.errors import counted

_PANEL_INTERVAL_S: Final = 0.25
_LINE_INTERVAL_S: Final = 1.0
_QUIET_S: Final = 60.0
_BAR_WIDTH: Final = 28
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS: Final = "_.-=+*#"
_LEARNING_FORMS: Final = {
    "loss": ".4g",
    "kl": ".4g",
    "entropy": ".4g",
    "response_length": ".1f",
    "clipped": ".4f",
    "gradient_norm": ".4g",
}
"""Formats of the values of a step in a line, by their names in `pipeline.telemetry.history.LEARNING`."""
_EVALUATION_FORMS: Final = {
    "pass_at_1": "pass@1 {:.4f}",
    "pass_at_k": "pass@{k} {:.4f}",
    "reward_mean": "reward {:.4f}",
    "response_length_mean_tokens": "length {:.1f} tokens",
}
_ECHO_COLUMNS: Final = 4
"""Columns right of the panel for the echo of Ctrl-C twice: an echo that wraps would move the panel by a line."""
_COLOURS: Final = {"ready": "green", "failed": "red"}

log = logging.getLogger(__name__)


class LiveView:
    """Shows the status of an instance until it is stopped.

    Args:
        stream: The output, standard output by default. A terminal gets the panel, any other stream lines.
        clock_s: Monotonic seconds.

    Attributes:
        is_gone: Whether the output's reader is gone, so that no more is shown.
    """

    def __init__(self, stream: TextIO | None = None, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        # Without a standard output, as after ``>&-``, Python has None in its place.
        self._stream = stream or sys.stdout or io.StringIO()
        self._clock_s = clock_s
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self.is_gone = stream is None and sys.stdout is None
        self._latest: Mapping[str, Any] | None = None
        self._shown: Mapping[str, Any] | None = None
        self._shown_s = -_QUIET_S

    def start(self) -> None:
        """Start the panel; lines on a terminal's standard error appear above it from now on."""
        if not self._stream.isatty() or self._console.is_dumb_terminal:
            return
        # Redirecting a standard error that is a file would put its lines on the terminal instead.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        self._attempt(self._live.start)

    def update(self, status: Mapping[str, Any]) -> None:
        """Show a status, unless the last one was shown too recently."""
        self._latest = status
        now_s = self._clock_s()
        if self._is_due(status, now_s) and self._is_writable():
            self._show(status, now_s)

    def log(self, line: str) -> None:
        """Pass a child's line on to standard error, above the panel."""
        # The reader may be gone; the run continues.
        with contextlib.suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def stop(self) -> None:
        """Show the last status and give the terminal back."""
        if self._latest is not None and self._latest is not self._shown and self._is_writable():
            self._show(self._latest, self._clock_s())
        if self._live is not None:
            self._attempt(self._live.stop)

    def _is_due(self, status: Mapping[str, Any], now_s: float) -> bool:
        passed_s = now_s - self._shown_s
        if self._live is not None:
            return passed_s >= _PANEL_INTERVAL_S
        if self._shown is None or _state(status) != _state(self._shown) or passed_s >= _QUIET_S:
            return True
        return _steps(status)[0] != _steps(self._shown)[0] and passed_s >= _LINE_INTERVAL_S

    def _show(self, status: Mapping[str, Any], now_s: float) -> None:
        if self._live is not None:
            shown = panel(status, ascii_only=self._console.options.ascii_only)
            live, shown = self._live, Constrain(shown, max(self._console.width - _ECHO_COLUMNS, 1))
            self._attempt(lambda: live.update(shown, refresh=True))
        else:
            first = self._shown is None
            self._attempt(lambda: self._write(line(status, introduce=first)))
        self._shown, self._shown_s = status, now_s

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _is_writable(self) -> bool:
        """Return whether a write would not block: an unread pipe or a stopped terminal must not hold up the run."""
        if self.is_gone:
            return False
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def _attempt(self, write: Callable[[], object]) -> None:
        if self.is_gone:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            self.is_gone = True
            # Data still buffered in the stream would fail again at exit, and change the exit code.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            log.warning("output is gone, the run goes on: error=%s", error)


def line(status: Mapping[str, Any], *, introduce: bool = False) -> str:
    """Return a status as one line of ``key=value``; keys and their order stay.

    Args:
        status: The answer of `rlhfd status`.
        introduce: Add the constant fields: algorithm, model, address of the metrics.
    """
    learning = status.get("learning") or {}
    fields = {
        "state": _state(status),
        "step": _part(*_steps(status), "/", "d"),
        "reward_mean": _shown(status.get("reward_mean"), ".4f"),
        "tokens_per_s": _shown(status.get("tokens_per_s"), ".0f"),
        "buffer_items": _part(*_items(status), "/", "d"),
        "staleness_mean": _shown(status.get("staleness_mean_versions"), ".2f"),
        "policy_version": _shown(status.get("policy_version"), "d"),
        "workers": workers(status, "/"),
        **{name: _shown(learning.get(name), form) for name, form in _LEARNING_FORMS.items()},
    }
    if introduce:
        fields |= {name: status.get(name, "") for name in ("algorithm", "model")}
        fields["metrics"] = status.get("metrics_url", "")
    return " ".join(f"{name}={value}" for name, value in fields.items())


def brief(status: Mapping[str, Any]) -> str:
    """Return the panel's head, step, reward and speed as one line."""
    return (
        f"rlhfd {_state(status)} {status.get('algorithm', '')} {status.get('model', '')}: step {steps(status)}, "
        f"reward {_shown(status.get('reward_mean'), '.3f')}, {_shown(status.get('tokens_per_s'), ',.0f')} tokens/s"
    )


def panel(status: Mapping[str, Any], *, ascii_only: bool = False) -> RenderableType:
    """Return a status as a panel of some ten lines."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_row("step", _bar(*_steps(status)))
    trend = sparkline(status.get("reward_history") or (), _BAR_WIDTH, _ASCII_BLOCKS if ascii_only else _BLOCKS)
    mean = _shown(status.get("reward_mean"), ".3f")
    rows.add_row("reward", Text.assemble((f"{trend:<{_BAR_WIDTH}}", "cyan"), f" {mean}"))
    rows.add_row("tokens", f"{_shown(status.get('tokens_per_s'), ',.0f')} /s")
    rows.add_row("buffer", _bar(*_items(status), " ready"))
    if status.get("evaluation") is not None:
        rows.add_row("held out", evaluation_text(status["evaluation"]))
    rows.add_row("staleness", f"{_shown(status.get('staleness_mean_versions'), '.2f')} versions")
    rows.add_row("policy", f"version {_shown(status.get('policy_version'), 'd')}")
    rows.add_row("workers", f"{workers(status)} ready")
    # Text, not str: rich would interpret brackets in a path as markup.
    state, run = _state(status), f" {status.get('algorithm', '')} {status.get('model', '')}".rstrip()
    title = Text.assemble("rlhfd ", (state, _COLOURS.get(state, "yellow")), run)
    return Panel(rows, title=title, title_align="left", subtitle=Text(status.get("metrics_url", ""), style="dim"))


def steps(status: Mapping[str, Any], of: str = " / ") -> str:
    """Return the step, and the last one of the run if there is one."""
    return _part(*_steps(status), of)


def workers(status: Mapping[str, Any], of: str = " / ") -> str:
    """Return the number of workers that are ready, and that of all."""
    states = [process.get("state") for process in status.get("processes") or () if process["role"] == "rollout"]
    return f"{states.count('ready')}{of}{len(states)}"


def _state(status: Mapping[str, Any]) -> str:
    return str(status.get("state") or "–")


def _steps(status: Mapping[str, Any]) -> tuple[int, int]:
    return status.get("step") or 0, status.get("max_steps") or 0


def _items(status: Mapping[str, Any]) -> tuple[int, int]:
    """Return the experiences that wait for a trainer, and their upper bound; 0 if only bytes bound it."""
    buffer = status.get("buffer") or {}
    return buffer.get("ready_items") or 0, buffer.get("capacity_items") or 0


def _part(number: int, total: int, of: str = " / ", form: str = ",") -> str:
    return of.join(format(count, form) for count in ((number, total) if total else (number,)))


def evaluation_text(evaluation: Mapping[str, Any]) -> str:
    """Return the last evaluation and the progress of the next as text."""
    k = evaluation.get("k") or "k"
    known = [
        form.format(value, k=k)
        for field, form in _EVALUATION_FORMS.items()
        # With k = 1 both are one number.
        if isinstance(value := evaluation.get(field), int | float) and not (field == "pass_at_k" and k == 1)
    ]
    last = f"version {evaluation['version']}: {', '.join(known)}" if evaluation.get("version") is not None else ""
    prompts = evaluation.get("prompts") or 0
    now = f"{evaluation.get('done') or 0:,} of {counted(prompts, 'prompt')} of an evaluation" if prompts else ""
    return "; ".join(part for part in (last, now) if part) or "not evaluated yet"


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Return at most `width` blocks, each the mean of an equal part of the values; the least mean is lowest."""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(blocks) - 1
    heights = [round((mean - low) / (high - low) * top) if high > low else top // 2 for mean in means]
    return "".join(blocks[height] for height in heights)


def _bar(number: int, total: int, unit: str = "") -> RenderableType:
    """Return a part of a total as a bar and as text; only as text without a total."""
    text = _part(number, total) + unit
    if not total:
        return text
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=min(number, total), width=_BAR_WIDTH, complete_style="cyan"), text)
    return row


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
