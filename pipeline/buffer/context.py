"""The parts that `pipeline.buffer.tickets` and `pipeline.buffer.leases` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipeline.buffer.admission import Limits
from pipeline.buffer.metrics import BufferMetrics
from pipeline.runtime.messages import Message
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.ledger import Ledger
from pipeline.storage.records import Chosen

Send = Callable[[str, Message], None]
"""Delivers a message to a peer, named as in `pipeline.runtime.transport`."""
KeepCopy = Callable[[Chosen, str, str], None]
"""Keeps a copy of rows; the further arguments are the reason (one word) and a description of the event."""


@dataclasses.dataclass
class BufferContext:
    """The state and the surroundings of one buffer.

    Attributes:
        ledger: The tickets and leases that are out.
        allocator: The allocator of extents in the arena.
        limits: The bounds of the buffer; replaced when a configuration is reloaded.
        send: Delivers a message to a peer by name.
        observer: Counts the events.
        quarantine: Keeps a copy of rows that are refused or never delivered again.
        peers: Incarnation of each known peer.
    """

    ledger: Ledger
    allocator: ExtentAllocator
    limits: Limits
    send: Send
    observer: BufferMetrics
    quarantine: KeepCopy
    peers: dict[str, int] = dataclasses.field(default_factory=dict)
