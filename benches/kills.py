"""What SIGKILL costs: the embedded task by rlhfd and by TRL's `GRPOTrainer`, undisturbed and killed every few steps.

rlhfd restarts the killed process by itself; its supervisor is started again, as a service manager would. TRL is one
process, which is started again and resumes from its last checkpoint. Both train the same model on the same prompts with
the same reward, rows a step and learning rate. `bin/bench kills` measures CPUs, `bin/card --kills` a card.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benches.card_row import Row
from benches.card_run import metrics_of, read_books
from benches.learning import ENDS, ROWS, Kill, Killer
from benches.measure import Sample, interleaved
from benches.peers import TRL, NotInstallableError, python_of
from benches.report import Section, Table
from benches.run import RunError, follow, lines_of, rlhfd_command, script_command, trace_path
from pipeline.errors import RlhfdError
from pipeline.runtime import lock
from pipeline.sort_digits import directory_of
from pipeline.trainer.setup import prepare

ROLES = {"rollout-0": "worker", "trainer-0": "trainer", "buffer-0": "buffer", "supervisor": "supervisor"}
"""The killed processes, in turns, and their names in the tables; with vLLM its process is the last one."""

_ENGINE = {"engine-0": "vLLM"}
_SEEDS, _EVERY = 3, 12
_QUICK_SEEDS, _QUICK_EVERY = 1, 4
_SAVE_STEPS = 10
_LOOK_S = 0.5
_FIRST_STEPS = 3
_UNDISTURBED, _KILLED = "undisturbed", "killed"
_TEXT = """The embedded task, a Llama of 0.86 M parameters that learns to sort digits: {rows} rows a step, {steps}
steps, {seeds}. *Killed*: SIGKILL after every {every} steps, in rlhfd of the worker, the trainer, the buffer and the
supervisor in turns, whose command is started again at once, in TRL ({trl}) of its only process, which is started
again at once too. TRL has one thread, rlhfd one in each of its two processes at work; with two threads a step of
TRL's takes 0.66 of the time (`bin/bench run`). rlhfd runs with its defaults, one checkpoint at the end. TRL writes a
checkpoint each {save} steps and resumes from the last one. A kill costs the difference of both runs of a seed to the
end of the last step, divided by the kills: imports and loading of the process that is started again are part of it.
Steps computed again were taken once more, from the state before them; a kill comes right after the end of a step,
whose weights have mostly been published by then; within a step it would cost either way the begun part of that step
too. Rows lost were sampled and are in no step of the final model: rlhfd's dropped rows, less those of the undisturbed
run, which drops the rows that were ahead at its end too; TRL's are those of the steps that are computed again. Rows
trained twice are in two steps of the final model: rows of its steps less the rows that the ledger counts as trained;
TRL samples within its step, so that it has none. The cost by process is the time from a kill to the next one, or to
the end, less the median step of the undisturbed run of that seed for each step between; the start of the run is no
part of it. verl and OpenRLHF, which need a GPU, resume from a checkpoint as TRL does, and were not measured. {note}"""


class Steps(NamedTuple):
    """The number of steps of a run, and the steps between two kills."""

    steps: int
    every: int

    @classmethod
    def for_kills(cls, kills: int, every: int) -> Steps:
        """Return the steps in which so many kills fit, the last one as long before the end as the others lie apart."""
        return cls(every * (kills + 1), every)

    @property
    def kills(self) -> Sequence[int]:
        """The steps after which a process is killed."""
        return range(self.every, self.steps, self.every)


@dataclass(frozen=True)
class Outcome:
    """A run to its last step.

    Attributes:
        seconds: From the command to the end of the last step.
        kills: Processes that were killed.
        repeated: Steps that were computed again.
        lost_rows: Rows that were sampled and are in no step of the final model.
        last: Mean reward of the last steps.
        step_s: Median seconds of a step, without the first ones.
        twice: Rows that are in two steps of the final model.
        spent_s: Seconds from each kill to the next one, or to the end, the steps between, and the kills, by process.
    """

    seconds: float
    kills: int
    repeated: int
    lost_rows: int
    last: float
    step_s: float = 0.0
    twice: int = 0
    spent_s: Mapping[str, tuple[float, int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the figures in one line."""
        return (
            f"{self.seconds:.1f} s, {self.kills} kills, {self.repeated} steps again, {self.lost_rows} rows in no step, "
            f"{self.twice} in two, reward {self.last:.3f}"
        )


def outcome_of(
    lines: Sequence[Mapping[str, Any]],
    began_unix_s: float,
    kills: Sequence[Kill] = (),
    *,
    dropped: int | None = None,
    repeated: int | None = None,
    twice: int = 0,
) -> Outcome:
    """Return the outcome of a run.

    Args:
        lines: A line of each step that was taken, in order: ``step``, ``time_unix_s``, ``reward_mean``.
        began_unix_s: Time of the command.
        kills: The kills, in order.
        dropped: Rows that the run itself counted as dropped; None: those of the steps that were taken again.
        repeated: Steps that the run itself counted as taken again; None: those that have several lines.
        twice: Rows that are in two steps of the final model.
    """
    final = {line["step"]: line for line in lines}
    repeated = len(lines) - len(final) if repeated is None else repeated
    ordered = [line for _, line in sorted(final.items())]
    ends_s = [line["time_unix_s"] for line in ordered]
    between_s = [after - before for before, after in itertools.pairwise(ends_s[_FIRST_STEPS:])]
    spent_s: dict[str, tuple[float, int, int]] = {}
    for kill, following in itertools.zip_longest(kills, kills[1:]):
        end_step, end_s = (following.step, following.unix_s) if following else (ordered[-1]["step"], ends_s[-1])
        seconds, steps, count = spent_s.get(kill.name, (0.0, 0, 0))
        spent_s[kill.name] = (seconds + end_s - kill.unix_s, steps + end_step - kill.step, count + 1)
    return Outcome(
        lines[-1]["time_unix_s"] - began_unix_s,
        len(kills),
        repeated,
        repeated * ROWS if dropped is None else dropped,
        statistics.fmean(line["reward_mean"] for line in ordered[-ENDS:]),
        statistics.median(between_s) if between_s else 0.0,
        twice,
        spent_s,
    )


class Difference(NamedTuple):
    """The figures of killed runs beside the undisturbed ones of the same seeds.

    Attributes:
        cost_s: Seconds a kill.
        repeated: Steps computed again in a run.
        lost_rows: Rows in no step of the final model, a kill.
        twice: Rows in two steps of the final model.
        by_process: Seconds a kill, by killed process.
    """

    cost_s: Sample
    repeated: float
    lost_rows: float
    twice: int
    by_process: Mapping[str, Sample]


def difference(killed: Sequence[Outcome], plain: Sequence[Outcome]) -> Difference:
    """Return the figures of killed runs, each beside the undisturbed run of its seed."""
    pairs = [*zip(killed, plain, strict=True)]
    by_process: dict[str, list[float]] = {}
    for one, other in pairs:
        for name, (spent_s, steps, count) in one.spent_s.items():
            by_process.setdefault(name, []).append((spent_s - steps * other.step_s) / count)
    return Difference(
        Sample.of((one.seconds - other.seconds) / one.kills for one, other in pairs),
        statistics.median(one.repeated for one in killed),
        statistics.median(max(0, one.lost_rows - other.lost_rows) / one.kills for one, other in pairs),
        sum(one.twice for one in killed),
        {name: Sample.of(values) for name, values in by_process.items()},
    )


Found = Mapping[str, Sequence[Outcome]]


def _killed(found: Found) -> Iterator[tuple[str, Sequence[Outcome], Sequence[Outcome]]]:
    """Yield each way's name, its killed runs and its undisturbed ones."""
    for label, runs in found.items():
        name, _, kind = label.rpartition(", ")
        if kind == _KILLED:
            yield name, runs, found[f"{name}, {_UNDISTURBED}"]


def tables(found: Found) -> list[Table]:
    """Return the tables of the ways' runs, each way's by seed: ``NAME, undisturbed`` and ``NAME, killed``."""
    differences = {name: difference(runs, plain) for name, runs, plain in _killed(found)}
    rows = []
    for label, runs in found.items():
        name, _, kind = label.rpartition(", ")
        cells = ("-", "0", "-", "-")
        if kind == _KILLED:
            own = differences[name]
            cells = (f"{own.cost_s}", f"{own.repeated:.0f}", f"{own.lost_rows:.0f}", f"{own.twice}")
        seconds = str(Sample.of(one.seconds for one in runs))
        last = f"{statistics.median(one.last for one in runs):.2f}"
        rows.append((label, f"{runs[0].kills}", seconds, *cells, last))
    header = (
        "`bin/bench kills`", "kills a run", "s to the last step", "s a kill costs", "steps computed again",
        "rows lost, a kill", "rows trained twice", f"reward, last {ENDS} steps",
    )  # fmt: skip
    costs = [
        (f"{name}, SIGKILL of its {process}", str(cost))
        for name, own in differences.items()
        for process, cost in own.by_process.items()
        if len(own.by_process) > 1
    ]
    return [Table(header, rows), Table(("by process", "s a kill costs"), costs)]


def card_rows(found: Found) -> Iterator[Row]:
    """Yield the rows of the ways' runs for `bin/card`."""
    for name, runs, plain in _killed(found):
        own = difference(runs, plain)
        costs = ", ".join(f"{process} {cost}" for process, cost in own.by_process.items())
        seconds, before_s = (statistics.median(one.seconds for one in group) for group in (runs, plain))
        last, before = (statistics.median(one.last for one in group) for group in (runs, plain))
        yield Row(f"{name}: SIGKILL", f"{runs[0].kills} of {', '.join(own.by_process)}")
        yield Row(f"{name}: to the last step", f"{seconds:.1f} s", f"undisturbed {before_s:.1f} s")
        yield Row(f"{name}: a kill costs", f"{own.cost_s} s", costs)
        yield Row(f"{name}: steps computed again", f"{own.repeated:.0f}", f"{own.lost_rows:.0f} rows lost a kill")
        yield Row(f"{name}: rows trained twice", f"{own.twice}", "0", failed="rows count twice" if own.twice else "")
        yield Row(f"{name}: reward of the last {ENDS} steps", f"{last:.3f}", f"undisturbed {before:.3f}")


def run(*, quick: bool, seeds: int = _SEEDS) -> Sequence[Section]:
    """Run all ways with each of so many seeds, in turns; `quick` with one."""
    seeds = _QUICK_SEEDS if quick else seeds
    plan = Steps.for_kills(len(ROLES), _QUICK_EVERY if quick else _EVERY)
    note, peers = "", {}
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-kills-") as name:
        try:
            peers["TRL"] = python_of(TRL)
        except (NotInstallableError, OSError, subprocess.SubprocessError) as error:
            note = f"TRL could not be measured here: {error}. "
        found = measured(Path(name), plan, seeds, peers)
    text = " ".join(
        _TEXT.format(
            rows=ROWS, steps=plan.steps, every=plan.every, trl=TRL.packages[0], save=_SAVE_STEPS, note=note,
            seeds=f"{seeds} seed{'s' if seeds > 1 else ''} a way",
        ).split()
    )  # fmt: skip
    return [Section("kills", "What a kill costs", text, tables(found))]


def on_card(folder: Path, *, device: str, every: int, engine: str = "transformers") -> Iterator[Row]:
    """Run rlhfd, and TRL beside the default engine where this interpreter has it, once each; yield their rows.

    Args:
        folder: An empty folder.
        device: Name of the card, "" for the CPU.
        every: Steps between two kills.
        engine: Engine of rlhfd's rollouts.
    """
    plan = Steps.for_kills(len(_roles(engine)), every)
    peers = {"TRL": sys.executable} if engine == "transformers" and importlib.util.find_spec("trl") else {}
    yield from card_rows(measured(folder, plan, 1, peers, engine=engine, device=device))


def measured(
    folder: Path,
    plan: Steps,
    seeds: int,
    peers: Mapping[str, str],
    *,
    engine: str = "transformers",
    device: str = "",
) -> dict[str, list[Outcome]]:
    """Run rlhfd and the peers, undisturbed and killed, in turns; return the outcomes by way, in the order of seeds."""
    torch.set_num_threads(1)
    prepare(directory_of(folder / "task"))
    own = "rlhfd" if engine == "transformers" else f"rlhfd, {engine}"
    ways: dict[str, Callable[[], Outcome]] = {}
    for kind, at in ((_UNDISTURBED, ()), (_KILLED, plan.kills)):
        ways[f"{own}, {kind}"] = _rlhfd(folder, kind, plan.steps, at, engine)
        for peer, python in peers.items():
            ways[f"{peer}, {kind}"] = _trl(python, folder, kind, plan.steps, at, device)
    return interleaved(ways, seeds, report=lambda line: print(line, file=sys.stderr, flush=True))


class Watch:
    """What a run tells beside its steps.

    Args:
        runtime_dir: Runtime directory of the run.

    Attributes:
        repeated: Steps whose lines were there and were removed by a trainer that computes them again.
        unaccounted: Largest number of rows, at a look at the metrics, that were sealed and in no state.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.repeated = self.unaccounted = 0
        self._runtime_dir = runtime_dir
        self._steps = 0
        self._looked_s = 0.0

    def at_step(self, steps: int) -> None:
        """Take the number of steps in the file; look at the metrics, twice a second at most."""
        self.repeated += max(0, self._steps - steps)
        self._steps = steps
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            with contextlib.suppress(RlhfdError, OSError):
                self.look(metrics_of(lock.find(self._runtime_dir)))

    def look(self, metrics: str) -> None:
        """Take the count of an exposition."""
        if found := re.search(r"^rlhfd_items_unaccounted (\S+)$", metrics, re.MULTILINE):
            self.unaccounted = max(self.unaccounted, abs(int(float(found[1]))))


def _roles(engine: str) -> Mapping[str, str]:
    return {**ROLES, **(_ENGINE if engine == "vllm" else {})}


def _rlhfd(folder: Path, kind: str, steps: int, at: Sequence[int], engine: str) -> Callable[[], Outcome]:
    seeds = itertools.count()
    roles = _roles(engine)

    def way() -> Outcome:
        seed = next(seeds)
        place = folder / f"rlhfd-{kind}-{seed}"
        shutil.copytree(directory_of(folder / "task"), directory_of(place))
        killer = Killer(place / "run", dict(zip(at, itertools.cycle(roles))))
        watch = Watch(place / "run")

        def at_step(step: int, _: subprocess.Popen[bytes]) -> None:
            watch.at_step(step)
            killer.at_step(step)

        began_unix_s = time.time()
        # A start after a kill of the supervisor goes on; in a folder of its own the first one is new.
        own = {"rollout.engine": engine, "trainer.resume": "auto"}
        command = rlhfd_command(own, steps)(seed, place)
        follow(command, place, steps, steps, at_step=at_step, revives=True)
        output = (place / "output").read_text(errors="replace")
        books = read_books(output)
        if killer.left or books is None:
            raise RunError(f"{killer.left} kills did not happen, books: {books}\n{output[-2000:]}")
        if books.unaccounted or watch.unaccounted:
            raise RunError(f"the books do not add up: {books}, {watch.unaccounted} rows in no state\n{output[-2000:]}")
        kills = [kill._replace(name=roles[kill.name]) for kill in killer.done]
        return outcome_of(
            lines_of(place), began_unix_s, kills,
            dropped=books.dropped, repeated=watch.repeated, twice=steps * ROWS - books.trained,
        )  # fmt: skip

    return way


def _trl(python: str, folder: Path, kind: str, steps: int, at: Sequence[int], device: str) -> Callable[[], Outcome]:
    seeds = itertools.count()
    command = script_command(
        python, "benches.run_trl", directory_of(folder / "task"), steps, 1, save_steps=_SAVE_STEPS, device=device
    )

    def way() -> Outcome:
        seed = next(seeds)
        due, kills = [*at], list[Kill]()
        place = folder / f"trl-{kind}-{seed}"
        trace_path(place).parent.mkdir(parents=True)

        def at_step(step: int, process: subprocess.Popen[bytes]) -> None:
            if due and step >= due[0]:
                del due[0]
                kills.append(Kill("process", step, time.time()))
                process.kill()

        began_unix_s = time.time()
        follow(command(seed, place), place, steps, steps, at_step=at_step, revives=True)
        return outcome_of(lines_of(place), began_unix_s, kills)

    return way
