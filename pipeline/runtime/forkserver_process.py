"""Entry of the forkserver (`pipeline.runtime.forkserver`): imports the roles' libraries, forks roles on request."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time

import setproctitle

from pipeline.runtime import role_libraries
from pipeline.runtime.forking import GPU, ForkRequest, next_request, threads_lost, unfit_to_fork
from pipeline.runtime.import_watch import ImportWatch
from pipeline.runtime.lifeline import die_with_parent


def main(reports: int, link: socket.socket, name: str, model: str) -> int:
    """Fork roles until the supervisor closes the connection; in a forked role, run it and return its exit code."""
    begin_forkserver(f"{name}: forkserver")
    with ImportWatch() as watch:
        role_libraries.load(role_libraries.ROLES.values(), model)
    if not can_serve(reports, _refusal(watch)):
        return 1
    while (found := next_request(link, 3)) is not None:
        request, descriptors = found
        if _forked():
            os.close(reports)
            link.close()
            return _run_role(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    return 0


def _refusal(watch: ImportWatch) -> str:
    """Return the reason why this process must not be forked, with the module at fault; "" if it may be."""
    if not (reason := unfit_to_serve()):
        return ""
    starters = dict.fromkeys(watch.starter_of(thread) or _before_us() for thread in threads_lost())
    return f"{' and '.join(starters) or 'a module that roles import'} {reason}"


def _before_us() -> str:
    """Return the name of what runs at Python's start, where there is such a module."""
    customize = [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    return " or ".join([*customize, "a .pth file of this environment"])


def begin_forkserver(title: str) -> None:
    """Set this process up as a forkserver, before its imports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Hang detection asks every child for its stacks.
    faulthandler.register(signal.SIGUSR1, chain=False)
    setproctitle.setproctitle(title)
    # Until what the imports have made is frozen.
    gc.disable()


def unfit_to_serve(device: str = GPU) -> str:
    """Return the reason why this process, which has imported torch, must not be forked, as `unfit_to_fork`."""
    badly = "has asked CUDA for its devices, after which a forked process cannot use a GPU"
    return unfit_to_fork(device) or (badly if forks_badly() else "")


def can_serve(reports: int, reason: str) -> bool:
    """Report that a forkserver is ready after its imports, or the reason why it must not be forked; return which."""
    if reason:
        os.write(reports, json.dumps({"state": "unusable", "error": reason}).encode() + b"\n")
        return False
    # Garbage collections in a forked process would write to, and so copy, every shared page. The imports leave about
    # 1 MB of garbage; collecting it would take as long as a tenth of them.
    gc.freeze()
    gc.enable()
    os.write(reports, b'{"state":"ready"}\n')
    return True


def forks_badly() -> bool:
    """Return whether CUDA refuses to work in a fork of this process: PyTorch notes it in the fork, not here."""
    import torch

    if (probe := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]) != 0


def _forked() -> bool:
    """Fork twice; return True in the grandchild, after its parent has exited."""
    if (middle := os.fork()) != 0:
        os.waitpid(middle, 0)
        return False
    parent = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    return True


def _run_role(request: ForkRequest, reports: int, lines: int, handshake: int) -> int:
    """Set up the process like an executed one, do the handshake with the supervisor, and run the role."""
    from pipeline.runtime import child_entry

    os.environb.clear()
    os.environb.update(request.environment)
    die_with_parent()
    os.setsid()
    for number in (1, 2):
        os.dup2(lines, number)
    os.close(lines)
    with socket.socket(fileno=handshake) as supervisor:
        supervisor.send(str(os.getpid()).encode())
        if not supervisor.recv(8):
            # The supervisor's timeout has passed; it may have started another process.
            return 1
    _reset_inherited_state()
    return child_entry.main(reports, request.work)


def _reset_inherited_state() -> None:
    """Reset the state that all forked processes would share: the random seed and the number of threads."""
    import numpy
    import torch

    numpy.random.seed()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


if __name__ == "__main__":
    die_with_parent()
    from pipeline.runtime.child_entry import leave

    leave(main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), *sys.argv[3:]))
