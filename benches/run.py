"""The whole run: the embedded task by rlhfd, by TRL's `GRPOTrainer`, and by plain PyTorch in one process.

All train the same model on the same prompts with the same reward, rows a step, learning rate, clip and KL, from a
process of their own, until the mean reward of the last steps is .7 or the steps are over.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.measure import Sample, end_process, interleaved
from benches.peers import TRL, NotInstallableError, python_of, python_of_vllm
from benches.report import ROOT, Section, Table
from pipeline.sort_digits import directory_of
from pipeline.trainer.setup import prepare

GOAL = 0.7
_MEAN_STEPS = 5
_FIRST_STEPS = 3
_SEEDS, _STEPS, _LEAST_STEPS = 5, 250, 20
_QUICK_SEEDS, _QUICK_STEPS = 1, 5
_STEP_LIMIT_S = 300.0
_POLL_S = 0.05
_STALENESS = (0, 1)
_RLHFD = "rlhfd, "
_SCRIPTS = {"plain PyTorch": "benches.run_plain", "TRL": "benches.run_trl"}
_THREADS = (1, 2)
_TEXT = """The embedded task, a Llama of 0.86 M parameters that learns to sort digits by GRPO on a CPU: {rows} rows a
step, 8 responses a prompt, learning rate 4e-4 after 10 steps of warm-up, clip .2, KL .01 to the initial model,
float32. *rlhfd* is `rlhfd start`: one process samples, by transformers or vLLM, one trains, a thread each; vLLM comes
with a torch and transformers of its own. *plain PyTorch* generates with transformers' `generate`, scores and steps in
one process (benches/run_plain.py). *TRL* is `GRPOTrainer` of {trl} with the same torch and transformers
(benches/run_trl.py). Each run is a command of its own; runs of a seed were made in
turns, {seeds}. A step lasts from the end of a step to the end of the next one, the first {first} left out. The reward
is the mean over all rows of the last {mean} steps. Seconds to {goal} count from the command, imports and start
included; "less the start" counts from the beginning of the first step. {note}"""


@dataclass(frozen=True)
class Trace:
    """The steps of a run.

    Attributes:
        ends_s: End of each step, in seconds since the command.
        rewards: Mean reward of the rows of each step.
    """

    ends_s: tuple[float, ...]
    rewards: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without the first ones."""
        first = min(_FIRST_STEPS, len(self.ends_s) - 2)
        return (self.ends_s[-1] - self.ends_s[first]) / (len(self.ends_s) - 1 - first)

    @property
    def start_s(self) -> float:
        """Seconds from the command to the beginning of the first step, which is taken to last as long as the others."""
        return max(0.0, self.ends_s[0] - self.step_s)

    @property
    def steps_to_goal(self) -> int | None:
        """Steps up to the first at which the mean reward of the last steps is the goal; None if it never was."""
        for end in range(_MEAN_STEPS, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[end - _MEAN_STEPS : end]) >= GOAL:
                return end
        return None

    @property
    def goal_s(self) -> float | None:
        """Seconds from the command to the goal; None if it was not reached."""
        return None if self.steps_to_goal is None else self.ends_s[self.steps_to_goal - 1]

    def __str__(self) -> str:
        """Return the figures in one line."""
        goal = f"{self.goal_s:.1f} s" if self.goal_s is not None else "not reached"
        return f"{len(self.ends_s)} steps of {self.step_s:.3f} s, to {GOAL:g}: {goal}"


class RunError(Exception):
    """A run ended without its steps; the message has the end of its output."""


def run(*, quick: bool) -> Sequence[Section]:
    """Run all ways with each seed."""
    seeds, steps = (_QUICK_SEEDS, _QUICK_STEPS) if quick else (_SEEDS, _STEPS)
    note = ""
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-run-") as name:
        folder = Path(name)
        prepare(directory_of(folder / "task"))
        engines, pythons = {"transformers": sys.executable}, {"plain PyTorch": sys.executable}
        for found, peer, make in ((engines, "vllm", python_of_vllm), (pythons, "TRL", lambda: python_of(TRL))):
            try:
                found[peer] = make()
            except (NotInstallableError, OSError, subprocess.SubprocessError) as error:
                note += f"{peer} could not be measured here: {error}. "
        commands: dict[str, Callable[[int, Path], list[str]]] = {
            f"{_RLHFD}{engine}, staleness {staleness}": rlhfd_command(
                {"rollout.engine": engine, "buffer.max_staleness": staleness}, steps, python=python
            )
            for engine, python in engines.items()
            for staleness in _STALENESS
        }
        for label, python in pythons.items():
            for threads in _THREADS:
                commands[_with_threads(label, threads)] = script_command(
                    python, _SCRIPTS[label], directory_of(folder / "task"), steps, threads
                )
        least = steps if quick else _LEAST_STEPS
        ways = {label: _way(label, command, folder, steps, least) for label, command in commands.items()}
        traces = interleaved(ways, seeds, report=lambda line: print(line, file=sys.stderr, flush=True))
    return [
        Section(
            "run", "The whole run, from the command to a model that has learned", _text(seeds, note), tables(traces)
        )
    ]


def tables(traces: Mapping[str, Sequence[Trace]]) -> list[Table]:
    """Return the table of the ways' traces, each way's by seed; ratios are to plain PyTorch, the faster of its ways."""
    plain = [label for label in traces if label.startswith("plain")]
    seconds = {label: Sample.of(trace.step_s for trace in found) for label, found in traces.items()}
    fastest = min(plain, key=lambda label: seconds[label].median)
    rows = []
    for label, found in traces.items():
        reached = [trace for trace in found if trace.goal_s is not None]
        goals = [trace.goal_s for trace in reached if trace.goal_s is not None]
        cells = ("-", "-", "-")
        if goals:
            cells = (
                str(Sample.of(goals)),
                str(Sample.of(goal - trace.start_s for goal, trace in zip(goals, reached, strict=True))),
                str(Sample.of(float(trace.steps_to_goal or 0) for trace in reached)),
            )
        speed = str(seconds[fastest].over(seconds[label]))
        rows.append((label, str(seconds[label]), speed, *cells, f"{len(reached)} of {len(found)}"))
    header = (
        "`bin/bench run`", "s a step", "steps/s, times plain PyTorch's", f"s to {GOAL:g}", "less the start",
        "steps", "seeds that reached it",
    )  # fmt: skip
    return [Table(header, rows)]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, ``step``, ``time_unix_s`` and ``reward_mean``; a last one without end is left out."""
    path = trace_path(folder)
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n")]


def trace_of(lines: Sequence[Mapping[str, Any]], began_unix_s: float) -> Trace:
    """Return the trace of the lines of a run."""
    return Trace(
        tuple(step["time_unix_s"] - began_unix_s for step in lines), tuple(step["reward_mean"] for step in lines)
    )


def _text(seeds: int, note: str) -> str:
    return " ".join(
        _TEXT.format(
            rows=256, trl=TRL.packages[0], seeds=f"{seeds} seed{'s' if seeds > 1 else ''}", first=_FIRST_STEPS,
            mean=_MEAN_STEPS, goal=f"{GOAL:g}", note=note,
        ).split()
    )  # fmt: skip


def _with_threads(label: str, threads: int) -> str:
    return f"{label}, {threads} thread{'s' if threads > 1 else ''}"


def rlhfd_command(
    own: Mapping[str, Any], steps: int, *, python: str = sys.executable
) -> Callable[[int, Path], list[str]]:
    """Return the command of a run with these settings beside the defaults, by its seed and its folder."""

    def command(seed: int, folder: Path) -> list[str]:
        settings = {
            "daemon.state_dir": folder,
            "daemon.runtime_dir": folder / "run",
            "daemon.seed": seed,
            "daemon.run_name": "bench",
            "trainer.max_steps": steps,
            "trainer.resume": "never",
            "metrics.port": 0,
            **own,
        }
        program = "from pipeline.cli.main import main; main()"
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        return [python, "-c", program, "start", *sets]

    return command


def script_command(
    python: str, script: str, task: Path, steps: int, threads: int, **more: object
) -> Callable[[int, Path], list[str]]:
    """Return the command of a script that trains; `more` has settings of that script."""

    def command(seed: int, folder: Path) -> list[str]:
        settings = {
            "task": str(task), "trace": str(trace_path(folder)), "steps": steps, "threads": threads, "seed": seed,
            "folder": str(folder), **more,
        }  # fmt: skip
        return [python, "-m", script, json.dumps(settings)]

    return command


def trace_path(folder: Path) -> Path:
    """Return the file with a line a step: rlhfd's own, and that of the scripts."""
    return folder / "runs" / "bench" / "metrics.jsonl"


def _way(
    label: str, command: Callable[[int, Path], list[str]], folder: Path, steps: int, least: int
) -> Callable[[], Trace]:
    seeds = itertools.count()

    def way() -> Trace:
        seed = next(seeds)
        place = folder / f"{label.replace(' ', '-').replace(',', '')}-{seed}"
        trace_path(place).parent.mkdir(parents=True)
        if label.startswith(_RLHFD):
            shutil.copytree(directory_of(folder / "task"), directory_of(place))
        return follow(command(seed, place), place, steps, least)

    return way


def follow(
    command: list[str],
    folder: Path,
    steps: int,
    least: int,
    *,
    at_step: Callable[[int, subprocess.Popen[bytes]], None] = lambda *_: None,
    revives: bool = False,
) -> Trace:
    """Run a command until it has the goal, `least` steps at the earliest, or its steps, then end it.

    Args:
        command: The command; its output goes to the file ``output`` of the folder.
        folder: Folder of the run, with the file of `trace_path`.
        steps: The steps after which it is over.
        least: Least number of steps; with as many as `steps` the goal ends nothing.
        at_step: Called with the last step in the file and the process, several times a second; a trainer that starts
            again may have removed the last lines, or takes their steps anew.
        revives: Whether a command that SIGKILL has ended is started again.
    """
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT),
        "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    began_unix_s, seen, seen_s = time.time(), 0, time.monotonic()
    with (folder / "output").open("wb") as output:

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment
            )

        process = begin()
        try:
            while True:
                has_ended = process.poll() is not None
                lines = lines_of(folder)
                trace, step = trace_of(lines, began_unix_s), lines[-1]["step"] if lines else 0
                if step >= steps or (trace.goal_s is not None and step >= least):
                    return trace
                if len(lines) > seen:
                    seen, seen_s = len(lines), time.monotonic()
                at_step(step, process)
                if has_ended and revives and process.returncode == -signal.SIGKILL:
                    process, has_ended = begin(), False
                if has_ended or time.monotonic() - seen_s > _STEP_LIMIT_S:
                    raise RunError((folder / "output").read_text(errors="replace")[-2000:])
                time.sleep(_POLL_S)
        finally:
            end_process(process, 60.0)
