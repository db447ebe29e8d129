"""The buffer's process: ZeroMQ and the arena's ledger around `pipeline.buffer.buffer`."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from pipeline.buffer.buffer import Buffer
from pipeline.buffer.context import Send
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.quarantine import Quarantine
from pipeline.buffer.sizing import ledger_layout, limits_of
from pipeline.buffer.snapshot import BufferSnapshot
from pipeline.buffer.spool import Spool
from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.prompts.passes import prompts_of_passes
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import Message, Published
from pipeline.runtime.pause import Pause
from pipeline.runtime.role import RoleContext
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, Traffic
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.ledger import Ledger
from pipeline.storage.weights_header import Age, newest_version
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.evaluations import FILE_NAME, EvaluationFile

_IDLE_S = 0.25
_PAUSED_S = 0.5
_LAST_MESSAGES_S = 2.0
# A stat of a file, or an update of the metrics, costs as much as a message: too much for each of a thousand a second.
_LOOK_S = 0.2
SHOW_S = 0.02
# Messages at a higher rate are handled together: the wake-up of three processes for each of a thousand appends a second
# costs more than the ledger's transactions.
_TURN_S = 0.001
# A message arrives within milliseconds; a `Published` that is later is taken for lost.
_MESSAGE_S = 1.0

log = logging.getLogger(__name__)


class Outboxes:
    """One outbox a peer, opened at the first message to it.

    Messages of one turn of the loop leave at its end, all messages to a peer at once: the wake-up of a process costs
    more than all of the buffer's work for a batch.
    """

    def __init__(self, context: RoleContext) -> None:
        self._folder = context.folder
        self._traffic = Traffic(context.metrics)
        self._open: dict[str, Outbox] = {}
        self._pending: dict[str, list[Message]] = {}

    def send(self, peer: str, message: Message) -> None:
        """Add a message to a peer; it leaves at `flush`, in order."""
        self._pending.setdefault(peer, []).append(message)

    def flush(self) -> None:
        """Send the messages since the last flush."""
        pending, self._pending = self._pending, {}
        # By name, trainers before workers: a trainer waits for its batch, a worker has tickets ahead.
        for peer in sorted(pending):
            if peer not in self._open:
                self._open[peer] = Outbox(self._folder, peer, self._traffic)
            self._open[peer].send_all(pending[peer])

    def close(self) -> None:
        """Close all outboxes; the last messages get a moment to leave."""
        self.flush()
        for outbox in self._open.values():
            outbox.close(linger_s=0.2)


class NewestWeights:
    """Gives the buffer a `Published` of the newest weights in shared memory if the trainer's own does not arrive.

    The trainer's message may be lost unread with a killed buffer. Rank 0 repeats it to the next buffer once it receives
    messages again. With several ranks, rank 0 may first wait for another rank, and that rank for a batch, which is not
    rolled out before the message arrives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The version whose message is missing, and since when.
        self._missing: tuple[Age, float] | None = None

    def look(self, buffer: Buffer, now_s: float, *, patience_s: float = _MESSAGE_S) -> None:
        """Handle a `Published` in the trainer's place if its own has been missing for `patience_s`."""
        found = newest_version(self._path)
        totals, versions = buffer.ledger.totals, buffer.ledger.versions
        if found is None or (
            found.version == totals.policy_version and versions.knows(found.version, found.fingerprint)
        ):
            self._missing = None
            return
        if self._missing is None or self._missing[0] != found.age:
            self._missing = found.age, now_s
        if now_s - self._missing[1] >= patience_s:
            # Once: a message that the buffer refuses would be refused again.
            self._missing = found.age, math.inf
            log.warning("the weights in shared memory are newer than the trainer's last message: version=%d instead "
                        "of %d rollback=%s", found.version, totals.policy_version, found.rollback)  # fmt: skip
            buffer.handle(
                Published(found.version, found.fingerprint, found.trained_through, found.rollback, found.position),
                now_s,
            )


def run(config: Config, context: RoleContext) -> ExitCode:
    """Serve tickets and leases until SIGTERM."""
    arena = Arena(context.folder / "arena", payload=False)
    ledger = Ledger(arena.ledger, ledger_layout(config))
    traffic = Traffic(context.metrics)
    mailbox, outboxes = Mailbox(context.folder, BUFFER, traffic), Outboxes(context)
    metrics = BufferMetrics(context.metrics)
    clock = ActivityClock(context.metrics, ["wait_data"])
    spool = Spool(config, arena, metrics)
    if ledger.totals.tickets:
        log.info("ledger taken over: ready=%d leased=%d tickets=%d", ledger.ready, ledger.leased, ledger.reserved)
    spool.take_in(ledger, time.monotonic(), lambda rows: metrics.set_aside("checksum", rows))
    evaluations = EvaluationFile(run_dir(config) / FILE_NAME)
    buffer = new_buffer(config, ledger, arena, outboxes.send, metrics, prompts=context.prompts, evaluations=evaluations)
    snapshot = BufferSnapshot(config, arena, metrics.snapshot_written, telemetry=metrics)
    pause, weights = Pause(context.folder), NewestWeights(context.folder / "weights")
    weights.look(buffer, time.monotonic(), patience_s=0.0)
    buffer.paused = pause.is_on()
    busy_s = looked_s = shown_s = -math.inf
    is_shown = True
    outboxes.flush()
    metrics.publish(buffer, time.monotonic(), arena.payload_bytes)
    context.ready()
    try:
        while not context.stopping:
            with clock.during("wait_data"):
                has_mail = mailbox.wait((_PAUSED_S if buffer.paused else _IDLE_S) if is_shown else SHOW_S)
                if has_mail and (left_s := busy_s + _TURN_S - time.monotonic()) > 0:
                    time.sleep(left_s)
                messages = mailbox.receive(0.0)
            now_s, refused = time.monotonic(), buffer.refused
            busy_s = now_s if has_mail else busy_s
            if now_s - looked_s >= _LOOK_S:
                looked_s, buffer.paused = now_s, pause.is_on()
                weights.look(buffer, now_s)
                evaluations.write_waiting()
                if (changed := context.reloaded()) is not None:
                    rollout = changed.rollout
                    buffer.limit(max_attempts=rollout.max_attempts, ticket_timeout_s=rollout.ticket_timeout_s)
            for message in messages:
                buffer.handle(message, now_s)
            traffic.drop(BUFFER, buffer.refused - refused)
            buffer.step(now_s)
            outboxes.flush()
            snapshot.step(buffer, now_s)
            if is_shown := not has_mail or now_s - shown_s >= SHOW_S:
                metrics.publish(buffer, now_s, arena.payload_bytes)
                shown_s = now_s
        _handle_last_messages(buffer, mailbox)
        outboxes.flush()
        whole = True
        if buffer.draining:
            snapshot.close(buffer)
            whole = buffer.finish(None if buffer.complete else spool.write)
            if whole:
                snapshot.remove()
            metrics.publish(buffer, time.monotonic(), arena.payload_bytes)
        return ExitCode.OK if whole else ExitCode.FAILED
    finally:
        outboxes.close()
        mailbox.close()
        ledger.close()
        arena.close()


def _handle_last_messages(buffer: Buffer, mailbox: Mailbox) -> None:
    """Handle the messages sent before SIGTERM: the signal may overtake a last version, or the `Drain` itself."""
    until_s = time.monotonic() + _LAST_MESSAGES_S
    while (left_s := until_s - time.monotonic()) > 0:
        messages = mailbox.receive(0.0 if buffer.draining else left_s)
        if not messages:
            return
        for message in messages:
            buffer.handle(message, time.monotonic())


def new_buffer(
    config: Config,
    ledger: Ledger,
    arena: Arena,
    send: Send,
    observer: BufferMetrics,
    *,
    prompts: int = 0,
    evaluations: EvaluationFile | None = None,
) -> Buffer:
    """Return the buffer of a configuration, on a ledger that is fresh or left by an earlier buffer."""
    if config.trainer.kind == "external" and ledger.totals.policy_version < 0:
        # An external trainer starts from the weights that the workers have loaded: version 0.
        ledger.publish(0, 0, 0)
    return Buffer(
        ledger,
        ExtentAllocator(arena.payload_bytes),
        limits_of(config, prompts_in_source=prompts),
        send,
        observer,
        workers=config.rollout.workers,
        quarantine=Quarantine(run_dir(config) / "quarantine", arena, count=observer.quarantine_file).keep,
        # A buffer without a book makes none: it only moves the rows of a failed run to disk.
        plan=None if evaluations is None else EvaluationPlan.of(config),
        book=evaluations,
        last_position=lambda: prompts_of_passes(config),
    )
