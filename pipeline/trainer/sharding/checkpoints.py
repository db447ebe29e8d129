"""Checkpoints of a sharded trainer, in the format of `pipeline.trainer.checkpoints`.

Rank 0 writes them, a tensor at a time, beside training: shared memory holds the weights, and the state of each rank.
Where it does not (`trainer.keep_state = "disk"`, adapters, whose base model no rank holds whole), training waits and
all ranks gather one tensor at a time to rank 0. Each rank reads its own rows of either. So a checkpoint does not depend
on the number of ranks, and a trainer without sharding reads it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from pipeline.config.model_files import WHOLE
from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.critic import VALUE_HEAD_FILE
from pipeline.models.lora import (
    ADAPTER_FILE,
    PEFT_PREFIX,
    LoraSettings,
    adapted_layers,
    adapter_of,
    merged_weight,
    twin_of_adapted_head,
    untied_where_adapted,
    write_description,
)
from pipeline.models.weights.held import HeldVersion
from pipeline.models.weights.shards import Shard
from pipeline.trainer.sharding.models import architecture_of, fill, fill_critic, shards_of
from pipeline.trainer.sharding.ranks import RankGroup
from pipeline.trainer.sharding.tensor_files import HERE, Entry, Files, write_tensors
from pipeline.trainer.state import OPTIONAL

_SPLIT_KINDS = ("exp_avg", "exp_avg_sq", "float32")


class Write(Protocol):
    """Writes a checkpoint from models and state that are written when `save_pretrained` and `state` are called."""

    def __call__(self, *, actor: Any, critic: Any, state: Mapping[str, Tensor] | Callable[[Path], None]) -> Path:
        """Write the checkpoint and return its folder; called on rank 0."""


class _Tensor(NamedTuple):
    """A tensor of a file, the shards of which it is made, and its name in shared memory."""

    entry: Entry
    shards: tuple[Shard, ...]
    name: str = ""
    combined: Callable[..., Tensor] | None = None


class _File(NamedTuple):
    path: Path
    tensors: list[_Tensor]


_Files = tuple[list[_File], list[_File], _File]
"""The files of the actor, those of the critic, if there is one, and that of the training state."""

_Source = Callable[[_Tensor], Tensor]
"""Returns the tensors of files, in their order."""


class _Gathering:
    """Gathers the tensors of files to rank 0, in their order."""

    def __init__(self, group: RankGroup, files: list[_File]) -> None:
        self._group = group
        self._left: Iterator[_Tensor] = iter([tensor for file in files for tensor in file.tensors])

    def next(self, expected: _Tensor) -> Tensor:
        """Return the next tensor, on rank 0."""
        found = next(self._left)
        assert found.entry == expected.entry, f"{found.entry} gathered, {expected.entry} written"
        wholes: list[Any] = [self._group.whole(shard) for shard in found.shards]
        whole: Tensor = wholes[0] if found.combined is None else found.combined(*wholes)
        return whole

    def drain(self) -> None:
        """Take part in every gather that is left: those of a rank that writes nothing, or of a failed write."""
        for tensor in self._left:
            for shard in tensor.shards:
                self._group.whole(shard)


class _Saved:
    """A model of a checkpoint, for `save_checkpoint` in place of a model."""

    def __init__(self, model: Any, files: list[_File], source: _Source, lora: LoraSettings | None) -> None:
        self._model = model
        self._files = files
        self._source = source
        self._lora = lora

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model into a directory, in Hugging Face's format."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._files:
            (folder / file.path).parent.mkdir(exist_ok=True)
            _write(folder / file.path, file, self._source)
        pretrained = getattr(self._model, "backbone", self._model)
        pretrained.config.architectures = [architecture_of(pretrained)]
        with untied_where_adapted(self._model):
            pretrained.config.save_pretrained(folder)
        if pretrained is self._model and pretrained.can_generate():
            pretrained.generation_config.save_pretrained(folder)
        if self._lora is not None:
            write_description(folder / ADAPTER_FILE.parent, self._model, self._lora)


def state_shards(state: Mapping[str, Tensor], models: Mapping[str, nn.Module]) -> dict[str, Shard]:
    """Return a rank's ranges of the training state.

    Args:
        state: From `pipeline.trainer.state.tensors_of`; moments and float32 copies are those of the rank's shards.
        models: The sharded models.
    """
    weights = {model: shards_of(module) for model, module in models.items()}
    found = {}
    for name, tensor in state.items():
        model, kind, weight = (*name.split(".", 2), "", "")[:3]
        if model in weights and kind in _SPLIT_KINDS:
            found[name] = weights[model][weight]._replace(local=tensor, dtype=tensor.dtype)
        else:
            found[name] = Shard.whole(tensor)
    return found


def save_together(
    group: RankGroup, models: Mapping[str, nn.Module], state: Mapping[str, Tensor], lora: LoraSettings, write: Write
) -> Path | None:
    """Write a checkpoint through rank 0; a collective.

    Args:
        group: The ranks.
        models: ``actor`` and, with PPO, ``critic``, sharded.
        state: This rank's training state.
        lora: Settings of the actor's adapters.
        write: Called on rank 0.

    Returns:
        The checkpoint's folder on rank 0, None on the other ranks.

    Raises:
        CheckpointError: On every rank, if the checkpoint cannot be written.
    """
    files = actor, critic, kept = _files_of(models, state)
    gathering = _Gathering(group, [*actor, *critic, kept])
    path, error = None, None
    try:
        if group.rank == 0:
            path = _written(write, models, files, gathering.next, lora if len(actor) > 1 else None)
    except CheckpointError as failed:
        error = failed
    finally:
        gathering.drain()
    if not group.agree(error is None):
        raise error or CheckpointError("rank 0 could not write the checkpoint")
    return path


def held_checkpoint(
    models: Mapping[str, nn.Module], state: Mapping[str, Tensor], held: HeldVersion
) -> Callable[[Write], Path]:
    """Return the write of a checkpoint by rank 0 from shared memory, in any thread; called while nobody computes.

    Args:
        models: As for `save_together`, without adapters.
        state: As for `save_together`.
        held: The version, with the training states of all ranks.
    """
    # Only names and shapes of the shards are used: a pass of the models may gather them meanwhile.
    files = _files_of(models, state)

    def tensor_of(expected: _Tensor) -> Tensor:
        return (held.weights if expected.name in held.weights else held.training)[expected.name]

    return lambda write: _written(write, models, files, tensor_of)


def _written(
    write: Write, models: Mapping[str, nn.Module], files: _Files, source: _Source, lora: LoraSettings | None = None
) -> Path:
    actor, critic, kept = files
    return write(
        actor=_Saved(models["actor"], actor, source, lora),
        critic=_Saved(models["critic"], critic, source, None) if critic else None,
        state=lambda file: _write(file, kept, source),
    )


def _files_of(models: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> _Files:
    critic = _critic_files(models["critic"]) if "critic" in models else []
    kept = [_plain(name, shard, name) for name, shard in state_shards(state, models).items()]
    return _actor_files(models["actor"]), critic, _File(Path(), kept)


def load_shards(
    folder: Path,
    state_file: str,
    models: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    files: Files = HERE,
) -> None:
    """Read a rank's shards of models and training state from a checkpoint.

    Args:
        folder: The checkpoint.
        state_file: Name of the training state's file in it.
        models: ``actor`` and, with PPO, ``critic``, sharded.
        state: This rank's training state, filled.
        files: Opens the checkpoint's files.

    Raises:
        CheckpointError: If a tensor is missing or unexpected, and not `OPTIONAL`, or has another shape.
    """
    shards = state_shards(state, models)
    with files.tensors([folder / state_file], str(folder / state_file)) as opened:
        if odd := (opened.names() ^ shards.keys()) - OPTIONAL:
            fault = "missing" if min(odd) in shards else "not of this model"
            raise CheckpointError(f"{folder / state_file}: {min(odd)} is {fault}")
        shards = {name: shard for name, shard in shards.items() if name in opened.names()}
        opened.check(shards)
        try:
            _load_models(folder, models, files)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        opened.fill(shards)


def _load_models(folder: Path, models: Mapping[str, nn.Module], files: Files) -> None:
    actor = models["actor"]
    if adapter_of(actor):
        adapters = shards_of(actor, published=True)
        with files.tensors([folder / ADAPTER_FILE], str(folder / ADAPTER_FILE)) as opened:
            opened.fill(adapters, {name: PEFT_PREFIX + name for name in adapters})
    else:
        fill(actor, folder, "model.actor", files=files)
    if "critic" in models:
        fill_critic(models["critic"], folder / "critic", "model.critic", files=files)


def _write(path: Path, file: _File, source: _Source) -> None:
    write_tensors(path, [tensor.entry for tensor in file.tensors], map(source, file.tensors))


def _plain(name: str, shard: Shard, held_name: str = "") -> _Tensor:
    return _Tensor(Entry(name, shard.dtype, shard.shape), (shard,), held_name)


def _actor_files(actor: nn.Module) -> list[_File]:
    shards, adapters = shards_of(actor), adapter_of(actor)
    scales = {name: layer.lora_scale for name, layer in adapted_layers(actor)}
    merged = []
    twin = twin_of_adapted_head(actor)
    for name, shard in [*shards.items(), *_head_shard(actor, shards, twin)]:
        layer = name.removesuffix(".weight")
        if name in adapters:
            continue
        if name.endswith(".weight") and layer in scales:
            down, up = (shards[f"{layer}.{matrix}.weight"] for matrix in ("lora_A", "lora_B"))
            entry = Entry(name, shard.dtype, shard.shape)
            combined = functools.partial(merged_weight, scale=scales[layer])
            merged.append(_Tensor(entry, (shard, down, up), combined=combined))
        else:
            merged.append(_plain(name, shard, f"actor.{name}"))
    files = [_File(Path(WHOLE), merged)]
    if adapters:
        files.append(_File(ADAPTER_FILE, [_plain(PEFT_PREFIX + name, shards[name]) for name in adapters]))
    return files


def _head_shard(actor: Any, shards: Mapping[str, Shard], twin: Any) -> list[tuple[str, Shard]]:
    """Return the shard of an adapted head under its own name, if `shards` has it as the embedding's alone."""
    if twin is None:
        return []
    names = [name for name, tensor in actor.state_dict(keep_vars=True).items() if tensor is twin]
    return [(name, shards[names[0]]) for name in names[1:]]


def _critic_files(critic: nn.Module) -> list[_File]:
    shards = shards_of(critic)

    def file(path: str, prefix: str) -> _File:
        named = {name: shard for name, shard in shards.items() if name.startswith(prefix)}
        tensors = [_plain(name.removeprefix(prefix), shard, f"critic.{name}") for name, shard in named.items()]
        return _File(Path(path), tensors)

    return [file(WHOLE, "backbone."), file(VALUE_HEAD_FILE, "value_head.")]
