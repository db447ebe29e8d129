"""The watchdog: observes every process of an instance, logs the hung ones with the stacks of all, and kills them."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.runtime.signals import stop_signal
from pipeline.supervisor.diagnosis import (
    ProcessView,
    RunView,
    ShareWindow,
    culprit,
    duration,
    explain,
    waits_for_external_trainer,
)
from pipeline.supervisor.external import ExternalRank, ExternalTrainer
from pipeline.supervisor.fleet import Fleet, Slot
from pipeline.supervisor.hangs import Observation, PauseWatch, Reason, RunWatch, Verdict, after_hang, hung
from pipeline.telemetry.engine_view import EngineWindow
from pipeline.telemetry.metrics import Progress

_DUMP_S = 2.0
"""Longest time for a process to write its stacks before it is killed; it is killed once they are written."""
_STOOD_S = 15.0
_QUIET_S = 1.0
_BUFFER_SILENT_S = 10.0
"""The buffer makes no long calls, so /healthz reports a hang of it before `daemon.hang_timeout_s` has passed."""

_NO_PROGRESS = Progress(0.0, "", 0.0, -1, 0.0, False)

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _PendingKill:
    """A hung process, killed once the stacks of all hung processes are in the log."""

    slot: Slot
    pid: int
    reason: Reason
    since_s: float
    lines_before: int
    lines_seen: int


@dataclasses.dataclass(eq=False)
class Watchdog:
    """Watches the fleet from the supervisor's loop.

    Attributes:
        fleet: The instance's processes.
        state: Returns the instance's state: starting, ready, paused or draining.
        gave_up: Called with the reason if the run makes no progress after a restart either.
        shares: Each process's time by activity over the last minute; filled by the supervisor's readings.
        engines: The workers' engines over the last minute; filled likewise.
        idle_steps: Newest steps in a row in which no token was trained; set by the supervisor's readings.
        lost_checkpoints: Checkpoints that could not be written since the last complete one; set likewise.
    """

    fleet: Fleet
    _: dataclasses.KW_ONLY
    state: Callable[[], str]
    gave_up: Callable[[str], None]
    shares: ShareWindow = dataclasses.field(default_factory=lambda: ShareWindow(60.0, 1.0), init=False)
    engines: EngineWindow = dataclasses.field(default_factory=EngineWindow, init=False)
    idle_steps: int = dataclasses.field(default=0, init=False)
    lost_checkpoints: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self._pauses, self._run = PauseWatch(), RunWatch()
        self._evaluation = (0, 0)
        self._pending_kills: list[_PendingKill] = []
        self._stopped: dict[str, tuple[int, float]] = {}
        self._dumped_s = -_DUMP_S
        ranks = self.fleet.config.trainer.world_size if self.fleet.config.trainer.kind == "external" else 0
        self._external = ExternalTrainer(Path(self.fleet.folder), self.fleet.slab, ranks, on_left=self.fleet.on_reaped)

    @property
    def is_stuck(self) -> bool:
        """Whether a kill is pending, or the run has made no progress since the last one."""
        return bool(self._pending_kills) or self._run.strikes > 0

    def tick(self, now_s: float, steps: float, version: float, evaluation: tuple[int, int] = (0, 0)) -> None:
        """Observe every process and the run; dump stacks and kill as needed.

        Args:
            now_s: Monotonic time.
            steps: Optimizer steps so far.
            version: Newest policy version.
            evaluation: Done and all prompts of an evaluation under way; 0 and 0 without one.
        """
        self._evaluation = evaluation
        self._external.look(now_s)
        daemon = self.fleet.config.daemon
        shortest_s = min(daemon.hang_timeout_s or daemon.startup_timeout_s, daemon.startup_timeout_s)
        paused = self._pauses.look(now_s, max(1.0, shortest_s / 2))
        if self._pauses.gap_s > _STOOD_S:
            log.warning("the supervisor stood still, as by a signal or a disk that does not answer, and commands too: "
                        "seconds=%.1f", self._pauses.gap_s)  # fmt: skip
        pending = {kill.slot.name for kill in self._pending_kills}
        observations = [self._observe(slot) for slot in self.fleet.slots if slot.state not in ("ended", "failed")]
        verdicts = hung(observations, now_s, self.fleet.config, watched_since_s=self._pauses.since_s)
        self._schedule_kills([verdict for verdict in verdicts if verdict.name not in pending], now_s)
        self._look_at_run(now_s, steps, version, paused=paused)
        self._execute(now_s)

    def labelled(self, slot: Slot, line: str) -> str:
        """Return a child's line for the log; while stacks are dumped, prefixed by the child's name."""
        dumping = self._pending_kills or self.fleet.clock() - self._dumped_s < _DUMP_S
        return f"{slot.name} | {line}" if dumping else line

    def is_buffer_silent(self, limit_s: float = _BUFFER_SILENT_S) -> bool:
        """Return whether the buffer is ready and its last heartbeat is older than the limit."""
        buffers = [self._observe(slot) for slot in self.fleet.of("buffer") if slot.state == "ready"]
        return any(self.fleet.clock() - buffer.progress.beat_s > limit_s for buffer in buffers)

    def why(self) -> dict[str, Any]:
        """Return the answer of `rlhfd why`: sentences, and the numbers behind them."""
        run = self._view()
        shares = {role: self.shares.shares(role) for role in ("rollout", "buffer", "trainer")}
        return {
            "state": run.state,
            "sentences": explain(run, {role: shares[role] for role in ("rollout", "trainer")}),
            "last_minute": {role: _rounded(found) for role, found in shares.items()},
            "quiet_s": round(run.quiet_s, 1),
            "processes": [
                {
                    "name": process.observed.name,
                    "pid": process.observed.pid,
                    "state": process.state,
                    "stopped": process.observed.is_stopped,
                    "node": process.node,
                    **_activity(run.now_s, process.observed.progress, process.shares),
                }
                for process in run.processes
                if process.observed.pid
            ]
            + [self._external_row(rank, run.now_s) for rank in run.external_ranks if rank.pid],
        }

    def external_ranks(self) -> Sequence[ExternalRank]:
        """Return the ranks of an external trainer; empty with the built-in one."""
        return self._external.look(self.fleet.clock())

    def _external_row(self, found: ExternalRank, now_s: float) -> dict[str, Any]:
        shares = self.shares.shares("trainer", str(found.rank)) if found.state == "connected" else {}
        return {
            "name": found.name,
            "pid": found.pid,
            "state": found.state,
            "stopped": found.state == "connected" and stop_signal(found.pid) is not None,
            **_activity(now_s, found.progress, shares),
        }

    # Observing.

    def _observe(self, slot: Slot) -> Observation:
        pid = slot.child.pid if slot.child else 0
        progress = self.fleet.slab.progress(slot.role, slot.index) if slot.works else _NO_PROGRESS
        # A process with a fresh heartbeat is not stopped; reading /proc for each one would cost more than all the rest.
        quiet = self.fleet.clock() - progress.beat_s > _QUIET_S
        stopped_by = stop_signal(pid) if quiet and pid else None
        stopped = stopped_by is not None
        if not stopped:
            self._stopped.pop(slot.name, None)
        elif self._stopped.get(slot.name, (0, 0.0))[0] != pid:
            self._stopped[slot.name] = pid, self.fleet.clock()
        stopped_since_s = self._stopped[slot.name][1] if stopped else None
        # A process that was sent SIGTERM is still watched; one that was killed with its group is not.
        is_judged = bool(pid) and slot.ended_by != "group"
        is_starting = is_judged and slot.ready_s is None and not slot.is_pending
        starting_since_s = slot.started_s if is_starting else None
        # The forkserver waits for requests and has no heartbeat.
        is_ready = is_judged and slot.ready_s is not None and slot.works
        return Observation(
            slot.name, slot.role, pid, is_ready, progress, stopped_since_s, starting_since_s, slot.state == "draining",
            stopped_by or "",
        )  # fmt: skip

    def _view(self) -> RunView:
        now_s, counts = self.fleet.clock(), self.fleet.slab.conservation()
        state = self.state()
        return RunView(
            now_s=now_s,
            state="stuck" if self.is_stuck and state == "ready" else state,
            processes=[
                ProcessView(
                    self._observe(slot),
                    slot.state,
                    slot.due_s if slot.state == "backoff" else slot.started_s,
                    self.shares.shares(slot.role, str(slot.index)),
                    slot.error or slot.last_line if slot.alive else slot.cause,
                    self.engines.view(slot.index) if slot.role == "rollout" else None,
                    str(slot.node or ""),
                )
                for slot in sorted(self.fleet.slots, key=lambda slot: not slot.works)
                # Neither setup nor forkservers are in the metrics; others wait for them at a start.
                if slot.works or slot.state == "starting"
            ],
            ready_items=counts.ready_items if counts else 0,
            leases_active=counts.leases_active if counts else 0,
            config=self.fleet.config,
            quiet_s=now_s - self._run.quiet_since_s,
            external_ranks=self.external_ranks(),
            evaluation=self._evaluation,
            idle_steps=self.idle_steps,
            lost_checkpoints=self.lost_checkpoints,
            nodes=len(self.fleet.nodes.alive),
            nodes_left=[(str(node), ago_s) for node, ago_s in self.fleet.nodes.recently_left(now_s)],
        )

    def _look_at_run(self, now_s: float, steps: float, version: float, *, paused: bool) -> None:
        counts = self.fleet.slab.conservation()
        marks = (
            steps,
            version,
            *self._evaluation,
            *((counts.sealed, counts.trained, sum(counts.dropped)) if counts else ()),
        )
        is_judged = self.fleet.all_ready() and self.state() == "ready" and not paused
        if is_judged and self.fleet.config.trainer.kind == "external":
            is_judged = not waits_for_external_trainer(self._view())
        timeout_s = self.fleet.config.daemon.progress_timeout_s
        if not self._run.look(now_s, marks, timeout_s, is_judged=is_judged):
            return
        run = self._view()
        limit, found = duration(timeout_s), culprit(run)
        reasons = " ".join(explain(run, {}))
        if found is None or self._run.strikes > 1:
            self._dump(now_s)
            self.gave_up(f"no progress for {limit}, and a restart did not help: {reasons}")
            return
        log.error("no progress for %s: %s", limit, reasons)
        verdict = Verdict.on(found.observed, "the run stands still", found.observed.progress.since_s)
        self._schedule_kills([verdict], now_s)

    # Acting.

    def _schedule_kills(self, verdicts: Sequence[Verdict], now_s: float) -> None:
        kills = [self._schedule_kill(verdict, now_s) for verdict in verdicts]
        if kills:
            self._pending_kills += kills
            self._dump(now_s, [kill.slot for kill in kills])
            # A stopped process must continue to write its stacks; its work in that second does no harm.
            self.fleet.signal([kill.slot for kill in kills if kill.reason == "stopped"], signal.SIGCONT)

    def _schedule_kill(self, verdict: Verdict, now_s: float) -> _PendingKill:
        slot = next(slot for slot in self.fleet.slots if slot.name == verdict.name)
        work = "lease" if slot.role == "trainer" else "ticket"
        # One name and one value each, for the fields of a log in JSON.
        event = f"hung: role=%s pid=%d stage=%s {work}=%d since_s=%.1f reason=%s"
        since_s = now_s - verdict.since_s
        log.error(event, verdict.name, verdict.pid, verdict.stage, verdict.working_on, since_s, verdict.reason)
        # The reason of its exit in the log: its last line will be one of a stack.
        if verdict.reason == "not ready in time":
            slot.is_late = True
            slot.error = (
                f"not ready within {self.fleet.config.daemon.startup_timeout_s:g} s (daemon.startup_timeout_s); "
                f"its last line: {slot.last_line or 'it printed nothing'}"
            )
        else:
            remedy = after_hang(verdict.reason, verdict.stage)
            slot.error = f"hung in {verdict.stage}: {verdict.reason}" + (remedy and f"; {remedy}")
        slot.ended_by, slot.from_outside = "watchdog", verdict.reason == "stopped"
        return _PendingKill(slot, verdict.pid, verdict.reason, now_s, slot.lines, slot.lines)

    def _dump(self, now_s: float, hung_slots: Sequence[Slot] = ()) -> None:
        """Have every child write the stacks of its threads to the log: hung ones always, others unless just done."""
        others: list[Slot] = []
        if now_s - self._dumped_s >= _DUMP_S:
            self._dumped_s = now_s
            # A child that is starting may have no handler yet: the signal would kill it.
            others = [slot for slot in self.fleet.alive() if slot.ready_s is not None and slot not in hung_slots]
        self.fleet.signal([*hung_slots, *others], signal.SIGUSR1)

    def _execute(self, now_s: float) -> None:
        for kill in [*self._pending_kills]:
            if kill.slot.child is None or kill.slot.child.pid != kill.pid:
                self._pending_kills.remove(kill)
            elif kill.reason == "not ready in time" and kill.slot.state == "ready":
                log.info("ready after all: process=%s pid=%d", kill.slot.name, kill.pid)
                kill.slot.error = kill.slot.ended_by = ""
                self._pending_kills.remove(kill)
        written = [kill for kill in self._pending_kills if kill.lines_before < kill.slot.lines == kill.lines_seen]
        for kill in self._pending_kills:
            kill.lines_seen = kill.slot.lines
            # Ranks end together: a kill of one ends the others, so all write their stacks before the first kill.
            if len(written) == len(self._pending_kills) or now_s - kill.since_s > _DUMP_S:
                self.fleet.signal([kill.slot], signal.SIGKILL)


def _activity(now_s: float, progress: Progress, shares: Mapping[str, float]) -> dict[str, Any]:
    return {
        "activity": progress.activity,
        "since_s": _ago(now_s, progress.since_s),
        "silent_s": _ago(now_s, progress.beat_s),
        "working_on": progress.working_on,
        "last_minute": _rounded(shares),
    }


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}


def _ago(now_s: float, then_s: float) -> float | None:
    return round(now_s - then_s, 1) if then_s else None
