"""Bytes that a run needs on each device, computed from its configuration and the sizes of its models alone.

The bytes a parameter are those of the table in docs/operations.md: tests compare both, and the table with real files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipeline.config.evaluation import prompts_per_ticket
from pipeline.config.losses import worker_holds_actor
from pipeline.config.model_files import ModelSizes, model_sizes
from pipeline.config.optimizers import moment_bytes
from pipeline.config.rewards import reward_models
from pipeline.config.schema import Config
from pipeline.config.sections import ReferenceRole

WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COPY_BYTES = {"bfloat16": 4, "float16": 4, "float32": 0}
HELD_COPY_BYTES = {"bfloat16": 2.125, "float16": 4, "float32": 0}
"""Bytes of a float32 copy in shared memory: of bfloat16 the lower half and a bit (`trainer/saving/lower_halves.py`)."""
GRADIENT_BYTES = {"bfloat16": 6, "float16": 6, "float32": 4}
STATE_SLOTS = 2
LEDGER_BYTES = 71_000_000
METRICS_BYTES = 1 << 20
DAEMON_BYTES, PROCESS_BYTES, SHARDING_BYTES = 100_000_000, 300_000_000, 200_000_000
"""Host memory of supervisor and buffer, of a rank or worker without its models, and of torch's parts for shards."""
VLLM_PROCESS_BYTES = 700_000_000
"""Host memory of vLLM's own process beside a worker, without its weights and cache; measured on a CPU, 0.65 GB."""
CONTEXT_BYTES = 1_200_000_000
"""Memory of a card that a process takes before its first tensor: context, kernels, workspaces of the libraries.

Measured on an H200: 2.3 GB of two processes, 0.5 to 1 GB of each and the driver's own."""
KEPT_SHARE = 0.3
"""Share of the tensors of passes that torch's allocator keeps beside them: freed blocks that fit no later request.

Weights, moments and gradients are allocated once. Measured: 0.7 GB kept by a rank whose passes hold 2.6, 28 %."""
_OF_PASSES = (
    "activations of a micro-batch", "logits", "gathered layers and root",
    "KV cache", "logits of a step", "passes over rows", "passes and graphs of the engine",
)  # fmt: skip
"""Terms whose tensors come and go, of other sizes each time."""

_PASS_TOKENS = 16_384
"""Tokens of a pass without a backward pass on a GPU, where no plan has chosen."""
_ROW_STEP = 32
_PASS_STATES, _PASS_INNER = 4, 3
"""Vectors of a token that such a pass holds at a time, of the hidden width and of the MLP's: those of one layer."""
_PASS_LOGITS, _SAMPLED_LOGITS = 2, 5
"""Copies in float32 of the logits of a chunk of log-probs, and of those of a token step that is sampled."""
VLLM_ROWS, _GRAPH_BYTES = 256, 500_000_000
"""Rows of a step of vLLM where `rollout.inference_batch_size` is left out, and its graphs with their workspaces."""

ENGINE_TERMS = ("weights of the engine", "KV cache")
"""Terms of an engine that allocates them itself, and frees them while it sleeps."""
_SHARD_TERMS = (*ENGINE_TERMS, "passes and graphs of the engine")
"""Terms of a rank of an engine."""

_HIDDEN_STATES, _INNER_STATES = 15.25, 4.0
"""Vectors that a layer keeps a token for its backward pass: of the hidden width, and of the MLP's. Fitted to the four
models of the table; the sums are within 3 % of it."""
_GPU_TOKENS = {False: 8_192, True: 16_384}
"""Tokens of a micro-batch on a GPU, without and with checkpointed activations."""
_CPU_TOKENS, _CPU_ROWS = 2_048, 48
_CPU_OPERATIONS = 2**40
_LOGITS = 2**26
_SHARD_BYTES = 4
VLLM_CPU_CACHE_BYTES = 1 << 30
"""The key-value cache of vLLM on a CPU where `rollout.cache_bytes` is left out."""

Terms = dict[str, int]
"""Bytes by what needs them."""


class Models(NamedTuple):
    """The sizes of a run's models; None for a model that the run does not have."""

    actor: ModelSizes
    critic: ModelSizes | None
    reference: ModelSizes | None
    rewards: Mapping[str, ModelSizes] = MappingProxyType({})
    """Reward models by label."""


class Needs(NamedTuple):
    """The bytes that a run needs.

    Attributes:
        rank: Bytes of each trainer rank, on its card or in host memory.
        worker: Bytes of each rollout worker, on its card or in host memory.
        shard: Bytes of each further card of a rollout worker (`rollout.tensor_parallel`).
        worker_host: Bytes of each rollout worker in host memory, beside its card.
        shared: In /dev/shm.
        publish: Written by a publish.
        rank_load: Host memory of a rank while it loads its models onto a card; 0 for shards.
        worker_load: The same of a worker.
    """

    rank: Terms
    worker: Terms
    shard: Terms
    worker_host: Terms
    shared: Terms
    publish: Terms
    rank_load: int
    worker_load: int


def models_of(config: Config, made: Mapping[str, ModelSizes] = MappingProxyType({})) -> Models:
    """Read the sizes of a configuration's models.

    Args:
        config: The configuration.
        made: Sizes by path of models whose files may not exist yet.

    Raises:
        ConfigError: If a folder has no readable config.json or safetensors file.
    """
    model = config.model

    def sizes(path: str, field: str) -> ModelSizes:
        return made[path] if path in made else model_sizes(Path(path), field)

    actor = sizes(model.actor, "model.actor")
    critic = reference = None
    if config.rollout.algorithm == "ppo":
        critic = actor if model.critic is None else sizes(model.critic, "model.critic")
    if config.reference_on is not None and config.reference_folder is not None:
        reference = actor if model.reference is None else sizes(model.reference, "model.reference")
    rewards = {one.label: sizes(one.path, one.key) for one in reward_models(config)}
    return Models(actor, critic, reference, rewards)


def needs(config: Config, models: Models, *, on_cards: bool) -> Needs:
    """Return the bytes that a run needs.

    Args:
        config: The configuration.
        models: The sizes of its models.
        on_cards: Whether ranks and workers have GPUs, which sets the tokens of a micro-batch.
    """
    trained, frozen = _trained_and_frozen(config, models)
    width = WEIGHT_BYTES[config.model.dtype]
    state = 0
    if config.trainer.keep_state != "disk":
        # An external trainer names its training state as it likes.
        copies = HELD_COPY_BYTES if config.trainer.kind == "builtin" else COPY_BYTES
        state = math.ceil(copies[config.model.dtype] * trained) + _moment_bytes(config, models, trained)
    is_ours = config.trainer.kind == "builtin"
    held = _reference_on("worker", config, models)
    streams = config.model.reference_device == "host"
    worker = _worker(config, models, on_cards=on_cards)
    return Needs(
        rank=_rank(config, models, trained, frozen, on_cards=on_cards) if is_ours else {},
        worker=worker,
        shard={term: worker[term] for term in _SHARD_TERMS if term in worker},
        worker_host={"layers of the reference": width * _streamed(held)} if streams and held is not None else {},
        shared={
            "arena and ledger": config.buffer.arena_bytes + LEDGER_BYTES + METRICS_BYTES,
            "weights": config.trainer.weight_slots * width * trained,
            "training state": STATE_SLOTS * state,
        },
        publish={"weights": width * trained, "training state": state // config.trainer.keep_state_every},
        rank_load=width * _largest(models.actor, models.critic, _reference_on("trainer", config, models))
        if is_ours and not config.shards_trainer
        else 0,
        # A streamed reference passes into the host memory that it keeps.
        worker_load=width * _largest(models.actor, models.critic, None if streams else held, *models.rewards.values()),
    )


def kept_bytes_a_token(sizes: ModelSizes, dtype: str, *, checkpointed: bool) -> int:
    """Return the bytes that a pass keeps a token for its backward pass.

    With checkpointed activations they are a hidden state a layer, and the activations of one layer.
    """
    a_layer = _HIDDEN_STATES * sizes.hidden + _INNER_STATES * sizes.inner
    vectors = sizes.layers * sizes.hidden + a_layer if checkpointed else sizes.layers * a_layer
    return round(WEIGHT_BYTES[dtype] * vectors)


def process_bytes(config: Config, role: str) -> int:
    """Return the host memory of a rank ("trainer") or worker without its models, its engine's process included.

    In a cluster the engine's process is on another machine.
    """
    has_engine = role == "rollout" and config.rollout.engine == "vllm" and config.cluster.engine == "local"
    engine = VLLM_PROCESS_BYTES if has_engine else 0
    if config.rollout.tensor_parallel > 1:
        # Each rank imports vLLM, as does the engine's process.
        engine *= 1 + config.rollout.tensor_parallel
    return PROCESS_BYTES + engine + (SHARDING_BYTES if role == "trainer" and config.shards_trainer else 0)


def checkpoint_bytes(config: Config, models: Models) -> int:
    """Return the bytes of a checkpoint: weights in `model.dtype`, merged and as adapters, and the training state."""
    trained, frozen = _trained_and_frozen(config, models)
    weights = WEIGHT_BYTES[config.model.dtype] * (trained + frozen)
    return weights + COPY_BYTES[config.model.dtype] * trained + _moment_bytes(config, models, trained)


def card_bytes(config: Config, role: str, terms: Terms) -> Terms:
    """Return what a rank ("trainer"), worker or further card of a worker ("shard") takes of it beside its tensors.

    vLLM's weights and cache are of fixed size: nothing is kept beside them.
    """
    has_vllm = role in ("rollout", "shard") and config.rollout.engine == "vllm"
    of_passes = sum(terms.get(term, 0) for term in _OF_PASSES if not (has_vllm and term in ENGINE_TERMS))
    processes = 2 if has_vllm and role == "rollout" else 1
    if role == "rollout" and config.rollout.tensor_parallel > 1:
        # The worker, the engine's process and the rank of this card.
        processes += 1
    return {"kept by the allocator": round(KEPT_SHARE * of_passes), "contexts and libraries": CONTEXT_BYTES * processes}


def _moment_bytes(config: Config, models: Models, trained: int) -> int:
    matrices = sum(model.matrix_parameters for model in (models.actor, models.critic) if model is not None)
    return moment_bytes(config.trainer.optimizer, trained, matrices)


def _trained_and_frozen(config: Config, models: Models) -> tuple[int, int]:
    trained, frozen = models.actor.parameters, 0
    if config.model.lora_rank:
        frozen = trained
        trained = models.actor.adapter_parameters(config.model.lora_rank, config.model.lora_targets)
    if models.critic is not None:
        trained += models.critic.backbone_parameters + models.critic.hidden + 1
    return trained, frozen


def _rank(config: Config, models: Models, trained: int, frozen: int, *, on_cards: bool) -> Terms:
    dtype, ranks, actor = config.model.dtype, config.shards, models.actor
    width = WEIGHT_BYTES[dtype]
    length, logits = config.lengths.row, actor.vocabulary
    wanted = config.trainer.activation_checkpointing
    checkpointed = on_cards if wanted is None else wanted
    tokens = _micro_batch_tokens(config, trained + frozen, on_cards=on_cards, checkpointed=checkpointed)
    both = [model for model in (actor, models.critic) if model is not None]
    kept = max(kept_bytes_a_token(model, dtype, checkpointed=checkpointed) for model in both)
    passes = {
        "activations of a micro-batch": tokens * kept,
        # The logits, their gradient, and one chunk in float32.
        "logits": 3 * 4 * min(_LOGITS, max(tokens - tokens // max(length, 1), 1) * logits),
    }
    reference = _reference_on("trainer", config, models)
    held = {} if reference is None else {"reference": width * reference.parameters}
    if not config.shards_trainer:
        return {
            "weights": width * (trained + frozen),
            **held,
            "float32 copies": COPY_BYTES[dtype] * trained,
            "moments": _moment_bytes(config, models, trained),
            "gradients": GRADIENT_BYTES[dtype] * trained,
            **passes,
        }
    # Parts of a trained model have gradients as large. The reference's, without any, are gathered before the step.
    gathered = max(*(2 * _at_once(model) for model in both), 0 if reference is None else _at_once(reference))
    return {
        "weights": math.ceil((_SHARD_BYTES * trained + width * frozen) / ranks),
        "moments": math.ceil(_moment_bytes(config, models, trained) / ranks),
        "gradients": math.ceil(4 * trained / ranks),
        **{name: math.ceil(nbytes / ranks) for name, nbytes in held.items()},
        "gathered layers and root": width * gathered,
        **passes,
    }


def _at_once(sizes: ModelSizes) -> int:
    """Return the parameters that shards are gathered to: two layers, or a layer beside embedding or head, and the root.

    The root has embedding and head if they are one tensor.
    """
    root = sizes.parameters - _streamed(sizes) - 2 * sizes.end_parameters
    return root + sizes.layer_parameters + max(sizes.layer_parameters, sizes.end_parameters)


def _gathered(sizes: ModelSizes) -> int:
    """Return the parameters of two layers and of everything but layers."""
    return sizes.parameters - _streamed(sizes) + 2 * sizes.layer_parameters


def _streamed(sizes: ModelSizes) -> int:
    """Return the parameters of all layers."""
    return min(sizes.layers * sizes.layer_parameters, sizes.parameters)


def _reference_on(role: ReferenceRole, config: Config, models: Models) -> ModelSizes | None:
    """Return the sizes of the reference if it is held by a role."""
    return models.reference if config.reference_on == role else None


def _largest(*models: ModelSizes | None) -> int:
    """Return the parameters of the largest model: a process loads one after the other."""
    return max(model.parameters for model in models if model is not None)


def cache_bytes(config: Config, models: Models, rows: int) -> int:
    """Return the bytes of vLLM's key-value cache for rows of the greatest length, on each of a worker's cards.

    Windows count as whole rows: it admits a row with room for the tokens of a step beside its window. Cards beyond the
    heads have copies.
    """
    sizes = models.actor
    elements = rows * config.lengths.row * sizes.layers * sizes.cached
    parts = min(config.rollout.tensor_parallel, sizes.cached_heads)
    return math.ceil(WEIGHT_BYTES[config.model.dtype] * elements / parts)


def row_bucket(rows: int) -> int:
    """Return the rows of the engine's tensors on a card: a power of two up to 32, then a multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= _ROW_STEP else -(-rows // _ROW_STEP) * _ROW_STEP


def _worker(config: Config, models: Models, *, on_cards: bool) -> Terms:
    width, sizes = WEIGHT_BYTES[config.model.dtype], models.actor
    adapters = _adapters(config, models)
    terms = {"actor": width * (models.actor.parameters + adapters)} if worker_holds_actor(config) else {}
    ticket = config.prompts_per_ticket * config.group_size
    # A ticket of an evaluation is generated at once, too.
    held_out = prompts_per_ticket(config) * config.evaluation.num_generations if config.evaluation.files else 0
    rows = max(ticket, held_out)
    rows = min(config.rollout.inference_batch_size or rows, rows)
    if config.rollout.engine == "vllm":
        # Each card has its part; on a CPU all ranks are counted.
        parts = config.rollout.tensor_parallel if on_cards else 1
        engine = width * (models.actor.parameters + adapters)
        if config.rollout.quantization == "fp8":
            # One byte for each value of a matrix of a layer; one layer at a time is as published during an update.
            engine -= (width - 1) * models.actor.linear_parameters - width * models.actor.layer_parameters
        terms["weights of the engine"] = math.ceil(engine / parts)
        # On a card the cache is what is free there: a row is the least with which the engine starts.
        if on_cards:
            terms["KV cache"] = config.rollout.cache_bytes or cache_bytes(config, models, 1)
        else:
            terms["KV cache"] = (config.rollout.cache_bytes or VLLM_CPU_CACHE_BYTES) * config.rollout.tensor_parallel
        if on_cards:
            # Its first pass is as large as any: a step of prompts, and the sampler with all rows.
            most = config.rollout.inference_batch_size or VLLM_ROWS
            sampled = 4 * _SAMPLED_LOGITS * most * sizes.vocabulary
            terms["passes and graphs of the engine"] = _GRAPH_BYTES + sampled + _pass_bytes(sizes, width, _PASS_TOKENS)
    else:
        rows = row_bucket(rows) if on_cards else rows
        terms["KV cache"] = width * rows * sizes.cached_of_row(config.lengths.row)
        if on_cards:
            # In the memory of graphs. The first token, outside of these, takes what passes over rows take later.
            terms["logits of a step"] = 4 * _SAMPLED_LOGITS * rows * sizes.vocabulary
    held = {"reference": _reference_on("worker", config, models), "critic": models.critic}
    held |= {"reward" if len(models.rewards) == 1 else f"reward {label}": one for label, one in models.rewards.items()}
    here = [models.actor] if "actor" in terms else []
    for name, its in held.items():
        if its is not None:
            streams = name == "reference" and config.model.reference_device == "host"
            terms[name] = width * (_gathered(its) if streams else its.parameters)
            here.append(its)
    if on_cards and here:
        rollout, length = config.rollout, config.lengths.row
        given = [size for size in (rollout.inference_batch_size, rollout.logits_forward_batch_size) if size is not None]
        # A bound of rows stands in place of that of tokens (`pipeline.rollout.model_passes`).
        tokens = min([ticket, *given]) * length
        if most := rollout.logits_forward_tokens or (0 if given else _PASS_TOKENS):
            tokens = min(tokens, most)
        terms["passes over rows"] = max(_pass_bytes(one, width, max(tokens, length)) for one in here) + (
            4 * _PASS_LOGITS * min(_LOGITS, tokens * models.actor.vocabulary)
        )
    return terms


def _pass_bytes(sizes: ModelSizes, width: int, tokens: int) -> int:
    """Return the bytes of the activations that a pass without a backward pass holds at a time."""
    return tokens * width * (_PASS_STATES * sizes.hidden + _PASS_INNER * sizes.inner)


def _adapters(config: Config, models: Models) -> int:
    rank = config.model.lora_rank
    return models.actor.adapter_parameters(rank, config.model.lora_targets) if rank else 0


def _micro_batch_tokens(config: Config, parameters: int, *, on_cards: bool, checkpointed: bool) -> int:
    """Return the tokens of a micro-batch, as `pipeline.models.pass_size` and the learner cut it."""
    trainer, length, rows = config.trainer, config.lengths.row, config.sample_batch_size
    if trainer.micro_batch_size is not None:
        return trainer.micro_batch_size * length
    if trainer.micro_batch_tokens is not None:
        most = trainer.micro_batch_tokens
    elif on_cards:
        most = _GPU_TOKENS[checkpointed]
    else:
        most = min(_CPU_TOKENS, max(1, _CPU_OPERATIONS // max(1, 6 * parameters)))
        rows = min(rows, _CPU_ROWS) if trainer.packing is False else rows
    return min(max(most, length), rows * length)
