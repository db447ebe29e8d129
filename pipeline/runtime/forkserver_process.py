"""Entry of the template (`pipeline.runtime.forkserver`): loads what roles load, then forks one whenever it is asked."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from pipeline.runtime.lifeline import die_with_parent

_REQUEST_BYTES = 1 << 20
_ROLES = ("pipeline.trainer.process", "pipeline.rollout.process", "pipeline.trainer.setup")
# Each is loaded at its first use, which every role comes to.
_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor", "PreTrainedTokenizerFast")
_EMBEDDED = "llama"


class Birth(NamedTuple):
    """What a forked process begins with."""

    spec: bytes
    environment: dict[str, str]
    reports: int
    lines: int
    meeting: socket.socket


def main(reports: int, link: socket.socket, name: str, model: str) -> int:
    """Fork roles until the supervisor goes; in a forked role, run it and return its exit code."""
    import setproctitle

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The watchdog asks every child for its stacks.
    faulthandler.register(signal.SIGUSR1, chain=False)
    setproctitle.setproctitle(f"{name}: forkserver")
    _load(model)
    if reason := _unfit():
        os.write(reports, json.dumps({"state": "unusable", "error": reason}).encode() + b"\n")
        return 1
    # Collections in a forked process would touch, and so copy, every page of what it shares with the others.
    gc.collect()
    gc.freeze()
    os.write(reports, b'{"state":"ready"}\n')
    while (birth := _next_birth(link)) is not None:
        if _forked():
            os.close(reports)
            link.close()
            return _live(birth)
        for descriptor in (birth.reports, birth.lines):
            os.close(descriptor)
        birth.meeting.close()
    return 0


def _load(model: str) -> None:
    """Import what roles would import, the code of the actor's kind of model among it."""
    for name in _ROLES:
        importlib.import_module(name)
    import transformers

    for name in _CLASSES:
        getattr(transformers, name)
    try:
        kind = str(json.loads((Path(model) / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        # Not made yet, or broken: whoever loads the model says so.
        kind = _EMBEDDED
    if importlib.util.find_spec(f"transformers.models.{kind}") is not None:
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def _unfit() -> str:
    """Return why this process must not be forked, "" if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"a module that roles import has started {threads - 1} threads, which a fork would lose"
    # CUDA is started once a process, and is dead in a copy of it.
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    if any(path.startswith("/dev/nvidia") for path in opened):
        return "a module that roles import has opened a GPU, which a forked process cannot use"
    return ""


def _next_birth(link: socket.socket) -> Birth | None:
    """Wait for the supervisor's next request; return None once it has gone."""
    import msgspec

    from pipeline.runtime.forkserver import ForkRequest

    data, descriptors, _, _ = socket.recv_fds(link, _REQUEST_BYTES, 3)
    if not data:
        return None
    request = msgspec.msgpack.decode(data, type=ForkRequest)
    reports, lines, meeting = descriptors
    return Birth(msgspec.json.encode(request.spec), request.environment, reports, lines, socket.socket(fileno=meeting))


def _forked() -> bool:
    """Fork twice; return True in the grandchild, whose parent has ended by then, or is about to."""
    if (middle := os.fork()) != 0:
        os.waitpid(middle, 0)
        return False
    parent = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    return True


def _live(birth: Birth) -> int:
    """Become what an executed process would be, meet the supervisor, and run the role."""
    from pipeline.runtime import child_entry

    os.environ.clear()
    os.environ.update(birth.environment)
    die_with_parent()
    os.setsid()
    for number in (1, 2):
        os.dup2(birth.lines, number)
    os.close(birth.lines)
    with birth.meeting as meeting:
        meeting.send(str(os.getpid()).encode())
        if not meeting.recv(8):
            # The supervisor gave up on us; it may have started another one.
            return 1
    _draw_apart()
    return child_entry.main(birth.reports, birth.spec.decode())


def _draw_apart() -> None:
    """Undo what all forked processes would have in common."""
    import numpy
    import torch

    numpy.random.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), *sys.argv[3:]))
