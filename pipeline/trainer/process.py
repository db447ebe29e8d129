"""A trainer rank's process: models, process group and connection around `pipeline.trainer.trainer`."""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as distributed

from pipeline.config.identity import identity_of
from pipeline.config.schema import Config
from pipeline.errors import ExitCode
from pipeline.models.critic import Critic
from pipeline.models.device import device_name, process_device
from pipeline.models.loading import Preprocessing, load_actor, load_critic, load_tokenizer
from pipeline.models.lora import Saved, adapt
from pipeline.models.weights.probe import answer
from pipeline.prompts import first_tokens
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.runtime.role import Report, RoleContext, reward_source
from pipeline.runtime.transport import Traffic
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.checkpoints import CheckpointNote, save_checkpoint
from pipeline.trainer.connect import open_connection
from pipeline.trainer.connection import Connection
from pipeline.trainer.learner import Learner
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.resume import Resumption
from pipeline.trainer.state import Progress, RankProgress, tensors_of
from pipeline.trainer.trainer import CheckpointWriter, Trainer

_IDLE_S = 0.25

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext) -> ExitCode:
    """Train until `trainer.max_steps`, a drain, or SIGTERM.

    Returns:
        `ExitCode.OK`; `ExitCode.FAILED` if the last checkpoint could not be written.

    Raises:
        ConfigError: If this rank's GPU cannot be used, or a model or tokenizer cannot be loaded.
    """
    torch.set_num_threads(config.trainer.threads)
    device = process_device()
    connection = open_connection(
        context.folder,
        rank=context.index,
        world_size=config.trainer.world_size,
        prefetch=batches_ahead(config),
        verify_checksum=config.buffer.checksum,
        traffic=Traffic(context.metrics),
    )
    context.metrics.gauge("rlhfd_arena_pinned_bytes").set(connection.pin(device))
    join_ranks(config, context)
    trainer = new_trainer(config, context, connection)
    context.ready(device_name(device))
    try:
        while not trainer.finished:
            context.metrics.beat()
            if (changed := context.reloaded()) is not None:
                trainer.save_every = changed.trainer.save_every
            if context.stopping:
                trainer.stop()
            elif not trainer.poll():
                trainer.wait(_IDLE_S)
        saved = trainer.close()
        if trainer.complete:
            context.report(Report(state="finished"))
    finally:
        # In the process group only after an error. Then nothing is released: freed page-locked memory waits for the GPU
        # as the group does, and the process exits at once. The supervisor ends the other ranks.
        if not context.in_process_group:
            connection.close()
    return ExitCode.OK if saved else ExitCode.FAILED


def batches_ahead(config: Config) -> int:
    """Return the number of batches that a rank holds: the batches of one version, and one ahead."""
    return config.trainer.gradient_accumulation_steps * config.trainer.publish_every + 1


def join_ranks(config: Config, context: RoleContext) -> None:
    """Join the process group of this generation, through a file in the instance's folder: it needs no port."""
    if config.trainer.world_size == 1:
        return
    if context.index == 0:
        # Files of earlier generations: each generation leaves its file when it is killed.
        for left in context.folder.glob("ranks-*"):
            if int(left.name.partition("-")[2]) < context.generation:
                left.unlink(missing_ok=True)
    backend = "nccl" if process_device().type == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"file://{context.folder / f'ranks-{context.generation}'}",
        rank=context.index,
        world_size=config.trainer.world_size,
        # A rank may wait for data without limit; hang detection is the supervisor's.
        timeout=datetime.timedelta(days=7),
    )
    context.in_process_group = True


def leave_ranks(context: RoleContext) -> None:
    """Leave the process group; returns once every rank leaves, and must follow a collective of all ranks."""
    if context.in_process_group:
        distributed.destroy_process_group()
        context.in_process_group = False


def all_ranks_agree(ready: bool) -> bool:
    """Return whether every rank passed True; a collective."""
    flag = torch.tensor(int(ready), device=process_device())
    distributed.all_reduce(flag, distributed.ReduceOp.MIN)
    return bool(flag)


def progress_of_all_ranks(own: RankProgress) -> list[RankProgress]:
    """Return every rank's progress, in order of ranks; a collective."""
    sent = torch.tensor(own, dtype=torch.int64, device=process_device())
    received = [torch.empty_like(sent) for _ in range(distributed.get_world_size())]
    distributed.all_gather(received, sent)
    return [RankProgress(*progress.tolist()) for progress in received]


def new_trainer(config: Config, context: RoleContext, connection: Connection) -> Trainer:
    """Return a trainer with its models loaded and set to the start of training (`pipeline.trainer.resume`)."""
    device = process_device()
    actor = load_actor(config.model.actor, dtype=config.model.dtype, device=device)
    models: dict[str, torch.nn.Module] = {"actor": actor}
    if config.rollout.algorithm == "ppo":
        models["critic"] = (
            Critic.from_actor(actor)
            if config.model.critic is None
            else load_critic(config.model.critic, dtype=config.model.dtype, device=device)
        )
    # After the critic, which is made from the backbone without adapters.
    adapt(actor, config.model, seed=config.daemon.seed)
    metrics = TrainerMetrics(context.metrics, rank=context.index, reward_source=reward_source(config))

    def agree(ready: bool) -> bool:
        if config.trainer.world_size == 1:
            return ready
        with metrics.in_collective():
            return all_ranks_agree(ready)

    def leave() -> None:
        # The first rank may still publish, or write a checkpoint that was due.
        with metrics.in_collective():
            leave_ranks(context)

    def gather(own: RankProgress) -> list[RankProgress]:
        if config.trainer.world_size == 1:
            return [own]
        with metrics.in_collective():
            return progress_of_all_ranks(own)

    learner = Learner(
        config.trainer,
        config.rollout.algorithm,
        actor,
        models.get("critic"),
        temperature=config.rollout.temperature,
        kl_coef=config.trainer_kl_coef,
        process_group=distributed.group.WORLD if config.trainer.world_size > 1 else None,
        on_phase=metrics.phase,
    )
    resumption = Resumption(config, connection, learner, models, device)
    start = resumption.find()
    # A barrier: the first rank replaces nothing that another rank still reads.
    agree(True)
    if context.index == 0:
        resumption.settle(start)
    trainer = Trainer(
        config,
        learner,
        connection,
        models,
        metrics,
        device=device,
        agree=agree,
        leave=leave,
        gather=gather,
        save=checkpoint_writer(config, models, learner, device, context.metrics.beat) if context.index == 0 else None,
        start=start,
        probe=actor_probe(config, actor, device),
    )
    if start.rollback:
        agree(True)
        published = connection.newest()
        if context.index and published is not None:
            connection.start_over(published)
    return trainer


def actor_probe(config: Config, actor: torch.nn.Module, device: torch.device) -> Callable[[], Probe] | None:
    """Return a function that runs the workers' probe on the actor; None if there are no probe tokens."""
    tokens = first_tokens(
        config.prompts.path, config.daemon.seed, config.prompts.template, load_tokenizer(config.model.actor)
    )
    return functools.partial(answer, actor, tokens, device) if tokens else None


def checkpoint_writer(
    config: Config,
    models: Mapping[str, torch.nn.Module],
    learner: Learner,
    device: torch.device,
    on_progress: Callable[[], None],
) -> CheckpointWriter:
    """Return the writer of this run's checkpoints; it calls `on_progress` while it writes."""
    preprocessing = Preprocessing(config.model.actor, load_tokenizer(config.model.actor))
    described, identity = config.model_dump(mode="json"), identity_of(config)

    def save(progress: Progress, version: WeightsVersion, *, complete: bool) -> Path:
        note = CheckpointNote(
            identity,
            progress.step,
            version.version,
            progress.position,
            complete,
            digest=f"{progress.digest:016x}",
            fingerprint=f"{version.fingerprint:016x}",
            config=described,
        )
        return save_checkpoint(
            checkpoints_dir(config),
            note,
            actor=Saved(models["actor"], config.model),
            tokenizer=preprocessing,
            critic=models.get("critic"),
            state=tensors_of(learner, progress, device),
            keep=config.trainer.keep_checkpoints,
            on_progress=on_progress,
        )

    return save
