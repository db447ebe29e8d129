"""Evaluations of a run: results of held-out prompts, their summary, and ``evaluations.jsonl``, a line each.

A line names the weights by version and fingerprint, and the files and settings by a digest
(`pipeline.runtime.evaluation_plan`): an evaluation of the same weights under the same plan gives the same numbers,
and is never made twice. The buffer writes the file, the trainer and people read it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pipeline.storage.files import UNREADABLE, write_at_end

FILE_NAME: Final = "evaluations.jsonl"
TOTAL: Final = "all"
"""The name of the summary of all files."""
GAUGES: Final = {
    "pass_at_1": "rlhfd_evaluation_pass_at_1_ratio",
    "pass_at_k": "rlhfd_evaluation_pass_at_k_ratio",
    "reward_mean": "rlhfd_evaluation_reward_mean",
    "response_length_mean_tokens": "rlhfd_evaluation_response_length_mean_tokens",
    "cut_ratio": "rlhfd_evaluation_cut_ratio",
}
"""The means of a `Summary` and their metrics."""

log = logging.getLogger(__name__)


class PromptResult(msgspec.Struct, frozen=True, array_like=True):
    """The responses to one held-out prompt; each has a reward.

    Attributes:
        position: Position of the prompt.
        responses: Their number.
        right: Responses whose reward is at least `evaluation.pass_reward`.
        reward: Mean reward.
        tokens: Mean length.
        cut: Responses that were cut at their maximum length.
    """

    position: int
    responses: int
    right: int
    reward: float
    tokens: float
    cut: int

    @property
    def is_possible(self) -> bool:
        """Whether the numbers can be of one prompt."""
        counts = 0 <= self.right <= self.responses and 0 <= self.cut <= self.responses and self.responses > 0
        return counts and math.isfinite(self.reward) and math.isfinite(self.tokens) and self.tokens >= 0


class Summary(msgspec.Struct, frozen=True):
    """Means over the prompts of a file; None where no prompt has a result.

    Attributes:
        name: The file's name, or `TOTAL`.
        prompts: Prompts with a result.
        failed: Prompts without one: they count for nothing, not as wrong.
        pass_at_1: Share of right responses.
        pass_at_k: Probability that one of k responses is right (`pass_at_k`).
        reward_mean: Mean reward of a response.
        response_length_mean_tokens: Mean length of a response.
        cut_ratio: Share of responses that were cut at their maximum length.
    """

    name: str
    prompts: int
    failed: int
    pass_at_1: float | None = None
    pass_at_k: float | None = None
    reward_mean: float | None = None
    response_length_mean_tokens: float | None = None
    cut_ratio: float | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation, complete.

    Attributes:
        version: Policy version of the weights; -1 for a model outside a run.
        fingerprint: Fingerprint of the weights, in hexadecimal.
        plan: Digest of files and settings.
        time_unix_s: Unix time of its end.
        num_generations: Responses to a prompt.
        k: The k of pass@k.
        total: The summary of all files.
        files: The summary of each file, in the order of the configuration.
    """

    version: int
    fingerprint: str
    plan: str
    time_unix_s: float
    num_generations: int
    k: int
    total: Summary
    files: list[Summary]


def pass_at_k(responses: int, right: int, k: int) -> float:
    """Return the probability that at least one of k responses is right, drawn without replacement from all.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al., "Evaluating Large Language Models Trained on Code"
    (arXiv:2107.03374, eq. 1).

    Args:
        responses: n.
        right: c, at most n.
        k: At most n.
    """
    return 1.0 - math.comb(responses - right, k) / math.comb(responses, k)


def summary(name: str, results: Sequence[PromptResult], prompts: int, k: int) -> Summary:
    """Return the means over the results of a file's prompts; all prompts have the same weight."""
    count = len(results)
    if not count:
        return Summary(name, 0, prompts)
    return Summary(
        name,
        count,
        prompts - count,
        math.fsum(result.right / result.responses for result in results) / count,
        math.fsum(pass_at_k(result.responses, result.right, k) for result in results) / count,
        math.fsum(result.reward for result in results) / count,
        math.fsum(result.tokens for result in results) / count,
        math.fsum(result.cut / result.responses for result in results) / count,
    )


def read_evaluations(path: Path) -> list[Evaluation]:
    """Return the evaluations of a file, the oldest first, without lines that do not decode, such as a torn last one."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Evaluation))
        except UNREADABLE:
            pass
    return found


def find(
    evaluations: Sequence[Evaluation], version: int, fingerprint: str, plan: str | None = None
) -> Evaluation | None:
    """Return the last evaluation of these weights, under this plan unless it is None; None if there is none."""
    for found in reversed(evaluations):
        if (found.version, found.fingerprint) == (version, fingerprint) and plan in (None, found.plan):
            return found
    return None


def newest(
    evaluations: Sequence[Evaluation],
    version: float,
    fingerprint_of: Callable[[int], int | None] = lambda version: None,
) -> Evaluation | None:
    """Return the newest evaluation up to a version, None without one; those of undone weights count for nothing.

    Args:
        evaluations: The evaluations, the oldest first.
        version: The run's present version: later ones have been undone.
        fingerprint_of: Returns the fingerprint of the weights that have the number of a version now; None if unknown.
    """
    for found in reversed(evaluations):
        known = fingerprint_of(found.version)
        if found.version <= version and (known is None or found.fingerprint == f"{known:016x}"):
            return found
    return None


class EvaluationFile:
    """The writer of ``evaluations.jsonl``; a line is on disk, whole, before a reader can see it complete.

    A line that cannot be written waits, and is tried again by `write_waiting`.

    Args:
        path: The file; made at the first evaluation.
        clock_s: Unix time.
    """

    def __init__(self, path: Path, *, clock_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock_s = clock_s
        self._found = read_evaluations(path)
        self._waiting: list[Evaluation] = []
        self._is_failing = False

    def newest(
        self, version: int, fingerprint_of: Callable[[int], int | None] = lambda version: None
    ) -> Evaluation | None:
        """Return the newest evaluation, as the function `newest`."""
        return newest(self._found, version, fingerprint_of)

    def find(self, version: int, fingerprint: int, plan: str) -> Evaluation | None:
        """Return the evaluation of these weights under this plan; None if there is none."""
        return find(self._found, version, f"{fingerprint:016x}", plan)

    def add(self, evaluation: Evaluation) -> None:
        """Append an evaluation with the time, and flush it to disk."""
        evaluation = msgspec.structs.replace(evaluation, time_unix_s=round(self._clock_s(), 3))
        self._found.append(evaluation)
        self._waiting.append(evaluation)
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the lines that could not be written before."""
        if not self._waiting:
            return
        try:
            self._append(b"".join(msgspec.json.encode(evaluation) + b"\n" for evaluation in self._waiting))
        except OSError as error:
            if not self._is_failing:
                log.error("an evaluation was not written, it is tried again: path=%s error=%s",
                          self._path, error.strerror)  # fmt: skip
            self._is_failing = True
            return
        self._waiting.clear()
        self._is_failing = False

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A killed writer may have left the part of a line.
            size = os.fstat(descriptor).st_size
            end = os.pread(descriptor, size, 0).rfind(b"\n") + 1
            os.ftruncate(descriptor, end)
            write_at_end(descriptor, data, end, flush=True)
        finally:
            os.close(descriptor)
