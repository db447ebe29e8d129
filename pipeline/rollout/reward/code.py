"""The reward `code`: the tests of a row, run after the response's code in a limited process of their own."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import secrets
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.config.rewards import CodeReward
from pipeline.errors import ConfigError, RewardError
from pipeline.rollout.reward import sandbox
from pipeline.rollout.reward.answers import block_of

_PYTHON: Final = re.compile(r"i?py(?:thon)?[23]?(?:\.\d+)*")
_FUTURE: Final = re.compile(r"^\s*from\s+__future__\s", re.MULTILINE)
_MOST_BYTES: Final = 4096
MEMORY_BYTES: Final = 512 << 20
"""Maximum memory of the tests of a row."""
_TRIAL_S: Final = 60.0

log = logging.getLogger(__name__)


def code_reward(settings: CodeReward) -> Callable[..., float]:
    """Return the reward function `code`: 1 if the tests end without an exception and within their limits, else 0.

    The code is the last fenced block of Python in the answer, else the last one of no language, else the answer. The
    tests are Python: the row's column `tests`, a text or a list of texts, or its answer. They run after the code, with
    its names.

    Raises:
        ConfigError: If this machine cannot isolate the code of responses, and `unisolated` is false.
    """
    _check_isolation(settings.unisolated)

    def code(
        input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, tests: Any = None, **_: Any
    ) -> float:
        sources = _tests(gt_answer if tests is None else tests)
        source = block_of(response, settings.tags, lambda language: bool(_PYTHON.fullmatch(language)))
        return float(passes([source, *sources], timeout_s=settings.timeout_s, unisolated=settings.unisolated))

    return code


def _tests(tests: Any) -> list[str]:
    """Return the sources of a row's tests.

    Raises:
        RewardError: If they are no Python: no response would ever pass.
    """
    parts = [str(part) for part in tests] if isinstance(tests, list) else [tests]
    if not all(isinstance(part, str) for part in parts) or not "".join(parts).strip():
        raise RewardError("code needs tests: a column of this name with Python text, or the answer")
    # A list may hold the lines of one text, or texts that each begin with their imports from `__future__`.
    if not any(_FUTURE.search(part) for part in parts[1:]):
        parts = ["\n".join(parts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            try:
                compile(part, "<tests>", "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                said = f"code cannot compile the tests: {type(error).__name__}"
                raise RewardError(f"{said}: {error}", bare=said) from error
    return parts


@functools.cache
def _check_isolation(unisolated: bool) -> None:
    try:
        kind = isolation(unisolated=unisolated)
    except RewardError as error:
        raise ConfigError(
            f"rewards.code: {error}; unisolated = true runs it all the same, where it can read "
            "the files and the memory of this user's processes (docs/rewards.md)"
        ) from error
    if kind == "nothing":
        log.warning("code of responses is not isolated: it can read the files and the memory of this user's processes")
    else:
        log.info("code of responses is isolated: by=%s", kind)


def isolation(*, unisolated: bool = False) -> str:
    """Return the way in which this machine isolates the code of responses: "namespaces", "Landlock" or "nothing".

    Args:
        unisolated: Whether "nothing" is a result, in place of an error.

    Raises:
        RewardError: If the process could not be started, isolated or limited.
    """
    kind = _said([], timeout_s=_TRIAL_S, memory_bytes=MEMORY_BYTES, unisolated=unisolated)
    if not kind:
        raise RewardError("code cannot run a process on this machine: it ended without a word")
    return kind


def passes(
    sources: Sequence[str], *, timeout_s: float, memory_bytes: int = MEMORY_BYTES, unisolated: bool = False
) -> bool:
    """Return whether Python sources run to their ends without an exception, one after the other in a limited process.

    Args:
        sources: Foreign code, isolated and limited (`pipeline.rollout.reward.sandbox`). All have the same names.
        timeout_s: Limit of its CPU and wall time.
        memory_bytes: Limit of its address space.
        unisolated: Whether it runs where this kernel cannot isolate it.

    Raises:
        RewardError: If the process could not be started, isolated or limited.
    """
    # A source that ends the process itself has not come to its end.
    return _said(sources, timeout_s=timeout_s, memory_bytes=memory_bytes, unisolated=unisolated) == ""


def _said(sources: Sequence[str], *, timeout_s: float, memory_bytes: int, unisolated: bool) -> str | None:
    """Return the text that the process has written behind the token; None without the token."""
    token = secrets.token_hex(16)
    request = {
        "sources": list(sources), "token": token, "cpu_s": math.ceil(timeout_s), "memory_bytes": memory_bytes,
        "unisolated": unisolated,
    }  # fmt: skip
    try:
        code, said = _ran(json.dumps(request).encode(), timeout_s)
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        raise RewardError(f"code cannot start a process: {error}") from error
    # Without the token it is an exit of a source.
    if code == sandbox.REFUSED and said.startswith(token):
        raise RewardError(f"code cannot limit its process on this machine: {said.removeprefix(token)}")
    return said.removeprefix(token) if said.startswith(token) else None


def _ran(request: bytes, timeout_s: float) -> tuple[int, str]:
    """Return the exit code of the process, and the beginning of its output."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as output:
        with open(write_end, "wb", buffering=0) as written:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-X", "utf8", str(Path(sandbox.__file__))],
                input=request,
                stdout=written,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                timeout=timeout_s,
                check=False,
            )
        # Read after its end, not by `run`: foreign code writes without end, and all of it would be kept here.
        return done.returncode, output.read(_MOST_BYTES).decode(errors="replace")
