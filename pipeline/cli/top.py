"""`rlhfd top`: a running instance on a full screen, polled once a second; one table if there is no terminal."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.cli.status import devices, duration, engine, progress, size, table, warnings
from pipeline.errors import UnreachableError
from pipeline.runtime.messages import is_evaluation
from pipeline.supervisor.live import brief, panel

_COLUMNS = ("process", "pid", "state", "doing", "for", "on", "engine", "last minute", "restarts", "memory", "devices")
# On a narrow terminal the later columns are left out; no column is cut.
_BY_PRIORITY = (
    "process", "pid", "state", "doing", "for", "restarts", "memory", "on", "engine", "devices", "last minute",
)  # fmt: skip
_GAP = 2
_LEAST_ROWS = 3
"""Processes for which the sentences of `why` make room in a short pane."""
_COLOURS = {"ready": "green", "failed": "red", "stopped": "red"}
_LEAST_SHARE = 0.02
_LAST_MINUTE_COLUMNS = 48
"""Of a screen; a pipe gets all."""

Ask = Callable[[str], dict[str, Any]]


def rows(status: Mapping[str, Any], why: Mapping[str, Any], *, columns: float = math.inf) -> list[tuple[str, ...]]:
    """Return one row a process: its activity now, and its time by activity over the last minute, in so many columns."""
    doing = {process["name"]: process for process in why.get("processes") or []}
    found: list[tuple[str, ...]] = []
    for process in status.get("processes") or []:
        role, index = process["role"], process["index"]
        at = doing.get(process.get("name"), {})
        working_on = at.get("working_on", -1)
        unit = {"rollout": "ticket", "trainer": "lease"}.get(role, "")
        shares = at.get("last_minute") or {}
        found.append(
            (
                f"{role} {index}",
                str(process.get("pid") or "–"),
                "stopped" if at.get("stopped") else str(process.get("state") or "–"),
                str(at.get("activity") or "–"),
                duration(at.get("since_s")),
                _on(unit, working_on, process),
                engine(process) or "–",
                _last_minute(shares, columns) or "–",
                str(process.get("restarts", "–")),
                size(process.get("resident_bytes")),
                devices(process),
            )
        )
    return found


def _last_minute(shares: Mapping[str, float], columns: float) -> str:
    """Return the shares of activities, as many of the largest, which come first, as fit."""
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share >= _LEAST_SHARE]
    while len(" ".join(parts)) > columns:
        parts.pop()
    return " ".join(parts)


def _on(unit: str, working_on: int, process: Mapping[str, Any]) -> str:
    """Return the ticket or lease in work, and the progress of a worker's stage; a dash without one."""
    if not unit or working_on < 0:
        return "–"
    done = progress(process)
    return ("held-out prompts" if is_evaluation(working_on) else f"{unit} {working_on:,}") + (done and f": {done}")


def text(status: Mapping[str, Any], why: Mapping[str, Any]) -> str:
    """Return the table as plain lines."""
    return "\n".join(table(_COLUMNS, rows(status, why)))


def screen(
    status: Mapping[str, Any], why: Mapping[str, Any], *, width: int = 200, height: int = 200, ascii_only: bool = False
) -> RenderableType:
    """Return the screen for a pane: the panel of `start`, the sentences of `why`, the processes.

    In a pane that is too short for them the panel is one line, then the sentences are left out, then the warnings, and
    as many processes are shown as fit.
    """
    found = rows(status, why, columns=_LAST_MINUTE_COLUMNS)
    fitting = _fitting(found, width)
    sentences = [Text(sentence) for sentence in why.get("sentences") or []]
    attention = [Text(f"ATTENTION: {warning}", style="bold red") for warning in warnings(status)]
    foot = Text(f"up {duration(status.get('uptime_s'))}; Ctrl-C leaves, the run continues", style="dim")
    above = panel(status, ascii_only=ascii_only)
    whole = Group(above, *attention, *sentences, Text(), _grid(found, fitting), Text(), foot)
    if _lines(whole, width) <= height:
        return whole
    short = Text(brief(status), no_wrap=True, overflow="ellipsis")
    for parts in ([short, *attention, *sentences], [short, *attention], [short]):
        # The head of the table and the foot are a line each.
        if (room := height - _lines(Group(*parts), width) - 2) >= min(len(found), _LEAST_ROWS):
            break
    left_out = {"processes": max(len(found) - max(room, 0), 0), "warnings": 0 if parts[1:] else len(attention)}
    more = "".join(f"{count:,} more {what}; " for what, count in left_out.items() if count)
    foot = Text(more, style="dim") + foot
    return Group(*parts, _grid(found[: max(room, 0)], fitting), foot)


def _grid(found: Sequence[tuple[str, ...]], fitting: Sequence[str]) -> Table:
    grid = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in fitting:
        grid.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in found:
        cells = dict(zip(_COLUMNS, row, strict=True))
        grid.add_row(*(Text(cells[name], style=_COLOURS.get(cells[name], "") if name == "state" else "")
                       for name in fitting))  # fmt: skip
    return grid


def _lines(shown: RenderableType, width: int) -> int:
    """Return the lines that a renderable takes in a width in columns."""
    console = Console(width=width, file=io.StringIO())
    return len(console.render_lines(shown, pad=False))


def _fitting(found: list[tuple[str, ...]], width: int) -> list[str]:
    """Return the columns that fit beside each other, in the order of display."""
    kept: set[str] = set()
    for name in _BY_PRIORITY:
        place = _COLUMNS.index(name)
        width -= max(len(cell) for cell in (name, *(row[place] for row in found))) + _GAP
        if width < 0:
            break
        kept.add(name)
    return [name for name in _COLUMNS if name in kept]


def run(ask: Ask, console: Console, interval_s: float) -> None:
    """Show the screen until Ctrl-C, or until the instance has ended.

    Raises:
        NotRunningError: If the instance has ended.
    """
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                width, height = console.size
                shown = screen(
                    ask("status"), ask("why"), width=width, height=height, ascii_only=console.options.ascii_only
                )
            except UnreachableError as error:
                # It may be starting, or busy for a moment: the next answer is shown.
                shown = Text(str(error), style="bold red")
            live.update(shown, refresh=True)
            time.sleep(interval_s)
