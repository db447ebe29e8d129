"""`rollout` with a model of 124 M parameters, the size of the smallest models that people train.

Not part of a whole run: coati's design, which recomputes every token of every row for each new one, takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benches.report import Section
from benches.rollout import compared
from benches.rollout_peers import Work

_SIZE = (768, 12, 25_000)


def run(*, quick: bool) -> Sequence[Section]:
    """Compare the ways to a rollout of this model."""
    works = [Work(2, 16, 4, 8, False)] if quick else [
        Work(4, 256, 2, 128), Work(8, 256, 4, 32), Work(8, 256, 4, 128, False),
    ]  # fmt: skip
    rounds = 1 if quick else 3
    return [compared("rollout-124m", _SIZE, works, rounds=rounds, with_trl=not quick, eos_strength=4.4, threads=2)]
