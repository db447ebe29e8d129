"""The watchdog at work: looks at every process of an instance, names who hangs, has all stacks dumped, and kills."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.schema import Config
from pipeline.supervisor.diagnosis import ProcessView, RunView, ShareWindow, culprit, duration, explain, waits_outside
from pipeline.supervisor.fleet import Fleet, Slot
from pipeline.supervisor.hangs import HangLimits, PauseWatch, Reason, RunWatch, Standing, Verdict, hung
from pipeline.telemetry.metrics import Progress
from pipeline.telemetry.slab import MetricsSlab

_DUMP_S = 2.0
"""How long a process gets to write its stacks before it is killed; it is killed as soon as they are there."""
_QUIET_S = 1.0
_BUFFER_SILENT_S = 10.0
"""The buffer calls nothing that takes long; health does not wait for `daemon.hang_timeout_s` to say that it hangs."""

_NOTHING_SEEN = Progress(0.0, "", 0.0, -1, 0.0, False)

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Condemned:
    """A process that will be killed once its stacks are in the log, and those of whoever is condemned beside it."""

    slot: Slot
    pid: int
    reason: Reason
    since_s: float
    lines_before: int
    lines_seen: int


class Watchdog:
    """Watches the fleet from the supervisor's loop.

    Attributes:
        shares: What processes spent the last minute on; the supervisor's readings feed it.
    """

    def __init__(
        self,
        config: Config,
        slab: MetricsSlab,
        fleet: Fleet,
        *,
        state: Callable[[], str],
        gave_up: Callable[[str], None],
    ) -> None:
        """Watch a fleet.

        Args:
            config: The instance's.
            slab: Where each process shows its progress.
            fleet: Those processes.
            state: Gives the instance's state: starting, ready, paused or draining.
            gave_up: Called with the reason when a restart did not make the run move.
        """
        self.shares = ShareWindow()
        self._config = config
        self._slab = slab
        self._fleet = fleet
        self._state = state
        self._gave_up = gave_up
        self._pauses, self._run = PauseWatch(0.0), RunWatch(0.0)
        self.limit(config)
        self._condemned: list[_Condemned] = []
        self._stopped: dict[str, tuple[int, float]] = {}
        self._dumped_s = -_DUMP_S

    def limit(self, config: Config) -> None:
        """Let the limits of a configuration hold from now on."""
        daemon = config.daemon
        # Two tickets are in a worker's hands at most: the second may have waited as long as the first took.
        self._limits = HangLimits(
            hang_timeout_s=daemon.hang_timeout_s,
            startup_timeout_s=daemon.startup_timeout_s,
            ticket_grace_s=config.rollout.ticket_timeout_s,
            progress_timeout_s=daemon.progress_timeout_s,
        )
        shortest_s = min(daemon.hang_timeout_s or daemon.startup_timeout_s, daemon.startup_timeout_s)
        self._pauses.limit(max(1.0, shortest_s / 2))
        self._run.limit(daemon.progress_timeout_s)

    @property
    def is_stuck(self) -> bool:
        """Whether a verdict waits to be carried out, or a first one did not make the run move yet."""
        return bool(self._condemned) or self._run.strikes > 0

    def tick(self, now_s: float, steps: float, version: float) -> None:
        """Look at every process and at the run, and act.

        Args:
            now_s: Monotonic time.
            steps: Optimizer steps so far.
            version: Newest policy version.
        """
        paused = self._pauses.look(now_s)
        condemned = {one.slot.name for one in self._condemned}
        standings = [self._standing(slot) for slot in self._fleet.slots if slot.state not in ("ended", "failed")]
        verdicts = hung(standings, now_s, self._limits, watched_since_s=self._pauses.since_s)
        self._condemn([verdict for verdict in verdicts if verdict.name not in condemned], now_s)
        self._look_at_run(now_s, steps, version, paused=paused)
        self._execute(now_s)

    def shown(self, slot: Slot, line: str) -> str:
        """Return a child's line as it is to be logged: while stacks are dumped, with its name before it."""
        dumping = self._condemned or self._fleet.now_s() - self._dumped_s < _DUMP_S
        return f"{slot.name} | {line}" if dumping else line

    def is_buffer_silent(self, limit_s: float = _BUFFER_SILENT_S) -> bool:
        """Whether the buffer is ready and has not moved for that long."""
        buffers = [self._standing(slot) for slot in self._fleet.of("buffer") if slot.state == "ready"]
        return any(self._fleet.now_s() - buffer.progress.beat_s > limit_s for buffer in buffers)

    def why(self) -> dict[str, Any]:
        """Return what `rlhfd why` shows: sentences, and the numbers behind them."""
        run = self._view()
        shares = {role: self.shares.shares(role) for role in ("rollout", "buffer", "trainer")}
        return {
            "state": run.state,
            "sentences": explain(run, {role: shares[role] for role in ("rollout", "trainer")}),
            "last_minute": {
                role: {name: round(share, 4) for name, share in found.items()} for role, found in shares.items()
            },
            "quiet_s": round(run.quiet_s, 1),
            "processes": [
                {
                    "name": process.standing.name,
                    "pid": process.standing.pid,
                    "state": process.state,
                    "stopped": process.standing.is_stopped,
                    "activity": process.standing.progress.activity,
                    "since_s": _ago(run.now_s, process.standing.progress.since_s),
                    "silent_s": _ago(run.now_s, process.standing.progress.beat_s),
                    "working_on": process.standing.progress.working_on,
                    "last_minute": {name: round(share, 4) for name, share in process.shares.items()},
                }
                for process in run.processes
                if process.standing.pid
            ],
        }

    # Looking.

    def _slots(self) -> list[Slot]:
        return [slot for slot in self._fleet.slots if slot.works]

    def _standing(self, slot: Slot) -> Standing:
        pid = slot.child.pid if slot.child else 0
        progress = self._slab.progress(slot.role, slot.index) if slot.works else _NOTHING_SEEN
        # One that moves is not stopped; to ask the kernel of each, each time, would cost more than all the rest.
        stopped = self._fleet.now_s() - progress.beat_s > _QUIET_S and is_stopped(pid)
        if not stopped:
            self._stopped.pop(slot.name, None)
        elif self._stopped.get(slot.name, (0, 0.0))[0] != pid:
            self._stopped[slot.name] = pid, self._fleet.now_s()
        stopped_since_s = self._stopped[slot.name][1] if stopped else None
        # One that is told to end is watched as before; one that was killed with its group is none of our business.
        is_judged = bool(pid) and slot.ended_by != "group"
        is_starting = is_judged and slot.ready_s is None and not slot.has_no_place
        starting_since_s = slot.started_s if is_starting else None
        # The template waits to be asked, and says nothing while it does.
        is_ready = is_judged and slot.ready_s is not None and slot.works
        return Standing(
            slot.name, slot.role, pid, is_ready, progress, stopped_since_s, starting_since_s, slot.state == "draining"
        )

    def _view(self) -> RunView:
        now_s, books = self._fleet.now_s(), self._slab.conservation()
        state = self._state()
        return RunView(
            now_s=now_s,
            state="stuck" if self.is_stuck and state == "ready" else state,
            processes=[
                ProcessView(
                    self._standing(slot),
                    slot.state,
                    slot.due_s if slot.state == "backoff" else slot.started_s,
                    self.shares.shares(slot.role, str(slot.index)),
                    slot.error or slot.last_line,
                )
                for slot in self._slots()
            ]
            + [self._preparing(slot) for slot in self._fleet.slots if not slot.works and slot.state == "starting"],
            ready_items=books.ready_items if books else 0,
            leases_active=books.leases_active if books else 0,
            batch_rows=self._config.sample_batch_size,
            is_external=self._config.trainer.kind == "external",
            limits=self._limits,
            quiet_s=now_s - self._run.quiet_since_s,
        )

    def _preparing(self, slot: Slot) -> ProcessView:
        """Return what others wait for at a start; it has no place in the metrics."""
        return ProcessView(self._standing(slot), slot.state, slot.started_s, {}, slot.error or slot.last_line)

    def _look_at_run(self, now_s: float, steps: float, version: float, *, paused: bool) -> None:
        books = self._slab.conservation()
        marks = (steps, version, *((books.sealed, books.trained, sum(books.dropped)) if books else ()))
        is_judged = self._fleet.all_ready() and self._state() == "ready" and not paused
        if is_judged and self._config.trainer.kind == "external":
            is_judged = not waits_outside(self._view())
        if not self._run.look(now_s, marks, is_judged=is_judged):
            return
        run = self._view()
        limit, found = duration(self._limits.progress_timeout_s), culprit(run)
        reasons = " ".join(explain(run, {}))
        if found is None or self._run.strikes > 1:
            self._dump(now_s)
            self._gave_up(f"no progress for {limit}, and a restart did not help: {reasons}")
            return
        log.error("no progress for %s: %s", limit, reasons)
        self._condemn([Verdict.on(found.standing, "the run stands still", found.standing.progress.since_s)], now_s)

    # Acting.

    def _condemn(self, verdicts: Sequence[Verdict], now_s: float) -> None:
        found = [self._judged(verdict, now_s) for verdict in verdicts]
        if found:
            self._condemned += found
            self._dump(now_s, [one.slot for one in found])
            # It cannot write before it goes on; what it does in that second, it would have done anyway.
            self._fleet.signal([one.slot for one in found if one.reason == "stopped"], signal.SIGCONT)

    def _judged(self, verdict: Verdict, now_s: float) -> _Condemned:
        slot = next(slot for slot in self._fleet.slots if slot.name == verdict.name)
        log.error(
            "hung: role=%s pid=%d stage=%s %s=%d since_s=%.1f reason=%s", verdict.name, verdict.pid, verdict.stage,
            "lease" if slot.role == "trainer" else "ticket", verdict.working_on, now_s - verdict.since_s,
            verdict.reason,
        )  # fmt: skip
        # What is said of its end; its last line will be one of a stack.
        if verdict.reason == "not ready in time":
            slot.is_late = True
            slot.error = (
                f"not ready within {self._limits.startup_timeout_s:g} s (daemon.startup_timeout_s); "
                f"its last line: {slot.last_line or 'it said nothing'}"
            )
        else:
            slot.error = f"hung in {verdict.stage}: {verdict.reason}"
        slot.ended_by = "watchdog"
        return _Condemned(slot, verdict.pid, verdict.reason, now_s, slot.lines, slot.lines)

    def _dump(self, now_s: float, condemned: Sequence[Slot] = ()) -> None:
        """Let every child write the stacks of its threads to the log; those that are condemned do so in any case."""
        others: list[Slot] = []
        if now_s - self._dumped_s >= _DUMP_S:
            self._dumped_s = now_s
            # One that has just been started may know no such signal yet, and would die of it.
            others = [slot for slot in self._fleet.alive() if slot.ready_s is not None and slot not in condemned]
        self._fleet.signal([*condemned, *others], signal.SIGUSR1)

    def _execute(self, now_s: float) -> None:
        for one in [*self._condemned]:
            if one.slot.child is None or one.slot.child.pid != one.pid:
                self._condemned.remove(one)
            elif one.reason == "not ready in time" and one.slot.state == "ready":
                log.info("ready after all: process=%s pid=%d", one.slot.name, one.pid)
                one.slot.error = one.slot.ended_by = ""
                self._condemned.remove(one)
        written = [one for one in self._condemned if one.lines_before < one.slot.lines == one.lines_seen]
        for one in self._condemned:
            one.lines_seen = one.slot.lines
            # Ranks end together: none is killed, and takes another one with it, before all have written.
            if len(written) == len(self._condemned) or now_s - one.since_s > _DUMP_S:
                self._fleet.signal([one.slot], signal.SIGKILL)


def _ago(now_s: float, then_s: float) -> float | None:
    return round(now_s - then_s, 1) if then_s else None


def is_stopped(pid: int) -> bool:
    """Whether a process is in the kernel's state T; a debugger's t is none of our business."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
