"""The reward `code`: the tests of a row, run after the response's code in a limited process of their own."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pipeline.config.rewards import RewardConfig
from pipeline.errors import RewardError
from pipeline.rollout.reward import sandbox

_BLOCK: Final = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MOST_BYTES: Final = 4096


def code_reward(settings: RewardConfig) -> Callable[..., float]:
    """Return the reward function `code`: 1 if the tests end without an exception and within their limits, else 0.

    The code is the last block in backquotes of the response, or the whole response if there is none. The tests are
    Python: the row's column `tests`, a text or a list of texts, or its answer.
    """

    def code(
        input_ids: Any, attention_mask: Any, *, response: str, gt_answer: Any, tests: Any = None, **_: Any
    ) -> float:
        tests = gt_answer if tests is None else tests
        if isinstance(tests, list):
            tests = "\n".join(map(str, tests))
        if not isinstance(tests, str) or not tests.strip():
            raise RewardError("code needs tests: a column of this name with Python text, or the answer")
        blocks = _BLOCK.findall(response)
        source = f"{blocks[-1] if blocks else response}\n\n{tests}\n"
        return float(passes(source, timeout_s=settings.code_timeout_s, memory_bytes=settings.code_memory_bytes))

    return code


def passes(source: str, *, timeout_s: float, memory_bytes: int) -> bool:
    """Return whether Python source runs to its end without an exception, in a limited process.

    Args:
        source: Foreign code; it cannot write files, start processes or use a network.
        timeout_s: Limit of its CPU and wall time.
        memory_bytes: Limit of its address space.

    Raises:
        RewardError: If the process could not be started, or this kernel does not limit it.
    """
    token = secrets.token_hex(16)
    request = {"source": source, "token": token, "cpu_s": math.ceil(timeout_s), "memory_bytes": memory_bytes}
    try:
        code, said = _ran(json.dumps(request).encode(), timeout_s)
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise RewardError(f"code cannot start a process: {error}") from error
    # Without the token it is an exit of the source.
    if code == sandbox.REFUSED and said.startswith(token):
        raise RewardError(f"code cannot limit its process on this machine: {said.removeprefix(token)}")
    # A source that ends the process itself has not come to its end.
    return said == token


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
