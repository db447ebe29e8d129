"""A child that does not outlive its parent, however the parent dies."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "RLHFD_PARENT"
"""In the environment of a child: the pid of whoever started it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies; to be called before anything slow is imported."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        # It died before we could ask.
        os._exit(0)
