"""A campaign of kills against a real daemon: the targets with their stages, and the time until training goes on.

The campaign observes the daemon from outside, through the metrics' shared memory: it waits until the chosen process is
at the chosen stage, and kills it there. A supervisor that dies is started again, as a service manager would.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import LedgerError
from pipeline.telemetry.slab import MetricsSlab
from tests.support.daemon import END_TIMEOUT_S, Daemon, descendants, is_alive, wait_until

_STAGE_TIMEOUT_S = 4.0
_LOOK_S = 0.0002
_TRAINED = re.compile(r"experiences: sealed \d+ = trained (\d+) \+")
# Longest delay of a kill after SIGTERM: most orderly shutdowns take that long.
_DRAIN_S = 0.5
# Longest delay of a kill after a start: a process forked by the forkserver takes about that long to start.
_START_S = 0.5
# Number of hanging targets for each turn of all killed targets; each hang costs daemon.hang_timeout_s.
_HANGS_A_TURN = 4


class Target(NamedTuple):
    """A role to kill, and the stage of its work, "" for any; with `hangs` the process is stopped, not killed.

    At the stage ``"drain"`` the daemon has received SIGTERM; at ``"start"`` the process has just replaced a killed one.
    The role ``"engine"`` is a process that a rollout worker has started and that ends with it, ``"environment"`` one
    that the worker replaces; the stage is the worker's.
    """

    role: str
    stage: str = ""
    hangs: bool = False


# A ticket's rows: reserved and being made (generate ... ref_logprob), half written (seal), sealed and not yet settled
# (after seal), ready and leased (any kill of the buffer), in the optimizer step (train), acknowledged by a publish in
# progress (publish); and a fetch in progress (fetch_weights).
TARGETS = (
    Target("rollout", "generate"),
    Target("rollout", "reward"),
    Target("rollout", "logprob"),
    Target("rollout", "seal"),
    Target("rollout", "after seal"),
    Target("rollout", "fetch_weights"),
    Target("rollout"),
    Target("buffer"),
    Target("buffer", "wait_data"),
    Target("buffer", "other"),
    Target("trainer", "train"),
    Target("trainer", "publish"),
    Target("trainer", "wait_data"),
    Target("trainer"),
    Target("forkserver"),
    Target("supervisor"),
    Target("everything"),
    Target("rollout", "drain"),
    Target("buffer", "drain"),
    Target("trainer", "drain"),
    Target("supervisor", "drain"),
    Target("rollout", "start"),
    Target("trainer", "start"),
    Target("rollout", "generate", hangs=True),
    Target("rollout", "seal", hangs=True),
    Target("rollout", "fetch_weights", hangs=True),
    Target("rollout", "start", hangs=True),
    Target("rollout", "drain", hangs=True),
    Target("buffer", hangs=True),
    Target("buffer", "drain", hangs=True),
    Target("trainer", "train", hangs=True),
    Target("trainer", "publish", hangs=True),
    Target("trainer", "start", hangs=True),
    Target("trainer", "drain", hangs=True),
)


WORKER_AND_SUPERVISOR = (
    Target("rollout", "generate"),
    Target("rollout", "reward"),
    Target("rollout", "seal"),
    Target("rollout", "after seal"),
    Target("rollout", "fetch_weights"),
    Target("rollout"),
    Target("rollout", "start"),
    Target("rollout", "drain"),
    Target("supervisor"),
    Target("supervisor", "drain"),
    Target("everything"),
)
ENVIRONMENTS = (
    Target("environment", "generate"),
    Target("environment", "fetch_weights"),
    Target("environment", "wait_data"),
    Target("environment"),
    Target("environment", "start"),
)
ENGINE_WORKER_AND_SUPERVISOR = (
    Target("engine", "generate"),
    Target("engine", "fetch_weights"),
    Target("engine"),
    *WORKER_AND_SUPERVISOR,
)


class Kill(NamedTuple):
    """One kill: the target, its real stage, the states of the rows, and the time until training went on."""

    target: Target
    stage: str
    states: tuple[str, ...]
    recovery_s: float


class Campaign:
    """Kills one process after another, each once training has gone on after the previous kill.

    Args:
        folder: The daemon's folder.
        sets: The daemon's settings.
        task: The embedded task; None if the settings name the model and the prompts.
        seed: Seed of the order of kills.
        targets: The processes to kill.
    """

    recovery_timeout_s = 120.0
    """Longest time of a start, and until training goes on after a kill."""

    def __init__(
        self, folder: Path, *sets: str, task: Path | None, seed: int, targets: tuple[Target, ...] = TARGETS
    ) -> None:
        self.kills: list[Kill] = []
        self.lives = 0
        # Counters live as long as the arena, which an orderly shutdown removes.
        self.trained_before_stops = 0
        self.daemon: Daemon
        self._folder = folder
        self._sets = sets
        self._task = task
        self._rng = random.Random(seed)
        self._killed = [target for target in targets if not target.hangs]
        self._hanging = [target for target in targets if target.hangs]
        self._turns: list[Target] = []
        self._hangs: list[Target] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Campaign:
        """Start the daemon and wait until it trains."""
        self._start()
        self._wait_trained(0)
        return self

    def __exit__(self, *error: object) -> None:
        """End the daemon of the last life."""
        self._open.__exit__(*error)

    def kill(self) -> Kill:
        """Kill the next target and wait until training has gone on."""
        target = self._next()
        before = self._trained()
        states = self._states()
        stage = self._strike(target)
        if target.role in ("environment", "host"):
            # A row that its environment is killed with twice is left out: the next kill waits until all are done. A
            # host has come back meanwhile.
            before = self._trained()
        started_s = time.monotonic()
        if target.stage == "drain":
            self._end(target)
            before = self._trained()
        elif target.role in ("supervisor", "everything"):
            self._revive()
        self._wait_trained(before)
        assert self._unaccounted() == 0, f"the books do not balance after {target}"
        kill = Kill(target, stage, states, time.monotonic() - started_s)
        self.kills.append(kill)
        return kill

    def settle(self) -> None:
        """Wait until every process is up and training has gone on once more."""
        self.daemon.wait_ready(self.recovery_timeout_s)
        self._wait_trained(self._trained())

    def report(self) -> str:
        """Return the kills by process and stage, and how long it took until training went on."""
        groups: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
        for kill in self.kills:
            groups[kill.target.role, "stopped" if kill.target.hangs else "killed", kill.stage].append(kill.recovery_s)
        lines = [
            f"  {role:<10} {how:<8} {stage or '-':<24} {len(times):>4} {sorted(times)[len(times) // 2]:>8.1f} s"
            for (role, how, stage), times in sorted(groups.items())
        ]
        states = collections.Counter(state for kill in self.kills for state in kill.states)
        # A hang is detected after daemon.hang_timeout_s, which is no part of the recovery.
        times = sorted(kill.recovery_s for kill in self.kills if not kill.target.hangs)
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
        return "\n".join(
            [
                f"{len(self.kills)} kills, {self.lives} lives of the supervisor; process, stage, count, median",
                *lines,
                "kills while rows were " + ", ".join(f"{state}: {count}" for state, count in sorted(states.items())),
                f"kill until a further batch is trained: p50 {p50:.1f} s, p99 {p99:.1f} s, most {times[-1]:.1f} s",
            ]
        )

    # Lives of the daemon.

    def _start(self) -> None:
        self.lives += 1
        daemon = Daemon(self._folder, *self._sets, task=self._task, name=f"life-{self.lives}")
        self.daemon = self._open.enter_context(daemon)
        self.daemon.wait_answering()

    def _revive(self) -> None:
        """Start the next life once nothing of the last one runs."""
        self.daemon.wait()
        self._start()

    def _end(self, target: Target) -> None:
        """Wait for the end of a shutdown, with exit code 0 unless the supervisor was killed; start again."""
        code = self.daemon.wait(self.recovery_timeout_s)
        if target.role != "supervisor":
            assert code == 0, f"{target} made it end with {code}\n{self.daemon.errors[-4000:]}"
        if not self.daemon.shm_dir.exists():
            self.trained_before_stops += trained_in(self.daemon.errors)
        self._start()

    # Targets.

    def _next(self) -> Target:
        if not self._turns:
            # Each target once a turn, in a random order.
            turn = [*self._killed, *(self._next_hang() for _ in self._hanging[:_HANGS_A_TURN])]
            self._turns = self._rng.sample(turn, len(turn))
        return self._turns.pop()

    def _next_hang(self) -> Target:
        if not self._hangs:
            self._hangs = self._rng.sample(self._hanging, len(self._hanging))
        return self._hangs.pop()

    def _strike(self, target: Target) -> str:
        """Kill the target, at its stage if it reaches it in time; return the stage at the kill."""
        if target.stage == "drain":
            return self._strike_drain(target)
        if target.role == "everything":
            for pid in [self.daemon.pid, *self.daemon.family()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return ""
        if target.role == "supervisor":
            family = self.daemon.family()
            os.kill(self.daemon.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "the children die with their supervisor")
            return ""
        if target.role == "forkserver":
            for pid in self.daemon.family():
                if _is_named(pid, b"rlhfd: forkserver"):
                    os.kill(pid, signal.SIGKILL)
            return ""
        with self._slab() as slab:
            role = "rollout" if target.role in ("engine", "environment") else target.role
            worker = self._rng.choice([slot.worker for slot in slab.layout.slots if slot.role == role])
            if target.role == "environment":
                return self._strike_environment(slab, target, worker)
            if target.stage == "start":
                return self._strike_start(slab, target, worker)
            stage = self._wait_stage(slab, target._replace(role=role), worker)
            pid = self._up(slab, role, worker)
            below, title = descendants(pid), f"rollout {worker} vllm".encode()
            engines = [each for each in self.daemon.family() if role == "rollout" and _is_named(each, title)]
            below += engines
            # A worker that has no engine yet is killed in its place.
            os.kill(engines[0] if engines and target.role == "engine" else pid, _blow(target))
            if not target.hangs:
                wait_until(lambda: not any(map(is_alive, below)), END_TIMEOUT_S, f"children of {role} {worker} end")
        return stage

    def _strike_environment(self, slab: MetricsSlab, target: Target, worker: int) -> str:
        """Kill a process of a worker's environments, at the stage "start" one of a worker that has just started."""
        if target.stage == "start":
            self._replaced(slab, "rollout", worker)
            stage = target.stage
        else:
            stage = self._wait_stage(slab, target._replace(role="rollout"), worker)
        below = wait_until(
            lambda: [pid for pid in descendants(slab.pid("rollout", worker)) if _is_named(pid, b"rlhfd: environment")],
            self.recovery_timeout_s,
            f"an environment of rollout {worker} is up",
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._rng.choice(below), signal.SIGKILL)
        return stage

    def _strike_start(self, slab: MetricsSlab, target: Target, worker: int) -> str:
        """Kill a process, then its successor a moment after that has started."""
        self._replaced(slab, target.role, worker)
        time.sleep(self._rng.random() * _START_S)
        # Another one, if it has ended by itself meanwhile.
        pid = self._up(slab, target.role, worker)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _blow(target))
        if not target.hangs:
            # Until then it looks alive to the next kill, which may be of the same role.
            wait_until(lambda: not is_alive(pid), END_TIMEOUT_S, f"{target.role} {worker} ends")
        return target.stage

    def _replaced(self, slab: MetricsSlab, role: str, worker: int) -> None:
        """Kill a process and wait until its successor has started."""
        killed = self._up(slab, role, worker)
        os.kill(killed, signal.SIGKILL)
        self._up(slab, role, worker, but=killed)

    def _up(self, slab: MetricsSlab, role: str, worker: int, *, but: int = 0) -> int:
        """Wait until a process, but this one, is up; return its pid, never 0, which `os.kill` takes for its group."""
        what = f"{'another ' if but else ''}{role} {worker} is up"
        return wait_until(lambda: pid if (pid := _pid(slab, role, worker)) != but else 0, self.recovery_timeout_s, what)

    def _strike_drain(self, target: Target) -> str:
        """Send SIGTERM to the daemon and kill the target a moment later, unless it has exited by itself."""
        self.daemon.wait_ready(self.recovery_timeout_s)
        # The process killed last may still be listed as ready, without a pid.
        names, pids = wait_until(lambda: self._named(target), self.recovery_timeout_s, f"{target.role} is up")
        name = self._rng.choice(names)
        self.daemon.signal(signal.SIGTERM)
        time.sleep(self._rng.random() * _DRAIN_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.daemon.pid if name == "supervisor" else pids[name], _blow(target))
        return target.stage

    def _named(self, target: Target) -> tuple[list[str], dict[str, int]] | None:
        pids = self.daemon.pids()
        names = [name for name in ("supervisor", *sorted(pids)) if name.startswith(target.role)]
        return (names, pids) if names else None

    def _wait_stage(self, slab: MetricsSlab, target: Target, worker: int) -> str:
        """Wait until the process is up and at the stage; at the deadline any stage will do."""
        self._up(slab, target.role, worker)
        # A random moment within the stage.
        delay_s = self._rng.random() * 0.02
        wanted, after = target.stage.removeprefix("after "), target.stage.startswith("after ")
        deadline = time.monotonic() + (_STAGE_TIMEOUT_S if wanted else delay_s)
        seen = False
        while time.monotonic() < deadline:
            stage = slab.progress(target.role, worker).activity
            if stage == wanted and not after:
                return stage
            if after and seen and stage != wanted:
                return target.stage
            seen = stage == wanted
            time.sleep(_LOOK_S)
        return slab.progress(target.role, worker).activity

    # Progress.

    @contextlib.contextmanager
    def _slab(self) -> Iterator[MetricsSlab]:
        slab = MetricsSlab.attach(self.daemon.shm_dir / "metrics")
        try:
            yield slab
        finally:
            slab.close()

    def _trained(self) -> int:
        with contextlib.suppress(OSError, LedgerError), self._slab() as slab:
            books = slab.conservation()
            return 0 if books is None else books.trained
        return 0

    def _unaccounted(self) -> int:
        with contextlib.suppress(OSError, LedgerError), self._slab() as slab:
            books = slab.conservation()
            return 0 if books is None else books.unaccounted
        return 0

    def _states(self) -> tuple[str, ...]:
        """Return the states that any row is in: reserved, ready, leased."""
        with contextlib.suppress(OSError, LedgerError), self._slab() as slab:
            if (books := slab.conservation()) is not None:
                held = {
                    "reserved": books.writing_items,
                    "ready": books.ready_items,
                    "leased": books.leased_items,
                }
                return tuple(state for state, rows in held.items() if rows)
        return ()

    def _wait_trained(self, before: int) -> None:
        self.daemon.wait_until(
            lambda: self._trained() > before, f"more than {before} rows trained", self.recovery_timeout_s
        )


def _blow(target: Target) -> signal.Signals:
    return signal.SIGSTOP if target.hangs else signal.SIGKILL


def trained_in(errors: str) -> int:
    """Return the trained rows in the log of a daemon after an orderly shutdown."""
    (trained,) = map(int, _TRAINED.findall(errors))
    return trained


def _pid(slab: MetricsSlab, role: str, worker: int) -> int:
    """Return the pid of a process that is up, else 0."""
    pid = slab.pid(role, worker) if slab.is_live(role, worker) else 0
    return pid if pid > 0 and is_alive(pid) else 0


def _is_named(pid: int, name: bytes) -> bool:
    with contextlib.suppress(OSError):
        return name in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
