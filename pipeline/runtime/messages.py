"""What the processes say to each other: frozen msgspec structs, msgpack on the wire, nothing pickled.

Bulk data never travels in a message; an extent of the arena is named by its offset instead. A process that died leaves
messages in flight behind, so whoever is addressed compares `to` with its own incarnation and ignores older mail.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeline.errors import DecodeError
from pipeline.storage.files import UNREADABLE


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every message; `array_like` keeps field names off the wire."""


FaultReason = Literal["lengths", "mask", "vocabulary", "not_finite", "malformed"]
"""What keeps experience out (`pipeline.rollout.insert_gate`); ``malformed``: whatever else is wrong with its fields."""


# To the buffer.


class Hello(Message, frozen=True):
    """A worker or trainer rank introduces itself, on its start and whenever a new buffer says `Welcome`.

    `held` are the tickets or leases it has in hand; the buffer gives the others of its name to its successor. A worker
    says in `attempts` as which attempt it got each: one that was handed out again since has not reached it.
    `fresh`: it was given none yet, so a trainer's weights are the newest version and nothing beyond. `pid` tells it
    from a predecessor whose death is reported late.
    """

    peer: str
    incarnation: int
    held: list[int] = []
    fresh: bool = True
    pid: int = 0
    attempts: list[int] = []


class WantTickets(Message, frozen=True):
    """A worker can hold this many tickets in all, those it holds now included."""

    worker: str
    incarnation: int
    tickets: int


class Sealed(Message, frozen=True):
    """A ticket's experiences are whole in the arena, checksum included; sent again until `Settled`.

    `attempt` is that of the ticket: of an earlier hand-out than the last it is a repeat. 0 where nobody counts them.
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


class Failed(Message, frozen=True):
    """A ticket came to nothing; the buffer decides whether its prompts are tried again. `attempt` as of `Sealed`."""

    worker: str
    ticket: int
    reason: str
    retry: bool
    attempt: int = 0


class Faulty(Message, frozen=True):
    """What came of a ticket did not pass the insert gate; sent again until `Settled`.

    It is in the extent all the same, for the quarantine; with `rows` 0 it could not be written. `attempt` is as of
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


class Credit(Message, frozen=True):
    """A trainer rank can hold this many leased batches in all."""

    trainer: str
    incarnation: int
    batches: int


class Ack(Message, frozen=True):
    """The optimizer step that used this batch is done: its rows count as trained."""

    trainer: str
    lease: int


class Release(Message, frozen=True):
    """A trainer hands a batch back unused; its rows are ready again.

    From an `incarnation` that the rank goes by no more it means nothing: its successor has the batch by then.
    """

    trainer: str
    lease: int
    incarnation: int


class Damaged(Message, frozen=True):
    """A trainer found extents of its lease unusable and trained on none of the batch: they are for quarantine.

    It has let go of that lease and of all that it held behind it, and goes by `incarnation` from here on: what was
    sent to it before, under the same numbers, is not for it any more.
    """

    trainer: str
    lease: int
    tickets: list[int]
    reason: str
    incarnation: int = 0


class Published(Message, frozen=True):
    """New weights are whole in shared memory; they include every lease below `trained_through`.

    With `rollback` they are older ones than those before: a trainer went on from a checkpoint, and what came after it
    exists no more. Prompts from `position` on may be missing from them, with -1 nobody knows which.
    """

    version: int
    fingerprint: int
    trained_through: int
    rollback: bool = False
    position: int = -1


class PeerDied(Message, frozen=True):
    """The supervisor has reaped this peer: its tickets and leases are free.

    `working_on` is the ticket or lease that it was at when it died, -1 for none.
    """

    peer: str
    working_on: int = -1
    pid: int = 0


class Drain(Message, frozen=True):
    """No new tickets and no new leases; finish what is in hand, then exit 0. Goes to the buffer, and from it to all.

    `complete`: the run has taken its last step, so what is undelivered is of no use to a later start.
    """

    complete: bool = False


# From the buffer.


class Welcome(Message, frozen=True):
    """A buffer answers `Hello`, or has started anew and asks for one."""

    incarnation: int


class Ticket(Message, frozen=True):
    """Leave to roll out `prompts` prompts from `position` on, and the room for what comes of it.

    Of a dead buffer it is void unless its successor was told of it: see `RolloutWorker`, which changes its name then.
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


class Settled(Message, frozen=True):
    """The buffer has taken note of a `Sealed`, `Faulty` or `Failed` ticket; the worker may forget it."""

    to: int
    ticket: int


class Wait(Message, frozen=True):
    """No ticket now: the buffer is ``full``, ``paused`` or ``draining``, or it would exceed the ``staleness`` bound."""

    to: int
    reason: str


class ExtentRows(Message, frozen=True):
    """Rows of one extent, in the order in which the batch takes them."""

    offset: int
    nbytes: int
    checksum: int
    policy_version: int
    ticket: int
    rows: list[int]


class Lease(Message, frozen=True):
    """One batch of `sample_batch_size` rows, the trainer's until `Ack` or `Release`.

    Every prompt before `position` is trained, dropped or in a lease up to this one: where a run goes on whose shared
    memory is lost.
    """

    to: int
    lease: int
    for_version: int
    parts: list[ExtentRows]
    deliveries: int = 1
    position: int = 0


# To the server of a `DetachedReplayBuffer`, and from it; beside these it speaks of tickets and leases as above.


class Join(Message, frozen=True):
    """A client introduces itself to the server of this incarnation, 0 for one it has not met yet.

    It listens on `socket`; of all that its name ever held it has at most this ticket or this lease.
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
    """A client wants `what` to be done, and `Books` when it is."""

    client: str
    incarnation: int
    request: int
    what: Literal["stats", "flush", "clear", "drain"]
    deadline_s: float


class Delivered(Message, frozen=True):
    """A consumer's `Ack` or `Damaged` was taken note of: the lease has ended."""

    to: int
    lease: int


class Refused(Message, frozen=True):
    """A request came to nothing; `kind` tells the error to raise."""

    to: int
    request: int
    kind: Literal["deadline", "closed", "arena"]
    reason: str


class Books(Message, frozen=True):
    """What became of all rows: ``sealed = trained + dropped + ready + leased``; `rows` were flushed or cleared."""

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


AnyMessage = (
    Hello
    | WantTickets
    | Sealed
    | Failed
    | Faulty
    | Credit
    | Ack
    | Release
    | Damaged
    | Published
    | PeerDied
    | Drain
    | Welcome
    | Ticket
    | Settled
    | Wait
    | Lease
    | Join
    | WantRoom
    | WantBatch
    | Ask
    | Delivered
    | Refused
    | Books
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return the message's wire form."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message that `data` holds.

    Raises:
        DecodeError: If it is not exactly one well-formed message of a known type.
    """
    try:
        message: Message = _decoder.decode(data)
    except UNREADABLE as error:
        raise DecodeError(f"message of {len(data):,} B does not decode: {error}") from error
    return message
