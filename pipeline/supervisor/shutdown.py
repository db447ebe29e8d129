"""The end of an instance in order: nothing is begun, trainers write a checkpoint, the buffer what is undelivered."""

from __future__ import annotations

import collections
import logging
import signal
from collections.abc import Iterable

from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.runtime.messages import Drain, PeerDied
from pipeline.runtime.role import monotonic_s
from pipeline.runtime.transport import Outbox, trainer_name
from pipeline.supervisor.fleet import Fleet, Slot
from pipeline.telemetry.slab import MetricsSlab

_ENDED_IN_ORDER = (ExitCode.OK, ExitCode.FAILED, ExitCode.GAVE_UP, ExitCode.BAD_CONFIG)

log = logging.getLogger(__name__)


class Ending:
    """From the word to end until no process is left; whoever still has something to write is started again if it dies.

    Args:
        config: The instance's.
        fleet: Its processes.
        slab: Its metrics.
        to_buffer: Where the buffer hears of it.
        taken_over: Whether a run before this one left training that may be in no checkpoint.

    Attributes:
        config: May be replaced by one whose time limits differ.
        exit_code: What the whole ends with.
        over: Whether no process is left.
        is_unsaved: Whether a start that failed has left training, of the run before it, that may be in no checkpoint.
    """

    def __init__(self, config: Config, fleet: Fleet, slab: MetricsSlab, to_buffer: Outbox, *, taken_over: bool) -> None:
        self.config = config
        self.exit_code = ExitCode.OK
        self.over = False
        self.is_unsaved = False
        self._fleet = fleet
        self._slab = slab
        self._to_buffer = to_buffer
        self._taken_over = taken_over
        self._since_s: float | None = None
        self._word = Drain()
        # Trainer ranks whose last steps may be in no checkpoint yet.
        self._owing: list[Slot] = []
        self._hung: collections.Counter[str] = collections.Counter()
        self._is_killed = False

    @property
    def under_way(self) -> bool:
        """Whether it has begun."""
        return self._since_s is not None

    def begin(self, *, complete: bool = False) -> None:
        """Let rollouts and steps in progress finish; `press_on` sees to it that this ends.

        Args:
            complete: Whether all steps are taken, so that what is undelivered is of no use.
        """
        self._since_s = monotonic_s()
        self._word = Drain(complete)
        self._to_buffer.send(self._word)
        self._owing = [] if complete or not self._has_trained() else list(self._fleet.of("trainer"))
        for slot in self._fleet.of("rollout", "setup", "template"):
            if slot.state in ("backoff", "waiting"):
                slot.state = "failed" if slot.role == "template" else "ended"
        self._end_in_order(
            slot for slot in self._fleet.alive("trainer", "rollout", "setup") if slot not in self._owing or is_up(slot)
        )

    def begin_failed(self) -> None:
        """Begin an end at which trainers write a checkpoint only if all of them are able to."""
        able = all(is_up(slot) for slot in self._fleet.of("trainer"))
        self.begin()
        hopeless = ["rollout", "setup"]
        if not able:
            self._owing = []
            self.is_unsaved = self._taken_over
            hopeless.append("trainer")
        self._fleet.signal(self._fleet.alive(*hopeless), signal.SIGKILL)

    def kill_all(self) -> None:
        """End at once."""
        self._since_s = monotonic_s() if self._since_s is None else self._since_s
        self._is_killed = True
        self._fleet.signal(self._fleet.alive(), signal.SIGKILL)

    def child_ended(self, slot: Slot, code: int) -> None:
        """Take note of an exit; one that died before it had written what it holds is started again."""
        if slot.role == "template":
            slot.state = "failed"
        elif slot.role == "buffer" and not self._is_killed:
            self._buffer_ended(slot, code)
        elif slot in self._owing and (code not in _ENDED_IN_ORDER or slot.ended_by == "group" or self._is_awaited()):
            self._rank_ended(slot, code)

    def _buffer_ended(self, slot: Slot, code: int) -> None:
        """Nobody else can write to disk what is undelivered."""
        may_come = code not in _ENDED_IN_ORDER and not self._hung_twice(slot)
        if may_come and self._fleet.retry(slot) is not None:
            said = slot.error or slot.last_line
            log.warning("buffer ended (%d) before it had written what is undelivered, restart: %s", code, said)
        elif code:
            self._failed()
            log.error("what was undelivered is lost: %s", slot.error or slot.last_line)

    def _is_awaited(self) -> bool:
        """Whether a rank starts, which it cannot without any of the others."""
        return any(other.state == "starting" for other in self._owing)

    def _rank_ended(self, slot: Slot, code: int) -> None:
        """Its last steps are in shared memory still; all ranks come back to write them, none could do it alone."""
        working_on = -1 if slot.ended_by == "group" else slot.working_on
        self._to_buffer.send(PeerDied(trainer_name(slot.index), working_on, slot.last_pid))
        if self._owing[0].state == "ended" and self._owing[0].last_exit == ExitCode.OK:
            # Rank 0 has written them; nobody needs the others any more.
            self._owing = []
            return
        hopeless = self._is_killed or self._hung_twice(slot)
        hopeless = hopeless or any(self._fleet.retry(other) is None for other in self._dead())
        self._fleet.kill_group(other for other in self._owing if other.alive)
        if not hopeless:
            said = slot.error or slot.last_line
            log.warning("%s ended (%d) before its last checkpoint, restart: %s", slot.name, code, said)
            return
        self._owing = []
        if self.exit_code is ExitCode.OK:
            self._failed()
            log.error(
                "%s ended (%d) before its last checkpoint, the next start goes on from the one before", slot.name, code
            )

    def _hung_twice(self, slot: Slot) -> bool:
        """Whether the watchdog killed it, and not for the first time: the next one would hang as well."""
        self._hung[slot.name] += slot.ended_by == "watchdog"
        return self._hung[slot.name] > 1

    def _dead(self) -> list[Slot]:
        return [slot for slot in self._owing if not slot.alive and slot.state != "backoff"]

    def press_on(self, now_s: float) -> None:
        """Do what is due: cut rollouts at the deadline, and end whom nobody waits for any more, the buffer last.

        Trainers and buffer get the time that their writing takes; one that hangs at it is the watchdog's to kill.
        """
        if self._since_s is not None and not self._is_killed:
            is_overdue = now_s - self._since_s > self.config.daemon.drain_timeout_s
            working = self._fleet.alive("trainer", "rollout", "setup")
            coming = [slot for slot in self._owing if slot.state in ("backoff", "waiting")]
            if is_overdue:
                self._cut([slot for slot in working if slot not in self._owing])
            if working or coming:
                self._bring_back(coming)
                self._end_in_order(slot for slot in self._owing if slot.state == "ready")
            elif is_overdue or not self._is_leased():
                self._end_buffer()
            for slot in [slot for slot in self._fleet.of("buffer") if slot.state == "backoff"]:
                self._fleet.start(slot)
                self._to_buffer.send(self._word)
        self.over = not self._fleet.alive()

    def _cut(self, slots: list[Slot]) -> None:
        if slots:
            log.warning("cut at daemon.drain_timeout_s: %s", ", ".join(slot.name for slot in slots))
            self._fleet.signal(slots, signal.SIGKILL)

    def _bring_back(self, coming: list[Slot]) -> None:
        # Ranks start together, or one would wait for the others of its generation for ever.
        if all(slot.state in ("backoff", "waiting", "starting") for slot in self._owing):
            for slot in coming:
                self._fleet.start(slot)

    def _end_in_order(self, slots: Iterable[Slot]) -> None:
        for slot in list(slots):
            self._fleet.signal([slot], signal.SIGTERM)
            slot.state = "draining"

    def _end_buffer(self) -> None:
        self._fleet.close()
        # Once, and none that still starts: without its handler it would die of it.
        self._end_in_order(slot for slot in self._fleet.alive("buffer") if slot.state == "ready")

    def _has_trained(self) -> bool:
        return self._taken_over or any(slot.generation > 1 or is_up(slot) for slot in self._fleet.of("trainer"))

    def _is_leased(self) -> bool:
        """Whether a trainer of somebody else's still holds a batch; it is told to drain, and gets the time for it."""
        books = self._slab.conservation()
        return self.config.trainer.kind == "external" and books is not None and books.leases_active > 0

    def _failed(self) -> None:
        self.exit_code = self.exit_code or ExitCode.FAILED


def is_up(slot: Slot) -> bool:
    """Whether a child runs that handles SIGTERM: one that still starts would die of it."""
    return slot.alive and slot.state == "ready"
