"""The optimizers of `trainer.optimizer`: the package that one needs, and the bytes of their moments."""

from __future__ import annotations

from typing import Literal

from pipeline.config import user_modules

Optimizer = Literal["adamw", "adamw_8bit", "muon"]

_MOMENT, _BYTE_MOMENT = 4.0, 1 + 4 / 256
"""Bytes of a moment in float32, and of one of 8 bits with its share of a scale."""


def missing_package(name: Optimizer) -> str:
    """Return the line that says what to install for an optimizer; an empty text if nothing is missing."""
    return user_modules.missing_package(name, "bitsandbytes", "bitsandbytes") if name == "adamw_8bit" else ""


def moment_bytes(name: Optimizer, trained: int, matrices: int) -> int:
    """Return the bytes of an optimizer's moments.

    Args:
        name: The optimizer.
        trained: Trained parameters.
        matrices: Parameters of matrices of decoder layers among them.
    """
    if name == "muon":
        return round(_MOMENT * (2 * trained - matrices))
    return round(2 * trained * (_BYTE_MOMENT if name == "adamw_8bit" else _MOMENT))
