"""The orderly shutdown: no new work, then trainers write a checkpoint and the buffer spools the undelivered rows."""

from __future__ import annotations

import collections
import logging
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import ExitCode
from pipeline.runtime.latest_checkpoint import checkpoints_dir, saved_version
from pipeline.runtime.messages import Drain
from pipeline.runtime.transport import Outbox
from pipeline.storage.weights_header import newest_version
from pipeline.supervisor.exits import death_of
from pipeline.supervisor.fleet import FORKSERVERS, Fleet, Slot

_CUT_AFTER_S = 1.0
"""Time for a worker to end by itself once all steps are taken; a longer rollout is of no use to any trainer."""
_FILES, _READS = ("weights", "training"), 100
_ENDED_IN_ORDER = (ExitCode.OK, ExitCode.FAILED, ExitCode.GAVE_UP, ExitCode.BAD_CONFIG)

log = logging.getLogger(__name__)


class Shutdown:
    """Shuts the instance down. A trainer or buffer that dies before saving its state is restarted.

    Args:
        fleet: The instance's processes.
        to_buffer: Sender of `Drain` and `PeerDied` to the buffer.
        taken_over: Whether an earlier run left training steps that may be in no checkpoint.

    Attributes:
        exit_code: Exit code of the instance.
        reason: The error behind an exit code other than 0, the last line of the log.
        over: Whether no process is left.
        is_unsaved: Whether a failed start leaves training steps of the earlier run that may be in no checkpoint.
        is_damaged: Whether shared memory is not whole any more, so that it is kept for no start.
        is_kept: Whether the end of the run is in shared memory alone, which stays for the next start.
    """

    def __init__(self, fleet: Fleet, to_buffer: Outbox, *, taken_over: bool) -> None:
        self.exit_code = ExitCode.OK
        self.reason = ""
        self.over = False
        self.is_unsaved = self.is_kept = self.is_damaged = False
        self._fleet = fleet
        self._to_buffer = to_buffer
        self._taken_over = taken_over
        self._since_s: float | None = None
        self._drain_message = Drain()
        # Trainer ranks whose last steps may be in no checkpoint yet.
        self._unsaved_ranks: list[Slot] = []
        self._hung: collections.Counter[str] = collections.Counter()
        self._cut: set[str] = set()
        self._is_killed = False

    @property
    def under_way(self) -> bool:
        """Whether the shutdown has begun."""
        return self._since_s is not None

    def begin(self, *, complete: bool = False) -> None:
        """Let rollouts and steps in progress finish; `advance` bounds the time that this takes.

        Args:
            complete: Whether all steps are taken, so that undelivered rows are of no use.
        """
        self._since_s = time.monotonic()
        self._drain_message = Drain(complete)
        self._to_buffer.send(self._drain_message)
        self._unsaved_ranks = [] if complete or not self._has_trained() else list(self._fleet.of("trainer"))
        for slot in self._fleet.of("rollout", "setup", *FORKSERVERS):
            if slot.state in ("backoff", "waiting"):
                slot.state = "failed" if slot.role in FORKSERVERS else "ended"
                self._fleet.on_change(slot)
        # It would kill a rank that is still starting.
        self._terminate(
            slot
            for slot in self._fleet.alive("trainer", "rollout", "setup")
            if slot not in self._unsaved_ranks or slot.state == "ready"
        )

    def begin_failed(self) -> None:
        """Begin the shutdown of a failed run: trainers write a checkpoint if each is up, or waits for a restart.

        Else shared memory stays for the next start, if a training state in it is newer than the last checkpoint.
        """
        able = all(slot.state in ("ready", "backoff") for slot in self._fleet.of("trainer"))
        self.begin()
        hopeless = ["rollout", "setup"]
        if not able:
            self._unsaved_ranks = []
            self.is_unsaved = self._taken_over
            hopeless.append("trainer")
            if self.has_unsaved():
                self._keep(f"the last steps are in no checkpoint: {self._held()}")
        self._fleet.signal(self._fleet.alive(*hopeless), signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all processes at once."""
        self._since_s = time.monotonic() if self._since_s is None else self._since_s
        self._is_killed = True
        self._fleet.signal(self._fleet.alive(), signal.SIGKILL)

    def give_up(self) -> None:
        """Kill all processes at once after an error of the shutdown; what is not on disk stays for the next start."""
        is_spooled = all(slot.last_exit == ExitCode.OK for slot in self._fleet.of("buffer"))
        if self.has_unsaved() or (self._has_trained() and not is_spooled):
            self._keep("the shutdown has failed: steps and rows that are not on disk")
        self.kill_all()

    def child_ended(self, slot: Slot, code: int) -> None:
        """Handle an exit; a process that died before saving its state is restarted."""
        if slot.role in FORKSERVERS:
            slot.state = "failed"
        elif slot.role == "buffer" and not self._is_killed and not self.is_damaged:
            self._buffer_ended(slot, code)
        elif slot in self._unsaved_ranks and self._must_restart(slot, code):
            self._rank_ended(slot, code)

    def note_unwritten(self, slot: Slot, code: int) -> None:
        """Fail the run if a rank that has taken all of its steps ended without the last checkpoint.

        The error of a rank that another one's death interrupted in a collective is none: both are restarted. So are
        ranks of which one was killed on another machine, whose gateway ends by an error.
        """
        ends, is_own = self.under_way or slot.finished, slot.ended_by != "group" and not slot.from_outside
        if slot.role == "trainer" and code == ExitCode.FAILED and is_own and ends:
            reason, held = f"{slot.name} has not written the last checkpoint, its error is above", self._held()
            if held:
                self._keep(f"{reason}: {held}")
            else:
                self.fail(ExitCode.FAILED, f"{reason}: nothing was published since the start")

    def _buffer_ended(self, slot: Slot, code: int) -> None:
        """Restart the buffer: no other process can write the undelivered rows to disk."""
        may_restart = code not in _ENDED_IN_ORDER and not self._hung_twice(slot)
        if may_restart and self._fleet.retry(slot) is not None:
            reason = slot.cause
            log.warning("buffer ended (%d) before it had written the undelivered rows, restart: %s", code, reason)
        elif code:
            self._keep(f"undelivered rows are not on disk: {slot.cause}: rows")

    def has_unsaved(self) -> bool:
        """Return whether shared memory holds a training state that is newer than the last checkpoint."""
        state = newest_version(Path(self._fleet.folder, _FILES[1]), attempts=_READS)
        return state is not None and state.version > saved_version(checkpoints_dir(self._fleet.config))

    def _held(self) -> str:
        """Return what shared memory holds of the end: the weights, and the training state if it is of this version.

        "" if nothing was published.
        """
        weights, state = (newest_version(Path(self._fleet.folder, name), attempts=_READS) for name in _FILES)
        if weights is None:
            return ""
        if state is not None and state.age == weights.age:
            return f"weights and training state of version {weights.version}"
        return f"weights of version {weights.version}, without its training state,"

    def _keep(self, reason: str) -> None:
        """Fail the run, and keep shared memory for the next start."""
        if self.is_damaged:
            self.fail(ExitCode.FAILED, reason)
            return
        self.is_kept = True
        kept = f"{reason} stay in {self._fleet.folder} for the next start, which goes on from there"
        # The last line of the run is its first failure.
        log.error("%s", kept)
        self.fail(
            ExitCode.FAILED,
            f"{kept}: make room in {self._fleet.config.daemon.state_dir} and start again (`rlhfd start --fresh` gives "
            "them up)",
        )

    def _must_restart(self, slot: Slot, code: int) -> bool:
        """Return whether a rank ended without saving, or another rank is starting, which needs all ranks."""
        is_needed = any(other.state == "starting" for other in self._unsaved_ranks)
        return code not in _ENDED_IN_ORDER or slot.ended_by == "group" or slot.from_outside or is_needed

    def _rank_ended(self, slot: Slot, code: int) -> None:
        """Restart all ranks to save the last steps, which are in shared memory; no rank can save them alone."""
        self._to_buffer.send(death_of(slot))
        if self._unsaved_ranks[0].state == "ended" and self._unsaved_ranks[0].last_exit == ExitCode.OK:
            # Rank 0 has written them; the others are not needed any more.
            self._unsaved_ranks = []
            return
        hopeless = self._is_killed or self._hung_twice(slot)
        hopeless = hopeless or any(self._fleet.retry(other) is None for other in self._dead())
        self._fleet.kill_group(other for other in self._unsaved_ranks if other.alive)
        if not hopeless:
            # Ranks end together: one warning, about the rank that ended first.
            if slot.ended_by != "group":
                reason = slot.cause
                log.warning("%s ended (%d) before its last checkpoint, restart: %s", slot.name, code, reason)
            return
        self._unsaved_ranks = []
        reason = f"{slot.name} ended ({code}) before its last checkpoint"
        if self.has_unsaved() and not self._is_killed:
            self._keep(f"{reason}: {self._held()}")
        else:
            self.fail(ExitCode.FAILED, f"{reason}, the next start resumes from the one before")

    def _hung_twice(self, slot: Slot) -> bool:
        """Return whether the watchdog killed it for the second time: the next one would hang as well."""
        self._hung[slot.name] += slot.ended_by == "watchdog"
        return self._hung[slot.name] > 1

    def _dead(self) -> list[Slot]:
        return [slot for slot in self._unsaved_ranks if not slot.alive and slot.state != "backoff"]

    def advance(self, now_s: float) -> None:
        """Take the next step: kill rollouts at the deadline, end processes that no other one needs, the buffer last.

        Trainers and buffer get the time that their writing takes; the watchdog kills one that hangs in it.
        """
        if self._since_s is not None and not self._is_killed:
            is_overdue = now_s - self._since_s > self._fleet.config.daemon.drain_timeout_s
            if is_overdue and any(slot.is_pending for slot in self._unsaved_ranks):
                self._give_up_ranks()
            working = self._fleet.alive("trainer", "rollout", "setup")
            restarting = [slot for slot in self._unsaved_ranks if slot.state in ("backoff", "waiting")]
            if is_overdue:
                self._kill("cut at daemon.drain_timeout_s", [s for s in working if s not in self._unsaved_ranks])
            elif self._drain_message.complete and now_s - self._since_s > _CUT_AFTER_S:
                self._kill("cut, all steps are taken", self._fleet.alive("rollout"))
            if working or restarting:
                self._restart_ranks(restarting)
                self._terminate(slot for slot in self._unsaved_ranks if slot.state == "ready")
            elif is_overdue or not self._is_leased():
                self._end_buffer()
            for slot in [slot for slot in self._fleet.of("buffer") if slot.state == "backoff"]:
                self._fleet.start(slot)
                self._to_buffer.send(self._drain_message)
        self.over = not self._fleet.alive()

    def _give_up_ranks(self) -> None:
        """End ranks that wait for the cluster, which may have no place for them any more."""
        ranks, self._unsaved_ranks = self._unsaved_ranks, []
        self._kill("cut at daemon.drain_timeout_s, waiting for the cluster", [slot for slot in ranks if slot.alive])
        for slot in ranks:
            if not slot.alive:
                slot.state = "ended"
                self._fleet.on_change(slot)
        if self.has_unsaved():
            self._keep(f"the cluster has no place for the trainer ranks: {self._held()}")

    def _kill(self, reason: str, slots: list[Slot]) -> None:
        """Kill processes, once each: an exit is seen some ticks later."""
        slots = [slot for slot in slots if slot.name not in self._cut]
        if slots:
            self._cut.update(slot.name for slot in slots)
            log.log(
                logging.INFO if self._drain_message.complete else logging.WARNING,
                "%s: %s", reason, ", ".join(slot.name for slot in slots),
            )  # fmt: skip
            self._fleet.signal(slots, signal.SIGKILL)

    def _restart_ranks(self, restarting: list[Slot]) -> None:
        # Ranks start together: one rank alone would wait forever for the others of its generation.
        if all(slot.state in ("backoff", "waiting", "starting") for slot in self._unsaved_ranks):
            for slot in restarting:
                self._fleet.start(slot)

    def _terminate(self, slots: Iterable[Slot]) -> None:
        for slot in list(slots):
            self._fleet.signal([slot], signal.SIGTERM)
            slot.state = "draining"
            self._fleet.on_change(slot)

    def _end_buffer(self) -> None:
        self._fleet.close()
        # Once, and not while it starts: without its handler, SIGTERM would kill it.
        self._terminate(slot for slot in self._fleet.alive("buffer") if slot.state == "ready")

    def _has_trained(self) -> bool:
        # A rank that was ready may have died since: its steps are in shared memory.
        ranks = self._fleet.of("trainer")
        return self._taken_over or any(slot.generation > 1 or slot.ready_s is not None for slot in ranks)

    def _is_leased(self) -> bool:
        """Return whether an external trainer still holds a batch; it was sent `Drain`, and gets the time for it."""
        counts = self._fleet.slab.conservation()
        return self._fleet.config.trainer.kind == "external" and counts is not None and counts.leases_active > 0

    def fail(self, code: ExitCode, reason: str) -> None:
        """Set exit code and reason of a failed run; the first failure counts."""
        if self.exit_code is ExitCode.OK:
            self.exit_code, self.reason = code, reason
            log.info("failed, ending: %s", reason)
