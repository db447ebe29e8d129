"""Models whose parameters are sharded over the ranks: loaded slice by slice, gathered a part at a time.

A part is a decoder layer; the embedding and the head, each large where the vocabulary is, unless they share their
weight; and the root, which has all else and is whole throughout a pass.

A model is made on the meta device, sharded there with torch's `fully_shard`, and each rank then reads its own rows from
the safetensors files: no process holds a whole model. Shards of trained parameters are float32; a model of bfloat16 is
gathered and computed in bfloat16, and its gradients are reduced in float32.

The passes of the trainer call a model's backbone and head apart, so they run inside `pipeline.models.inputs.inside`,
which FSDP takes for the forward pass of the root.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.chunked_log_probs import plain_head
from pipeline.models.critic import VALUE_HEAD_FILE, Critic
from pipeline.models.inputs import reshard
from pipeline.models.loading import sees_images, shell
from pipeline.models.lora import LoraSettings, adapt, adapter_of, initial_adapters
from pipeline.models.weights.probe import answer
from pipeline.models.weights.shards import Shard
from pipeline.storage.weights_header import Probe
from pipeline.trainer.sharding.reduction import ReductionInPlace
from pipeline.trainer.sharding.replicas import Replica
from pipeline.trainer.sharding.tensor_files import HERE, Files, sources_of

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 1 << 20
_OFF = 'trainer.sharding = "none" trains it whole'


class _Sharded(NamedTuple):
    dtypes: dict[str, torch.dtype]
    class_name: str
    replica: Replica


_sharded: WeakKeyDictionary[nn.Module, _Sharded] = WeakKeyDictionary()


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is from `load_actor_shards` or `load_critic_shards`."""
    return model in _sharded


def replica_of(model: nn.Module) -> Replica:
    """Return the replica that a sharded model is a shard of."""
    return _sharded[model].replica


def architecture_of(model: nn.Module) -> str:
    """Return the name of a model's class in transformers, without FSDP's addition."""
    return _sharded[model].class_name if model in _sharded else type(model).__name__


def whole_answer(model: nn.Module, tokens: Sequence[int], device: torch.device) -> Probe:
    """Return a model's answer to the probe (`pipeline.models.weights.probe`); of a sharded model, a collective."""
    found = answer(model, tokens, device)
    reshard(model)
    return found


def shards_of(model: nn.Module, *, published: bool = False) -> dict[str, Shard]:
    """Return a rank's ranges of a model's tensors by name, live; a tensor under two names (tied weights) once.

    Args:
        model: A sharded model.
        published: Whether to return the tensors that are published alone: the adapters of a model with adapters.
    """
    from torch.distributed.tensor import DTensor

    kind = _sharded[model]
    chosen = adapter_of(model) if published else {}
    found: dict[str, Shard] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not tensor.numel() or (chosen and name not in chosen):
            continue
        seen.add(id(tensor))
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            found[name] = Shard.whole(tensor.detach())
            continue
        local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        rows = -(-shape[0] // kind.replica.shards)
        first = min(kind.replica.shard * rows, shape[0])
        assert local.shape[0] == min(rows, shape[0] - first), f"{name}: {tuple(local.shape)} of {shape}"
        found[name] = Shard(local, shape, first * (tensor.numel() // shape[0]), kind.dtypes[name])
    return found


def sharded_models(config: Config, device: torch.device) -> dict[str, nn.Module]:
    """Return a rank's shards of the run's models, ``actor`` and, with PPO, ``critic``; a collective.

    Raises:
        ConfigError: If a model does not load, or cannot be sharded.
    """
    if device.type == "cpu":
        _return_freed_memory()
    model, replica = config.model, Replica.of(device, config.trainer.world_size // config.shards)
    models = {
        "actor": load_actor_shards(
            model.actor, dtype=model.dtype, device=device, replica=replica, lora=model, seed=config.daemon.seed
        )
    }
    if config.rollout.algorithm == "ppo":
        path, field = (model.actor, "model.actor") if model.critic is None else (model.critic, "model.critic")
        models["critic"] = load_critic_shards(path, dtype=model.dtype, device=device, replica=replica, field=field)
    return models


def _return_freed_memory() -> None:
    """Let glibc map every tensor of 1 MiB or more by itself, so that its memory returns to the kernel when it is freed.

    By default glibc takes tensors of up to 32 MiB from its heap, once it has freed one, and the gathered layers and
    gradients that come and go in each pass leave holes there as large as all shards.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def load_actor_shards(
    path: str | Path,
    *,
    dtype: str,
    device: torch.device,
    replica: Replica,
    lora: LoraSettings | None,
    seed: int = 0,
    field: str = "model.actor",
) -> nn.Module:
    """Return a rank's shards of a causal language model, with adapters if the settings say so; a collective.

    Args:
        path: A directory written by ``save_pretrained`` with safetensors files.
        dtype: Dtype of passes and published weights, as "bfloat16".
        device: Device of the shards.
        replica: The replica of this rank.
        lora: Settings of the adapters; None for a model that is not trained: its shards are of `dtype`.
        seed: Seed of the adapters' first values.
        field: The configuration field that names the directory, for the error message.

    Raises:
        ConfigError: If the directory does not load, or the model cannot be sharded.
    """
    if sees_images(path, field=field):
        raise ConfigError(f"{field}: vision-language models are not sharded: {path}; {_OFF}")
    model: Any = shell(path, dtype=dtype, field=field)
    if lora is None:
        model.requires_grad_(False)
    else:
        adapt(model, lora, seed=seed)
    _shard(model, model, dtype, device, replica, field)
    _copy_generation_config(model, Path(path))
    fill(model, Path(path), field, without=adapter_of(model))
    if lora is not None:
        shards = shards_of(model, published=True)
        with torch.no_grad():
            for name, value in initial_adapters(model, lora, seed=seed):
                shards[name].local.copy_(value.reshape(-1)[shards[name].elements].view(shards[name].local.shape))
    # The first pass: FSDP lays the shards out for good. Its answer is kept.
    with torch.no_grad():
        plain_head(model, device)
    reshard(model)
    return model.eval()  # type: ignore[no-any-return]


def load_critic_shards(
    path: str | Path, *, dtype: str, device: torch.device, replica: Replica, field: str = "model.critic"
) -> nn.Module:
    """Return a rank's shards of a critic; a collective.

    Args:
        path: A directory of a critic, or of any model with a backbone: then the value head is zero.
        dtype: Dtype of passes and published weights of the backbone, as "bfloat16"; the value head is float32.
        device: Device of the shards.
        replica: The replica of this rank.
        field: The configuration field that names the directory, for the error message.

    Raises:
        ConfigError: If the directory does not load, or the model cannot be sharded.
    """
    critic: Any = Critic(shell(path, dtype=dtype, field=field, has_head=False))
    critic.requires_grad_(True)
    _shard(critic, critic.backbone, dtype, device, replica, field)
    fill_critic(critic, Path(path), field)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    with torch.no_grad():
        critic(tokens, torch.ones_like(tokens))
    reshard(critic)
    return critic.eval()  # type: ignore[no-any-return]


def fill_critic(critic: Any, folder: Path, field: str, *, files: Files = HERE) -> None:
    """Read a rank's shards of a critic from a folder; a folder without a value head sets the head to 0.

    Arguments: those of `fill`.
    """
    head = {name: shard for name, shard in shards_of(critic).items() if name.startswith("value_head.")}
    fill(critic, folder, field, without=head, inner="backbone.", files=files)
    if not files.has(folder / VALUE_HEAD_FILE):
        for shard in head.values():
            shard.local.zero_()
        return
    with files.tensors([folder / VALUE_HEAD_FILE], str(folder)) as opened:
        opened.fill(head, {name: name.removeprefix("value_head.") for name in head})


def fill(model: Any, folder: Path, field: str, *, without: Any = (), inner: str = "", files: Files = HERE) -> None:
    """Read a rank's shards of a model from a folder in Hugging Face's format.

    Args:
        model: The sharded model.
        folder: The folder.
        field: The configuration field that names the folder, for the error message.
        without: Names that are not read.
        inner: Prefix of the model's names that the files' names do not have.
        files: Opens the folder's files.

    Raises:
        ConfigError: If the files are missing or are another model's.
    """
    shards = {name: shard for name, shard in shards_of(model).items() if name not in without}
    pretrained = getattr(model, "backbone", model)
    try:
        with files.tensors(folder, str(folder)) as opened:
            names = {name: name.removeprefix(inner) for name in shards}
            twins = {**getattr(pretrained, "all_tied_weights_keys", {})}
            twins |= {second: first for first, second in twins.items()}
            found = sources_of(names.values(), opened, pretrained.base_model_prefix, twins, field)
            opened.fill(shards, {name: found[names[name]] for name in shards})
    except CheckpointError as error:
        raise ConfigError(f"{field}: cannot load a model from {error}") from error


def _shard(model: nn.Module, pretrained: Any, dtype: str, device: torch.device, replica: Replica, field: str) -> None:
    """Shard a model on the meta device, then give each shard memory on a device, without values."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    layers = _layers(pretrained, field)
    class_name = type(model).__name__
    _fill_buffers(model, pretrained, device)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype.is_floating_point:
            parameter.data = parameter.data.float()
    compute = getattr(torch, dtype)
    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    mesh = replica.mesh
    embedding, head = _ends(pretrained)
    for layer in (*layers, *embedding):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for layer in embedding:
        # Its gradient is made of tokens and of the gradients of its results.
        layer.set_unshard_in_backward(False)
    for layer in head:
        # Its backward pass is the next thing after its forward pass.
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if isinstance(model, Critic):
        # float32 as in `Critic`, whatever the backbone's.
        fully_shard(model.value_head, mesh=mesh)
    root: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Losses are divided by the actions of all ranks already: gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if device.type == "cpu":
                module.set_custom_reduce_scatter(ReductionInPlace())
    for module in (root, *head):
        module.computed = types.MethodType(_computed, module)
        register_fsdp_forward_method(module, "computed")
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    # Each name has got memory of its own.
    pretrained.tie_weights()
    _sharded[root] = _Sharded(dtypes, class_name, replica)


def _computed(_: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> Any:
    # Copies: FSDP hooks the results, and a view would lose its hook if it were changed in place. It hooks the inputs
    # too: once their gradients are known, those of the module are reduced.
    result = call(*inputs)
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(None if each is None else each.clone() for each in result)


def _layers(pretrained: Any, field: str) -> Sequence[nn.Module]:
    """Return the layers that are gathered one at a time."""
    kinds = set(getattr(pretrained, "_no_split_modules", None) or ())
    found = [
        layer
        for stack in pretrained.modules()
        if isinstance(stack, nn.ModuleList)
        for layer in stack
        if type(layer).__name__ in kinds
    ]
    if not found:
        raise ConfigError(
            f"{field}: {type(pretrained).__name__} does not name its layers (_no_split_modules: "
            f"{', '.join(sorted(kinds)) or 'none'}), so it cannot be sharded; {_OFF}"
        )
    return found


def _ends(pretrained: Any) -> tuple[list[Any], list[Any]]:
    """Return a model's embedding and its head, each in a list, which is empty if it has none or both share a weight."""
    embedding, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or (head is not None and head.weight is embedding.weight):
        return [], []
    return [embedding], [head] if isinstance(head, nn.Linear) else []


def _fill_buffers(model: nn.Module, pretrained: Any, device: torch.device) -> None:
    """Give buffers memory and values, as transformers does; parameters stay on the meta device."""
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            buffer = getattr(module, name)
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.zeros_like(buffer, device=device), persistent=persistent)
        if names:
            pretrained._init_weights(module)


def _copy_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
