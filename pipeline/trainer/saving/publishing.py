"""Versions of a rank are published beside training: the step waits for them only before it changes what they read.

    training's thread     begins the publish, gathers the next batch, runs it forward and backward      waits, steps
    publishing thread     writes the training state, then the weights, turns the page ----------------/

The order of stores is that of a publish in place (`pipeline.models.weights.versions`), so that a kill at any of them
leaves the same. The tensors are read live, not copied before: `finish` is called before the optimizer changes them.
The publishing thread reports the version to the buffer as soon as the page is turned, so that workers begin with it
while training computes. Training's thread counts the step at its first look after that.

Sharded ranks publish together, each in a thread: their collectives are on a process group of its own. They meet before.

On a GPU the copies are on a stream of their own, after all that training had issued before the publish, and are
complete when the thread ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from pipeline.config.losses import answers_every
from pipeline.config.schema import Config
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.connection import Connection
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import LearnerProtocol, Progress, tensors_of

BESIDE_FROM_BYTES = 1 << 20
"""Bytes of the weights, the same on every rank, from which a thread is worth its start."""

log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A publish that has begun.

    Attributes:
        written: The version, once its page is turned, and the seconds of the writes.
        keeps_state: Whether the version has a training state.
        then: Called after the end.
    """

    written: Future[tuple[WeightsVersion, float]]
    keeps_state: bool
    then: Callable[[], None]


class Publishing:
    """Publishes the versions of one rank; used by training's thread.

    Attributes:
        version: The newest version that is reported.
        is_beside: Whether a thread may publish; else each call of `publish` returns at its end.
    """

    def __init__(
        self,
        config: Config,
        learner: LearnerProtocol,
        connection: Connection,
        models: RankModels,
        metrics: TrainerMetrics,
        *,
        device: torch.device,
        probe: Callable[[], Probe] | None,
    ) -> None:
        """Publish nothing yet; `Trainer` explains the arguments."""
        self.version = WeightsVersion(0, 0)
        self.is_beside = True
        self._config = config.trainer
        self._answers_every = answers_every(config)
        self._learner = learner
        self._connection = connection
        self._models = models
        self._metrics = metrics
        self._device = device
        self._probe = probe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._side_stream: torch.cuda.Stream | None = None
        self._pending: _Pending | None = None
        self._waited_s = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether a publish has begun whose version is not reported yet."""
        return self._pending is not None

    @property
    def next_number(self) -> int:
        """Number of the version after `version`, which may be under way."""
        return self.version.version + 1

    def publish(
        self,
        progress: Progress,
        *,
        first: WeightsVersion | None = None,
        keeps_state: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Publish the live weights, which acknowledges the batches in hand.

        Args:
            progress: The progress of training with these weights.
            first: The version of this trainer's first publish, as `PolicyVersions.publish` wants it; None for the next.
            keeps_state: Whether the version has a training state though `trainer.keep_state_every` would not say so.
            then: Called once the version is reported.

        Raises:
            ConfigError, UnreachableError, WeightsError: As `PolicyVersions.publish`; from `finish` if a thread
                publishes.
        """
        self.finish()
        wanted, started_s = first or WeightsVersion(self.next_number), time.monotonic()
        is_first, number = first is not None, wanted.version
        with self._metrics.publishing():
            probe = self._probe_answer(number, first=is_first)
            training = None
            every = self._config.keep_state_every
            # A predecessor with another configuration may have left two slots of weights.
            every = every if every == 1 or self._models.versions.may_lack_state() else 1
            if self._config.keep_state != "disk" and (is_first or keeps_state or number % every == 0):
                training = tensors_of(self._learner, progress)
            wanted = wanted._replace(trained_through=self._connection.begin_version(), probe=probe)
            write = self._models.writing(wanted, training)
            if self._is_worth_a_thread and not is_first:
                written = self._thread.submit(self._write_and_tell, write, self._stream())
            else:
                written = Future()
                written.set_result(_timed(write, contextlib.nullcontext()))
        self._waited_s = time.monotonic() - started_s
        self._pending = _Pending(written, training is not None, then)
        self.poll()

    def poll(self) -> None:
        """Report a version whose page is turned."""
        if self._pending is not None and self._pending.written.done():
            self.finish()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a page that is due is turned, `timeout_s` at most."""
        if self._pending is None or self._pending.written.done():
            return
        started_s = time.monotonic()
        with self._metrics.publishing():
            wait([self._pending.written], timeout_s)
        self._waited_s += time.monotonic() - started_s

    def finish(self) -> None:
        """Wait until the version under way is the newest, and report it.

        Raises:
            Exception: The error of the thread; the version is not published then.
        """
        if self._pending is None:
            return
        self.wait()
        pending, self._pending = self._pending, None
        self.version, written_s = pending.written.result()
        self._connection.end_version(self.version)
        if self._connection.rank == 0:
            versions = self._models.versions
            self._metrics.published(
                self.version.version,
                versions.nbytes,
                written_s,
                waited_s=self._waited_s,
                state_s=versions.state_s if pending.keeps_state else None,
            )
        pending.then()

    def close(self) -> None:
        """End the thread; a version under way, as after an error of training, is published: its step was taken."""
        self._thread.shutdown()
        if self._pending is not None and (error := self._pending.written.exception()) is not None:
            log.error("version %d is not published: %s", self.next_number, error)
        self._pending = None

    @property
    def _is_worth_a_thread(self) -> bool:
        # The first publish of a trainer maps the files, and sets their size.
        return self.is_beside and self._models.versions.weights_bytes >= BESIDE_FROM_BYTES

    def _write_and_tell(
        self, write: Callable[[], WeightsVersion], stream: contextlib.AbstractContextManager[None]
    ) -> tuple[WeightsVersion, float]:
        written = _timed(write, stream)
        self._connection.tell(written[0])
        return written

    def _stream(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of copies that begin after all that training has issued so far, beside what it issues."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self._device)
        return _after(torch.cuda.current_stream(self._device).record_event(), self._side_stream)

    def _probe_answer(self, number: int, *, first: bool) -> Probe | None:
        """Return the probe answer of a version; None if it carries no probe."""
        if self._probe is None or not (first or number % self._answers_every == 0):
            return None
        # The first rank may wait for its checkpoint. Inside the model's own collectives the others would seem hung.
        self._models.meet()
        return self._probe()


def _timed(
    write: Callable[[], WeightsVersion], stream: contextlib.AbstractContextManager[None]
) -> tuple[WeightsVersion, float]:
    """Return the version that is written, with the stream of its copies, and the seconds of the writes."""
    started_s = time.monotonic()
    with stream:
        found = write()
    return found, time.monotonic() - started_s


@contextlib.contextmanager
def _after(event: torch.cuda.Event, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        yield
