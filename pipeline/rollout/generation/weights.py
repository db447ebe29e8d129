"""The weights of a worker: those of its models and of its engine, replaced by each version that it fetches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from pipeline.errors import WeightsError
from pipeline.models.weights.copies import WeightsCopy
from pipeline.models.weights.store import WeightsReader, part_of
from pipeline.rollout.generation.engine_probe import EngineProbe, PublishedProbe
from pipeline.rollout.generation.interface import Engine
from pipeline.storage.weights_header import WeightsVersion

_FETCH_ATTEMPTS = 16


WeightsSource: TypeAlias = WeightsReader | WeightsCopy
"""Source of published weights: shared memory, or a copy sent over the network."""


@dataclasses.dataclass
class ModelWeights:
    """The weights of a worker's models, replaced in place, and of an engine beside them.

    Attributes:
        targets: The tensors that published weights are copied into, by published name.
        engine: Samples the prompts; paused during the copy, then notified of the new weights.
        check: Called with each version fetched; raises WeightsMismatchError if the model does not compute with it.
        probe: Asks the engine about each version; None: it is not asked.
    """

    targets: Mapping[str, Tensor]
    engine: Engine
    check: Callable[[WeightsVersion], None] = lambda fetched: None
    probe: EngineProbe | None = None

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version.

        Args:
            source: Holds the newest version.

        Returns:
            The version fetched.

        Raises:
            WeightsMismatchError: If the weights do not fit the engine's model, or the worker's model does not compute
                with the version fetched.
            WeightsError: If the weights are torn, or another model's.
        """
        self.engine.pause()
        fetched = source.fetch(self.targets)
        if not _took_file(self.engine, source, fetched):
            self.engine.update_weights(part_of(self.targets, "actor"), fetched.version)
        self.engine.resume()
        self.check(fetched)
        return fetched

    def hand_over_again(self, version: int) -> None:
        """Have the engine take the version that the targets hold once more, from the targets."""
        self.engine.pause()
        self.engine.update_weights(part_of(self.targets, "actor"), version)
        self.engine.resume()


@dataclasses.dataclass
class EngineWeights:
    """The weights of a worker whose engine alone holds the actor.

    Attributes:
        engine: Takes versions out of shared memory (``fetch_weights(path, age)``, as `VllmEngine`), and tensors of a
            copy (`Engine.update_weights`).
        probe: Asks it about each version.
        beside: The tensors that the worker takes beside the engine, by published name: those of a critic, and the
            moments of scores.
    """

    engine: Any
    probe: PublishedProbe
    beside: Mapping[str, Tensor]
    _source: WeightsSource | None = dataclasses.field(default=None, init=False)

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version, the engine's straight from shared memory, or out of a copy.

        Arguments, result and errors are those of `ModelWeights.fetch`.
        """
        self._source = source
        self.engine.pause()
        for _ in range(_FETCH_ATTEMPTS):
            # The fingerprint of a copy is compared with the published one here: the engine gets its tensors alone.
            if self.beside or isinstance(source, WeightsCopy):
                fetched = source.fetch(self.beside, partial=True)
            else:
                fetched = source.newest_whole()
            if self._has_taken(source, fetched):
                self.engine.resume()
                self.probe.published = fetched
                return fetched
            # Overwritten before the engine had it.
        raise WeightsError(f"no version of the weights was held until the engine had it, in {_FETCH_ATTEMPTS} attempts")

    def hand_over_again(self, version: int) -> None:
        """Have the engine take the version fetched last once more.

        Raises:
            WeightsError: If nothing holds it any more.
        """
        self.engine.pause()
        held = self.probe.published
        if self._source is None or held is None or not self._has_taken(self._source, held):
            raise WeightsError(f"the engine must have version {version} again, and shared memory holds it no more")
        self.engine.resume()

    def _has_taken(self, source: WeightsSource, wanted: WeightsVersion) -> bool:
        if isinstance(source, WeightsCopy):
            self.engine.update_weights(part_of(source.tensors(), "actor"), wanted.version)
            return True
        return _took_file(self.engine, source, wanted)


WorkerWeights: TypeAlias = ModelWeights | EngineWeights
"""The weights of a worker, replaced by each version."""


def _took_file(engine: Any, source: WeightsSource, wanted: WeightsVersion) -> bool:
    """Have a paused engine with a method `fetch_weights` take a version out of shared memory.

    Returns:
        Whether it has; False also if it took another one, because the trainer has overwritten this one since.
    """
    path, fetch = getattr(source, "path", None), getattr(engine, "fetch_weights", None)
    try:
        return path is not None and fetch is not None and bool(fetch(path, wanted.age) == wanted.age)
    except WeightsError:
        return False
