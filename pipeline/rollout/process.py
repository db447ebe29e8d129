"""The process of a rollout worker: models, arena and ZeroMQ around `pipeline.rollout.worker`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from pipeline.config.identity import run_dir
from pipeline.config.rewards import may_have_numbers, part_labels, reward_functions
from pipeline.config.schema import Config
from pipeline.errors import EngineKilledError, ExitCode, WeightsMismatchError
from pipeline.models.device import device_name, process_device
from pipeline.models.loading import load_tokenizer
from pipeline.rollout.first_rollouts import note_first_prompts
from pipeline.rollout.loader import load_roller
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.sample_recorder import RolloutSamples
from pipeline.rollout.sleep import EngineSleep
from pipeline.rollout.ticket_stream import EngineStream, TicketStream, new_stream
from pipeline.rollout.worker import RolloutWorker, WorkerHook
from pipeline.runtime.lifeline import end_group_with_this
from pipeline.runtime.role import Report, RoleContext, await_turn, reward_source
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, Sender, Traffic, worker_name
from pipeline.storage.arena import Arena
from pipeline.storage.card_turns import EngineTurn
from pipeline.telemetry.number_names import NumberNames

_IDLE_S = 0.5

Loader = Callable[[Config, RoleContext, RolloutMetrics], TicketStream]

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext, load: Loader | None = None) -> ExitCode:
    """Roll out tickets until a shutdown or the end of a drain.

    Args:
        config: The instance's.
        context: This process's.
        load: Loads the worker's models; without it `load_local`, which loads them into this process.

    Returns:
        OK, after a shutdown or a drain.

    Raises:
        ConfigError: If this worker's GPU cannot be used, or its models or reward cannot be loaded.
        WeightsMismatchError: If the model does not compute with its weights; the worker is reported as unusable.
    """
    torch.set_num_threads(config.rollout.threads)
    if load is None and reward_functions(config) and not config.rollout.reward_timeout_s:
        # Functions of the user run in this process; what they start ends with it.
        end_group_with_this()
    # Before sockets and memory: the processes of the reward functions are forks of this one while it is alone.
    tokenizer, metrics = prepare(config, context)
    stream = load_local(config, context, tokenizer, metrics) if load is None else load(config, context, metrics)
    device = process_device()
    arena = Arena(context.folder / "arena")
    arena.populate()
    traffic = Traffic(context.metrics)
    mailbox = Mailbox(context.folder, worker_name(context.index), traffic)
    outbox = Outbox(context.folder, BUFFER, traffic)
    worker = worker_with(stream, config, context, tokenizer, arena, outbox, metrics)
    # The models of another loader are in another process.
    context.ready(device_name(device) if load is None else "")
    waiting_since_s = time.monotonic()
    try:
        while not worker.finished:
            context.reloaded()
            worker.draining |= context.stopping
            for message in mailbox.receive(0.0):
                worker.handle(message)
            if not worker.idle and worker.may_work():
                waited_s = time.monotonic() - waiting_since_s
                for _ in range(worker.step()):
                    metrics.ticket_came(waited_s)
                    waited_s = 0.0
                waiting_since_s = time.monotonic()
                continue
            # Not during the work: its progress beats.
            context.metrics.beat()
            if worker.idle:
                metrics.in_flight(0)
            wait_s = worker.rest(_IDLE_S)
            with metrics.waiting(for_card=not worker.idle):
                for message in mailbox.receive(wait_s):
                    worker.handle(message)
        return ExitCode.OK
    except WeightsMismatchError:
        context.report(Report(state="unusable"))
        raise
    except EngineKilledError:
        context.report(Report(killed=True))
        raise
    finally:
        worker.close()
        outbox.close(linger_s=1.0)
        mailbox.close()


def new_worker(config: Config, context: RoleContext, arena: Arena, sender: Sender) -> RolloutWorker:
    """Load a worker that computes in this process, and introduce it to the buffer; see `load_local`."""
    tokenizer, metrics = prepare(config, context)
    stream = load_local(config, context, tokenizer, metrics)
    return worker_with(stream, config, context, tokenizer, arena, sender, metrics)


def prepare(config: Config, context: RoleContext) -> tuple[Any, RolloutMetrics]:
    """Return the tokenizer of a worker, and its metrics."""
    tokenizer = load_tokenizer(config.model.actor)
    if context.index == 0:
        note_first_prompts(config, tokenizer)
    metrics = RolloutMetrics(
        context.metrics,
        reward_source=reward_source(config),
        transport="ray" if config.cluster.engine == "ray" else "shm",
        reward_labels=part_labels(config),
        log_texts=config.daemon.log_texts,
    )
    return tokenizer, metrics


def load_local(config: Config, context: RoleContext, tokenizer: Any, metrics: RolloutMetrics) -> TicketStream:
    """Load the models and the reward, and try both on one prompt.

    Raises:
        ConfigError: If the reward function does not return one finite number a row.
    """
    roller = load_roller(
        config,
        tokenizer,
        metrics,
        texts=may_quote_texts(config, context),
        before_engine=functools.partial(take_turn, config, context, metrics),
    )
    return new_stream(roller, config, metrics)


def take_turn(config: Config, context: RoleContext, metrics: RolloutMetrics) -> None:
    """Take the turn on a card that a trainer shares: an engine is loaded awake.

    Raises:
        SystemExit: At a shutdown.
    """
    if not config.rollout.sleep:
        return
    # Not before: the processes of the reward functions, forks of this one, would hold it as well.
    turn = context.turn = EngineTurn(context.folder)
    await_turn(context, turn, metrics.waiting_to_load)


def may_quote_texts(config: Config, context: RoleContext) -> bool:
    """Return whether an error may quote prompts and answers: at the first start a person reads it and needs them."""
    return config.daemon.log_texts or context.generation <= 1


def worker_with(
    stream: TicketStream,
    config: Config,
    context: RoleContext,
    tokenizer: Any,
    arena: Arena,
    sender: Sender,
    metrics: RolloutMetrics,
) -> RolloutWorker:
    """Return the worker of a configuration with this stream."""
    samples = RolloutSamples.of(config, tokenizer, context.index, time.monotonic)
    hooks: list[WorkerHook] = [] if samples is None else [samples]
    if context.turn is not None:
        hooks.append(EngineSleep(context.turn, cast("EngineStream", stream), metrics))
    return RolloutWorker(
        stream,
        arena,
        context.folder / "weights",
        sender,
        metrics,
        index=context.index,
        clock=time.monotonic,
        group_size=config.group_size,
        hooks=hooks,
        numbers=NumberNames(run_dir(config)) if may_have_numbers(config) else None,
        initial_version=0 if config.trainer.kind == "external" else -1,
    )
