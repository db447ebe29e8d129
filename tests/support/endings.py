"""The last line of each trainer rank: its steps, the weights, and the digest of all experience."""

import re
from typing import NamedTuple

_ENDED = re.compile(r"\b(trainer-\d+|serial)\b.*training ended: steps=(\d+) weights=([0-9a-f]{16}|-) experiences=(\w+)")


class Ending(NamedTuple):
    """A rank's last line.

    Attributes:
        steps: Optimizer steps taken.
        weights: Fingerprint of the weights; "-" on every rank but the first, which publishes.
        experiences: Digest of all experience that all ranks trained on.
    """

    steps: int
    weights: str
    experiences: str


def endings(errors: str) -> dict[str, Ending]:
    """Return the last line of each rank by its name, from the standard error of a daemon that has ended."""
    return {name: Ending(int(steps), *digests) for name, steps, *digests in _ENDED.findall(errors)}
