"""One run of `bin/card`: a daemon that is watched from outside, and the figures of its own metrics."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benches.card_row import Row
from benches.learning import Killer
from benches.measure import descendants, end_process, figure
from benches.run import lines_of, rlhfd_command, trace_path
from pipeline.config.plan import models_of
from pipeline.config.schema import Config
from pipeline.errors import RlhfdError
from pipeline.runtime import lock
from pipeline.supervisor.capacity import machine
from pipeline.supervisor.capacity.budgets import budgets_of
from pipeline.supervisor.gpus import read_once
from pipeline.supervisor.placement import visible_gpus

_POLL_S = 0.25
_ANSWER_S = 2.0
_END_S = 20.0
_LEFT_OUT = 2
"""First steps that no speed counts: graphs are captured, kernels loaded."""
_PHASES = ("forward_s", "backward_s", "reduce_s", "optimizer_s")
_BOOKS = re.compile(r"experiences: sealed (\d+) = trained (\d+) \+ dropped (\d+).*\+ ready (\d+) \+ leased (\d+)")
_SERIES = re.compile(r"^(rlhfd_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class CardRun:
    """A run. The figures are valid once `to_end` has returned.

    Args:
        folder: Folder of the run, which has modules of rewards.
        settings: Settings of the run beside those of `benches.run.rlhfd_command`.
        kills: Processes that are killed, as ``rollout``, by the step at which they are.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], kills: Mapping[int, str] | None = None) -> None:
        self._folder = folder
        self._runtime_dir = folder / "run"
        trace_path(folder).parent.mkdir(parents=True)
        self._settings = {key: value for key, value in settings.items() if key != "trainer.max_steps"}
        self._steps = int(str(settings["trainer.max_steps"]))
        self._killer = Killer(self._runtime_dir, {step: f"{role}-0" for step, role in (kills or {}).items()})
        self._kills = [*(kills or {}).values()]
        self._began_s = self._ready_s = 0.0
        self._metrics = ""
        self._config: Config | None = None
        self._used_before = used_of_card()
        self._used: dict[str, float] = defaultdict(float)
        self._code = 0

    def to_end(self) -> None:
        """Start it, and wait until it has ended; kill what is due meanwhile. An exception ends it, too."""
        command = rlhfd_command(self._settings, self._steps)(0, self._folder)
        self._began_s = time.monotonic()
        with (self._folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self._folder
            )
        try:
            while process.poll() is None:
                self._look()
                self._killer.at_step(len(self.lines))
                time.sleep(_POLL_S)
        finally:
            end_process(process, _END_S)
        self._code = process.returncode

    @property
    def output(self) -> str:
        """The output of the run so far."""
        return (self._folder / "output").read_text(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of its steps (metrics.jsonl)."""
        return lines_of(self._folder)

    @property
    def killed(self) -> list[str]:
        """The processes that were killed."""
        return self._kills[: len(self._kills) - self._killer.left]

    @property
    def left(self) -> list[str]:
        """The processes that were to be killed and were not."""
        return self._kills[len(self.killed) :]

    def ended(self) -> Row:
        """Return the row of its end; a run that failed says its last line."""
        code, ready = self._code, f"ready after {self._ready_s:.1f} s" if self._ready_s else "never ready"
        lines = [line for line in self.output.splitlines() if line.strip()]
        reason = f"exit code {code}; {lines[-1][-300:] if lines else 'it printed nothing'}" if code else ""
        return Row("the run", f"exit code {code}, {ready}", failed=reason)

    def books(self) -> Row:
        """Return the row of its books."""
        return books_of(self.output)

    def speeds(self) -> Iterator[Row]:
        """Return the rows of its speed, the first steps left out."""
        yield from speeds_of(self.lines)
        for phase, name in (("publish", "a publish"), ("load", "a fetch by the worker")):
            if (mean_s := self.seconds_of("rlhfd_weight_sync_duration_seconds", phase=phase)) is not None:
                count = self._value("rlhfd_weight_sync_duration_seconds_count", phase=phase)
                yield Row(f"{name} of the run", f"{mean_s * 1e3:.0f} ms", f"mean of {count:.0f}")

    def memory(self, *, on_card: bool) -> Iterator[Row]:
        """Return the rows of its memory against `rlhfd plan`: of the card, of its ranks and workers; or of the host."""
        if self._config is None:
            yield Row("memory", failed="the run was never reached")
            return
        name = "the card" if on_card else "host"
        budgets = budgets_of(self._config, models_of(self._config), machine.described(os.environ))
        budget = next(one for one in budgets if one.name.startswith("GPU") == on_card and one.name != machine.SHM)
        used = self._used[name] - (self._used_before if on_card else 0)
        share = used / budget.total_bytes
        reason = f"{share:.0%} of the plan" if on_card and share > 1 else ""
        yield Row(
            f"memory of {name}", f"{used / 1e9:.2f} GB",
            f"planned {budget.total_bytes / 1e9:.2f} GB, {share:.0%} of it",
            failed=reason,
        )  # fmt: skip
        for role in ("trainer", "rollout"):
            if reserved := self._used[f"{role} reserved"]:
                planned = sum(count for term, count in budget.terms.items() if term.startswith(role))
                yield Row(
                    f"torch's memory in the {role}", f"{reserved / 1e9:.2f} GB reserved", f"planned {planned / 1e9:.2f}"
                )

    @property
    def card_terms(self) -> dict[str, int]:
        """The terms of `rlhfd plan` of the run's card, of engine and step together; none before the run is reached."""
        if self._config is None:
            return {}
        together = self._config.model_copy(update={"rollout": self._config.rollout.model_copy(update={"sleep": False})})
        budgets = budgets_of(together, models_of(together), machine.described(os.environ))
        return next((budget.terms for budget in budgets if budget.is_card), {})

    @property
    def used_before_bytes(self) -> int:
        """Memory of the card that was in use before the run."""
        return self._used_before

    def seconds_of(self, histogram: str, **labels: str) -> float | None:
        """Return the mean of a histogram of seconds at the last look; None if it has no observation."""
        count = self._value(f"{histogram}_count", **labels)
        return self._value(f"{histogram}_sum", **labels) / count if count else None

    def _look(self) -> None:
        """Read the metrics; keep the largest memory."""
        with contextlib.suppress(RlhfdError, OSError, ValueError):
            record = lock.find(self._runtime_dir)
            self._metrics = metrics_of(record)
            if self._config is None:
                self._config = Config.model_validate_json((Path(record.shm_dir) / "config.json").read_text())
            if not self._ready_s and self._value("rlhfd_ready"):
                self._ready_s = time.monotonic() - self._began_s
            for words, used in re.findall(r"^rlhfd_gpu_memory_used_bytes\{(.*)\} (\S+)$", self._metrics, re.MULTILINE):
                gpu = dict(re.findall(r'(\w+)="([^"]*)"', words))
                if _is_the_card(gpu["gpu"], gpu["uuid"]):
                    self._keep("the card", float(used))
            for role in ("trainer", "rollout"):
                self._keep(f"{role} reserved", self._value("rlhfd_torch_memory_bytes", role=role, state="reserved"))
            self._keep("host", proportional_bytes(record.pid))

    def _keep(self, name: str, value: float) -> None:
        self._used[name] = max(self._used[name], value)

    def _value(self, name: str, **labels: str) -> float:
        return sum(self._values(name, **labels))

    def _values(self, name: str, **labels: str) -> list[float]:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = _SERIES.findall(self._metrics)
        return [float(value) for key, words, value in found if key == name and all(word in words for word in wanted)]


def metrics_of(record: lock.InstanceRecord) -> str:
    """Return the metrics of a run as Prometheus gets them.

    Raises:
        OSError: If it does not answer.
    """
    # A proxy has no business with this machine's own address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{record.url}/metrics", timeout=_ANSWER_S) as answer:
        text: str = answer.read().decode()
    return text


class Books(NamedTuple):
    """The rows that a run has sealed, and those in each state at its end."""

    sealed: int
    trained: int
    dropped: int
    ready: int
    leased: int

    @property
    def unaccounted(self) -> int:
        """Rows that are lost (positive) or counted twice (negative)."""
        return self.sealed - self.trained - self.dropped - self.ready - self.leased


def read_books(output: str) -> Books | None:
    """Return the books that a run told at its end, by its output; None if it told none."""
    found = _BOOKS.findall(output)
    return Books(*map(int, found[-1])) if found else None


def books_of(output: str) -> Row:
    """Return the row of a run's books by its output: rows sealed, and where they are."""
    books = read_books(output)
    if books is None:
        return Row("the books", failed="the run told none")
    named = " + ".join(f"{getattr(books, name):,} {name}" for name in ("trained", "dropped", "ready", "leased"))
    return Row("rows", f"{books.sealed:,} sealed", named, failed="they do not add up" if books.unaccounted else "")


def speeds_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Return the rows of the speed of a run's steps, the first ones left out."""
    steps = lines[_LEFT_OUT - 1 :]
    if len(steps) < 2:
        yield Row("steps", str(len(lines)), failed="too few for a speed")
        return
    taken_s = steps[-1]["time_unix_s"] - steps[0]["time_unix_s"]
    rows = sum(step["rows"] for step in steps[1:])
    responses = sum(step["rows"] * step["response_length_mean_tokens"] for step in steps[1:])
    yield Row("response tokens/s", figure(responses / taken_s), f"{rows / taken_s:.1f} rows/s")
    own_s = [sum(step[phase] for phase in _PHASES) for step in steps[1:]]
    trained = sum(step["tokens_trained"] for step in steps[1:])
    yield Row(
        "seconds a step",
        f"{taken_s / (len(steps) - 1):.3f}",
        f"{statistics.median(own_s):.3f} in the trainer's passes, {figure(trained / sum(own_s))} tokens/s",
    )


def used_of_card() -> int:
    """Return the memory in use of the card, 0 without one."""
    return sum(gpu.used_bytes for gpu in read_once() if _is_the_card(str(gpu.index), gpu.uuid))


def _is_the_card(index: str, uuid: str) -> bool:
    """Return whether a GPU is the first of those that this process may use, the only one that a run gets."""
    first = next(iter(visible_gpus(os.environ)), "")
    return index == first if first.isdecimal() else bool(first) and uuid.startswith(first)


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; pages that several map count once (Pss)."""
    total = 0
    for one in {pid, *descendants(pid)}:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{one}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total
