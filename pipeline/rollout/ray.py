"""Rollout workers whose models compute on any machine of a Ray cluster.

    this machine                                       any machine of the cluster
    supervisor, buffer, trainer as without Ray
    rollout N: a gateway, which is the worker  ----->  its actor: models, reward, maker (`pipeline.rollout.remote`)
      tickets, arena, metrics, samples         <-----    experience, as objects
    the weights' holder, an actor              ----->    weights: one object a version, once to each machine

So nobody but the gateway knows of Ray: it takes tickets, passes them on, puts what comes back into the arena, and
counts. An actor belongs to its gateway and ends with it, whoever ends first; the death of its machine is the worker's,
whose successor looks for another place in the cluster. A gateway beats when its actor did, so that an actor that hangs
is found as any other worker is.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError, WeightsError
from pipeline.models.loading import load_tokenizer
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout import process as rollout_process
from pipeline.rollout.loader import Scored
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.process import may_tell_texts, worker_with
from pipeline.rollout.remote import CallResult, NodeStatus, RolloutNode, WorkerSpec
from pipeline.rollout.roller import Rolled
from pipeline.rollout.sample_recorder import RolloutSamples
from pipeline.rollout.worker import RolloutWorker
from pipeline.runtime.role import Report, RoleContext, monotonic_s
from pipeline.runtime.transport import Sender
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import Age, WeightsVersion

_NAMESPACE: Final = "rlhfd"
_LOOK_S: Final = 0.1
_PENDING_S: Final = 10.0
_PENDING_AGAIN_S: Final = 300.0
_ANSWER_S: Final = 5.0
_AGAIN_S: Final = 0.5
# Within which weights are put into the store, and carried to another machine, at the slowest.
_PATIENCE_S: Final = 30.0
_HELD_BYTES_S: Final = 5e8
_CARRIED_BYTES_S: Final = 1e8
_MOST_CHARACTERS: Final = 2000

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext) -> ExitCode:
    """Be a worker whose models are an actor of the cluster, until told to stop."""
    _join(config, context)
    try:
        return rollout_process.run(config, context, new_worker)
    except _StoppedError:
        return ExitCode.OK
    finally:
        ray.shutdown()


def new_worker(
    config: Config, context: RoleContext, arena: Arena, sender: Sender, metrics: RolloutMetrics
) -> RolloutWorker:
    """Have the models loaded somewhere in the cluster, and introduce the worker to the buffer."""
    tokenizer = load_tokenizer(config.model.actor)
    samples = RolloutSamples.of(config, tokenizer, context.index, monotonic_s)
    scored: Scored = (lambda parts: None) if samples is None else samples.scored
    models = RemoteModels(config, context, metrics, scored)
    models.load()
    return worker_with(models, config, context, arena, sender, metrics, samples)


def _join(config: Config, context: RoleContext) -> None:
    """Become a driver of the cluster."""
    # Who runs a daemon on a server of his own reports to nobody.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.cluster.address
    try:
        if address != "auto":
            # Ray itself would try for minutes, and say nothing.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        told = f"cluster.address: no Ray cluster at {address} that this machine is part of (ray start): {error}"
        # One that was there before may come back.
        raise (ConfigError if context.generation <= 1 else RlhfdError)(told) from error
    # Ray has taken the signal over.
    context.stop_on_sigterm()
    _settle()


class RemoteModels:
    """What a gateway rolls out with: its actor's models."""

    def __init__(self, config: Config, context: RoleContext, metrics: RolloutMetrics, scored: Scored) -> None:
        """Ask the cluster for an actor.

        Args:
            config: The instance's.
            context: The gateway's; it beats when the actor does.
            metrics: Where the actor's work is counted.
            scored: Told the parts of each reward.
        """
        self._context = context
        self._metrics = metrics
        self._scored = scored
        self._weights_path = context.folder / "weights"
        self._hang_timeout_s = config.daemon.hang_timeout_s
        self._beats = -1
        self._rolls = False
        self._looking: Any = None
        self._holder: Any = None
        self._machine = "?"
        self._cpus, self._gpus = float(config.rollout.threads), config.cluster.worker_gpus
        errand = WorkerSpec(config.model_dump_json(), os.getcwd(), may_tell_texts(config, context))
        actor = ray.remote(
            num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, concurrency_groups={"look": 1},
            scheduling_strategy="SPREAD",
        )(_RolloutActor)  # fmt: skip
        self._actor = actor.remote(errand)

    def load(self) -> None:
        """Wait until there is a place and the models are loaded.

        Raises:
            ConfigError: If they cannot be, on the first machine that was found for them.
            RlhfdError: On a later one, or if the machine is lost.
        """
        self._find_place()
        try:
            self._machine, pid = self._ask("load")
        except ConfigError as error:
            if self._context.generation <= 1:
                raise
            # It was right elsewhere: another machine may be.
            raise RlhfdError(str(error), bare=error.bare) from error
        log.info("rolls out in the cluster: machine=%s actor_pid=%d gpus=%g", self._machine, pid, self._gpus)

    def roll(self, position: int, prompts: int) -> Rolled:
        """Roll out the prompts from a position on; see `pipeline.rollout.roller.Roller.roll`."""
        with self._metrics.clock.during("generate"):
            self._rolls = True
            try:
                rolled: Rolled = self._ask("roll", position, prompts)
            finally:
                self._rolls = False
        return rolled

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Have the newest weights sent to the actor; return which they are.

        Raises:
            WeightsMismatchError: If the actor's model does not compute what they say.
            WeightsError: If they could not be had.
        """
        held_s, carried_s = _PATIENCE_S + source.nbytes / _HELD_BYTES_S, _PATIENCE_S + source.nbytes / _CARRIED_BYTES_S
        give_up_s = time.monotonic() + 2 * held_s + carried_s
        while True:
            try:
                fetched: WeightsVersion = self._ask("fetch", self._newest(held_s), patience_s=carried_s)
                return fetched
            except _LostError as error:
                # Who held them was another gateway's and went with that; for a moment its name still leads to it.
                self._holder = None
                if time.monotonic() > give_up_s:
                    raise WeightsError(f"the cluster does not carry the weights: {error}") from error
                log.warning("weights to be sent anew: reason=%s", str(error))
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def _find_place(self) -> None:
        """Wait until the actor answers, however long the cluster has no room for it."""
        answered = self._actor.look.remote(logging.getLogger().level, 0.0)
        is_told, due_s = False, time.monotonic() + _PENDING_S
        while not ray.wait([answered], timeout=_LOOK_S)[0]:
            if self._context.stopping:
                raise _StoppedError
            if time.monotonic() > due_s:
                is_told, due_s, free = True, time.monotonic() + _PENDING_AGAIN_S, ray.available_resources()
                log.warning("waits for the cluster to have a place: gpus=%g cpus=%g free_gpus=%g free_cpus=%g",
                            self._gpus, self._cpus, free.get("GPU", 0.0), free.get("CPU", 0.0))  # fmt: skip
                self._context.report(Report(state="pending"))
        if is_told:
            self._context.report(Report(state="placed"))

    def _newest(self, patience_s: float) -> Any:
        """Return a reference to the newest weights.

        Raises:
            _LostError: If whoever holds them is gone, or does not answer.
        """
        try:
            # Kept: an actor goes with the last handle of those who made it.
            self._holder = self._holder or self._find_holder()
            return self._wait(self._holder.newest.remote(), patience_s)[0]
        except TimeoutError as error:
            ray.kill(self._holder)
            raise _LostError(f"who holds them has not answered for {patience_s:.0f} s") from error
        except RayError as error:
            raise _LostError(_told(error)) from error

    def _find_holder(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = f"weights of {socket.gethostname()}:{self._context.folder}"
        holder = ray.remote(num_cpus=0)(WeightsHolder)
        return holder.options(name=name, get_if_exists=True, scheduling_strategy=here).remote(str(self._weights_path))

    def _ask(self, method: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        """Have the actor do something; count what it tells of it, and return or raise what became of it.

        Raises:
            _LostError: If an argument did not reach it.
        """
        # One at an earlier call tells nothing of this one.
        self._looking = None
        try:
            answer: CallResult = self._wait(getattr(self._actor, method).remote(*arguments), patience_s, ends=False)
        except RayActorError as error:
            raise RlhfdError(f"the actor on {self._machine} is gone: {_told(error)}") from error
        except RayError as error:
            if isinstance(error, ObjectLostError) or isinstance(getattr(error, "cause", None), ObjectLostError):
                raise _LostError(_told(error)) from error
            raise
        self._context.metrics.beat()
        _log(answer.records)
        for name, seconds in answer.stages:
            self._metrics.staged(name, seconds)
        for reason in answer.reward_errors:
            self._metrics.reward_errored(reason)
        for parts in answer.scores:
            self._scored(parts)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _wait(self, reference: Any, patience_s: float, *, ends: bool = True) -> Any:
        """Return what a call gives once it does; meanwhile pass on the actor's signs of life.

        Args:
            reference: To what it gives.
            patience_s: So long the wait counts as progress: bytes are on their way, and nobody can tell how many.
            ends: Whether the wait ends with that.

        Raises:
            TimeoutError: If it has.
        """
        until_s = time.monotonic() + patience_s
        while not ray.wait([reference], timeout=_LOOK_S)[0]:
            self._look()
            if time.monotonic() < until_s:
                self._context.metrics.beat()
            elif ends:
                raise TimeoutError
        return ray.get(reference)

    def _look(self) -> None:
        if (config := self._context.reloaded()) is not None:
            self._hang_timeout_s = config.daemon.hang_timeout_s
        if self._looking is not None:
            if not ray.wait([self._looking], timeout=0)[0]:
                return
            try:
                self._take(ray.get(self._looking))
            except RayActorError:
                # The call that is waited for says so too.
                return
        self._looking = self._actor.look.remote(logging.getLogger().level, self._hang_timeout_s)

    def _take(self, look: NodeStatus) -> None:
        if look.beats != self._beats:
            self._beats = look.beats
            self._context.metrics.beat()
        if self._rolls and look.activity:
            self._metrics.clock.enter(look.activity)
        _log(look.records)


class _RolloutActor(RolloutNode):
    """The actor: a `RolloutNode` that can be looked at while it works."""

    def __init__(self, errand: WorkerSpec) -> None:
        _settle()
        if not ray.get_gpu_ids():
            # Ray leaves one that asked for none all of its machine's.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        super().__init__(errand)

    look = ray.method(concurrency_group="look")(RolloutNode.look)


class WeightsHolder:
    """Puts each version into the cluster's store once, however many workers ask; an actor of the daemon's machine."""

    def __init__(self, path: str) -> None:
        self._reader = WeightsReader(Path(path))
        self._age: Age | None = None
        self._held: list[Any] = []

    def newest(self) -> list[Any]:
        """Return a reference to a `pipeline.models.weights.store.WeightsCopy` of the newest version."""
        newest = self._reader.newest()
        if newest is not None and newest.age != self._age:
            copy = self._reader.copy()
            self._age, self._held = copy.version.age, [ray.put(copy)]
        return self._held


class _StoppedError(Exception):
    """Told to stop before there was a place in the cluster."""


class _LostError(Exception):
    """Weights did not reach the actor; another attempt may."""


def _settle() -> None:
    """Have tensors travel as their bytes, which Ray copies once, not as pickles; and log without Ray's marks."""
    logging.setLogRecordFactory(logging.LogRecord)

    def taken_apart(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.Size]:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape

    def put_together(parts: tuple[Any, torch.dtype, torch.Size]) -> torch.Tensor:
        data, dtype, shape = parts
        return torch.from_numpy(data.copy()).view(dtype).reshape(shape)

    ray.util.register_serializer(torch.Tensor, serializer=taken_apart, deserializer=put_together)


def _log(records: Sequence[logging.LogRecord]) -> None:
    """Log what an actor has logged as our own."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _told(error: BaseException) -> str:
    """Return all that Ray says of an error, on one line and without its colours: the reason is rarely in the first."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error) or type(error).__name__).split("\n")
    return " | ".join(line.strip() for line in lines if line.strip())[:_MOST_CHARACTERS]
