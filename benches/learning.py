"""Whether the ways of training learn alike: the embedded task with stale rows, several ranks, shards, LoRA, PPO, kills.

Each run is `rlhfd start` in a state folder of its own, all with the same model, prompts, rows a step and steps. The
figure is the gain: mean reward of the last steps less that of the first ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benches.measure import Sample, descendants, interleaved
from benches.report import Section, Table
from benches.run import RunError, Trace, follow, rlhfd_command
from pipeline.errors import RlhfdError
from pipeline.runtime import control, lock
from pipeline.sort_digits import directory_of
from pipeline.trainer.setup import prepare

ROWS = 256
ENDS = 10
"""Steps at either end of a run whose mean reward is taken."""

_SEEDS, _STEPS, _STALE_STEPS = 3, 150, 120
_QUICK_SEEDS, _QUICK_STEPS = 1, 12
_QUICK_WAYS = ("GRPO, staleness 1", "four ranks, sharded, packed, checkpointed, with three kills")
_ANSWER_TIMEOUT_S = 5.0
_LORA = {
    "model.lora_rank": 16,
    "model.lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "trainer.learning_rate": 2e-3,
}
_TEXT = f"""The embedded task, a Llama of 0.86 M parameters that learns to sort digits on CPUs, by `rlhfd start` with
its defaults and the keys of the second column: {ROWS} rows a step over all ranks (PPO 128), learning rate 4e-4 after 10
steps of warm-up, KL .01 to the initial model (0 in PPO), float32. Each run has a state folder of its own; {{rounds}};
seeds differ in prompts and samples, the initial model is the same. The rewards are means over all rows of the first and
the last {ENDS} steps, the gain is their difference in a run. Staleness is the mean over all trained rows, as status
shows it; with the bound 4 the trainer has the reference and small micro-batches, which makes it slower than the worker,
so that rows get as old as they may. The ways of different staleness have a lower learning rate and fewer steps, because
they differ at 4e-4 (docs/measured.md). The ratio of the policy loss, clipped at .2, corrects for stale rows; with
`rollout.log_probs=trainer` the weights of `trainer.importance_correction`, truncated at 2, do. Kills are `kill -9` of a
rank, of the worker and of rank 0, after a quarter, a half and three quarters of the steps. PPO trains its
critic alone in its first 10 steps."""


def ranks(count: int, **trainer: object) -> dict[str, object]:
    """Return the settings of so many ranks, with as many rows a step as one, and other keys of the trainer."""
    keys = {f"trainer.{key}": value for key, value in trainer.items()}
    return {"trainer.world_size": count, "buffer.sample_batch_size": ROWS // count, **keys}


@dataclass(frozen=True)
class Way:
    """Settings of a run, by key, what is killed in it, processes by the share of the steps, and its steps."""

    settings: Mapping[str, object]
    kills: Mapping[float, str] = field(default_factory=dict)
    steps: int = _STEPS


# A trainer that is slower than the worker, with the same gradients: else rows get hardly older than one version.
_STALE = {"buffer.max_staleness": 4, "trainer.micro_batch_size": 4, "model.reference_device": "trainer"}
_SLOW = {"trainer.learning_rate": 1e-4}
_PACKED = {"sharding": "full", "packing": True, "activation_checkpointing": True}
WAYS = {
    "GRPO, staleness 0": Way({"buffer.max_staleness": 0, **_SLOW}, steps=_STALE_STEPS),
    "GRPO, staleness 1": Way({"buffer.max_staleness": 1, **_SLOW}, steps=_STALE_STEPS),
    "GRPO, staleness 4": Way({**_STALE, **_SLOW}, steps=_STALE_STEPS),
    "GRPO, staleness 4, off-policy weights": Way(
        {**_STALE, **_SLOW, "rollout.log_probs": "trainer"}, steps=_STALE_STEPS
    ),
    "one rank": Way({}),
    "two ranks": Way(ranks(2, sharding="none")),
    "two ranks, sharded, packed, checkpointed": Way(ranks(2, **_PACKED)),
    "four ranks, sharded, packed, checkpointed, with three kills": Way(
        ranks(4, **_PACKED), {0.25: "trainer-1", 0.5: "rollout-0", 0.75: "trainer-0"}
    ),
    "LoRA": Way(_LORA),
    "LoRA, two ranks, sharded, packed, checkpointed": Way({**_LORA, **ranks(2, **_PACKED)}),
    "LoRA, four ranks, sharded, packed, checkpointed": Way({**_LORA, **ranks(4, **_PACKED)}),
    "PPO": Way({"rollout.algorithm": "ppo"}),
}


@dataclass(frozen=True)
class Learned:
    """The gain of a run.

    Attributes:
        first: Mean reward of the first steps.
        last: Mean reward of the last steps.
        staleness: Mean staleness of all trained rows, in versions.
        step_s: Mean seconds of a step.
    """

    first: float
    last: float
    staleness: float
    step_s: float

    @classmethod
    def of(cls, trace: Trace, output: str) -> Learned:
        """Return the figures of a run's steps and of the last line of status in its output."""
        shown = re.findall(r"\bstaleness_mean=([0-9.]+)", output)
        if not shown:
            raise RunError(output[-2000:])
        rewards = trace.rewards
        return cls(statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:]), float(shown[-1]), trace.step_s)

    @property
    def gain(self) -> float:
        """Mean reward of the last steps less that of the first."""
        return self.last - self.first

    def __str__(self) -> str:
        """Return the figures in one line."""
        return f"{self.first:.3f} to {self.last:.3f}, staleness {self.staleness:g}, {self.step_s:.2f} s a step"


class Kill(NamedTuple):
    """A process that was killed, the steps that its run had taken then, and the time in Unix seconds."""

    name: str
    step: int
    unix_s: float


class Killer:
    """Kills processes of a run when it has taken so many steps.

    Args:
        runtime_dir: Runtime directory of the run.
        due: Name of the process by steps: ``trainer-1`` and the like, ``supervisor``, ``engine-0`` for the process of
            vLLM of worker 0.

    Attributes:
        done: The kills so far, in order.
    """

    def __init__(self, runtime_dir: Path, due: Mapping[int, str]) -> None:
        self.done: list[Kill] = []
        self._runtime_dir = runtime_dir
        self._due = sorted(due.items())

    @property
    def left(self) -> int:
        """Kills that are still to come."""
        return len(self._due)

    def at_step(self, step: int) -> None:
        """Kill what is due at this step; a process that has no pid just now is killed at a later call."""
        if not self._due or step < self._due[0][0]:
            return
        with contextlib.suppress(RlhfdError, ProcessLookupError):
            if pid := self._pid(self._due[0][1]):
                os.kill(pid, signal.SIGKILL)
                self.done.append(Kill(self._due.pop(0)[1], step, time.time()))

    def _pid(self, name: str) -> int | None:
        """Return the pid of a process; None if it has none just now."""
        record = lock.find(self._runtime_dir)
        if name == "supervisor":
            return record.pid
        role, _, index = name.partition("-")
        answer = control.request(record, "status", _ANSWER_TIMEOUT_S)
        pids = {f"{one['role']}-{one['index']}": one["pid"] for one in answer["processes"]}
        if role != "engine":
            return pids.get(name)
        return next((pid for pid in sorted(descendants(record.pid)) if _is_engine(pid, index)), None)


def _is_engine(pid: int, index: str) -> bool:
    """Return whether a process is the engine of a worker, as vLLM's processes are called."""
    with contextlib.suppress(OSError):
        return f"rollout {index} vllm".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def run(*, quick: bool) -> Sequence[Section]:
    """Run all ways with each seed."""
    seeds = _QUICK_SEEDS if quick else _SEEDS
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-learning-") as name:
        folder = Path(name)
        prepare(directory_of(folder / "task"))
        ways = {
            label: _way(way, folder, number, _QUICK_STEPS if quick else way.steps)
            for number, (label, way) in enumerate(WAYS.items())
            if not quick or label in _QUICK_WAYS
        }
        found = interleaved(ways, seeds, report=lambda line: print(line, file=sys.stderr, flush=True))
    steps = f"{_QUICK_STEPS} steps" if quick else f"{_STEPS} steps, {_STALE_STEPS} of the ways of different staleness"
    rounds = f"{steps}, {seeds} seed{'s' if seeds > 1 else ''} a way (`daemon.seed`)"
    text = " ".join(_TEXT.split()).format(rounds=rounds)
    return [Section("learning", "What a run learns, by the way it is trained", text, [table(found)])]


def table(found: Mapping[str, Sequence[Learned]]) -> Table:
    """Return the table of the ways' runs, each way's by seed."""
    header = (
        "`bin/bench learning`", "keys", f"reward, first {ENDS} steps", f"last {ENDS} steps", "gain", "staleness",
        "s a step",
    )  # fmt: skip
    rows = []
    for label, runs in found.items():
        figures = ([getattr(one, name) for one in runs] for name in ("first", "last", "gain"))
        staleness = statistics.median(one.staleness for one in runs)
        step_s = statistics.median(one.step_s for one in runs)
        cells = (*(_rewards(values) for values in figures), f"{staleness:.2f}", f"{step_s:.2f}")
        rows.append((label, ", ".join(f"`{word}`" for word in words(WAYS[label].settings)), *cells))
    return Table(header, rows)


def _rewards(values: Sequence[float]) -> str:
    """Return median and range with two places after the point, all that a mean of some thousand rewards has."""
    found = Sample.of(values)
    return f"{found.median:.2f} ({min(values):.2f} to {max(values):.2f})"


def words(settings: Mapping[str, object]) -> list[str]:
    """Return the settings as words for ``--set``."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def _way(way: Way, folder: Path, number: int, steps: int) -> Callable[[], Learned]:
    seeds = itertools.count()
    settings = dict(word.split("=", 1) for word in words(way.settings))

    def learn() -> Learned:
        seed = next(seeds)
        place = folder / f"{number}-{seed}"
        shutil.copytree(directory_of(folder / "task"), directory_of(place))
        killer = Killer(place / "run", {round(share * steps): name for share, name in way.kills.items()})
        command = rlhfd_command(settings, steps)(seed, place)
        trace = follow(command, place, steps, steps, at_step=lambda step, _: killer.at_step(step))
        output = (place / "output").read_text(errors="replace")
        if killer.left:
            raise RunError(f"{killer.left} kills did not happen\n{output[-2000:]}")
        shutil.rmtree(place)
        return Learned.of(trace, output)

    return learn
