"""Ranks of a process group, forked from one process that has imported torch and not computed with it yet.

Each import of torch and transformers costs five seconds of a core.

    subprocess.run(forked_ranks.command(2, "tests.trainer.test_learner:train_rank", folder), check=True, timeout=100)
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pipeline.runtime import role_libraries
from pipeline.runtime.forking import ForkedChild


def command(count: int, function: str, folder: Path, *options: str) -> list[str]:
    """Return the command that runs ranks by ``module:function``, which is called with rank and folder.

    Args:
        count: Number of ranks.
        function: Function of a rank.
        folder: The ranks' folder.
        options: Options of Python.
    """
    return [sys.executable, *options, "-m", __name__, str(count), function, str(folder)]


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


if __name__ == "__main__":
    # Each rank would import what transformers imports at its first use.
    role_libraries.load((), "")
    _module, _, _name = sys.argv[2].partition(":")
    _main = getattr(importlib.import_module(_module), _name)
    _run(int(sys.argv[1]), lambda rank: _main(rank, sys.argv[3]))
