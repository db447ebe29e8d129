"""The messages between the processes: frozen msgspec structs, msgpack on the wire, nothing pickled.

Bulk data never travels in a message; the message has the offset of its extent in the arena. A dead process leaves
messages in flight, so a receiver compares `to` with its own incarnation and ignores messages to an earlier one.
"""

from __future__ import annotations

import functools
import operator
from typing import Final, Literal

import msgspec

from pipeline.errors import DecodeError
from pipeline.storage.files import UNREADABLE
from pipeline.telemetry.evaluations import PromptResult


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every message; `array_like` keeps field names off the wire."""


EVALUATION_TICKETS: Final = 1 << 52
"""Numbers of evaluation tickets begin here, those of all others are below; a float64 of the metrics holds both."""


def is_evaluation(ticket: int) -> bool:
    """Return whether this is the number of an evaluation ticket, which has no extent and no rows."""
    return ticket >= EVALUATION_TICKETS


FaultReason = Literal["lengths", "mask", "vocabulary", "not_finite", "malformed"]
"""The check of the insert gate that failed (`pipeline.rollout.insert_gate`); ``malformed``: any other wrong field."""


# To the buffer.


class Hello(Message, frozen=True):
    """A worker or trainer rank connects, at its start and after each `Welcome` of a new buffer.

    `held` are the tickets or leases that it holds; the buffer treats the others of its name as those of a dead
    predecessor. `attempts` are the attempt numbers of a worker's held tickets: a ticket handed out again since has
    another number and has not reached it. `fresh`: it has received no lease yet, so a trainer's weights are exactly the
    newest version. `pid` distinguishes it from a predecessor whose death is reported late.
    """

    peer: str
    incarnation: int
    held: list[int] = []
    fresh: bool = True
    pid: int = 0
    attempts: list[int] = []


class WantTickets(Message, frozen=True):
    """A worker can hold this many tickets in all, its present tickets included."""

    worker: str
    incarnation: int
    tickets: int


class Sealed(Message, frozen=True):
    """A ticket's experience is whole in the arena, checksum included; repeated until `Settled`.

    `attempt` is the ticket's: a message with an earlier attempt than the last is late and has no effect. 0: attempts
    are not counted. `flat` are the numbers of the groups whose rewards are all equal, from 0, in order.
    """

    worker: str
    ticket: int
    rows: int
    nbytes: int
    checksum: int
    policy_version: int
    fingerprint: int
    prompts_failed: int = 0
    attempt: int = 0
    flat: list[int] = []


class Failed(Message, frozen=True):
    """A ticket failed without experience; the buffer decides on a retry of its prompts. `attempt`: see `Sealed`."""

    worker: str
    ticket: int
    reason: str
    retry: bool
    attempt: int = 0


class Faulty(Message, frozen=True):
    """A ticket's experience failed the insert gate; repeated until `Settled`.

    It is in the extent nevertheless, for the quarantine; `rows` is 0 if it could not be written. `attempt`: see
    `Sealed`.
    """

    worker: str
    ticket: int
    reason: FaultReason
    detail: str
    rows: int
    nbytes: int
    checksum: int
    policy_version: int
    fingerprint: int
    attempt: int = 0


class Evaluated(Message, frozen=True):
    """The results of an evaluation ticket, at most one a prompt; repeated until `Settled`. `attempt`: see `Sealed`."""

    worker: str
    ticket: int
    policy_version: int
    fingerprint: int
    results: list[PromptResult]
    attempt: int = 0


class Credit(Message, frozen=True):
    """A trainer rank can hold this many leased batches in all."""

    trainer: str
    incarnation: int
    batches: int


class Ack(Message, frozen=True):
    """The optimizer step that used this batch is done: its rows count as trained, once every rank has said so."""

    trainer: str
    lease: int


class Release(Message, frozen=True):
    """A trainer hands a batch back unused; its rows are ready again.

    It has no effect from an earlier `incarnation` of the rank: the successor has the batch by then.
    """

    trainer: str
    lease: int
    incarnation: int


class Damaged(Message, frozen=True):
    """A trainer found extents of its lease unusable and trained on no row of the batch; the buffer quarantines them.

    The trainer has dropped that lease and its later leases, and has a new `incarnation` from then on: leases sent to
    it before, under the same numbers, are ignored.
    """

    trainer: str
    lease: int
    tickets: list[int]
    reason: str
    incarnation: int = 0


class Published(Message, frozen=True):
    """New weights are whole in shared memory; they include every lease below `trained_through`.

    With `rollback` they are older than the weights before: a trainer resumed from a checkpoint, and the later versions
    are void. Prompts from `position` on may be missing from them; -1: unknown.
    """

    version: int
    fingerprint: int
    trained_through: int
    rollback: bool = False
    position: int = -1


class PeerDied(Message, frozen=True):
    """The supervisor has reaped this peer: its tickets are handed out again, its leases go to its successor.

    `working_on` is its ticket or lease in work at its death, -1 for none.
    """

    peer: str
    working_on: int = -1
    pid: int = 0


class Drain(Message, frozen=True):
    """No new tickets and no new leases; finish the work in hand, then exit 0. To the buffer, and from it to all peers.

    `complete`: the run has taken its last step, so undelivered rows are useless to a later start.
    """

    complete: bool = False


# From the buffer.


class Welcome(Message, frozen=True):
    """The buffer's answer to `Hello`, or the request of a restarted buffer for one."""

    incarnation: int


class Ticket(Message, frozen=True):
    """Permission to roll out `prompts` prompts from `position` on, with reserved room for their rows.

    With `evaluation` the prompts are those of the held-out file of this number; they have no rows, and no room.
    A dead buffer's ticket is void unless the worker has named it to the successor: see `RolloutWorker`, which takes a
    new incarnation then.
    """

    to: int
    ticket: int
    position: int
    prompts: int
    attempt: int
    offset: int
    nbytes: int
    policy_version: int
    deadline_s: float
    evaluation: int = -1


class Settled(Message, frozen=True):
    """The buffer has recorded a `Sealed`, `Faulty`, `Failed` or `Evaluated` ticket; the worker may forget it."""

    to: int
    ticket: int


class Wait(Message, frozen=True):
    """No ticket now: the buffer is ``full``, ``paused`` or ``draining``, or it would exceed the ``staleness`` bound.

    ``ended``: the prompts of `trainer.max_epochs` passes are issued.
    """

    to: int
    reason: str


class ExtentRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one extent, in the order in which the batch takes them, and the prompts of its ticket; -1: unknown."""

    offset: int
    nbytes: int
    checksum: int
    policy_version: int
    ticket: int
    rows: list[int]
    position: int = -1
    prompts: int = 0


class Lease(Message, frozen=True):
    """One batch of `sample_batch_size` rows, the trainer's until `Published`, `Ack`, `Release` or `Damaged`.

    Every prompt before `position` is trained, dropped or in a lease up to this one; a run whose shared memory is lost
    resumes there. `deaths` is the largest number of trainers that died at a row of it.
    """

    to: int
    lease: int
    for_version: int
    parts: list[ExtentRows]
    position: int = 0
    deaths: int = 0


class Exhausted(Message, frozen=True):
    """All prompts of `trainer.max_epochs` passes were issued, and the rows that are left are fewer than a batch.

    Every lease below `through` is leased or trained; as things stand no other one follows.
    """

    to: int
    through: int


# To and from the server of a `DetachedReplayBuffer`; it uses the messages about tickets and leases above as well.


class Join(Message, frozen=True):
    """A client connects to the server of this incarnation, 0 for a server unknown to it.

    It receives on `socket`; it holds at most this ticket or this lease, and no earlier one of its name.
    """

    client: str
    incarnation: int
    socket: str
    server: int
    ticket: int = -1
    lease: int = -1


class WantRoom(Message, frozen=True):
    """A client will append `rows` rows in up to `nbytes` and waits for a `Ticket` until `deadline_s`."""

    client: str
    incarnation: int
    request: int
    rows: int
    nbytes: int
    deadline_s: float


class WantBatch(Message, frozen=True):
    """A client waits for a `Lease` until `deadline_s`."""

    client: str
    incarnation: int
    request: int
    deadline_s: float


class Ask(Message, frozen=True):
    """A client requests an action and, after it, `Books`."""

    client: str
    incarnation: int
    request: int
    action: Literal["stats", "flush", "clear", "drain"]
    deadline_s: float


class Delivered(Message, frozen=True):
    """A consumer's `Ack` or `Damaged` is recorded: the lease has ended."""

    to: int
    lease: int


class Refused(Message, frozen=True):
    """A request failed; `kind` determines the error to raise."""

    to: int
    request: int
    kind: Literal["deadline", "closed", "arena"]
    reason: str


class Books(Message, frozen=True):
    """The totals of all rows: ``sealed = trained + dropped + ready + leased``; `rows` were flushed or cleared."""

    to: int
    request: int
    sealed: int
    trained: int
    dropped: int
    ready: int
    leased: int
    batches: int
    free_bytes: int
    rows: int = 0


KINDS: Final = tuple(Message.__subclasses__())

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(functools.reduce(operator.or_, KINDS))


def encode(message: Message) -> bytes:
    """Return the message's wire form."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in `data`.

    Raises:
        DecodeError: If it is not exactly one well-formed message of a known type.
    """
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise DecodeError(f"message of {len(data):,} B does not decode: {error}") from error
