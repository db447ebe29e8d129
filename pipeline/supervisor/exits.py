"""The consequence of each child's exit before the shutdown: a restart, the shutdown, or the end with an exit code."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from pipeline.errors import ExitCode
from pipeline.runtime.messages import PeerDied
from pipeline.runtime.transport import Outbox, trainer_name, worker_name
from pipeline.supervisor.fleet import FORKSERVERS, Fleet, Slot

log = logging.getLogger(__name__)

_LESS_MEMORY: Final = {
    "rollout": "rollout.logits_forward_tokens (rollout.logits_forward_batch_size, where it is set), "
    "rollout.inference_batch_size, rollout.batch_size or rollout.workers",
    "trainer": "trainer.micro_batch_tokens (trainer.micro_batch_size, where it is set), buffer.sample_batch_size or "
    "rollout.max_length",
}


@dataclasses.dataclass
class ExitHandler:
    """Restarts children that exited, or ends the run; an exit during the shutdown is `shutdown.Shutdown`'s.

    Attributes:
        fleet: The instance's processes.
        to_buffer: Sender of the deaths of workers and ranks to the buffer.
        drain: Called with the reason once training is complete.
        abort: Called with exit code and reason if the run cannot continue.
    """

    fleet: Fleet
    to_buffer: Outbox
    drain: Callable[[str], None]
    abort: Callable[[ExitCode, str], None]
    _finished_ranks: set[int] = dataclasses.field(default_factory=set, init=False)

    def handle(self, slot: Slot, code: int) -> None:
        """Decide the consequence of an exit.

        Args:
            slot: The slot of the child that exited.
            code: Exit code, or minus the signal.
        """
        if code in (ExitCode.BAD_CONFIG, ExitCode.GAVE_UP):
            self.abort(ExitCode(code), slot.error or f"{slot.name} ended with exit code {code}: {slot.cause}")
        elif slot.role == "setup":
            self._setup_ended(slot, code)
        elif slot.role == "trainer":
            self._rank_ended(slot, code)
        elif slot.role in FORKSERVERS:
            self._forkserver_ended(slot, code)
        else:
            if slot.role == "rollout":
                self.to_buffer.send(death_of(slot))
            self._retry(slot, code)

    def _setup_ended(self, slot: Slot, code: int) -> None:
        if code == 0:
            for role in self.fleet.of("trainer", "rollout"):
                self.fleet.start(role)
        elif code < 0:
            # Its successor makes the folder anew, or finds it whole.
            self._retry(slot, code)
        else:
            # An error of its own, such as a folder that it cannot write, would come again.
            self.abort(ExitCode.FAILED, f"the embedded model could not be made: {slot.cause}")

    def _rank_ended(self, slot: Slot, code: int) -> None:
        self.to_buffer.send(death_of(slot))
        # A rank that exited by itself while another one died is needed nevertheless: that one restarts, and not alone.
        # So does the gateway of a rank that was killed on another machine.
        by_itself = code == ExitCode.OK or (code == ExitCode.FAILED and not slot.from_outside)
        has_finished = slot.finished and by_itself and slot.ended_by != "group"
        # Once rank 0 has written the last checkpoint, no other rank is needed.
        if has_finished or 0 in self._finished_ranks:
            self._finished_ranks.add(slot.index)
            if len(self._finished_ranks) == len([*self.fleet.of("trainer")]):
                self.drain("training is complete")
            return
        # A rank cannot continue without the others, and no new rank can join it: all of them restart.
        self.fleet.kill_group(self.fleet.alive("trainer"))
        for other in self.fleet.of("trainer"):
            if other.index in self._finished_ranks:
                self.fleet.restart_now(other)
        self._finished_ranks.clear()
        self._retry(slot, code)

    def _forkserver_ended(self, slot: Slot, code: int) -> None:
        """Plan another forkserver: no running process depends on it; without one, a start takes seconds more."""
        delay_s = self.fleet.retry(slot)
        of, forks = ("", "roles") if slot.role == "forkserver" else (" of engines", "engines")
        further = f"{forks} are started without it" if delay_s is None else f"restart in {delay_s:.1f} s"
        log.warning("the forkserver%s has ended (%d), %s: %s", of, code, further, slot.cause)

    def _retry(self, slot: Slot, code: int) -> None:
        delay_s = self.fleet.retry(slot)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        how += f", {slot.ended_by}" if slot.ended_by else ""
        reason = slot.cause
        if remedy := after_exit(slot.role, slot.ended_by, reason):
            reason = f"{reason}; {remedy}"
        if delay_s is not None:
            log.warning("%s ended (%s), restart in %.1f s: %s", slot.name, how, delay_s, reason)
            return
        how = f"({how})" + ("" if slot.unusable or slot.is_late else " too often")
        usable = any(other.state != "failed" for other in self.fleet.of("rollout"))
        if slot.role != "rollout" or not usable:
            self.abort(ExitCode.GAVE_UP, f"{slot.name} failed {how}: {reason}")
            return
        log.error("%s ended %s, it is not started again: %s", slot.name, how, reason)


def death_of(slot: Slot) -> PeerDied:
    """Return the word of a worker's or rank's death, with the ticket or lease that may have caused it.

    None may have, if another rank died before, if another program killed or stopped the process or its engine, or if a
    worker's weights are wrong.
    """
    peer = (worker_name if slot.role == "rollout" else trainer_name)(slot.index)
    has_cause = slot.ended_by == "group" or slot.from_outside or slot.unusable
    return PeerDied(peer, -1 if has_cause else slot.working_on, slot.last_pid)


def after_exit(role: str, ended_by: str, reason: str) -> str:
    """Return the keys that help after an exit for want of memory; empty after any other exit.

    Args:
        role: Role of the process.
        ended_by: As in `pipeline.supervisor.fleet.Slot`; "oom" after a kill by the kernel.
        reason: The error that the process reported, or its last line.
    """
    if role not in _LESS_MEMORY or not (ended_by == "oom" or "out of memory" in reason.lower()):
        return ""
    return f"out of memory: lower {_LESS_MEMORY[role]}"
