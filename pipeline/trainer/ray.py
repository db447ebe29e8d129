"""Trainer ranks on other machines of a Ray cluster (`trainer.nodes`).

    this machine                                              another machine
    supervisor, buffer, arena, weights
    trainer 0 ... : the ranks of this machine  <- collectives ->  the ranks of that machine
    trainer N: the gateway of rank N  ------ wire -------------->  its actor: the rank (`pipeline.trainer.remote`)

A gateway is the rank for supervisor and buffer: it holds the rank's lock, passes messages on, reads the rows of leases
from the arena, and shows the rank's metrics in its slot. Actor and gateway end together, and with them all ranks, which
start together again (`pipeline.trainer.resume`).

Of whole models the ranks of the daemon's machine have everything: they alone publish, keep the training state and write
checkpoints, and the others get models and state from the first rank. Shards of a remote rank go through its gateway to
the files of the daemon's machine, and come from there (`pipeline.trainer.sharding.remote`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, RlhfdError
from pipeline.runtime.messages import Hello
from pipeline.runtime.ray_cluster import NoRoomError, as_error_of_start, await_room, begin_actor, join, one_line
from pipeline.runtime.role import Report, RoleContext
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, trainer_name
from pipeline.storage.arena import Arena
from pipeline.telemetry.carried_records import log_carried
from pipeline.trainer.connect import lock_rank
from pipeline.trainer.meeting import Meeting, StoppedError, found_meeting, offer_address
from pipeline.trainer.prefetch import ArenaRows, Gathering
from pipeline.trainer.remote import FIND, Downward, Question, RankSpec, RemoteRank, Upward, in_one_extent
from pipeline.trainer.sharding.remote import ShardService

_LOOK_S: Final = 0.1

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext) -> ExitCode:
    """Run a rank on another machine until it ends; return its exit code.

    Raises:
        ConfigError: If there is no cluster, or the rank cannot compute where it is placed, at the first start.
        RlhfdError: If it cannot compute there at a later start, or its actor or its machine is lost.
    """
    started_s = time.monotonic()
    try:
        join(config, context)
        return _Gateway(config, context, started_s).run()
    except (NoRoomError, StoppedError):
        return ExitCode.OK
    finally:
        ray.shutdown()


class _Gateway:
    def __init__(self, config: Config, context: RoleContext, started_s: float) -> None:
        self._config = config
        self._context = context
        self._started_s = started_s
        self._ends = threading.Event()
        self._told_to_stop = False
        # One carries the buffer's messages to the end; the other is for shards, beside the rows of the next batch: a
        # publish may move gigabytes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="gateway")
        self._work: list[Future[None]] = []

    def run(self) -> ExitCode:
        """Place the rank and serve it to its end."""
        context, folder = self._context, self._context.folder
        lock = lock_rank(folder, context.index)
        arena = Arena(folder / "arena")
        mailbox, outbox = Mailbox(folder, trainer_name(context.index)), Outbox(folder, BUFFER)
        self._outbox = outbox
        self._rows = ArenaRows(arena, Gathering.of(self._config))
        shard = context.index % self._config.shards
        shards = ShardService(folder / "weights", shard, weight_slots=self._config.trainer.weight_slots)
        self._shards = shards
        try:
            offer_address(folder, context.generation, get_node_ip_address())
            context.report(Report(state="pending"))
            self._actor = self._placed(found_meeting(folder, context.generation, self._waits))
            self._work.append(self._threads.submit(self._carry, mailbox))
            return self._served()
        finally:
            self._ends.set()
            with contextlib.suppress(AttributeError):
                ray.kill(self._actor)
            self._threads.shutdown()
            shards.close()
            outbox.close(linger_s=1.0)
            mailbox.close()
            arena.close()
            os.close(lock)

    def _waits(self) -> None:
        if self._context.stopping:
            raise StoppedError

    def _placed(self, meeting: Meeting) -> Any:
        """Return the rank's actor, once the cluster has room for the ranks of all other machines."""
        gpus = 1.0 if meeting.device == "cuda" else 0.0
        node = self._context.index // self._config.ranks_here - 1
        group = self._group(gpus)
        machines, ranks = self._config.trainer.nodes - 1, self._config.ranks_here
        each = f"gpus_each={gpus * ranks:g} cpus_each={self._config.trainer.threads * ranks}"
        await_room(group.ready(), self._context, f"machines={machines} ranks_each={ranks} {each}")
        spec = RankSpec(
            config=self._config.model_dump_json(),
            rank=self._context.index,
            generation=self._context.generation,
            meeting=meeting,
            slots=self._context.metrics.slots,
            started_s=time.monotonic() - self._started_s,
        )
        actor = ray.remote(
            num_cpus=self._config.trainer.threads, num_gpus=gpus, max_restarts=0,
            concurrency_groups={"down": 1, "up": 1},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        )(_RankActor)  # fmt: skip
        return actor.remote(spec)

    def _group(self, gpus: float) -> Any:
        """Return the placement of the ranks of this generation: one bundle a machine, each on another one."""
        # The names of an earlier generation may still be known.
        name = f"rlhfd {socket.gethostname()} {os.getppid()} {self._context.folder.name} {self._context.generation}"
        if self._context.index > self._config.ranks_here:
            while True:
                self._waits()
                with contextlib.suppress(ValueError):
                    return get_placement_group(name)
                time.sleep(_LOOK_S)
        ranks = self._config.ranks_here
        bundle = {"CPU": float(ranks * self._config.trainer.threads)} | ({"GPU": ranks * gpus} if gpus else {})
        return placement_group([bundle] * (self._config.trainer.nodes - 1), strategy="STRICT_SPREAD", name=name)

    def _served(self) -> ExitCode:
        """Pass on what the actor has until its rank has ended."""
        try:
            done = self._actor.run.remote()
            collected = self._actor.collect.remote()
            while True:
                ready, _ = ray.wait([collected, done], timeout=_LOOK_S)
                self._tell_changes()
                self._look_at_work()
                if collected in ready:
                    self._take(ray.get(collected))
                    collected = self._actor.collect.remote()
                elif ready:
                    break
            ended: ExitCode | RlhfdError = ray.get(done)
            self._take(ray.get(collected))
            while not (last := ray.get(self._actor.collect.remote(0.0))).is_empty:
                self._take(last)
        except RayActorError as error:
            # An error of the rank is an answer of its actor: a batch at which it dies without one is not blamed.
            self._context.report(Report(killed=True))
            raise RlhfdError(f"the actor of trainer rank {self._context.index} is gone: {one_line(error)}") from error
        except RayError as error:
            raise RlhfdError(f"trainer rank {self._context.index} failed: {one_line(error)}") from error
        if isinstance(ended, RlhfdError):
            raise as_error_of_start(ended, self._context) if isinstance(ended, ConfigError) else ended
        return ended

    def _take(self, upward: Upward) -> None:
        for message in upward.messages:
            if isinstance(message, Hello):
                # The supervisor reports the death of this process.
                message = msgspec.structs.replace(message, pid=os.getpid())
            self._outbox.send(message)
        log_carried(upward.records)
        self._context.metrics.show(upward.slot)
        for report in upward.reports:
            self._context.report(report)
        for question in upward.questions:
            if question.method == FIND:
                self._answer(question, in_one_extent(self._rows, *question.arguments))
            else:
                self._work.append(self._threads.submit(self._answer_of_shards, question))

    def _answer(self, question: Question, found: Any) -> None:
        self._actor.deliver.remote(Downward(found={question.number: found}))

    def _answer_of_shards(self, question: Question) -> None:
        self._answer(question, self._shards.answer(question.method, question.arguments))

    def _look_at_work(self) -> None:
        """Raise the unexpected error of an answer or of the carrying: the rank would wait without end."""
        for work in [work for work in self._work if work.done()]:
            self._work.remove(work)
            work.result()

    def _carry(self, mailbox: Mailbox) -> None:
        """Pass on the buffer's messages; in a thread of its own."""
        while not self._ends.is_set():
            if messages := mailbox.receive(_LOOK_S):
                self._actor.deliver.remote(Downward(messages=messages))

    def _tell_changes(self) -> None:
        if (config := self._context.reloaded()) is not None:
            self._actor.deliver.remote(Downward(config=config.model_dump_json()))
        if self._context.stopping and not self._told_to_stop:
            self._told_to_stop = True
            self._actor.deliver.remote(Downward(stopping=True))


class _RankActor(RemoteRank):
    """The actor: a `RemoteRank` that is spoken with during `run`."""

    def __init__(self, spec: RankSpec) -> None:
        begin_actor()
        super().__init__(spec)

    deliver = ray.method(concurrency_group="down")(RemoteRank.deliver)
    collect = ray.method(concurrency_group="up")(RemoteRank.collect)
