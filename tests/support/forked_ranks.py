"""Ranks of a process group, forked from a process that has loaded the libraries and not computed yet (`warm`).

Each import of torch and transformers costs eight seconds of a core.

    @pytest.mark.ranks
    def test_two_ranks(tmp_path):
        forked_ranks.run(2, "tests.trainer.test_learner:train_rank", tmp_path, timeout_s=100)
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pipeline.runtime.forking import ForkedChild
from tests.support import warm


def run(count: int, function: str, folder: Path, *, timeout_s: float) -> None:
    """Run ranks to their end, by ``module:function``, which is called with rank and folder; fail if one fails.

    Args:
        count: Number of ranks.
        function: Function of a rank.
        folder: The ranks' folder.
        timeout_s: Longest time.
    """
    server = warm.server()
    assert server is not None, "the test has the mark `ranks`"
    command = [__name__, str(count), function, str(folder)]
    process = server.start(command, Path.cwd(), os.environ, sys.__stdout__.fileno(), sys.__stderr__.fileno())
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    assert code == 0, f"{function}: see above"


def main(count: str, function: str, folder: str) -> NoReturn:
    """Run them; the program of the process that forks them."""
    warnings.filterwarnings("error", category=UserWarning, module=r"torch\.distributed\.fsdp\Z")
    module, _, name = function.partition(":")
    rank_main = getattr(importlib.import_module(module), name)
    _run(int(count), lambda rank: rank_main(rank, folder))


def _run(count: int, rank_main: Callable[[int], object]) -> NoReturn:
    """Run ranks and exit, with 0 if none failed; the others would wait for one that did, and are killed."""
    ranks = [ForkedChild(functools.partial(rank_main, rank), (), {}) for rank in range(count)]
    alive = {rank.pid: rank for rank in ranks}
    while alive:
        pid, status = os.wait()
        ended = ranks.index(alive.pop(pid))
        if code := os.waitstatus_to_exitcode(status):
            for other in alive.values():
                other.kill()
            sys.exit(f"rank {ended} of {count} ended with {code}")
    sys.exit(0)
