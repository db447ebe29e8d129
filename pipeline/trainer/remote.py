"""A trainer rank on another machine than the daemon's (`trainer.nodes`): the process of any rank, over a wire.

The rank runs `pipeline.trainer.process` as a rank of the daemon's machine does, and takes part in the same collectives.
What that rank finds in shared memory comes over a wire, whose other end is the rank's gateway (`pipeline.trainer.ray`):

    messages of the buffer   both ways, in order
    rows of a lease          asked for by their places; the gateway answers with them in one extent
    shards                   to the files of the daemon's machine, and back (`pipeline.trainer.sharding.remote`)
    metrics                  a slab of this process alone, whose state the gateway shows as its own slot
    reports, log records     to the gateway, which passes them on
    reload, shutdown         from the gateway

The rank's `RemoteRank` is called by three threads: `run` to the end, `deliver` and `collect` beside it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError
from pipeline.experience import codec
from pipeline.models.device import process_device
from pipeline.runtime.actor_start import ActorSpec, enter
from pipeline.runtime.messages import ExtentRows, Message
from pipeline.runtime.role import Report, RoleContext
from pipeline.telemetry.carried_records import CarriedRecords
from pipeline.telemetry.metrics import START, TRAINER, SlotName
from pipeline.telemetry.slab import MetricsSlab, SlotState
from pipeline.trainer import process
from pipeline.trainer.connection import Connection
from pipeline.trainer.meeting import Meeting, StoppedError
from pipeline.trainer.prefetch import FoundRows, Gathering, RowSource
from pipeline.trainer.sharding.remote import Count, RemoteShards

FIND: Final = "find"
_COLLECT_S: Final = 0.1

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec(ActorSpec):
    """The specification of a remote rank.

    Attributes:
        rank: Its rank.
        meeting: The place where the ranks meet.
        slots: The slots of the instance's metrics.
        started_s: Time since the start of the gateway.
    """

    rank: int
    meeting: Meeting
    slots: Sequence[SlotName]
    started_s: float


@dataclasses.dataclass(frozen=True)
class FoundExtent:
    """The rows of a lease in one extent, or the damaged ones' reasons by ticket.

    Attributes:
        extent: The extent's bytes, uint8.
        checksum: Their xxh3-64 checksum.
        rows: Number of rows.
        damaged: See `FoundRows`.
    """

    extent: np.ndarray[Any, np.dtype[np.uint8]]
    checksum: int
    rows: int
    damaged: dict[int, str]


class Question(NamedTuple):
    """A call that a rank waits for: rows of a lease (`find`), or a method of `ShardService`.

    Attributes:
        number: Its number.
        method: The method.
        arguments: Its arguments.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Upward:
    """The messages, questions and metrics of a rank for its gateway.

    Attributes:
        messages: Messages to the buffer, in order.
        questions: Calls that the rank waits for.
        reports: Reports to the supervisor.
        records: Log records.
        slot: The present state of its metrics.
    """

    messages: list[Message]
    questions: list[Question]
    reports: list[Report]
    records: list[logging.LogRecord]
    slot: SlotState

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the state of the metrics is there."""
        return not (self.messages or self.questions or self.reports or self.records)


@dataclasses.dataclass(frozen=True)
class Downward:
    """The messages, answers and changes of a gateway for its rank.

    Attributes:
        messages: Messages of the buffer, in order.
        found: Answers by the number of their question: the result, or the error of the call.
        config: The instance's configuration as JSON, if it has changed; else empty.
        stopping: Whether a shutdown has begun.
    """

    messages: list[Message] = dataclasses.field(default_factory=list)
    found: dict[int, Any] = dataclasses.field(default_factory=dict)
    config: str = ""
    stopping: bool = False


def in_one_extent(rows: RowSource, parts: Sequence[ExtentRows]) -> FoundExtent | RlhfdError:
    """Return the rows of a lease in one extent, of each of its extents those that are meant and no other.

    Args:
        rows: Their place.
        parts: The extents and rows.

    Returns:
        The extent, or the error for which there is none.
    """
    try:
        found = rows.find(parts)
        if found.damaged:
            return FoundExtent(np.zeros(0, np.uint8), 0, 0, dict(found.damaged))
        encoding = codec.Encoding(codec.gather(found.chosen))
        extent = np.zeros(encoding.nbytes, np.uint8)
        encoded = encoding.write(extent.data)
    except RlhfdError as error:
        return error.with_traceback(None)
    return FoundExtent(extent, encoded.checksum, encoding.header.rows, {})


class Wire:
    """The rank's end: receiver and sender of its session, and the place of the rows of its leases."""

    def __init__(self, count: Count = lambda data, nbytes: None) -> None:
        """Begin without a message.

        Args:
            count: Counts bytes of rows.
        """
        self._count = count
        self._changed = threading.Condition()
        self._received: list[Message] = []
        self._sent: list[Message] = []
        self._asked: list[Question] = []
        self._found: dict[int, Any] = {}
        self._reports: list[Report] = []
        self._questions = 0

    # The rank's threads.

    def receive(self, timeout_s: float) -> list[Message]:
        """Return the messages that have arrived, waiting up to `timeout_s` for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._received, timeout_s)
            received, self._received = self._received, []
        return received

    def send(self, message: Message) -> None:
        """Queue a message to the buffer."""
        with self._changed:
            self._sent.append(message)
            self._changed.notify_all()

    def report(self, report: Report) -> None:
        """Queue a report to the supervisor."""
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def find(self, parts: Sequence[ExtentRows]) -> FoundRows:
        """Return rows of leases, which the gateway has checked and laid into one extent.

        Raises:
            RlhfdError: If the gateway cannot find them.
            DecodeError: If other bytes have arrived than it has sent.
        """
        found: FoundExtent = self.ask(FIND, list(parts))
        self._count("rows_received", found.extent.nbytes)
        if found.damaged:
            return FoundRows([], found.damaged)
        reader = codec.ExtentReader(found.extent.data, checksum=found.checksum)
        return FoundRows([(reader, range(found.rows))], {})

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a call that the gateway makes.

        Raises:
            RlhfdError: The error of the call.
        """
        with self._changed:
            number = self._questions = self._questions + 1
            self._asked.append(Question(number, method, arguments))
            self._changed.notify_all()
            self._changed.wait_for(lambda: number in self._found)
            found = self._found.pop(number)
        if isinstance(found, RlhfdError):
            raise found
        return found

    # The gateway's calls.

    def deliver(self, downward: Downward) -> None:
        """Take what the gateway sends."""
        with self._changed:
            self._received += downward.messages
            self._found |= downward.found
            self._changed.notify_all()

    def collect(self, slot: MetricsSlab, rank: int, records: CarriedRecords, timeout_s: float) -> Upward:
        """Return what the rank has for its gateway, waiting up to `timeout_s` for the first of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent or self._asked or self._reports, timeout_s)
            sent, self._sent = self._sent, []
            asked, self._asked = self._asked, []
            reports, self._reports = self._reports, []
        return Upward(sent, asked, reports, records.take(), slot.writer(TRAINER, rank).state())


@dataclasses.dataclass
class _RankContext(RoleContext):
    """A context without files: the gateway sends each configuration."""

    sent_config: str = ""
    _taken: str = ""

    def changed_config(self) -> str | None:
        sent = self.sent_config
        if sent == self._taken:
            return None
        self._taken = sent
        return sent


class RemoteRank:
    """One rank on its machine; the gateway calls it."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._wire = Wire(self._count)
        self._records = CarriedRecords()
        logging.getLogger().addHandler(self._records)
        # Whoever ends this process kills it: no file of it has a name from here on.
        with tempfile.TemporaryDirectory(prefix="rlhfd-rank-") as name:
            folder = Path(name)
            self._slab = MetricsSlab.create(folder / "metrics", spec.slots)
        self._slab.begin(TRAINER, spec.rank, activity=START)
        writer = self._slab.writer(TRAINER, spec.rank)
        writer.enter(START, time.monotonic_ns() - int(spec.started_s * 1e9), 0)
        self._context = _RankContext(
            TRAINER,
            spec.rank,
            folder,
            writer,
            self._wire.report,
            spec.generation,
            sent_config=spec.config,
        )

    def run(self) -> ExitCode | RlhfdError:
        """Train to the end; return the rank's exit code, or the error that names this machine."""
        try:
            return self._run()
        except StoppedError:
            return ExitCode.OK
        except RlhfdError as raised:
            # Without its frames, which refer to the tensors they worked on.
            error = type(raised)(
                f"on {socket.gethostname()}: {raised}", bare=f"on {socket.gethostname()}: {raised.bare}"
            )
            error.__cause__ = error.__context__ = None
            return error

    def deliver(self, downward: Downward) -> None:
        """Take what the gateway sends."""
        if downward.config:
            self._context.sent_config = downward.config
        if downward.stopping:
            self._context.stopping = True
        self._wire.deliver(downward)

    def collect(self, timeout_s: float = _COLLECT_S) -> Upward:
        """Return what this rank has for its gateway, waiting up to `timeout_s` seconds for the first of it."""
        return self._wire.collect(self._slab, self._spec.rank, self._records, timeout_s)

    def _run(self) -> ExitCode:
        config = enter(self._spec)
        logging.getLogger().setLevel(config.daemon.log_level.upper())
        log.info("trains in the cluster: machine=%s actor_pid=%d", socket.gethostname(), os.getpid())
        if (found := process_device().type) != (wanted := self._spec.meeting.device):
            raise ConfigError(f"this rank computes on {found}, the first one on {wanted}: all must on the same")
        return process.run(config, self._context, self._connect, self._spec.meeting)

    def _connect(self, config: Config, context: RoleContext) -> Connection:
        return Connection(
            self._wire, context.folder / "weights", self._wire, self._wire,
            rank=context.index, world_size=config.trainer.world_size,
            prefetch=process.batches_ahead(config),
            # The rows of the next batch are on their way while this one is trained.
            gathering=Gathering.of(config)._replace(ahead=True),
            remote=RemoteShards(self._wire.ask, self._count) if config.shards_trainer else None,
        )  # fmt: skip

    def _count(self, data: str, nbytes: int) -> None:
        self._context.metrics.counter("rlhfd_remote_rank_bytes_total", data=data).inc(nbytes)
