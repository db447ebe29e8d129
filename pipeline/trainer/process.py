"""A trainer rank's process: models, process group and connection around `pipeline.trainer.trainer`."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from pipeline.config.identity import identity_of, run_dir
from pipeline.config.losses import log_probs_by, signals_without_scores
from pipeline.config.rewards import may_have_numbers, part_labels
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode
from pipeline.models.compiled_layers import Uses, compile_layers
from pipeline.models.device import device_name, free_cached, grow_segments, process_device
from pipeline.models.float32_logits import compute_in_float32, use_float32_logits
from pipeline.models.fused_kernels import fuse
from pipeline.models.loading import critic_of, load_actor, load_tokenizer, refuse_large_tokenizer
from pipeline.models.lora import adapt
from pipeline.models.tokenizer_file import TokenizerFiles
from pipeline.models.weights.held import HeldVersion
from pipeline.progress import Telemetry
from pipeline.prompts.passes import last_step
from pipeline.prompts.rendering import first_tokens
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.runtime.role import Report, RoleContext, await_turn, reward_source
from pipeline.runtime.transport import Traffic
from pipeline.storage.card_turns import RankTurn
from pipeline.storage.recording import FOLDER as RECORDING
from pipeline.storage.recording import MOST_BYTES, TrainerStart
from pipeline.telemetry.evaluations import FILE_NAME as EVALUATIONS
from pipeline.telemetry.number_names import NumberNames
from pipeline.trainer.card_memory import CardMemory, planned_bytes
from pipeline.trainer.checkpoints import save_checkpoint
from pipeline.trainer.connect import open_connection
from pipeline.trainer.connection import Connection
from pipeline.trainer.dealing import RankBalance, Ranks, rows_of_all_ranks
from pipeline.trainer.hooks import TrainerHook
from pipeline.trainer.learner import Learner
from pipeline.trainer.loss.objective import Objective
from pipeline.trainer.meeting import Meeting, StoppedError, enter_group, forget_earlier, leave_the_verdict
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.recording.recorder import StepRecorder, cut, versions
from pipeline.trainer.resume import Resumption, Start
from pipeline.trainer.saving.background import CheckpointWriter, Point
from pipeline.trainer.saving.best import EvaluationFollower
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.sharding.models import load_actor_shards, replica_of, sharded_models, whole_answer
from pipeline.trainer.sharding.ranks import RankGroup
from pipeline.trainer.sharding.replicas import TIMEOUT
from pipeline.trainer.spreading import of_first, spread
from pipeline.trainer.state import RankProgress, tensors_of
from pipeline.trainer.step_log import FILE_NAME, StepLog
from pipeline.trainer.trainer import Trainer

_IDLE_S = 0.5

Turn = Callable[[], contextlib.AbstractContextManager[None]]

log = logging.getLogger(__name__)


def connect_here(config: Config, context: RoleContext) -> Connection:
    """Return the connection of a rank on the daemon's machine."""
    return open_connection(
        context.folder, config, rank=context.index, prefetch=batches_ahead(config), traffic=Traffic(context.metrics)
    )


def run(
    config: Config,
    context: RoleContext,
    connect: Callable[[Config, RoleContext], Connection] = connect_here,
    meeting: Meeting | None = None,
) -> ExitCode:
    """Train until `trainer.max_steps` or `trainer.max_epochs`, a drain, or SIGTERM.

    Args:
        config: The run's configuration.
        context: This rank's process.
        connect: Connects the rank to the daemon.
        meeting: The place where the ranks meet, on another machine than the daemon's.

    Returns:
        `ExitCode.OK`; `ExitCode.FAILED` if the last checkpoint could not be written.

    Raises:
        ConfigError: If this rank's GPU cannot be used, or a model or tokenizer cannot be loaded.
    """
    torch.set_num_threads(config.trainer.threads)
    device = process_device()
    grow_segments(device, os.environ)
    connection = connect(config, context)
    try:
        join_ranks(config, context, meeting)
    except StoppedError:
        connection.close()
        return ExitCode.OK
    trainer = new_trainer(config, context, connection)
    context.ready(device_name(device))
    try:
        while not trainer.finished:
            trainer.beat()
            if (changed := context.reloaded()) is not None:
                trainer.save_every = changed.trainer.save_every
            if context.stopping:
                trainer.stop()
            elif not trainer.poll():
                trainer.wait(_IDLE_S)
        saved = trainer.close()
        if trainer.complete:
            context.report(Report(state="finished"))
    except BaseException as error:
        trainer.abandon()
        if config.trainer.world_size > 1:
            leave_the_verdict(context, error)
        raise
    finally:
        # In the process group only after an error. Then nothing is released: freed page-locked memory waits for the GPU
        # as the group does, and the process exits at once. The supervisor ends the other ranks.
        if not context.in_process_group:
            connection.close()
    return ExitCode.OK if saved else ExitCode.FAILED


def batches_ahead(config: Config) -> int:
    """Return the number of batches that a rank holds: the batches of one version, and one ahead."""
    return config.trainer.gradient_accumulation_steps * config.trainer.publish_every + 1


def join_ranks(config: Config, context: RoleContext, meeting: Meeting | None = None) -> None:
    """Join the process group of this generation.

    On one machine the ranks meet through a file in the instance's folder, which needs no port.

    Raises:
        StoppedError: If a shutdown comes before ranks of several machines have met.
        RlhfdError: If they cannot meet.
    """
    if config.trainer.world_size == 1:
        return
    if config.trainer.nodes > 1:
        enter_group(config, context, meeting)
        return
    if context.index == 0:
        forget_earlier(context.folder, context.generation)
    # Also where the image of a cluster names another one: nothing of these ranks leaves the machine.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if process_device().type == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"file://{context.folder / f'ranks-{context.generation}'}",
        rank=context.index,
        world_size=config.trainer.world_size,
        timeout=TIMEOUT,
    )
    context.in_process_group = True


def leave_ranks(context: RoleContext) -> None:
    """Leave the process group; returns once every rank leaves, and must follow a collective of all ranks."""
    if context.in_process_group:
        distributed.destroy_process_group()
        context.in_process_group = False


def progress_of_all_ranks(group: RankGroup, own: RankProgress) -> list[RankProgress]:
    """Return every rank's progress, in order of ranks; a collective."""
    # One collective: the sums travel as the bits of their float64.
    every = group.gather([own.digest, own.position, *np.array(own.sums, np.float64).view(np.uint64).tolist()])
    return [
        RankProgress(digest, position, tuple(np.array(words, np.uint64).view(np.float64).tolist()))
        for digest, position, *words in every
    ]


def new_trainer(config: Config, context: RoleContext, connection: Connection) -> Trainer:
    """Return a trainer with its models loaded and set to the start of training (`pipeline.trainer.resume`)."""
    device = process_device()
    models = sharded_models(config, device) if config.shards_trainer else whole_models(config, device)
    actor: Any = models["actor"]
    tokenizer = load_tokenizer(config.model.actor)
    refuse_large_tokenizer(tokenizer, actor.config.get_text_config().vocab_size, config.model.actor)
    tokens = first_tokens(config.prompts, config.daemon.seed, tokenizer)
    metrics = TrainerMetrics(
        context.metrics,
        rank=context.index,
        reward_source=reward_source(config),
        reward_labels=part_labels(config),
        numbers=NumberNames(run_dir(config)) if may_have_numbers(config) else None,
    )

    # Encloses a collective, in which this rank makes no progress of its own.
    waiting = metrics.in_collective()
    ranks = Ranks()
    if config.trainer.world_size > 1:
        # While the ranks leave, the first one may still publish, or write a checkpoint that was due.
        group = RankGroup(device, metrics.in_collective)
        ranks = Ranks(
            agree=group.agree,
            leave=waiting(functools.partial(leave_ranks, context)),
            gather=functools.partial(progress_of_all_ranks, group),
            balance=RankBalance(connection, device, waiting(rows_of_all_ranks)) if deals_rows(config) else None,
        )
    turn = functools.partial(turn_of_start, context, metrics) if config.rollout.sleep else contextlib.nullcontext
    learner = new_learner(config, models, tokens, device, metrics, turn)
    rank_models = RankModels(config, models, connection, device, metrics.in_collective, beside=learner.published())
    # Sharded ranks of several machines read their own shards: each has another part of what is there.
    is_spread = config.trainer.nodes > 1 and not rank_models.is_sharded
    first_reads = waiting(of_first) if config.trainer.nodes > 1 and rank_models.is_sharded else operator.call
    resumption = Resumption(
        config, connection, learner, rank_models,
        agree=bool if is_spread else ranks.agree,
        of_first=first_reads,
    )  # fmt: skip
    start = resumption.find() if context.index == 0 or not is_spread else Start()
    if is_spread:
        start = waiting(spread)(start, learner, rank_models, connection, device)
    ends_at = last_step(config, step=start.progress.step, position=start.progress.position)
    metrics.ends_at(ends_at)
    # A barrier: the first rank replaces nothing that another rank still reads.
    ranks.agree(True)
    if context.index == 0:
        resumption.settle(start)
    # The ranks that save together follow the evaluations together. Those of one machine all have the files.
    saves_with = rank_models.agree if rank_models.is_sharded and rank_models.publishes else None
    reads = first_reads if config.shards > config.ranks_here else operator.call
    trainer = Trainer(
        config,
        learner,
        connection,
        rank_models,
        metrics,
        device=device,
        ranks=ranks,
        save=checkpoint_writer(config, rank_models, learner) if rank_models.publishes else None,
        start=start,
        probe=functools.partial(whole_answer, actor, tokens, device) if tokens else None,
        hooks=new_hooks(config, context, start, metrics, saves_with, reads),
        last_step=ends_at,
        turn=RankTurn(context.folder, context.index, free_cached) if config.rollout.sleep else None,
    )
    if config.rollout.sleep:
        # The memory of the start.
        free_cached()
    if start.rollback:
        ranks.agree(True)
        published = of_first(connection.newest) if is_spread else connection.newest()
        if context.index and published is not None:
            connection.start_over(published)
    return trainer


@contextlib.contextmanager
def turn_of_start(context: RoleContext, metrics: TrainerMetrics) -> Iterator[None]:
    """Hold the rank's turn during passes of its start that are as large as a step's: the plan counts no engine beside.

    Once it waits, engines finish their tickets and sleep.

    Raises:
        SystemExit: At a shutdown.
    """
    turn = RankTurn(context.folder, context.index, free_cached)
    try:
        await_turn(context, turn, metrics.waiting_for_card)
        yield
        turn.give_back()
    finally:
        turn.close()


class _Recording(TrainerHook):
    """Removes the recorded steps that are taken again, and opens the recorder, once the first weights are published."""

    def __init__(self, config: Config, start: Start, metrics: TrainerMetrics) -> None:
        self._config, self._start, self._metrics = config, start, metrics

    def began(self, trainer: Trainer) -> TrainerHook:
        recorder = open_recorder(self._config, self._start, process_device(), self._metrics)
        return self if recorder is None else recorder.began(trainer)


def new_hooks(
    config: Config,
    context: RoleContext,
    start: Start,
    metrics: TrainerMetrics,
    agree: Callable[[bool], bool] | None,
    of_first: Callable[[Callable[[], Any]], Any],
) -> list[TrainerHook]:
    """Return the optional behaviour of a rank, in the order of its stores.

    Args:
        config: The run's configuration.
        context: This rank's process.
        start: The point from which training starts.
        metrics: The rank's metrics.
        agree: The collective of the ranks that write checkpoints together, on each of them; None on another rank, and
            if the first one writes them alone.
        of_first: Returns the result of a call that reads files of the run, on several machines the first rank's.
    """
    leads = context.index == 0

    hooks: list[TrainerHook] = []
    if leads:
        # A trainer of several ranks records nothing.
        hooks += [_Recording(config, start, metrics), open_step_log(config, start)]
    if config.evaluation.files and (leads or agree is not None):
        hooks.append(
            EvaluationFollower(
                run_dir(config) / EVALUATIONS,
                checkpoints_dir(config),
                every=config.evaluation.every,
                keep_best=config.evaluation.keep_best,
                agree=agree or bool,
                of_first=of_first,
                leads=leads,
                reads=context.index < config.ranks_here,
            )
        )
    if process_device().type == "cuda":
        # Without a plan, which the start has told, nothing is compared.
        with contextlib.suppress(ConfigError):
            hooks.append(CardMemory(planned_bytes(config)))
    return hooks


def deals_rows(config: Config) -> bool:
    """Return whether the rows of a step are dealt to the ranks for equal work.

    With several mini-batches the rows of an update follow from the order of the leases.
    """
    return config.trainer.world_size > 1 and config.trainer.mini_batches == 1


def new_learner(
    config: Config,
    models: Mapping[str, torch.nn.Module],
    tokens: Sequence[int],
    device: torch.device,
    telemetry: Telemetry = Telemetry.none(),
    turn: Turn = contextlib.nullcontext,
) -> Learner:
    """Return the learner of these models as they start, ``actor`` and with PPO ``critic``; with shards a collective.

    The reference of the KL is loaded here if it is the trainer's. It is not one of the models, so that no publish,
    training state or checkpoint has it.

    Args:
        config: The run's configuration.
        models: The models, whole or sharded; with `trainer.world_size` above 1 the process group has been joined.
        tokens: Tokens of the run's first prompt.
        device: Device of the models.
        telemetry: See `Learner`.
        turn: Encloses passes as large as a step's.
    """
    actor = models["actor"]
    reference = load_reference(config, actor, device)
    every = [*models.values(), *([] if reference in (None, actor) else [reference])]
    fuse(every, device)
    in_float32 = use_float32_logits(
        actor,
        tokens,
        device,
        dtype=config.model.dtype,
        given=config.model.float32_logits,
        temperature=config.rollout.temperature,
        most_columns=config.lengths.row,
    )
    if in_float32 and reference is not None and reference is not actor:
        compute_in_float32(reference)
    learner = Learner(
        config.trainer,
        config.rollout.algorithm,
        actor,
        models.get("critic"),
        temperature=config.rollout.temperature,
        kl_coef=config.trainer_kl_coef,
        objective=objective_of(config),
        computes_log_probs=log_probs_by(config) == "trainer",
        reference=reference,
        observes_scores=config.rollout.reward_scale == "running",
        run_seed=config.daemon.seed,
        process_group=distributed.group.WORLD if config.trainer.world_size > 1 else None,
        telemetry=telemetry,
    )
    most_tokens = learner.largest_pass(config.lengths.row)
    compile_passes(config, models, reference, device, packed=learner.packs_rows, tokens=most_tokens, turn=turn)
    return learner


def compile_passes(
    config: Config,
    models: Mapping[str, torch.nn.Module],
    reference: torch.nn.Module | None,
    device: torch.device,
    *,
    packed: bool,
    tokens: int,
    turn: Turn = contextlib.nullcontext,
) -> None:
    """Compile the layers of a learner's models and of its reference, as configured; those of shards are not."""
    is_auto = config.model.compile == "auto"
    if not config.model.compile or (is_auto and (device.type == "cpu" or config.shards_trainer)):
        return
    if config.shards_trainer:
        log.warning("layers are not compiled: reason=the trainer's ranks hold shards")
        return
    # PPO's first steps compute the actor's log-probs without gradients.
    scored = log_probs_by(config) == "trainer" or ("critic" in models and config.trainer.critic_warmup_steps > 0)
    actor = models["actor"]
    uses = {actor: Uses(packed, trained=True, scored=scored, without_adapters=reference is actor, tokens=tokens)}
    if "critic" in models:
        uses[models["critic"]] = Uses(packed, trained=True, scored=False, tokens=tokens)
    if reference is not None and reference is not actor:
        uses[reference] = Uses(packed, tokens=tokens)
    with turn():
        compile_layers(uses, device, only_if_faster=is_auto)


def load_reference(config: Config, actor: torch.nn.Module, device: torch.device) -> torch.nn.Module | None:
    """Return the trainer's reference model: None if it has none, and with LoRA the actor, whose base is frozen.

    Raises:
        ConfigError: If it cannot be loaded.
    """
    if config.reference_on != "trainer":
        return None
    if (path := config.reference_folder) is None:
        return actor
    settings: Any = {"dtype": config.model.dtype, "device": device, "field": "model.reference"}
    if config.shards_trainer:
        return load_actor_shards(path, replica=replica_of(actor), lora=None, **settings)
    return load_actor(path, **settings)


def whole_models(config: Config, device: torch.device) -> dict[str, torch.nn.Module]:
    """Return the models, each whole on this rank: ``actor`` and, with PPO, ``critic``."""
    actor = load_actor(config.model.actor, dtype=config.model.dtype, device=device)
    models: dict[str, torch.nn.Module] = {"actor": actor}
    if config.rollout.algorithm == "ppo":
        models["critic"] = critic_of(actor, config.model.critic, dtype=config.model.dtype, device=device)
    # After the critic, which is made from the backbone without adapters.
    adapt(actor, config.model, seed=config.daemon.seed)
    return models


def objective_of(config: Config) -> Objective:
    """Return the loss of a configuration."""
    return Objective.of(
        config.trainer,
        # REINFORCE++ normalizes over the batch of a step, which the trainer alone has.
        whitens=(config.rollout.algorithm == "ppo" and config.trainer.whiten_advantages)
        or config.advantages == "reinforce_baseline",
        response_tokens=config.lengths.response or config.lengths.row,
        equal_groups=signals_without_scores(config),
    )


def open_step_log(config: Config, start: Start) -> StepLog:
    """Return the log of the run's steps, without those that are taken again."""
    # Version 0 is published by a run without a step, or by one that is rolled back to its start.
    is_new_run = start.version == 0 and not start.rollback
    return StepLog(run_dir(config) / FILE_NAME, after_step=start.progress.step, is_new_run=is_new_run)


def open_recorder(config: Config, start: Start, device: torch.device, metrics: TrainerMetrics) -> StepRecorder | None:
    """Return the recorder of the run's steps; None if none is wanted, or if it cannot be opened.

    A recording that an earlier start kept has no steps after the present one then, whether any are recorded or not.
    """
    record, folder, after_step = config.trainer.record, run_dir(config) / RECORDING, start.progress.step
    if record == "off":
        try:
            cut(folder, after_step)
        except OSError as error:
            log.error("recorded steps that are taken again are not removed: path=%s error=%s", folder, error.strerror)
        return None
    described = TrainerStart(identity_of(config), config.model_dump(mode="json"), versions(), device_name(device))
    metrics.begin_recording()
    try:
        return StepRecorder(
            folder,
            described,
            after_step=after_step,
            most_bytes=MOST_BYTES if record == "rows" else 0,
            count=metrics.recorded,
            hold=metrics.recording_holds,
        )
    except OSError as error:
        metrics.recorded("failed")
        log.error("no step is recorded: path=%s error=%s", folder, error.strerror)
        return None


def checkpoint_writer(config: Config, models: RankModels, learner: Learner) -> CheckpointWriter:
    """Return the writer of this run's checkpoints."""
    files = TokenizerFiles(config.model.actor)
    described, identity = config.model_dump(mode="json"), identity_of(config)

    def save(point: Point, held: HeldVersion | None, telemetry: Telemetry) -> Path | None:
        progress, version, complete = point
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
        write = functools.partial(
            save_checkpoint,
            checkpoints_dir(config),
            note,
            tokenizer=files,
            keep=config.trainer.keep_checkpoints,
            telemetry=telemetry,
        )
        state = tensors_of(learner, progress) if held is None else None
        return models.save(write, state, held)

    return save
