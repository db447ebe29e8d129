"""The tensors that a run's models expect: names, shapes and dtypes, without any weights."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.critic import Critic
from pipeline.models.loading import shell
from pipeline.models.lora import LoraSettings, adapt, adapter_of

_SHOWN = 3
_WRAPPERS = {
    "module": ("DistributedDataParallel", "model.module.state_dict()"),
    "_orig_mod": ("torch.compile", "model._orig_mod.state_dict()"),
    "_fsdp_wrapped_module": ("FullyShardedDataParallel", "its full state dict"),
    "_checkpoint_wrapped_module": ("checkpoint_wrapper", "the state dict without that part of the names"),
}
"""Parts that wrappers add to the names of a state dict: the wrapper, and the state dict to publish in place of it."""


def expected_tensors(
    actor_path: str | Path, *, dtype: str, lora: LoraSettings, with_critic: bool, critic_path: str | None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that workers take from a publish, by model and name, on the meta device.

    Args:
        actor_path: Directory of the actor.
        dtype: Dtype of the weights, as "bfloat16".
        lora: The settings of the adapters; with rank 0 the whole actor is published.
        with_critic: Whether workers have a critic.
        critic_path: Directory of the critic; None if the critic is made of the actor's backbone.

    Raises:
        ConfigError: If a directory has no model configuration.
    """
    actor = shell(actor_path, dtype=dtype)
    models: dict[str, nn.Module] = {}
    if with_critic:
        models["critic"] = (
            Critic.from_actor(actor)
            if critic_path is None
            else Critic(shell(critic_path, dtype=dtype, field="model.critic", has_head=False))
        )
    # After the critic, which is made from the backbone without adapters.
    adapt(actor, lora, seed=0)
    # Kept as parameters: tied weights are one object under two names.
    tensors = {name: model.state_dict(keep_vars=True) for name, model in models.items()}
    whole = actor.state_dict(keep_vars=True)
    return {"actor": {name: whole[name] for name in adapter_of(actor) or whole}, **tensors}


def faults(model: str, given: Mapping[str, Any], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the reasons for which workers cannot use a state dict, each as a sentence; usually none.

    Args:
        model: The model's name, for the sentences.
        given: The state dict.
        expected: The tensors of the model, from `expected_tensors`; of tied tensors one is enough.
    """
    extra = [name for name in given if name not in expected]
    if extra and (cause := _wrapper(extra, expected)):
        return [f"{model}: names that are not the model's ({len(extra):,}), as {extra[0]}: {cause}"]
    if extra and any(".lora_" in name for name in extra):
        return [
            f"{model}: adapters that workers do not have ({len(extra):,}), as {extra[0]}: "
            "publish the merged weights, or set model.lora_rank and model.lora_targets"
        ]
    if extra and all(".lora_" in name for name in expected):
        return [
            f"{model}: names that are no adapters' ({len(extra):,}), as {extra[0]}: with model.lora_rank the adapters "
            "alone are published (get_peft_model_state_dict)"
        ]
    found = [f"{model}: names that are not the model's ({len(extra):,}): {_listed(extra)}"] if extra else []
    twins = collections.defaultdict(list)
    for name, tensor in expected.items():
        twins[id(tensor)].append(name)
    missing = [names[0] for names in twins.values() if not any(name in given for name in names)]
    if missing:
        found.append(f"{model}: missing tensors ({len(missing):,} of {len(twins):,}): {_listed(missing)}")
    for problem in (lambda name, value, _: kind_fault(name, value), _shape, _dtype):
        wrong = [text for name in given if name in expected and (text := problem(name, given[name], expected[name]))]
        if wrong:
            more = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
            return [*found, f"{model}: {wrong[0]}{more}"]
    return found


def nonfinite(model: str, given: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence on the tensors of a state dict with a NaN or an infinity; empty if there is none.

    Args:
        model: The model's name, for the sentence.
        given: The state dict; each tensor is read once, without a copy.
    """
    wrong = [name for name, tensor in given.items() if not _is_finite(tensor)]
    return [f"{model}: NaN or infinity in {len(wrong):,} of {len(given):,} tensors: {_listed(wrong)}"] if wrong else []


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def _wrapper(extra: Sequence[str], expected: Mapping[str, Tensor]) -> str:
    """Return the wrapper that added parts to these names; empty if they are not the model's without those parts."""
    parts = {part for name in extra for part in name.split(".") if part in _WRAPPERS}
    inner = (".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in extra)
    if not parts or not any(name in expected for name in inner):
        return ""
    return "; ".join(f"`{part}.` comes from {_WRAPPERS[part][0]}, publish {_WRAPPERS[part][1]}" for part in _WRAPPERS
                     if part in parts)  # fmt: skip


def kind_fault(name: str, given: Any) -> str:
    """Return why a value is no whole tensor with values of its own; empty if it is one."""
    if not isinstance(given, Tensor):
        return f"{name} is a {type(given).__name__}, not a tensor"
    if type(given) not in (Tensor, nn.Parameter):
        # As of FSDP2: parts of it are on other processes.
        return f"{name} is a {type(given).__name__}, not a whole tensor: publish its full_tensor(), taken on all ranks"
    if given.is_meta or given.layout != torch.strided:
        return f"{name} has no values of its own: it is {given.layout} on the device {given.device}"
    return ""


def _shape(name: str, given: Tensor, expected: Tensor) -> str:
    if given.shape == expected.shape:
        return ""
    return f"{name} has the shape {tuple(given.shape)}, the model's has {tuple(expected.shape)}"


def _dtype(name: str, given: Tensor, expected: Tensor) -> str:
    if given.dtype == expected.dtype:
        return ""
    is_whole = not expected.dtype.is_floating_point
    remedy = "" if is_whole else f" (model.dtype): publish each tensor `.to({expected.dtype})`"
    return f"{name} is {given.dtype}, the model's is {expected.dtype}{remedy}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
