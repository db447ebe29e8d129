"""Errors of rlhfd: the class of an error tells its consequence, its message what, the value and the limit."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of ``rlhfd`` and of its child processes; part of the interface."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    UNREACHABLE = 4
    GAVE_UP = 70
    BAD_CONFIG = 78


class RlhfdError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        bare: The message for a log: without words of somebody else's code, which may quote prompts and answers.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str = "", *, bare: str = "") -> None:
        super().__init__(message)
        self.bare = bare or message

    def told(self, *, texts: bool) -> str:
        """Return the whole message if it may hold `texts`, else the bare one."""
        return str(self) if texts else self.bare


class ConfigError(RlhfdError):
    """The configuration, or a file it names, is wrong: do not restart, tell the operator (exit 78)."""

    exit_code = ExitCode.BAD_CONFIG


class NotRunningError(RlhfdError):
    """No instance serves this runtime directory (exit 3)."""

    exit_code = ExitCode.NOT_RUNNING


class UnreachableError(RlhfdError):
    """An instance holds the runtime directory but does not answer (exit 4)."""

    exit_code = ExitCode.UNREACHABLE


class GaveUpError(RlhfdError):
    """The run cannot go on and a restart would not help (exit 70)."""

    exit_code = ExitCode.GAVE_UP


class ShapeError(RlhfdError, ValueError):
    """Tensors whose shapes or dtypes disagree: a fault of the caller; the message names field, row and both sizes."""


class FieldError(RlhfdError, ValueError):
    """A field that is missing, mixed or holds a value it must not hold; the message names field and row."""


class TokenError(FieldError):
    """A token id that the model does not have."""


class PromptError(RlhfdError):
    """A prompt that cannot be rolled out: no room for a response, an image or template that fails: set it aside."""


class RewardError(RlhfdError):
    """A reward that is no finite number: the experience is errored, which is not reward 0.

    `raised` tells a function that raised from one that returned something else.
    """

    def __init__(self, message: str, *, bare: str = "", raised: bool = False) -> None:
        super().__init__(message, bare=bare)
        self.raised = raised


class ArenaFullError(RlhfdError):
    """No extent of that size is free now: wait for a release, then retry."""


class LedgerError(RlhfdError):
    """The ledger refuses a transition or cannot be read: an invariant is broken, die rather than lose an item."""


class DecodeError(RlhfdError):
    """A message or extent that does not decode: drop it and count it."""


class WeightsError(RlhfdError):
    """Weights that are torn, of another model or of another fingerprint: never load them."""


class WeightsMismatchError(RlhfdError):
    """A worker whose model does not compute what its weights say: nothing it makes is of use, never restart it."""


class CheckpointError(RlhfdError):
    """A checkpoint that cannot be written, or does not hold what it says: go on, or take the one before it."""


class BufferClosedError(RlhfdError):
    """The buffer was closed while a caller waited on it."""


class DeadlineError(RlhfdError, TimeoutError):
    """A wait reached its deadline; the message names what was waited for."""
