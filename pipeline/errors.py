"""Errors of rlhfd: the class of an error states its consequence, its message the problem, the value and the limit."""

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


def counted(count: int, one: str, several: str = "") -> str:
    """Return a count with its noun, for messages: ``1 row``, ``2 rows``, ``1,024 batches``.

    Args:
        count: The count.
        one: The noun, or noun and verb, of one.
        several: Those of several; `one` with an s if it is left out.
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


class RlhfdError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        exit_code: Exit code of a process that ends because of this error.
        bare: The message for a log: without messages of foreign code, which may quote prompts and answers.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str = "", *, bare: str = "") -> None:
        """Make an error.

        Args:
            message: The whole message: the problem, the value and the limit.
            bare: The message without any text of prompts and answers; empty if `message` holds none.
        """
        super().__init__(message)
        self.bare = bare or message

    def told(self, *, texts: bool) -> str:
        """Return the message for a log or a report.

        Args:
            texts: Whether the message may quote prompts and answers (``daemon.log_texts``).

        Returns:
            The whole message if `texts`, else `bare`.
        """
        return str(self) if texts else self.bare


class ConfigError(RlhfdError):
    """The configuration, or a file in it, is wrong: no restart, the operator repairs it (exit 78)."""

    exit_code = ExitCode.BAD_CONFIG


class NotRunningError(RlhfdError):
    """No instance serves this runtime directory (exit 3)."""

    exit_code = ExitCode.NOT_RUNNING


class UnreachableError(RlhfdError):
    """An instance holds the runtime directory but does not answer (exit 4)."""

    exit_code = ExitCode.UNREACHABLE


class StoppedError(UnreachableError):
    """A signal has stopped the instance, as Ctrl-Z does: it answers once it is continued (exit 4)."""


class GaveUpError(RlhfdError):
    """The run cannot continue and a restart would not help (exit 70)."""

    exit_code = ExitCode.GAVE_UP


class DeviceMemoryError(GaveUpError):
    """A device without memory for a single row: the same row would fail again after a restart (exit 70)."""


class ShapeError(RlhfdError, ValueError):
    """Tensors whose shapes or dtypes disagree: a fault of the caller; the message names field, row and both sizes."""


class FieldError(RlhfdError, ValueError):
    """A field that is missing, mixed or holds an invalid value; the message names field and row."""


class TokenError(FieldError):
    """A token id outside the model's vocabulary."""


class PromptError(RlhfdError):
    """A prompt that cannot be rolled out: no room for a response, an image or chat template fails: set it aside."""


class RewardError(RlhfdError):
    """A reward that is not a finite number: the experience is errored, which is not reward 0.

    Attributes:
        raised: Whether the reward function raised; False if it returned an invalid value.
        cause: Function, kind of error and place in the code, which rows with the same cause share; empty if not known.
    """

    def __init__(self, message: str, *, bare: str = "", raised: bool = False, cause: str = "") -> None:
        """Make an error; see `RlhfdError` for `message` and `bare`."""
        super().__init__(message, bare=bare)
        self.raised = raised
        self.cause = cause

    def at(self, place: str) -> RewardError:
        """Return this error with a function, or a row, in front of its texts."""
        bare = f"{place}: {self.bare or self}"
        found = RewardError(f"{place}: {self}", bare=bare, raised=self.raised, cause=bare)
        found.__cause__ = self.__cause__
        return found


class ArenaFullError(RlhfdError):
    """No extent of that size is free now: wait for a release, then retry."""


class LedgerError(RlhfdError):
    """The ledger refuses a transition or cannot be read, an invariant is broken: exit rather than lose an item."""


class DecodeError(RlhfdError):
    """A message or extent that does not decode: drop it and count it."""


class LinkEndedError(RlhfdError, EOFError):
    """The process at the other end of a link has closed it, or has ended: its death says more."""


class TornMessageError(LinkEndedError):
    """The other end of a link was closed within a message, which is lost."""


class WeightsError(RlhfdError):
    """Weights that are incomplete, of another model or of another fingerprint: never load them."""


class WeightsMismatchError(RlhfdError):
    """A worker whose model's output does not match its weights: its experience is of no use, never restart it."""


class EngineKilledError(RlhfdError):
    """SIGKILL has ended a worker's engine: restart the worker; no ticket is the cause, unless memory ran out."""


class CheckpointError(RlhfdError):
    """A checkpoint that cannot be written, or whose content is invalid: continue, or take the one before it."""


class BufferClosedError(RlhfdError):
    """The buffer was closed while a caller waited on it."""


class DeadlineError(RlhfdError, TimeoutError):
    """A wait reached its deadline; the message names the awaited event."""
