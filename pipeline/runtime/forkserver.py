"""The template: one process that has loaded what roles load, and of which they are forked in a few milliseconds.

To import torch and transformers takes a role seconds of CPU; copying a process that has them takes none. The template
never computes, opens no device and has one thread, so there is nothing in it that a fork could break. A role forked
of it is the supervisor's own child: the template forks twice and the supervisor adopts what is left, so that nothing
that runs depends on the template. This is the supervisor's end of it, which does not load torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from pipeline.runtime.child_process import LaunchSpec, Process, Starter, child_environment, executed

_FORK_TIMEOUT_S = 5.0
_MODULE = "pipeline.runtime.forkserver_process"


class ForkRequest(msgspec.Struct, frozen=True):
    """What is to be forked; the pipes for reports and lines, and a socket to meet it at, come with the message."""

    spec: LaunchSpec
    environment: dict[str, str]


class Forkserver:
    """The supervisor's end of the one template of an instance, in whichever life it is."""

    def __init__(self) -> None:
        self._link: socket.socket | None = None

    def starter(self, name: str, model: str, environment: Mapping[str, str]) -> Starter:
        """Return what starts the template.

        Args:
            name: The instance's.
            model: Directory of the model whose code it loads beforehand.
            environment: Variables set on top of ours.
        """

        def start(reports: int, lines: int) -> Process:
            self.close()
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._link.settimeout(_FORK_TIMEOUT_S)
            with theirs:
                arguments = [str(theirs.fileno()), name, model]
                return executed(_MODULE, arguments, environment, pass_fds=(theirs.fileno(),))(reports, lines)

        return start

    def forked(self, spec: LaunchSpec, environment: Mapping[str, str]) -> Starter:
        """Return what forks a role of the template, with these variables set on top of ours."""

        def start(reports: int, lines: int) -> Process:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours:
                ours.settimeout(_FORK_TIMEOUT_S)
                with theirs:
                    self._ask(ForkRequest(spec, child_environment(environment)), reports, lines, theirs.fileno())
                if not (answer := ours.recv(64)):
                    raise ConnectionResetError("the template has gone")
                # It waits for this word: one that we gave up on finds the socket closed, and ends.
                ours.send(b"go")
            return ForkedProcess(int(answer))

        return start

    def _ask(self, request: ForkRequest, *descriptors: int) -> None:
        if self._link is None:
            raise ConnectionResetError("there is no template")
        socket.send_fds(self._link, [msgspec.msgpack.encode(request)], descriptors)

    def close(self) -> None:
        """Let go of it; a template whose supervisor has let go ends."""
        if self._link is not None:
            self._link.close()
            self._link = None


class ForkedProcess:
    """A child of this process that another one forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reap it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
