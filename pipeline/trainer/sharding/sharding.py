"""The models of a run, loaded as a rank's shards."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from pipeline.config.schema import Config
from pipeline.trainer.sharding.models import load_actor_shards, load_critic_shards
from pipeline.trainer.sharding.replicas import Replica

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 1 << 20


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
