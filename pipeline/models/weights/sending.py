"""The way of published weights to other machines: a holder beside them, a relay on each other machine.

    weights file -> WeightsHolder -- Offer: differences, or the whole version --> WeightsRelay -> workers of its machine

A worker asks its machine's relay for the version held there, the holder for an offer from that version on, and has the
relay take the offer. Whatever the number of workers, a version goes to a machine once. The relay compares the
fingerprint of the bytes that differences lead to with the published one. If they are others, it holds no version any
more, and the next offer is the whole one; so it is for a new relay, or one that has missed too much.

A refused offer is followed by another one from the same holder to the same relay: no process starts anew for it.

Values go by references (`store`, `load`), as in an object store: a reference costs nothing until it is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.errors import WeightsError
from pipeline.models.weights.copies import WeightsCopy
from pipeline.models.weights.differences import applied, difference
from pipeline.models.weights.store import WeightsReader
from pipeline.storage.weights_header import Age, WeightsVersion

_MOST_OFFERS: Final = 3

Store = Callable[[Any], Any]
"""Stores a value, and returns a reference to it."""
Load = Callable[[Any], Any]
"""Returns the value of a reference; its arrays may be read-only."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """The newest version, for a machine that holds `base`.

    Attributes:
        version: The newest version.
        base: The version from which the differences lead to it; None: the reference is to a whole one.
        references: To a `WeightsCopy`, or to each `Difference`, in order.
    """

    version: WeightsVersion
    base: Age | None
    references: list[Any]


@dataclasses.dataclass(frozen=True)
class Taken:
    """The result of an offer.

    Attributes:
        references: To the `WeightsCopy` that the machine holds now; none if the offer was refused.
        whole_bytes: Bytes of whole versions that were sent to the machine.
        difference_bytes: Bytes of differences that were sent to it.
        reason: The reason of a refusal.
        is_damaged: Whether the differences did not lead to the published bytes.
    """

    references: list[Any]
    whole_bytes: int = 0
    difference_bytes: int = 0
    reason: str = ""
    is_damaged: bool = False


def offered(
    held: Callable[[], Age | None], offer: Callable[[Age | None], Offer], take: Callable[[Offer], Taken]
) -> Iterator[Taken]:
    """Have a relay take the newest version; yield the result of each offer, of which the last one may be refused too.

    A relay that another worker has had take a version meanwhile refuses an offer, and one whose differences led to
    other bytes; the next offer fits the version that it holds then.

    Args:
        held: The relay's.
        offer: The holder's.
        take: The relay's.
    """
    for _ in range(_MOST_OFFERS):
        taken = take(offer(held()))
        yield taken
        if taken.references:
            return


class _Step(NamedTuple):
    base: Age
    nbytes: int
    reference: Any


class WeightsHolder:
    """Stores each version once for all machines: its difference from the one before, and all of it on demand.

    Differences are made once another machine has asked, and kept as long as all of them together have at most half of
    the bytes of a version.
    """

    def __init__(self, path: str, store: Store, load: Load) -> None:
        """Open a weights file, which may have no version yet."""
        self._reader = WeightsReader(Path(path))
        self._store = store
        self._load = load
        self._newest: WeightsCopy | None = None
        self._whole: list[Any] = []
        self._steps: list[_Step] = []
        self._sends = False

    def whole(self) -> list[Any]:
        """Return one reference, to the newest version, for the workers of this machine; errors as `offer`."""
        return self._stored(self._advanced())

    def offer(self, held: Age | None) -> Offer:
        """Return the newest version for a machine.

        Args:
            held: The version that the machine holds; None if it needs the whole one.

        Raises:
            WeightsError: If there is no version yet, or every attempt at a whole copy failed.
        """
        self._sends = True
        newest = self._advanced()
        if held == newest.version.age:
            return Offer(newest.version, held, [])
        bases = [step.base for step in self._steps]
        if held is not None and held in bases:
            return Offer(newest.version, held, [step.reference for step in self._steps[bases.index(held) :]])
        return Offer(newest.version, None, self._stored(newest))

    def close(self) -> None:
        """Unmap the file."""
        self._reader.close()

    def _stored(self, newest: WeightsCopy) -> list[Any]:
        if not self._whole:
            self._whole = [self._store(newest)]
            # The store's bytes are the base of the next difference: no second copy is kept.
            self._newest = self._load(self._whole[0])
        return self._whole

    def _advanced(self) -> WeightsCopy:
        found, base = self._reader.newest(), self._newest
        if base is not None and found is not None and found.age == base.version.age:
            return base
        newest = self._reader.copy()
        most_bytes = newest.data.nbytes // 2
        made = difference(base, newest, most_bytes) if self._sends and base is not None else None
        # Before another version takes its place in the store.
        self._newest, self._whole, base = newest, [], None
        if made is None:
            self._steps = []
            return newest
        self._steps.append(_Step(made.base, made.nbytes, self._store(made)))
        while sum(step.nbytes for step in self._steps) > most_bytes:
            del self._steps[0]
        return newest


class WeightsRelay:
    """Holds the newest version that a worker of this machine asked for, for all workers of the machine."""

    def __init__(self, store: Store, load: Load) -> None:
        self._store = store
        self._load = load
        self._copy: WeightsCopy | None = None
        self._references: list[Any] = []

    def held(self) -> Age | None:
        """Return the version held; None before the first one, and after differences that led to other bytes."""
        return None if self._copy is None else self._copy.version.age

    def take(self, offer: Offer) -> Taken:
        """Take over a version, unless another worker has had it taken meanwhile."""
        held = self.held()
        if offer.version.age == held:
            return Taken(self._references)
        if offer.base is None:
            # Before another version takes their place in the store.
            self._copy, self._references = None, []
            whole: WeightsCopy = self._load(offer.references[0])
            self._references = [self._store(whole)]
            self._copy = self._load(self._references[0])
            return Taken(self._references, whole_bytes=whole.data.nbytes)
        if self._copy is None or offer.base != held:
            return Taken([], reason="another worker of the machine has fetched other weights meanwhile")
        differences = [self._load(reference) for reference in offer.references]
        nbytes = sum(one.nbytes for one in differences)
        base, self._copy, self._references = self._copy, None, []
        try:
            copy = applied(base, differences)
        except WeightsError as error:
            return Taken([], difference_bytes=nbytes, reason=str(error), is_damaged=True)
        self._copy, self._references = copy, [self._store(copy)]
        return Taken(self._references, difference_bytes=nbytes)
