"""rlhfd's way: codec and arena, the buffer's own process with its ledger, and the trainer's connection.

The producer is a rollout worker without a rollout: it takes tickets, writes an existing experience, and sends `Sealed`.
Everything else is as in a run: leases, ledger, version stamps, xxh3 on both sides.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benches.ways import QUEUED_BATCHES, Send
from benches.workload import APPEND_ROWS, BATCH_ROWS, TRAINER_VARIABLE, Arrays
from pipeline.buffer import process as buffer_process
from pipeline.buffer.sizing import checked_layout
from pipeline.config.schema import Config, DaemonConfig, RolloutConfig, TrainerConfig
from pipeline.config.sections import BufferConfig, MetricsConfig
from pipeline.errors import DeadlineError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.runtime.messages import Hello, Sealed, Settled, Ticket, WantTickets, Welcome
from pipeline.runtime.role import RoleContext
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, worker_name
from pipeline.runtime.workspace import Workspace
from pipeline.storage.arena import Arena
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.connect import open_connection
from pipeline.trainer.connection import Connection

# Half of the batches that may be queued are leased to the trainer; half are reserved, or sealed and not leased yet.
_PREFETCH = QUEUED_BATCHES // 2
_TICKETS_AHEAD = QUEUED_BATCHES // 2 * BATCH_ROWS // APPEND_ROWS
_WORKERS = 2
_DEADLINE_S = 60.0
_TRAINER = os.environ.get(TRAINER_VARIABLE)


class Way:
    """The trainer's side, and the instance around it."""

    def __init__(self) -> None:
        folder = Path("/dev/shm") / f"rlhfd-bench-{secrets.token_hex(4)}"
        config = configuration(folder)
        self._workspace = Workspace.prepare(folder, config, checked_layout(config))
        slots = [SlotName("supervisor", 0), SlotName("buffer", 0), SlotName("trainer", 0)]
        MetricsSlab.create(self._workspace.metrics_path, slots).close()
        self._buffer = subprocess.Popen([sys.executable, "-m", "benches.ways.daemon", str(folder)])
        self.parts = {"buffer": self._buffer.pid}
        if _TRAINER == "own":
            config = config.changed("trainer", kind="builtin")
        self._connection: Connection = open_connection(folder, config, rank=0, prefetch=_PREFETCH)

    def address(self) -> Any:
        return str(self._workspace.folder)

    def batches(self) -> Iterator[Any]:
        if _TRAINER is None:
            return map(arrays_of, self._connection.experiences(timeout_s=_DEADLINE_S))
        return map(arrays_of_rows, self._connection.experiences(timeout_s=_DEADLINE_S, ragged=True))

    def close(self) -> None:
        self._connection.close()
        self._buffer.kill()
        self._buffer.wait()
        shutil.rmtree(self._workspace.folder, ignore_errors=True)

    @staticmethod
    def sender(address: Any, index: int) -> Send:
        worker = Worker(Path(address), index)
        return worker.send


class Worker:
    """A rollout worker whose experience exists already."""

    def __init__(self, folder: Path, index: int) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        self._arena = Arena(folder / "arena")
        self._arena.populate()
        self._name = worker_name(index)
        self._mailbox, self._outbox = Mailbox(folder, self._name), Outbox(folder, BUFFER)
        self._incarnation = os.getpid()
        self._tickets: list[Ticket] = []
        self._made: dict[int, tuple[Arrays, RaggedRows]] = {}
        self._welcome: Welcome | None = None
        self._outbox.send(Hello(self._name, self._incarnation, []))
        while self._welcome is None:
            self._receive(deadline_s)
        self._outbox.send(Hello(self._name, self._incarnation, []))
        self._outbox.send(WantTickets(self._name, self._incarnation, _TICKETS_AHEAD))

    def send(self, arrays: Arrays) -> None:
        """Write an append into the room of the next ticket, and send `Sealed`."""
        if id(arrays) not in self._made:
            self._made[id(arrays)] = (arrays, RaggedRows.of(experience_of(arrays)))
        rows = self._made[id(arrays)][1]
        deadline_s = time.monotonic() + _DEADLINE_S
        while not self._tickets:
            self._receive(deadline_s)
        ticket = self._tickets.pop(0)
        encoded = codec.encode(rows, self._arena.extent(ticket.offset, ticket.nbytes))
        self._outbox.send(
            Sealed(self._name, ticket.ticket, APPEND_ROWS, encoded.nbytes, encoded.checksum, ticket.policy_version, 0)
        )

    def _receive(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise DeadlineError("the buffer gives no ticket")
        for message in self._mailbox.receive(0.5):
            match message:
                case Welcome():
                    self._welcome = message
                case Ticket(to=self._incarnation):
                    self._tickets.append(message)
                case Settled():
                    pass


def configuration(folder: Path) -> Config:
    """Return a run of batches of 16 rows whose trainer never publishes; the bound of staleness allows it."""
    return Config(
        daemon=DaemonConfig(runtime_dir=folder / "run", state_dir=folder / "state"),
        rollout=RolloutConfig(algorithm="ppo", workers=_WORKERS, batch_size=APPEND_ROWS),
        buffer=BufferConfig(
            sample_batch_size=BATCH_ROWS,
            limit=QUEUED_BATCHES - _PREFETCH,
            max_staleness=1024,
            arena_bytes=256 << 20,
            # 16 MiB an append: images come in appends of 8 rows.
            row_bytes=(16 << 20) // APPEND_ROWS,
        ),
        trainer=TrainerConfig(kind="external", publish_every=1024),
        metrics=MetricsConfig(port=0),
    )


def experience_of(arrays: Arrays) -> Experience:
    """Return the experience that shares these arrays; an external trainer's metrics take its scores."""
    tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in arrays.items()}
    tensors["info"] = {"score": tensors["reward"]}
    if "pixel_values" in tensors:
        patches = len(tensors["pixel_values"]) // APPEND_ROWS
        grids = torch.tensor([[1, 1, patches]]).repeat(APPEND_ROWS, 1)
        return ExperienceVL(**tensors, image_grid_thws=grids)
    return Experience(**tensors)


def arrays_of(experience: Experience) -> Arrays:
    """Return the tensors of a batch as arrays over the same memory."""
    return {name: value.numpy() for name, value in vars(experience).items() if isinstance(value, torch.Tensor)}


def arrays_of_rows(rows: RaggedRows) -> Arrays:
    """Return the columns and the pixels of rows without padding as arrays over the same memory."""
    vision = {} if rows.vision is None else rows.vision.tensors()
    return {**rows.columns, **{name: value.numpy() for name, value in vision.items()}}


def _serve(folder: Path) -> None:
    workspace = Workspace.open(folder)
    config = Config.model_validate_json(workspace.config_path.read_bytes())
    slab = MetricsSlab.attach(workspace.metrics_path)
    slab.begin("buffer")
    writer = slab.writer("buffer")
    buffer_process.run(config, RoleContext("buffer", 0, folder, writer, lambda report: None))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
