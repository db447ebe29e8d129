"""All roles in one process, in turns: the same decisions on the same arena, without a socket or a second process.

It is slower, and its roles cannot be killed one by one; it is meant for stepping through with a debugger. With
``max_staleness = 0`` it gives, bit for bit, the experience and the weights of a run with any number of workers.
"""

from __future__ import annotations

import collections
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

from pipeline import sort_digits
from pipeline.buffer.buffer import Buffer
from pipeline.buffer.metrics import BufferMetrics
from pipeline.buffer.process import new_buffer
from pipeline.buffer.sizing import checked_layout, ledger_layout
from pipeline.buffer.snapshot import BufferSnapshot
from pipeline.buffer.spool import Spool
from pipeline.config import user_modules
from pipeline.config.identity import run_dir, run_name
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError
from pipeline.prompts.source import prompts_at_most
from pipeline.rollout.process import new_worker
from pipeline.rollout.worker import RolloutWorker
from pipeline.runtime.latest_checkpoint import checkpoints_dir, read_latest
from pipeline.runtime.lock import InstanceLock, SharedMemoryLock, StateLock, shm_directory
from pipeline.runtime.messages import Message
from pipeline.runtime.role import RoleContext
from pipeline.runtime.run_start import begin_run, forgotten_if_refused, open_run
from pipeline.runtime.signals import hold_signals, ignore_signals, outlive_user_signals, unwind_on_signals
from pipeline.runtime.transport import BUFFER, trainer_name, worker_name
from pipeline.runtime.workspace import Workspace
from pipeline.storage.arena import Arena
from pipeline.storage.ledger import Ledger
from pipeline.telemetry import log as logs
from pipeline.telemetry.evaluations import FILE_NAME, EvaluationFile
from pipeline.telemetry.history import learning_of
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.run_log import RunLog
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer import setup
from pipeline.trainer.connection import Connection
from pipeline.trainer.prefetch import Gathering
from pipeline.trainer.process import batches_ahead, new_trainer
from pipeline.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class Queue:
    """A role's messages from the other roles of its process: a `Sender` to it, and its `Receiver`."""

    def __init__(self) -> None:
        self._messages: collections.deque[Message] = collections.deque()

    def send(self, message: Message) -> None:
        """Queue a message to the role."""
        self._messages.append(message)

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """Return the queued messages without a wait: within one process no role could queue more meanwhile."""
        return [self._messages.popleft() for _ in range(len(self._messages))]


def run(loaded: LoadedConfig, *, back_to: str = "") -> ExitCode:
    """Run an instance in this process until it has ended.

    Args:
        loaded: The configuration.
        back_to: A checkpoint of the run to go back to, such as ``step-000070``.

    Raises:
        ConfigError: If the configuration cannot be run in one process, or not on this machine.
    """
    # One process prints for all roles; one progress bar a model is noise.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # As for a child.
    user_modules.use_folder_of(loaded.path)
    user_modules.extend_path()
    config = sort_digits.with_paths(loaded.config)
    logs.configure("serial", level=config.daemon.log_level, json=config.daemon.log_format == "json")
    if config.trainer.world_size != 1 or config.trainer.kind != "builtin":
        raise ConfigError(
            "--serial: one process holds one built-in trainer rank; set trainer.world_size = 1 and kind = builtin"
        )
    if config.cluster.engine != "local":
        raise ConfigError("--serial: one process computes all of it; set cluster.engine = local")
    hold_signals()
    outlive_user_signals()
    runtime_dir, shm_dir = Path(config.daemon.runtime_dir), shm_directory(config.daemon.runtime_dir)
    state_lock = StateLock(Path(config.daemon.state_dir), runtime_dir, run_name(config))
    with (
        InstanceLock(runtime_dir),
        state_lock,
        RunLog(config, "serial"),
        SharedMemoryLock(shm_dir) as shm_lock,
        forgotten_if_refused(config),
    ):
        if completed := open_run(config, shm_dir, back_to=back_to, dtype_follows_gpus=loaded.dtype_follows_gpus):
            _tell(completed)
            return ExitCode.OK
        if config.metrics.tracker:
            log.warning("metrics.tracker: no tracker runs with --serial; the next start without it sends the lines")
        workspace = begin_run(config, shm_dir, checked_layout(config))
        shm_lock.hold()
        serial, has_begun = None, False
        try:
            unwind_on_signals()
            if sort_digits.is_used(loaded.config):
                setup.prepare(sort_digits.directory_of(config.daemon.state_dir))
            has_begun = True
            serial = _Serial(config, workspace)
            code = serial.run()
        except BaseException as error:
            ignore_signals()
            if isinstance(error, RlhfdError):
                _spool_undelivered(config, workspace)
            # After an unexpected error, or one of the trainer, the run stays in shared memory for the next start, as
            # after a kill.
            has_steps = serial is not None and serial.step > 0
            if not has_begun or isinstance(error, SystemExit) or (isinstance(error, RlhfdError) and not has_steps):
                workspace.undo()
            raise
        ignore_signals()
        if code is ExitCode.OK:
            workspace.remove()
        else:
            log.error("the end of the run is not on disk, its errors are above: weights, training state and rows stay "
                      "in %s for the next start, which goes on from there: make room in %s and start again "
                      "(`rlhfd start --fresh` gives them up)", workspace.folder, config.daemon.state_dir)  # fmt: skip
        if serial.failure is not None:
            raise serial.failure
        return code


def _spool_undelivered(config: Config, workspace: Workspace) -> None:
    """Spool the untrained rows of a failed run to disk, for the next start."""
    if not workspace.metrics_path.exists():
        return
    arena = Arena(workspace.arena_path, payload=False)
    metrics = BufferMetrics(MetricsSlab.attach(workspace.metrics_path).writer("buffer", 0))
    buffer = new_buffer(config, Ledger(arena.ledger, ledger_layout(config)), arena, lambda peer, message: None, metrics)
    buffer.finish(Spool(config, arena).write)


class _Serial:
    """The roles and their turns.

    Attributes:
        failure: The error of buffer or worker that has ended the run, which stops as at a signal then.
    """

    def __init__(self, config: Config, workspace: Workspace) -> None:
        self._config = config
        self._queues: dict[str, Queue] = collections.defaultdict(Queue)
        self._stopping = self._is_at_trainer = False
        self.failure: RlhfdError | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        slots = [SlotName("supervisor"), SlotName("buffer"), SlotName("trainer", 0), SlotName("rollout", 0)]
        self._slab = MetricsSlab.reopen(workspace.metrics_path, slots)
        self._reader = MetricsReader(self._slab)
        self._arena = Arena(workspace.arena_path)
        self._buffer_metrics = BufferMetrics(self._context("buffer", workspace).metrics)
        self._spool = Spool(config, self._arena)
        self._evaluations = EvaluationFile(run_dir(config) / FILE_NAME)
        self._buffer = self._new_buffer()
        self._snapshot = BufferSnapshot(config, self._arena, self._buffer_metrics.snapshot_written)
        self._trainer = self._new_trainer(workspace)
        self._worker = self._new_worker(workspace)

    @property
    def step(self) -> int:
        """The last step that the trainer has taken."""
        return self._trainer.step

    def run(self) -> ExitCode:
        """Take turns until the run has ended; return whether its end is on disk.

        Raises:
            RlhfdError: If the trainer, or any role before the first step, cannot go on.
        """
        try:
            return self._run()
        except BaseException:
            self._trainer.abandon()
            raise

    def _run(self) -> ExitCode:
        try:
            self._take_turns()
        except RlhfdError as error:
            # An error within a step may leave the weights half changed.
            if self._is_at_trainer or not self.step:
                raise
            self.failure = error
        saved = self._trainer.close()
        self._buffer_turn()
        self._buffer.draining = True
        self._snapshot.close(self._buffer)
        whole = self._buffer.finish(None if self._trainer.complete else self._spool.write)
        if whole:
            self._snapshot.remove()
        self._worker.close()
        totals = self._buffer.ledger.totals
        log.info("experiences: sealed=%d trained=%d dropped=%d", totals.sealed, totals.trained, sum(totals.dropped))
        if (latest := read_latest(root := checkpoints_dir(self._config))) is not None:
            log.info("checkpoint, a folder for from_pretrained: %s", root / latest.path)
        return ExitCode.OK if saved and whole else ExitCode.FAILED

    def _take_turns(self) -> None:
        step = -1
        while not (self._trainer.finished or self._stopping):
            self._buffer_turn()
            self._worker_turn()
            self._buffer_turn()
            self._is_at_trainer = True
            self._trainer_turn()
            self._is_at_trainer = False
            if self.step != step:
                step = self.step
                self._print_step(step)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        # The present turn is finished first; a second signal does not wait for it.
        unwind_on_signals()

    def _context(self, role: str, workspace: Workspace) -> RoleContext:
        self._slab.begin(role, 0)
        return RoleContext(role, 0, workspace.folder, self._slab.writer(role, 0), lambda report: None)

    def _new_buffer(self) -> Buffer:
        ledger = Ledger(self._arena.ledger, ledger_layout(self._config))
        config = self._config.changed("rollout", workers=1)
        metrics = self._buffer_metrics
        self._spool.take_in(ledger, time.monotonic(), lambda rows: metrics.set_aside("checksum", rows))
        return new_buffer(
            config, ledger, self._arena, lambda peer, message: self._queues[peer].send(message), metrics,
            prompts=prompts_at_most(config.prompts), evaluations=self._evaluations,
        )  # fmt: skip

    def _new_trainer(self, workspace: Workspace) -> Trainer:
        torch.set_num_threads(self._config.trainer.threads)
        connection = Connection(
            self._arena, workspace.weights_path,
            self._queues[trainer_name(0)], self._queues[BUFFER],
            rank=0, world_size=1, prefetch=batches_ahead(self._config),
            gathering=Gathering.of(self._config), weight_slots=self._config.trainer.weight_slots,
        )  # fmt: skip
        trainer = new_trainer(self._config, self._context("trainer", workspace), connection)
        trainer.publish_in_place()
        return trainer

    def _new_worker(self, workspace: Workspace) -> RolloutWorker:
        torch.set_num_threads(self._config.rollout.threads)
        context = self._context("rollout", workspace)
        return new_worker(self._config, context, self._arena, self._queues[BUFFER])

    def _buffer_turn(self) -> None:
        now_s = time.monotonic()
        for message in self._queues[BUFFER].receive():
            self._buffer.handle(message, now_s)
        self._buffer.step(now_s)
        self._evaluations.write_waiting()
        self._snapshot.step(self._buffer, now_s)
        self._buffer_metrics.publish(self._buffer, now_s, self._arena.payload_bytes)

    def _worker_turn(self) -> None:
        for message in self._queues[worker_name(0)].receive():
            self._worker.handle(message)
        self._worker.rest(0.0)
        if not self._worker.idle and self._worker.may_work():
            torch.set_num_threads(self._config.rollout.threads)
            self._worker.step()

    def _trainer_turn(self) -> None:
        self._trainer.wait(0.0)
        torch.set_num_threads(self._config.trainer.threads)
        self._trainer.poll()

    def _print_step(self, step: int) -> None:
        reading = self._reader.read()
        reward = reading.value("rlhfd_reward_mean")
        learning = "".join(f" {name}={value:.4g}" for name, value in learning_of(reading).items())
        _tell(f"step={step} reward={'-' if reward is None else f'{reward:.3f}'}{learning}")


def _tell(line: str) -> None:
    """Write a line to standard output; a run outlives the reader of a pipe, and a disk that is full."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("standard output is lost, the run goes on without it: %s", error)
        # The line that is left in its buffer would fail again at the end of the process.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
