"""The supervisor's side of the forkserver; it loads no torch.

The forkserver is one process that has imported the libraries of the roles; a role is forked from it in a few
milliseconds. The import of torch and transformers costs a role seconds of CPU, the copy of a process costs none. The
forkserver never computes, opens no device and has one thread, so a fork loses nothing. A role forked from it is the
supervisor's own child: the forkserver forks twice and the supervisor adopts the grandchild, so no running process
depends on the forkserver.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from pipeline.runtime.child_process import Process, Starter, executed
from pipeline.runtime.forking import ForkedProcess, request_fork

_FORK_TIMEOUT_S = 5.0
_MODULE = "pipeline.runtime.forkserver_process"
_JEMALLOC = "JE_ARROW_MALLOC_CONF"


def forkserver_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a forkserver: no library of these starts threads as it is imported.

    pyarrow's allocator reads the options in their order, so ours applies unless a later one is the user's.
    """
    options = ["background_thread:false", environment.get(_JEMALLOC, "")]
    return {**environment, "OPENBLAS_NUM_THREADS": "1", _JEMALLOC: ",".join(filter(None, options))}


class Forkserver:
    """The supervisor's side of an instance's one forkserver, through its restarts."""

    def __init__(self) -> None:
        self._link: socket.socket | None = None

    def starter(self, name: str, model: str, environment: Mapping[str, str]) -> Starter:
        """Return a function that starts the forkserver.

        Args:
            name: The instance's name.
            model: Directory of the model whose code it loads.
            environment: All variables of the process.
        """

        def start(reports: int, lines: int) -> Process:
            self.close()
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._link.settimeout(_FORK_TIMEOUT_S)
            with theirs:
                arguments = [str(theirs.fileno()), name, model]
                variables = forkserver_environment(environment)
                return executed(_MODULE, arguments, variables, pass_fds=(theirs.fileno(),))(reports, lines)

        return start

    def forked(self, spec: str, environment: Mapping[str, str]) -> Starter:
        """Return a function that forks a role by its `LaunchSpec` as JSON, with these variables as its environment."""

        def start(reports: int, lines: int) -> Process:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours:
                ours.settimeout(_FORK_TIMEOUT_S)
                with theirs:
                    if self._link is None:
                        raise ConnectionResetError("there is no forkserver")
                    request_fork(self._link, spec, environment, reports, lines, theirs.fileno())
                if not (answer := ours.recv(64)):
                    raise ConnectionResetError("the forkserver has exited")
                # The forked process waits for this: after our timeout it finds the socket closed, and exits.
                ours.send(b"go")
            return ForkedProcess(int(answer))

        return start

    def close(self) -> None:
        """Close the connection; the forkserver then exits."""
        if self._link is not None:
            self._link.close()
            self._link = None
