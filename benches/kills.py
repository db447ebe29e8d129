"""What SIGKILL costs: the embedded task by rlhfd and by TRL's `GRPOTrainer`, undisturbed and killed every few steps.

rlhfd restarts the killed process by itself. TRL is one process, which is started again and resumes from its last
checkpoint. Both train the same model on the same prompts with the same reward, rows a step and learning rate.
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

import torch

from benches.card_run import dropped_rows
from benches.learning import ENDS, ROWS, Killer
from benches.measure import Sample, interleaved
from benches.peers import TRL, NotInstallableError, python_of_trl
from benches.report import ROOT, Section, Table
from benches.run import RunError, follow, rlhfd_command, trace_path
from pipeline.sort_digits import directory_of
from pipeline.trainer.setup import prepare

_SEEDS, _STEPS, _EVERY = 3, 60, 12
_QUICK_SEEDS, _QUICK_STEPS, _QUICK_EVERY = 1, 12, 4
_ROLES = ("rollout-0", "trainer-0", "buffer-0")
_SAVE_STEPS = 10
_STEP_LIMIT_S = 300.0
_POLL_S = 0.05
_UNDISTURBED, _KILLED = "undisturbed", "killed"
_TEXT = """The embedded task, a Llama of 0.86 M parameters that learns to sort digits on CPUs: {rows} rows a step,
{steps} steps, {seeds}. *Killed*: SIGKILL after every {every} steps, in rlhfd of the worker, the trainer and the buffer
in turns, in TRL ({trl}) of its only process. rlhfd runs with its defaults, one checkpoint at the end. TRL writes a
checkpoint each {save} steps, is started again at once, and resumes from the last one. A kill costs the difference of
both runs of a seed to the end of the last step, divided by the kills: imports and loading of the process that is
started again are part of it. Rows for nothing were sampled and are in no step of the final model: rlhfd's dropped
rows, less those of the undisturbed run, which drops the rows that were ahead at its end too; TRL's are those of the
steps that are taken again. {note}"""


@dataclass(frozen=True)
class Outcome:
    """A run to its last step.

    Attributes:
        seconds: From the command to the end of the last step.
        kills: Processes that were killed.
        repeated: Steps that were taken again.
        lost_rows: Rows that were sampled and are in no step of the final model.
        last: Mean reward of the last steps.
    """

    seconds: float
    kills: int
    repeated: int
    lost_rows: int
    last: float

    def __str__(self) -> str:
        """Return the figures in one line."""
        return f"{self.seconds:.1f} s, {self.kills} kills, {self.repeated} steps again, reward {self.last:.3f}"


def outcome_of(lines: Sequence[Mapping[str, Any]], began_unix_s: float, kills: int, dropped: int | None) -> Outcome:
    """Return the outcome of a run.

    Args:
        lines: A line of each step that was taken, in order: ``step``, ``time_unix_s``, ``reward_mean``.
        began_unix_s: Time of the command.
        kills: Processes that were killed.
        dropped: Rows that the run itself counted as dropped; None: those of the steps that were taken again.
    """
    final = {line["step"]: line for line in lines}
    repeated = len(lines) - len(final)
    rewards = [line["reward_mean"] for _, line in sorted(final.items())]
    lost = repeated * ROWS if dropped is None else dropped
    last = statistics.fmean(rewards[-ENDS:])
    return Outcome(lines[-1]["time_unix_s"] - began_unix_s, kills, repeated, lost, last)


def table(found: Mapping[str, Sequence[Outcome]]) -> Table:
    """Return the table of the ways' runs, each way's by seed: ``NAME, undisturbed`` and ``NAME, killed``."""
    rows = []
    for label, runs in found.items():
        name, _, kind = label.rpartition(", ")
        plain = found[f"{name}, {_UNDISTURBED}"]
        cost = lost = "-"
        if kind == _KILLED:
            pairs = [*zip(runs, plain, strict=True)]
            cost = str(Sample.of((one.seconds - other.seconds) / one.kills for one, other in pairs))
            lost = (
                f"{statistics.median(max(0, one.lost_rows - other.lost_rows) / one.kills for one, other in pairs):.0f}"
            )
        rows.append(
            (
                label,
                f"{runs[0].kills}",
                str(Sample.of(one.seconds for one in runs)),
                cost,
                f"{statistics.median(one.repeated for one in runs):.0f}",
                lost,
                f"{statistics.median(one.last for one in runs):.2f}",
            )
        )
    header = (
        "`bin/bench kills`", "kills a run", "s to the last step", "s a kill costs", "steps taken again",
        "rows for nothing, a kill", f"reward, last {ENDS} steps",
    )  # fmt: skip
    return Table(header, rows)


def run(*, quick: bool) -> Sequence[Section]:
    """Run all ways with each seed, in turns."""
    seeds, steps, every = (_QUICK_SEEDS, _QUICK_STEPS, _QUICK_EVERY) if quick else (_SEEDS, _STEPS, _EVERY)
    note, peers = "", {}
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-kills-") as name:
        folder = Path(name)
        torch.set_num_threads(1)
        prepare(directory_of(folder / "task"))
        try:
            peers["TRL"] = python_of_trl()
        except (NotInstallableError, OSError, subprocess.SubprocessError) as error:
            note = f"TRL could not be measured here: {error}. "
        ways: dict[str, Callable[[], Outcome]] = {}
        for kind in (_UNDISTURBED, _KILLED):
            at = range(every, steps, every) if kind == _KILLED else range(0)
            ways[f"rlhfd, {kind}"] = _rlhfd(folder, kind, steps, at)
            for peer, python in peers.items():
                ways[f"{peer}, {kind}"] = _trl(python, folder, kind, steps, at)
        found = interleaved(ways, seeds, report=lambda line: print(line, file=sys.stderr, flush=True))
    text = " ".join(
        _TEXT.format(
            rows=ROWS, steps=steps, every=every, trl=TRL, save=_SAVE_STEPS, note=note,
            seeds=f"{seeds} seed{'s' if seeds > 1 else ''} a way",
        ).split()
    )  # fmt: skip
    return [Section("kills", "What a kill costs", text, [table(found)])]


def _rlhfd(folder: Path, kind: str, steps: int, at: Sequence[int]) -> Callable[[], Outcome]:
    seeds = itertools.count()

    def way() -> Outcome:
        seed = next(seeds)
        place = folder / f"rlhfd-{kind}-{seed}"
        shutil.copytree(directory_of(folder / "task"), directory_of(place))
        due = dict(zip(at, itertools.cycle(_ROLES)))
        killer = Killer(place / "run", due)
        began_unix_s = time.time()
        follow(rlhfd_command({}, steps)(seed, place), place, steps, steps, at_step=killer.at_step)
        output = (place / "output").read_text(errors="replace")
        dropped = dropped_rows(output)
        if killer.left or dropped is None:
            raise RunError(f"{killer.left} kills did not happen, rows dropped: {dropped}\n{output[-2000:]}")
        return outcome_of(_lines(place), began_unix_s, len(due), dropped)

    return way


def _trl(python: str, folder: Path, kind: str, steps: int, at: Sequence[int]) -> Callable[[], Outcome]:
    seeds = itertools.count()

    def way() -> Outcome:
        seed = next(seeds)
        place = folder / f"trl-{kind}-{seed}"
        trace_path(place).parent.mkdir(parents=True)
        settings = {
            "task": str(directory_of(folder / "task")), "trace": str(trace_path(place)), "steps": steps, "threads": 1,
            "seed": seed, "folder": str(place), "save_steps": _SAVE_STEPS,
        }  # fmt: skip
        command = [python, "-m", "benches.run_trl", json.dumps(settings)]
        began_unix_s = time.time()
        for due in [*at, steps]:
            _until(command, place, due, kill=due < steps)
        return outcome_of(_lines(place), began_unix_s, len(at), None)

    return way


def _until(command: Sequence[str], place: Path, step: int, *, kill: bool) -> None:
    """Run a command until it has taken a step, then kill it; without `kill` until it ends by itself."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    with (place / "output").open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=place, env=environment
        )
        seen, seen_s = 0, time.monotonic()
        try:
            while process.poll() is None:
                lines = _lines(place)
                if kill and lines and lines[-1]["step"] >= step:
                    return
                if len(lines) > seen:
                    seen, seen_s = len(lines), time.monotonic()
                if time.monotonic() - seen_s > _STEP_LIMIT_S:
                    raise RunError((place / "output").read_text(errors="replace")[-2000:])
                time.sleep(_POLL_S)
            if kill or process.returncode:
                raise RunError((place / "output").read_text(errors="replace")[-2000:])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def _lines(place: Path) -> list[dict[str, Any]]:
    path = trace_path(place)
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n")]
