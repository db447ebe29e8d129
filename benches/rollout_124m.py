"""`rollout` with a model of 124 M parameters, the size of the smallest models that people train.

Not part of a whole run: coati's design, which computes every token of every row again for each new one, takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benches.report import Section
from benches.rollout import THREADS, compared
from benches.rollout_peers import Work


def run(*, quick: bool) -> Sequence[Section]:
    """Compare the ways to a rollout of this model."""
    torch.set_num_threads(THREADS)
    works = [Work(2, 16, 4, 8, False)] if quick else [
        Work(4, 64, 2, 128), Work(8, 64, 4, 32), Work(8, 64, 4, 128, False),
    ]  # fmt: skip
    size, rounds = (768, 12, 25_000), 1 if quick else 3
    return [compared("rollout-124m", size, works, rounds=rounds, with_trl=not quick, eos_strength=3.6)]
