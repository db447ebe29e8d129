"""rlhfd: rollout, buffer and training processes of RLHF, kept running on a GPU server.

The names below are the library's public ones; all other names are private and may move. Each public name is imported at
its first use, so that `import pipeline` loads no torch: supervisor, buffer and command line run without it.

Modules: `errors` (all error classes, exit codes), `progress` (the receiver of progress and events), `prompts` (the
prompt sequence), `serial` (all roles in one process), `sort_digits` (the embedded task).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.errors import RlhfdError
    from pipeline.experience.batching import (
        make_experience_batch,
        remove_padding_in_sequences,
        split_experience_batch,
        zero_pad_sequences,
    )
    from pipeline.experience.ragged import RaggedRows
    from pipeline.experience.saved_rows import QuarantinedExtent, read_quarantine, recorded_batches
    from pipeline.experience.types import BufferItem, BufferItemVL, Experience, ExperienceVL, is_vl_experience
    from pipeline.experience.vision_rows import VisionRows
    from pipeline.models.critic import Critic
    from pipeline.models.loading import load_actor, load_critic, load_reward_model, load_tokenizer
    from pipeline.models.log_probs import action_log_probs, action_log_probs_and_entropies, action_values
    from pipeline.models.packing import packed_action_log_probs, packed_action_values
    from pipeline.progress import Telemetry
    from pipeline.replay.buffer import DetachedReplayBuffer
    from pipeline.rollout.environment.types import Environment, Turn
    from pipeline.rollout.environment.verifiers import verifiers_environment
    from pipeline.rollout.generation.engines import EngineFactory
    from pipeline.rollout.generation.interface import ResponseGenerator, Responses, Sampling
    from pipeline.rollout.maker import ExperienceMaker, NaiveExperienceMaker
    from pipeline.rollout.reward.functions import FunctionReward
    from pipeline.rollout.reward.signatures import batched
    from pipeline.trainer.connect import connect
    from pipeline.trainer.connection import Batch, Connection
    from pipeline.trainer.loss.losses import PolicyLoss, masked_mean, policy_loss, value_loss, whiten

_MODULES = {
    "errors": ("RlhfdError",),
    "experience.batching": (
        "make_experience_batch",
        "remove_padding_in_sequences",
        "split_experience_batch",
        "zero_pad_sequences",
    ),
    "experience.ragged": ("RaggedRows",),
    "experience.saved_rows": ("QuarantinedExtent", "read_quarantine", "recorded_batches"),
    "experience.types": ("BufferItem", "BufferItemVL", "Experience", "ExperienceVL", "is_vl_experience"),
    "experience.vision_rows": ("VisionRows",),
    "models.critic": ("Critic",),
    "models.loading": ("load_actor", "load_critic", "load_reward_model", "load_tokenizer"),
    "models.log_probs": ("action_log_probs", "action_log_probs_and_entropies", "action_values"),
    "models.packing": ("packed_action_log_probs", "packed_action_values"),
    "progress": ("Telemetry",),
    "replay.buffer": ("DetachedReplayBuffer",),
    "rollout.environment.types": ("Environment", "Turn"),
    "rollout.environment.verifiers": ("verifiers_environment",),
    "rollout.generation.engines": ("EngineFactory",),
    "rollout.generation.interface": ("ResponseGenerator", "Responses", "Sampling"),
    "rollout.maker": ("ExperienceMaker", "NaiveExperienceMaker"),
    "rollout.reward.functions": ("FunctionReward",),
    "rollout.reward.signatures": ("batched",),
    "trainer.connect": ("connect",),
    "trainer.connection": ("Batch", "Connection"),
    "trainer.loss.losses": ("PolicyLoss", "masked_mean", "policy_loss", "value_loss", "whiten"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Batch",
    "BufferItem",
    "BufferItemVL",
    "Connection",
    "Critic",
    "DetachedReplayBuffer",
    "EngineFactory",
    "Environment",
    "Experience",
    "ExperienceMaker",
    "ExperienceVL",
    "FunctionReward",
    "NaiveExperienceMaker",
    "PolicyLoss",
    "QuarantinedExtent",
    "RaggedRows",
    "ResponseGenerator",
    "Responses",
    "RlhfdError",
    "Sampling",
    "Telemetry",
    "Turn",
    "VisionRows",
    "action_log_probs",
    "action_log_probs_and_entropies",
    "action_values",
    "batched",
    "connect",
    "is_vl_experience",
    "load_actor",
    "load_critic",
    "load_reward_model",
    "load_tokenizer",
    "make_experience_batch",
    "masked_mean",
    "packed_action_log_probs",
    "packed_action_values",
    "policy_loss",
    "read_quarantine",
    "recorded_batches",
    "remove_padding_in_sequences",
    "split_experience_batch",
    "value_loss",
    "verifiers_environment",
    "whiten",
    "zero_pad_sequences",
]


# Hidden from type checkers, which would take any attribute of the package for one that exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        # Later uses find the name without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
