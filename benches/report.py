"""`benches/RESULTS.md`: one section a benchmark and device, each with the machine and versions it was measured with.

A run replaces the sections that it has measured and leaves the others unchanged. README and docs/measured.md repeat
rows of it word for word: `update_page` copies them, a test compares them.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "RESULTS.md"
_INTRODUCTION = """# Results

Written by `bin/bench`, which measures the sections that take 15 minutes together; `bin/bench NAME` measures one. The
sections *card*, *sleep* and those named after a card are of `bin/card`, each of a run on that card.
A figure is the median, with the range over the rounds in brackets. Unless a section says otherwise, compared ways were
measured in turns, and a ratio is the median of the ratios of the rounds: on a machine with other users, ratios hold and
absolute figures do not.
"""
_VERSIONS = ("torch", "numpy", "pyzmq", "transformers")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; each row has as many cells as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table in Markdown."""
        if self.title:
            yield from (f"**{self.title}**", "")
        yield _row(self.header)
        yield "|" + "---|" * len(self.header)
        for cells in self.rows:
            if len(cells) != len(self.header):
                raise ValueError(f"{len(cells)} cells under a header of {len(self.header)}: {cells}")
            yield _row(cells)
        yield ""


@dataclasses.dataclass(frozen=True)
class Section:
    """The results of one benchmark.

    Attributes:
        name: Name of the benchmark, as on the command line.
        title: Subject of the measurement, in a few words.
        text: Method, and notes on the figures.
        tables: The figures.
        device: The card it ran on, "" for the CPU; sections of the same name on other devices are kept beside it.
    """

    name: str
    title: str
    text: str
    tables: Sequence[Table]
    device: str = ""

    @property
    def heading(self) -> str:
        """The line that identifies this section."""
        return f"## {self.name}" + (f" on {self.device}" if self.device else "")

    def markdown(self, *, took_s: float, command: str) -> str:
        """Return the section's text in the file."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        how = f"`{command}`, {took_s:.0f} s, {today}, load {os.getloadavg()[0]:.1f} at its end. {machine(self.device)}"
        lines = [self.heading, "", f"{self.title}.", "", self.text.strip(), "", how, ""]
        for table in self.tables:
            lines += table.lines()
        return "\n".join(lines)


def machine(device: str = "") -> str:
    """Return one line with the machine and the versions that run on it."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    parts = [named.group(1) if named else platform.processor(), f"{cores} cores", f"{memory_gib:.0f} GiB"]
    parts += [device] if device else []
    parts += [f"Linux {platform.release()}", f"Python {platform.python_version()}"]
    for package in _VERSIONS:
        parts.append(f"{package} {importlib.metadata.version(package)}")
    commit = _commit()
    return ", ".join(parts) + (f"; commit {commit}" if commit else "") + "."


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a results file by their headings."""
    found = {}
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
        found[part.partition("\n")[0]] = part.rstrip("\n") + "\n"
    return found


def merge(text: str, measured: Sequence[tuple[str, str]], order: Sequence[str]) -> str:
    """Return a results file in which the measured sections, by heading, replace the earlier ones.

    Args:
        text: The present file, "" for none.
        measured: Headings and sections.
        order: Names of benchmarks, in the order of their sections.
    """
    found = sections_of(text) | {heading: section.rstrip("\n") + "\n" for heading, section in measured}

    def place(heading: str) -> tuple[int, str]:
        name = heading.removeprefix("## ").split(" on ")[0]
        return (list(order).index(name) if name in order else len(order), heading)

    return "\n".join([_INTRODUCTION, *(found[heading] for heading in sorted(found, key=place))])


def table_rows(text: str) -> list[tuple[str, ...]]:
    """Return the rows of all tables in a Markdown text, headers and rules left out."""
    rows, header = [], True
    for line in text.splitlines():
        if not line.startswith("|"):
            header = True
        elif set(line) <= set("|-: "):
            header = False
        elif not header:
            rows.append(tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
    return rows


def update_page(page: str, results: str) -> str:
    """Return a page with each table row whose first cell is that of a row of RESULTS.md replaced by that row."""
    known = {row[0]: row for row in table_rows(results)}
    lines = []
    for line in page.splitlines(keepends=True):
        row = table_rows(f"|-|\n{line}")
        same = known.get(row[0][0]) if row else None
        lines.append(_row(same) + "\n" if same is not None and len(same) == len(row[0]) else line)
    return "".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""
