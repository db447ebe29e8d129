"""The buffer's process: ZeroMQ and the arena's ledger around `pipeline.buffer.buffer`."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from pipeline.buffer.buffer import Buffer
from pipeline.buffer.leases import Send
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.observer import Observer
from pipeline.buffer.quarantine import Quarantine
from pipeline.buffer.sizing import ledger_layout, limits_of
from pipeline.buffer.snapshot import BufferSnapshot
from pipeline.buffer.spool import Spool
from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.runtime.messages import Message, Published
from pipeline.runtime.pause import Pause
from pipeline.runtime.role import RoleContext, monotonic_s
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, Traffic
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.ledger import Ledger
from pipeline.storage.weights_header import Age, newest_version
from pipeline.telemetry.activity import ActivityClock

_IDLE_S = 0.25
_LAST_WORDS_S = 2.0
# A look at a file, or the books shown, costs as much as a message: neither is due at each of a thousand a second.
_LOOK_S = 0.2
SHOW_S = 0.02
# Messages that come faster than that are answered together: waking three processes up for each of a thousand appends a
# second costs more than their books.
_TURN_S = 0.001
# What is said is here within milliseconds.
_WORD_S = 1.0

log = logging.getLogger(__name__)


class Outboxes:
    """An outbox a peer, opened when something is first said to it.

    What is said within a turn of the loop leaves at its end, to each peer at once: waking a process up costs more than
    all that the buffer does for a batch.
    """

    def __init__(self, context: RoleContext) -> None:
        self._folder = context.folder
        self._traffic = Traffic(context.metrics)
        self._open: dict[str, Outbox] = {}
        self._said: dict[str, list[Message]] = {}

    def send(self, peer: str, message: Message) -> None:
        """Say something to a peer; it leaves at `flush`, in order."""
        self._said.setdefault(peer, []).append(message)

    def flush(self) -> None:
        """Queue what was said since the last time."""
        said, self._said = self._said, {}
        # By name, trainers before workers: a batch is waited for, a ticket was handed out ahead.
        for peer in sorted(said):
            if peer not in self._open:
                self._open[peer] = Outbox(self._folder, peer, self._traffic)
            self._open[peer].send_all(said[peer])

    def close(self) -> None:
        """Close them all, giving last words a moment to leave."""
        self.flush()
        for outbox in self._open.values():
            outbox.close(linger_s=0.2)


class NewestWeights:
    """Tells the buffer of the newest weights in shared memory, where their trainer's own word of them does not come.

    It may have lain unread with a killed buffer. Rank 0 says it again to the next one once it listens; with several
    ranks it may first wait for another one, and that one for a batch that nobody rolls out before the word is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsaid: tuple[Age, float] | None = None

    def look(self, buffer: Buffer, now_s: float, *, patience_s: float = _WORD_S) -> None:
        """Say what the trainer should have said, if it has not for so long."""
        found = newest_version(self._path)
        totals, versions = buffer.ledger.totals, buffer.ledger.versions
        if found is None or (
            found.version == totals.policy_version and versions.knows(found.version, found.fingerprint)
        ):
            self._unsaid = None
            return
        if self._unsaid is None or self._unsaid[0] != found.age:
            self._unsaid = found.age, now_s
        if now_s - self._unsaid[1] >= patience_s:
            # Once: what the buffer refuses would be refused again.
            self._unsaid = found.age, math.inf
            log.warning("the weights in shared memory are newer than what their trainer has said: version=%d instead "
                        "of %d rollback=%s", found.version, totals.policy_version, found.rollback)  # fmt: skip
            buffer.handle(
                Published(found.version, found.fingerprint, found.trained_through, found.rollback, found.position),
                now_s,
            )


def run(config: Config, context: RoleContext) -> ExitCode:
    """Serve tickets and leases until told to stop."""
    arena = Arena(context.folder / "arena", payload=False)
    ledger = Ledger(arena.ledger, ledger_layout(config))
    traffic = Traffic(context.metrics)
    mailbox, outboxes = Mailbox(context.folder, BUFFER, traffic), Outboxes(context)
    metrics = BufferMetrics(context.metrics)
    clock = ActivityClock(context.metrics, ["wait_data"])
    spool = Spool(config, arena, context.metrics.beat)
    if ledger.totals.tickets:
        log.info("ledger taken over: ready=%d leased=%d tickets=%d", ledger.ready, ledger.leased, ledger.reserved)
    spool.take_in(ledger, monotonic_s(), lambda rows: metrics.set_aside("checksum", rows))
    buffer = new_buffer(config, ledger, arena, outboxes.send, metrics, prompts=context.prompts)
    journal = BufferSnapshot(config, arena, metrics.journal_written, on_progress=context.metrics.beat)
    pause, weights = Pause(context.folder), NewestWeights(context.folder / "weights")
    weights.look(buffer, monotonic_s(), patience_s=0.0)
    buffer.paused = pause.is_on()
    busy_s = looked_s = shown_s = -math.inf
    is_shown = True
    outboxes.flush()
    metrics.publish(buffer, monotonic_s(), arena.payload_bytes)
    context.ready()
    try:
        while not context.stopping:
            with clock.during("wait_data"):
                said = mailbox.wait(_IDLE_S if is_shown else SHOW_S)
                if said and (left_s := busy_s + _TURN_S - monotonic_s()) > 0:
                    time.sleep(left_s)
                messages = mailbox.receive(0.0)
            now_s, refused = monotonic_s(), buffer.refused
            busy_s = now_s if said else busy_s
            if now_s - looked_s >= _LOOK_S:
                looked_s, buffer.paused = now_s, pause.is_on()
                weights.look(buffer, now_s)
                if (changed := context.reloaded()) is not None:
                    rollout = changed.rollout
                    buffer.limit(max_attempts=rollout.max_attempts, ticket_timeout_s=rollout.ticket_timeout_s)
            for message in messages:
                buffer.handle(message, now_s)
            traffic.drop(BUFFER, buffer.refused - refused)
            buffer.step(now_s)
            outboxes.flush()
            journal.step(buffer, now_s)
            if is_shown := not said or now_s - shown_s >= SHOW_S:
                metrics.publish(buffer, now_s, arena.payload_bytes)
                shown_s = now_s
        _hear_last_words(buffer, mailbox)
        outboxes.flush()
        whole = True
        if buffer.draining:
            journal.close(buffer)
            whole = buffer.finish(None if buffer.complete else spool.write)
            if whole:
                journal.remove()
            metrics.publish(buffer, monotonic_s(), arena.payload_bytes)
        return ExitCode.OK if whole else ExitCode.FAILED
    finally:
        outboxes.close()
        mailbox.close()
        ledger.close()
        arena.close()


def _hear_last_words(buffer: Buffer, mailbox: Mailbox) -> None:
    """Take note of what was said before SIGTERM came: the signal may overtake a last version, or the drain itself."""
    until_s = monotonic_s() + _LAST_WORDS_S
    while (left_s := until_s - monotonic_s()) > 0:
        messages = mailbox.receive(0.0 if buffer.draining else left_s)
        if not messages:
            return
        for message in messages:
            buffer.handle(message, monotonic_s())


def new_buffer(
    config: Config, ledger: Ledger, arena: Arena, send: Send, observer: Observer, *, prompts: int = 0
) -> Buffer:
    """Return the buffer that a configuration asks for, on a ledger fresh or left by an earlier one."""
    if config.trainer.kind == "external" and ledger.totals.policy_version < 0:
        # A trainer of one's own starts from the weights that the workers have loaded: version 0.
        ledger.publish(0, 0, 0)
    return Buffer(
        ledger,
        ExtentAllocator(arena.payload_bytes),
        limits_of(config),
        send,
        observer,
        workers=config.rollout.workers,
        max_attempts=config.rollout.max_attempts,
        ticket_timeout_s=config.rollout.ticket_timeout_s,
        prompts_in_source=prompts,
        quarantine=Quarantine(
            config.daemon.state_dir / "quarantine",
            arena,
            most_bytes=config.buffer.quarantine_bytes,
            count=observer.quarantine_file,
        ).keep,
    )
