"""Rollout workers whose models compute on any machine of a Ray cluster.

    this machine                                       any machine of the cluster
    supervisor, buffer, trainer as without Ray
    rollout N: a gateway, which is the worker  ----->  its actor: models, reward, maker (`pipeline.rollout.remote`)
      tickets, arena, metrics, samples         <-----    experience, as objects; its engine, its environments
    the weights' holder, an actor              ----->    the machine's relay, an actor: a version once to each machine,
                                                         only the changed words where these are less

Only the gateway uses Ray: it takes tickets, calls the actor, writes the experience into the arena, and counts. An actor
belongs to its gateway; each of the two ends when the other one ends, and with the actor its engine and the processes of
its rewards and environments. The death of the actor's machine is the death of
the worker, whose successor is placed on another machine. A gateway writes a heartbeat when its actor's count of
heartbeats has grown, so that hang detection finds a hanging actor as it finds any other worker.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError, WeightsError
from pipeline.models.weights.sending import Taken, WeightsHolder, WeightsRelay, offered
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout import process as rollout_process
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.node_watch import WATCHERS, NodeWatch
from pipeline.rollout.process import may_quote_texts
from pipeline.rollout.remote import CallResult, Loaded, NodeStatus, RolloutNode, WorkerSpec
from pipeline.rollout.roller import Rolled
from pipeline.runtime import run_inputs
from pipeline.runtime.ray_cluster import NoRoomError, as_error_of_start, await_room, begin_actor, join, one_line
from pipeline.runtime.role import ClusterNode, Report, RoleContext
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.carried_records import log_carried

_STATUS_S: Final = 0.1
# Longest time of a call that steps the engine: tickets come, and weights change in flight, between two of them.
_STEP_S: Final = 0.2
_RETRY_S: Final = 0.5
# Longest time to put weights into the store, and to transfer them to another machine: a constant and a slowest speed.
_PATIENCE_S: Final = 30.0
# Time that holder and relay have besides, if their processes may have to be started: minutes on a busy machine.
_HOLDER_START_S: Final = 120.0
_STORED_BYTES_S: Final = 5e8
_TRANSFERRED_BYTES_S: Final = 1e8

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext) -> ExitCode:
    """Run a worker whose models are an actor of the cluster, until a shutdown or the end of a drain."""
    watch = NodeWatch(_nodes, context.report)
    try:
        join(config, context)
        _send_tensors_as_bytes()
        if context.index < WATCHERS:
            watch.start()
        return rollout_process.run(config, context, load_remote)
    except NoRoomError:
        return ExitCode.OK
    finally:
        watch.close()
        ray.shutdown()


def load_remote(config: Config, context: RoleContext, metrics: RolloutMetrics) -> RemoteStream:
    """Have the models loaded on a machine of the cluster."""
    stream = RemoteStream(config, context, metrics)
    stream.load()
    return stream


class RemoteStream:
    """A gateway's `pipeline.rollout.ticket_stream.TicketStream`: each call is a call of its actor."""

    def __init__(self, config: Config, context: RoleContext, metrics: RolloutMetrics) -> None:
        """Request an actor from the cluster.

        Args:
            config: The instance's.
            context: The gateway's; its heartbeat follows the actor's.
            metrics: The gateway's; the actor's work is counted there.
        """
        self._config = config
        self._context = context
        self._metrics = metrics
        self._weights_path = context.folder / "weights"
        self._hang_timeout_s = config.daemon.hang_timeout_s
        self.tickets_ahead = 1
        self.updates_in_flight = config.rollout.weight_updates == "in_flight"
        self._has_room = True
        self._beats: int | None = None
        self._status: Any = None
        self._overtaken: list[Any] = []
        self._holder: Any = None
        self._relay: Any = None
        self._machine = "?"
        self._place = ""
        self._cpus, self._gpus = float(config.rollout.threads), config.cluster.worker_gpus
        spec = WorkerSpec(
            config=config.model_dump_json(),
            generation=context.generation,
            texts=may_quote_texts(config, context),
            log_texts=config.daemon.log_texts,
        )
        actor = ray.remote(
            num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, concurrency_groups={"status": 1},
            scheduling_strategy="SPREAD",
        )(_RolloutActor)  # fmt: skip
        self._actor = actor.remote(spec)

    def load(self) -> None:
        """Wait until the actor is placed on a machine and the models are loaded.

        Raises:
            ConfigError: If the models cannot be loaded, or other files are there than here, at the first start of this
                worker.
            RlhfdError: If they cannot be loaded, or are others, at a later start, or the machine is lost.
        """
        answered = self._actor.status.remote(logging.getLogger().level, 0.0)
        await_room(answered, self._context, f"gpus={self._gpus:g} cpus={self._cpus:g}", self._actor)
        self._place = self._node_id()
        # Its process starts while the models are loaded; without an answer it is asked for again with the weights.
        with contextlib.suppress(_LostError):
            self._relay = self._find_relay()
        try:
            loaded: Loaded = self._call("load")
        except ConfigError as error:
            raise as_error_of_start(error, self._context) from None
        self._machine, self.tickets_ahead = loaded.machine, loaded.tickets_ahead
        self._compare(loaded.inputs)
        log.info("rolls out in the cluster: machine=%s actor_pid=%d gpus=%g", loaded.machine, loaded.pid, self._gpus)
        self._context.report(Report(placed_on=self._node()))

    def _compare(self, inputs: Mapping[str, str]) -> None:
        if not (unlike := run_inputs.unlike_here(self._config, inputs)):
            return
        told = f"on {self._machine}: other files than on the daemon's machine: {', '.join(unlike)}"
        error = as_error_of_start(ConfigError(told), self._context)
        # Prompts or code that are being changed under way end no run.
        if isinstance(error, ConfigError) or any(map(run_inputs.is_fixed, unlike)):
            raise error
        log.warning("%s", error)

    @property
    def has_room(self) -> bool:
        """Whether another ticket can make progress, as of the last call."""
        return self._has_room

    def begin(self, ticket: int, position: int, prompts: int, *, evaluation: int = -1) -> None:
        """Have the actor take the prompts of a ticket over."""
        self._call("begin", ticket, position, prompts, evaluation)

    def step(self) -> list[int]:
        """Have the actor advance the tickets, for a moment; return those that have ended."""
        ended: list[int] = self._call("step", _STEP_S, shows=True)
        return ended

    def finish(self, ticket: int) -> Rolled:
        """Have the actor score an ended ticket; return its rollout."""
        rolled: Rolled = self._call("finish", ticket, shows=True)
        return rolled

    def cancel(self, tickets: Sequence[int]) -> None:
        """Have the actor drop tickets."""
        if tickets:
            self._call("cancel", list(tickets))

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Have the newest weights sent to the actor; return their version.

        Raises:
            WeightsMismatchError: If the actor's model does not compute with them.
            WeightsError: If the cluster has not delivered them in time, however often they were sent again.
        """
        stored_s = _PATIENCE_S + source.nbytes / _STORED_BYTES_S
        transferred_s = _PATIENCE_S + source.nbytes / _TRANSFERRED_BYTES_S
        give_up_s = time.monotonic() + 2 * (2 * _HOLDER_START_S + stored_s) + 3 * transferred_s
        while True:
            try:
                newest = self._newest(stored_s, transferred_s)
                fetched: WeightsVersion = self._call("fetch", newest, patience_s=transferred_s)
                return fetched
            except _LostError as error:
                # Holder or relay belonged to another gateway and died with it; a name stays registered for a moment.
                # The other one stays: Ray ends it with the handle, if it was made here.
                self._holder = None if self._holder in error.lost else self._holder
                self._relay = None if self._relay in error.lost else self._relay
                self._node_id()
                if time.monotonic() > give_up_s:
                    raise WeightsError(f"the cluster does not deliver the weights: {error}") from error
                log.warning("weights are sent again: reason=%s", str(error))
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """End the actor."""
        # The last words of one that has died are there too.
        self._pass_by_statuses(_STATUS_S)
        ray.kill(self._actor)

    def _node_id(self) -> str:
        """Return Ray's id of the actor's machine.

        Raises:
            RlhfdError: If the actor is gone.
        """
        try:
            node_id: str = self._wait(self._actor.node_id.remote(), 0.0, ends=False)
        except RayActorError as error:
            raise RlhfdError(f"the actor on {self._machine} is gone: {one_line(error)}") from error
        return node_id

    def _node(self) -> ClusterNode | None:
        """Return the node on which the actor runs; None if the cluster does not know it any more."""
        return next((node for node in _nodes() if node.id == self._place), None)

    def _newest(self, stored_s: float, transferred_s: float) -> Any:
        """Have the newest weights sent to the actor's machine, if it has them not; return a reference to them.

        Args:
            stored_s: Time to put them into the store.
            transferred_s: Time to transfer them.

        Raises:
            _LostError: If holder or relay is dead or does not answer, or every offer was refused.
        """
        starts_s = 0.0 if self._holder is not None else _HOLDER_START_S
        # Kept: Ray ends an actor with the last handle to it in the process that made it.
        if self._holder is None:
            self._holder = self._find(WeightsHolder, _here(), str(self._weights_path), ray.put, ray.get)
        if self._place == _here():
            return self._ask(self._holder, "whole", patience_s=stored_s + starts_s)[0]
        if self._relay is None:
            self._relay = self._find_relay()
        taken = Taken([])
        for taken in offered(
            # Another worker of the machine may have started it a moment ago, or have it take a version.
            functools.partial(self._ask, self._relay, "held", patience_s=transferred_s + _HOLDER_START_S),
            functools.partial(self._ask, self._holder, "offer", patience_s=stored_s + starts_s),
            functools.partial(self._ask, self._relay, "take", patience_s=transferred_s),
        ):
            self._metrics.weights_sent(taken.whole_bytes, taken.difference_bytes)
            if taken.is_damaged:
                self._metrics.count("weights_synced", "refused")
            if not taken.references:
                log.warning("weights are sent again: reason=%s", taken.reason)
        if not taken.references:
            raise _LostError(taken.reason)
        return taken.references[0]

    def _find_relay(self) -> Any:
        """Return the relay of the actor's machine; None if that is the daemon's, which has the weights."""
        return None if self._place == _here() else self._find(WeightsRelay, self._place, ray.put, ray.get)

    def _find(self, kind: type, node_id: str, *arguments: Any) -> Any:
        """Return the actor of this kind on a machine; it is started if there is none."""
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        name = f"{kind.__name__} of {socket.gethostname()}:{self._context.folder} on {node_id}"
        actor = ray.remote(num_cpus=0)(kind)
        try:
            return actor.options(name=name, get_if_exists=True, scheduling_strategy=there).remote(*arguments)
        except RayError as error:
            raise _LostError(one_line(error)) from error

    def _ask(self, actor: Any, method: str, *arguments: Any, patience_s: float) -> Any:
        """Return the value of a call of holder or relay.

        Raises:
            _LostError: If the actor is dead, or does not answer in time, and then is killed.
        """
        try:
            return self._wait(getattr(actor, method).remote(*arguments), patience_s)
        except TimeoutError as error:
            ray.kill(actor)
            raise _LostError(f"their {method} has not come for {patience_s:.0f} s", actor) from error
        except RayError as error:
            raise _LostError(one_line(error), actor) from error

    def _call(self, method: str, *arguments: Any, patience_s: float = 0.0, shows: bool = False) -> Any:
        """Call a method of the actor, count the events of its result, and return its value or raise its error.

        Args:
            method: The method.
            arguments: Its arguments.
            patience_s: As for `_wait`.
            shows: Whether this process's activity is the actor's meanwhile.

        Raises:
            _LostError: If the weights of a fetch did not reach the actor.
            RlhfdError: If the actor is gone, or its result is lost.
        """
        # A status requested during an earlier call does not describe this one.
        self._pass_by_statuses()
        try:
            called = getattr(self._actor, method).remote(*arguments)
            result: CallResult = self._wait(called, patience_s, ends=False, shows=shows)
        except RayActorError as error:
            raise RlhfdError(f"the actor on {self._machine} is gone: {one_line(error)}") from error
        except RayError as error:
            is_lost = isinstance(error, ObjectLostError) or isinstance(getattr(error, "cause", None), ObjectLostError)
            if is_lost and method == "fetch":
                raise _LostError(one_line(error), self._holder, self._relay) from error
            if isinstance(error, RayTaskError) and not is_lost:
                # An unexpected error of the actor's own code, with its traceback.
                raise
            raise RlhfdError(f"{method} on {self._machine} has no result: {one_line(error)}") from error
        self._pass_by_statuses()
        self._show(result.status, shows=shows)
        self._has_room = result.has_room
        for counted, given in result.events:
            getattr(self._metrics, counted)(*given)
        if result.error is not None:
            raise result.error
        return result.value

    def _wait(self, reference: Any, patience_s: float, *, ends: bool = True, shows: bool = False) -> Any:
        """Wait for the value of a call; pass on the actor's heartbeats meanwhile.

        Args:
            reference: To the value.
            patience_s: Time for which the wait alone counts as progress: bytes are in flight, and Ray does not tell how
                many.
            ends: Whether the wait ends after `patience_s`.
            shows: As for `_call`.

        Returns:
            The value.

        Raises:
            TimeoutError: If there is no value after `patience_s`, with `ends`.
        """
        until_s = time.monotonic() + patience_s
        while not ray.wait([reference], timeout=_STATUS_S)[0]:
            self._poll_status(shows=shows)
            if time.monotonic() < until_s:
                self._context.metrics.beat()
            elif ends:
                raise TimeoutError
        return ray.get(reference)

    def _poll_status(self, *, shows: bool) -> None:
        self._context.reloaded()
        if self._context.newest_config is not None:
            self._hang_timeout_s = self._context.newest_config.daemon.hang_timeout_s
        if self._status is not None:
            if not ray.wait([self._status], timeout=0)[0]:
                return
            try:
                self._show(ray.get(self._status), shows=shows)
            except RayActorError:
                # The call that is waited for raises this error too.
                return
        self._status = self._actor.status.remote(logging.getLogger().level, self._hang_timeout_s)

    def _pass_by_statuses(self, wait_s: float = 0.0) -> None:
        """Log the records of statuses that come too late to be shown: the actor has handed them out once."""
        if self._status is not None:
            self._overtaken.append(self._status)
            self._status = None
        if self._overtaken:
            come, self._overtaken = ray.wait(self._overtaken, num_returns=len(self._overtaken), timeout=wait_s)
            for status in come:
                with contextlib.suppress(RayError):
                    log_carried(ray.get(status).records)

    def _show(self, status: NodeStatus, *, shows: bool) -> None:
        metrics = self._metrics
        if status.beats != self._beats:
            self._beats = status.beats
            metrics.progress()
        metrics.show_rows(*status.progress)
        metrics.sampled_remotely(status.sampled, status.in_hand)
        if status.load is not None:
            metrics.engine(status.load)
        # Not once a status: a change of the activity is a heartbeat.
        if shows and status.activity != metrics.clock.activity:
            metrics.clock.enter(status.activity)
        log_carried(status.records)


class _RolloutActor(RolloutNode):
    """The actor: a `RolloutNode` whose status can be requested during a call."""

    def __init__(self, spec: WorkerSpec) -> None:
        begin_actor()
        _send_tensors_as_bytes()
        super().__init__(spec)

    status = ray.method(concurrency_group="status")(RolloutNode.status)

    def node_id(self) -> str:
        """Return Ray's id of this machine."""
        return _here()


class _LostError(Exception):
    """Weights did not reach the actor: retry.

    Attributes:
        lost: The holder or the relay, or both, that are not to be asked again.
    """

    def __init__(self, reason: str, *lost: Any) -> None:
        super().__init__(reason)
        self.lost = lost


def _send_tensors_as_bytes() -> None:
    """Have Ray copy the bytes of tensors once, in place of pickles."""

    def serialize(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.Size]:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape

    def deserialize(parts: tuple[Any, torch.dtype, torch.Size]) -> torch.Tensor:
        data, dtype, shape = parts
        return torch.from_numpy(data.copy()).view(dtype).reshape(shape)

    ray.util.register_serializer(torch.Tensor, serializer=serialize, deserializer=deserialize)


def _here() -> str:
    """Return Ray's id of this machine."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _nodes() -> list[ClusterNode]:
    """Return the nodes of the cluster, those that have left too; none if it does not answer."""
    try:
        found = ray.nodes()
    except RayError as error:
        log.debug("the cluster does not list its nodes: %s", error)
        return []
    return [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            node["Alive"],
            # The socket of a node lies in the session's folder; that of a node that has left may not be known.
            next((part for part in Path(node["RayletSocketName"]).parts if part.startswith("session_")), ""),
        )
        for node in found
    ]
