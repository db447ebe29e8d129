"""Rollout workers whose models compute on any machine of a Ray cluster.

    this machine                                       any machine of the cluster
    supervisor, buffer, trainer as without Ray
    rollout N: a gateway, which is the worker  ----->  its actor: models, reward, maker (`pipeline.rollout_node`)
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
import socket
import time
from pathlib import Path
from typing import Any, Final

import ray
import torch
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline import rollout_process
from pipeline.arena import Arena
from pipeline.config import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError, WeightsError
from pipeline.models import load_tokenizer
from pipeline.role import RoleContext, monotonic_s
from pipeline.roller import Rolled
from pipeline.rollout import RolloutWorker
from pipeline.rollout_metrics import RolloutMetrics
from pipeline.rollout_models import Scored
from pipeline.rollout_node import Answer, Errand, Look, RolloutNode
from pipeline.rollout_process import may_tell_texts, worker_with
from pipeline.rollout_samples import RolloutSamples
from pipeline.transport import Sender
from pipeline.weights import WeightsReader
from pipeline.weights_header import Age, WeightsVersion

_NAMESPACE: Final = "rlhfd"
_LOOK_S: Final = 0.1
_PENDING_S: Final = 10.0
_ANSWER_S: Final = 5.0
_WEIGHTS_S: Final = 30.0
_AGAIN_S: Final = 0.5

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
            socket.create_connection((host, int(port)), _ANSWER_S).close()
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
        self._beats = -1
        self._looking: Any = None
        self._holder: Any = None
        self._machine = "?"
        gpus = config.cluster.worker_gpus
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        self._wanted = {"CPU": float(config.rollout.threads), "GPU": gpus}
        # As JSON with the number of workers that runs, which a reload may have changed by then.
        errand = Errand(config.model_dump_json(), os.getcwd(), may_tell_texts(config, context))
        actor = ray.remote(
            num_cpus=self._wanted["CPU"], num_gpus=gpus, max_restarts=0, concurrency_groups={"look": 1},
            scheduling_strategy="SPREAD",
        )(_RolloutActor)  # fmt: skip
        self._actor = actor.remote(errand)

    def load(self) -> None:
        """Wait until there is a place and the models are loaded.

        Raises:
            ConfigError: If they cannot be, on the first machine that was found for them.
            RlhfdError: On a later one, or if the machine is lost.
        """
        try:
            self._machine, pid = self._ask("load")
        except ConfigError as error:
            if self._context.generation <= 1:
                raise
            # It was right elsewhere: another machine may be.
            raise RlhfdError(str(error), bare=error.bare) from error
        log.info("rolls out in the cluster: machine=%s actor_pid=%d gpus=%g", self._machine, pid, self._wanted["GPU"])

    def roll(self, position: int, prompts: int) -> Rolled:
        """Roll out the prompts from a position on; see `pipeline.roller.Roller.roll`."""
        with self._metrics.clock.during("generate"):
            rolled: Rolled = self._ask("roll", position, prompts)
        return rolled

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Have the newest weights sent to the actor; return which they are.

        Raises:
            MistrustedError: If the actor's model does not compute what they say.
            WeightsError: If they could not be had.
        """
        deadline_s = time.monotonic() + _WEIGHTS_S
        while True:
            try:
                # Kept: an actor goes with the last handle of those who made it.
                self._holder = self._holder or self._find_holder()
                (weights,) = self._wait(self._holder.newest.remote())
                fetched: WeightsVersion = self._ask("fetch", weights)
                return fetched
            except RayError as error:
                # It was another gateway's and went with that; for a moment its name still leads to it.
                self._holder = None
                if time.monotonic() > deadline_s:
                    reason = _first_line(error)
                    raise WeightsError(
                        f"the cluster has not carried the weights in {_WEIGHTS_S:g} s: {reason}"
                    ) from error
                log.warning("weights to be sent anew: reason=%s", _first_line(error))
                time.sleep(_AGAIN_S)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def _find_holder(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = f"weights of {socket.gethostname()}:{self._context.folder}"
        holder = ray.remote(num_cpus=0)(WeightsHolder)
        return holder.options(name=name, get_if_exists=True, scheduling_strategy=here).remote(str(self._weights_path))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Have the actor do something; count what it tells of it, and return or raise what became of it."""
        try:
            answer: Answer = self._wait(getattr(self._actor, method).remote(*arguments))
        except RayActorError as error:
            raise RlhfdError(f"the actor on {self._machine} is gone: {_first_line(error)}") from error
        self._context.metrics.beat()
        for name, seconds in answer.stages:
            self._metrics.staged(name, seconds)
        for reason in answer.reward_errors:
            self._metrics.reward_errored(reason)
        for parts in answer.scores:
            self._scored(parts)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _wait(self, reference: Any) -> Any:
        """Return what a call gives once it does; meanwhile pass on the actor's signs of life."""
        began_s, is_told = time.monotonic(), False
        while not ray.wait([reference], timeout=_LOOK_S)[0]:
            self._look()
            if self._beats < 0 and self._context.stopping:
                raise _StoppedError
            if self._beats < 0 and not is_told and time.monotonic() - began_s > _PENDING_S:
                is_told = True
                free = {name: ray.available_resources().get(name, 0.0) for name in self._wanted}
                log.warning("waits for a place in the cluster: gpus=%g cpus=%g free_gpus=%g free_cpus=%g",
                            self._wanted["GPU"], self._wanted["CPU"], free["GPU"], free["CPU"])  # fmt: skip
        self._look()
        return ray.get(reference)

    def _look(self) -> None:
        if self._looking is None:
            self._looking = self._actor.look.remote()
        if not ray.wait([self._looking], timeout=0)[0]:
            return
        reference, self._looking = self._looking, None
        try:
            look: Look = ray.get(reference)
        except RayActorError:
            # The call that is waited for says so too.
            return
        if look.beats != self._beats:
            self._beats = look.beats
            self._context.metrics.beat()
        if look.activity:
            self._metrics.clock.enter(look.activity)
        for record in look.records:
            logging.getLogger(record.name).handle(record)


class _RolloutActor(RolloutNode):
    """The actor: a `RolloutNode` that can be looked at while it works."""

    def __init__(self, errand: Errand) -> None:
        _settle()
        super().__init__(errand)

    look = ray.method(concurrency_group="look")(RolloutNode.look)


class WeightsHolder:
    """Puts each version into the cluster's store once, however many workers ask; an actor of the daemon's machine."""

    def __init__(self, path: str) -> None:
        self._reader = WeightsReader(Path(path))
        self._age: Age | None = None
        self._held: list[Any] = []

    def newest(self) -> list[Any]:
        """Return a reference to a `pipeline.weights.WeightsCopy` of the newest version."""
        newest = self._reader.newest()
        if newest is not None and newest.age != self._age:
            copy = self._reader.copy()
            self._age, self._held = copy.version.age, [ray.put(copy)]
        return self._held


class _StoppedError(Exception):
    """Told to stop before there was a place in the cluster."""


def _settle() -> None:
    """Have tensors travel as their bytes, which Ray copies once, not as pickles; and log without Ray's marks."""
    logging.setLogRecordFactory(logging.LogRecord)

    def taken_apart(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.Size]:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape

    def put_together(parts: tuple[Any, torch.dtype, torch.Size]) -> torch.Tensor:
        data, dtype, shape = parts
        return torch.from_numpy(data.copy()).view(dtype).reshape(shape)

    ray.util.register_serializer(torch.Tensor, serializer=taken_apart, deserializer=put_together)


def _first_line(error: BaseException) -> str:
    # A task's error tells on which actor first.
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
