"""The weight of the KL in the loss: constant, or led by a controller to a target of the KL.

    e       = clip(kl / target - 1, -0.2, 0.2)
    kl_coef = kl_coef (1 + e min(rows / horizon, 1))        after each step

Ziegler et al. 2019, arXiv:1909.08593 section 2.2, where K = rows / horizon is 0.1.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_MAX_ERROR = 0.2
HORIZON_ROWS: Final = 10_000
"""Rows over which a constant error of 1 would double the weight, as in the paper."""


def next_kl_coef(kl_coef: float, kl_nats: float, target_nats: float, rows: float, horizon_rows: float) -> float:
    """Return the weight of the next step.

    Args:
        kl_coef: The weight of this step.
        kl_nats: The KL to the reference in this step.
        target_nats: The KL at which the weight stays, above 0.
        rows: Rows of the step; those beyond the horizon do not count.
        horizon_rows: Rows over which a constant error of 1 would double the weight.

    Returns:
        The weight; `kl_coef` if the KL is NaN or infinite.
    """
    if not math.isfinite(kl_nats):
        return kl_coef
    error = min(max(kl_nats / target_nats - 1, -_MAX_ERROR), _MAX_ERROR)
    return kl_coef * (1 + error * min(rows / horizon_rows, 1.0))


class KlControl:
    """The weight of the KL in the loss, and its controller."""

    def __init__(self, kl_coef: float, target_nats: float | None, horizon_rows: int) -> None:
        """Start at a weight.

        Args:
            kl_coef: The weight; of the first step, if there is a target.
            target_nats: The KL to which the controller leads; None for a constant weight.
            horizon_rows: As in `next_kl_coef`.
        """
        self._constant = kl_coef
        self._target_nats = target_nats
        self._horizon_rows = horizon_rows
        self._adapted = torch.tensor(kl_coef, dtype=torch.float64)

    @property
    def kl_coef(self) -> float:
        """The weight in force."""
        return self._constant if self._target_nats is None else float(self._adapted)

    def observe(self, kl_nats: float, rows: float) -> None:
        """Set the weight of the next step from the KL and the rows of a step."""
        if self._target_nats is not None:
            self._adapted.fill_(next_kl_coef(self.kl_coef, kl_nats, self._target_nats, rows, self._horizon_rows))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state, live: of a constant weight none."""
        return {} if self._target_nats is None else {"kl_coef": self._adapted}
