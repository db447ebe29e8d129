"""The training state beside the weights, as named tensors: progress and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from pipeline.errors import FieldError
from pipeline.experience.ragged import RaggedRows, ragged_rows
from pipeline.experience.running_moments import SCORES
from pipeline.experience.types import Experience
from pipeline.experience.vision_rows import MODEL_KEYWORDS
from pipeline.trainer.step_stats import StepStats

_PROGRESS = "progress"

OPTIONAL = frozenset({"kl_coef", "return_moments", SCORES, "generator.cpu", "generator.cuda"})
"""Tensors that a checkpoint may lack or have more: those of settings that may change with a resume, and random state,
which earlier checkouts wrote and no step reads.
"""


class LearnerProtocol(Protocol):
    """The interface of a learner (`pipeline.trainer.learner.Learner`).

    Attributes:
        step: Optimizer steps taken.
    """

    step: int

    def update(self, batches: list[RaggedRows], *, before_change: Callable[[], None]) -> StepStats:
        """Take one optimizer step.

        Before a weight, or a tensor of `tensors`, is changed `before_change` is called: they may be copied by another
        thread until it returns.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a step changes beside the weights, live."""


class Progress(NamedTuple):
    """The progress of training.

    Attributes:
        step: Optimizer steps taken.
        digest: Digest of all experience that all ranks trained on, in order (`digest_after`, `after_step`); the same on
            every rank.
        position: First prompt that may be missing from the trained experience.
    """

    step: int = 0
    digest: int = 0
    position: int = 0


class RankProgress(NamedTuple):
    """The progress of one rank in a step.

    Attributes:
        digest: Digest of all ranks' experience before the step, and of this rank's experience in it.
        position: Every prompt before it is trained or dropped, or in a lease up to this rank's newest.
        sums: Sums over this rank's rows of the step (`pipeline.trainer.row_means`).
    """

    digest: int
    position: int
    sums: tuple[float, ...] = ()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return data


def digest_after(digest: int, batches: Iterable[RaggedRows | Experience]) -> int:
    """Return the digest of all experience up to and including these batches.

    The digest is a chain: each value is computed from the previous value and one batch's bytes. So one number is
    enough to continue the chain in another process.

    Args:
        digest: The digest of all experience before these batches.
        batches: The next batches, in training order.

    Raises:
        FieldError: If a batch lacks a field that is trained on.
    """
    for rows in map(ragged_rows, batches):
        link = xxhash.xxh3_64(digest.to_bytes(8, "little"))
        link.update(np.array([rows.lengths, rows.counts], np.int64).data)
        for name in ("sequences", "action_log_probs", "advantages", "reward", "behaviour_log_probs"):
            column = rows.columns.get(name)
            # Rows of which the trainer computes the log-probs have none.
            if column is None and name in ("advantages", "reward"):
                raise FieldError("advantages or reward is missing")
            link.update(b"" if column is None else np.ascontiguousarray(column).data)
        if rows.vision is not None:
            for name in MODEL_KEYWORDS:
                tensors, firsts = getattr(rows.vision, name), rows.vision.firsts(name)
                # Rows that share an image are several times the bytes of it.
                own = {
                    row: xxhash.xxh3_64_digest(_bytes_of(tensors[row]))
                    for row in set(firsts)
                    if tensors[row] is not None
                }
                link.update(b"".join(own.get(first, bytes(8)) for first in firsts))
        # 63 bits: the digest also fits into a signed integer.
        digest = link.intdigest() >> 1
    return digest


def after_step(step: int, ranks: Sequence[RankProgress]) -> Progress:
    """Return the progress after a step, the same on every rank: rank 0's training state alone holds it.

    The digests of several ranks are joined to one, from which each rank continues its chain: the ranks of a successor
    then continue as these would have done. Each rank's position holds for the rows of its own batches and of all lower
    leases; a step trains the leases of all ranks, so that the highest of their positions holds after it.

    Args:
        step: Optimizer steps taken.
        ranks: The progress of each rank, in order of ranks.
    """
    position = max(rank.position for rank in ranks)
    if len(ranks) == 1:
        return Progress(step, ranks[0].digest, position)
    joined = xxhash.xxh3_64(b"".join(rank.digest.to_bytes(8, "little") for rank in ranks))
    return Progress(step, joined.intdigest() >> 1, position)


def tensors_of(learner: LearnerProtocol, progress: Progress) -> dict[str, torch.Tensor]:
    """Return the training state: the learner's tensors, live, and a copy of the progress."""
    return {_PROGRESS: torch.tensor(progress, dtype=torch.int64), **learner.tensors()}


def progress_of(state: Mapping[str, torch.Tensor]) -> Progress:
    """Return the progress of a training state."""
    return Progress(*state[_PROGRESS].tolist())
