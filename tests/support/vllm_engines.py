"""Engines of vLLM that are forks of one forkserver: each process of pytest imports vLLM once for all of its tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.runtime import engine_forkserver
from pipeline.runtime.engine_forkserver import ForkedEngine
from pipeline.runtime.forkserver import forkserver_environment
from pipeline.runtime.lifeline import PARENT_VARIABLE
from pipeline.runtime.vllm_variables import vllm_environment
from tests.support.daemon import wait_until

if TYPE_CHECKING:
    from pipeline.rollout.generation.vllm import wire
    from pipeline.rollout.generation.vllm.engine import VllmEngine

START_S = 300.0

# As `python -m pipeline.runtime.engine_forkserver`, with forks that run code too (`said_by_a_fork`).
_PROGRAM = """
import os, sys
from pathlib import Path
from pipeline.rollout.generation.vllm import process
from pipeline.runtime import engine_forkserver
from pipeline.runtime.child_entry import leave
from pipeline.runtime.lifeline import die_with_parent

run_engine = process.forked

def forked(link, text):
    from vllm import envs
    from vllm.model_executor.models import registry

    # For the first look at each kind of model vLLM starts a process, which imports it anew: one such look is enough.
    if any(Path(envs.VLLM_CACHE_ROOT, "modelinfos").glob("*.json")):
        registry._run_in_subprocess = lambda look: look()
    if text.startswith("# code"):
        exec(text, {"say": lambda line: os.write(link, f"{line}\\n".encode())})
    else:
        run_engine(link, text)

process.forked = forked
die_with_parent()
leave(engine_forkserver.main(int(sys.argv[1]), *sys.argv[2:]))
"""


class Forkserver:
    """A forkserver of engines, as the supervisor starts it.

    Args:
        path: Its socket.
        on_cpu: Whether its engines compute on the CPU.
        program: Arguments of Python before those of the forkserver.
        variables: Variables in addition to the test's own.

    Attributes:
        path: Its socket.
        process: The process.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_cpu: bool = True,
        program: Sequence[str] = ("-m", engine_forkserver.__name__),
        **variables: str,
    ) -> None:
        self.path = path
        self._reports, theirs = os.pipe()
        environment = vllm_environment(forkserver_environment(os.environ), on_cpu=on_cpu)
        self.process = subprocess.Popen(
            [sys.executable, "-P", *program, str(theirs), str(path), "test"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs],
            env={**environment, PARENT_VARIABLE: str(os.getpid()), **variables},
        )
        os.close(theirs)
        # It listens before it imports vLLM.
        wait_until(path.exists, START_S, "the forkserver listens")

    def report(self) -> Any:
        """Wait for its report: it is ready, or unusable."""
        return json.loads(os.read(self._reports, 4096))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._reports)


@pytest.fixture(scope="session")
def forkserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of the one forkserver of engines."""
    path = tmp_path_factory.mktemp("engines") / "engines.sock"
    with contextlib.closing(Forkserver(path, program=("-c", _PROGRAM))) as made:
        yield made.path


def forked_engine(settings: wire.Settings, forkserver: Path) -> VllmEngine:
    """Return an engine that is a fork."""
    # conftest imports this module, in processes that need no torch too.
    from pipeline.rollout.generation.vllm.engine import EngineProcess, VllmEngine

    return VllmEngine(settings, process=EngineProcess(settings, forkserver=forkserver))


def said_by_a_fork(code: str, forkserver: Path) -> str:
    """Run code in a process that has imported vLLM; return the lines that it has written by ``say(line)``."""
    ours, theirs = socket.socketpair()
    variables = vllm_environment(os.environ, on_cpu=True)
    with ours, theirs, contextlib.closing(ForkedEngine(forkserver, theirs.fileno(), f"# code\n{code}", variables)):
        theirs.close()
        ours.settimeout(START_S)
        with ours.makefile() as said:
            return said.read()
