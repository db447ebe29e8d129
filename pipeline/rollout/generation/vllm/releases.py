"""Releases of vLLM: the refusal of those that are not admitted, and the differences between them.

Nothing here imports vLLM: the worker checks the release before it starts a process that does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pipeline.config.vllm_release import problem_of_quantization, refusal_of_vllm
from pipeline.errors import ConfigError


def refuse_unsuitable() -> None:
    """Refuse an environment without vLLM, or with a release that is not admitted.

    Raises:
        ConfigError: If the environment is refused.
    """
    if refusal := refusal_of_vllm():
        raise ConfigError(refusal)


def refuse_unable_to_quantize() -> None:
    """Refuse a release whose reload of quantized weights is not known.

    Raises:
        ConfigError: If the release is refused.
    """
    if problem := problem_of_quantization():
        raise ConfigError(f"rollout.quantization: {problem}")


def has_field(kind: type, name: str) -> bool:
    """Return whether a dataclass of vLLM has a field.

    `EngineArgs` without `mm_device_do_normalize` is of a release that never normalizes pixels on the device.
    """
    return name in {field.name for field in dataclasses.fields(kind)}


def is_woken(engine: Any, answer: bool | None) -> bool:
    """Return whether an engine is awake after `wake_up`, whose answer is None up to 0.27."""
    return answer is not False and not engine.is_sleeping()


def renames_of(model: Any) -> Any:
    """Return a model's mapper from published names of layers to its own; None for a model that renames none.

    A mapper also stacks layers, which adapters must not be: 0.27 has `get_unstacked_mapper` for a mapper that does not,
    0.32 `get_rename_mapper`. A mapper of 0.24 has neither, and stacks nothing.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper
