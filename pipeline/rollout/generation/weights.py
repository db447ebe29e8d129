"""The weights of a worker: those of its models and of its engine, replaced by each version that it fetches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from pipeline.errors import FieldError, ShapeError, WeightsError
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.generation.engine_probe import EngineProbe, PublishedProbe
from pipeline.rollout.generation.interface import Engine
from pipeline.rollout.prompt_batch import sample_all, tokens_of
from pipeline.storage.weights_header import WeightsVersion

_ACTOR = "actor."
_FETCH_ATTEMPTS = 16


class WeightsSource(Protocol):
    """Source of published weights: shared memory (`WeightsReader`), or a copy sent over the network (`WeightsCopy`)."""

    def fetch(self, into: Mapping[str, Tensor]) -> WeightsVersion:
        """Copy the newest version into tensors, by published name; return that version."""


@dataclasses.dataclass
class ModelWeights:
    """The weights of a roller's models, replaced in place.

    Attributes:
        targets: The tensors that published weights are copied into, by published name.
        engine: Paused during the copy, then notified of the new weights. It samples the prompts; None: the maker does.
        check: Called with each version fetched; raises WeightsMismatchError if the model does not compute with it.
        probe: Asks the engine about each version; None: it is not asked.
    """

    targets: Mapping[str, Tensor]
    engine: Engine | None = None
    check: Callable[[WeightsVersion], None] = lambda fetched: None
    probe: EngineProbe | None = None

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version.

        Args:
            source: Holds the newest version.

        Returns:
            The version fetched.

        Raises:
            WeightsMismatchError: If the model does not compute with the version fetched.
            WeightsError: If the weights are torn, or another model's.
        """
        if self.engine is not None:
            self.engine.pause()
        fetched = source.fetch(self.targets)
        if self.engine is not None:
            hand_over(self.engine, source, fetched, self.targets)
            self.engine.resume()
        self.check(fetched)
        return fetched

    def hand_over_again(self, version: int) -> None:
        """Have the engine take the version that the targets hold once more, from the targets."""
        assert self.engine is not None
        actor = {name.removeprefix(_ACTOR): tensor for name, tensor in self.targets.items() if name.startswith(_ACTOR)}
        self.engine.pause()
        self.engine.update_weights(actor, version)
        self.engine.resume()

    def prove(self, version: int) -> int:
        """Ask the engine about a version, and return the tokens of its answers; there must be no request in hand.

        An engine that refuses the request is not judged; a warning is logged.

        Raises:
            WeightsMismatchError: If the engine does not compute with it (`EngineProbe.judge`).
        """
        if self.engine is None or self.probe is None:
            return 0
        tokens = 0
        while True:
            try:
                answers = sample_all(self.engine, [self.probe.request(0)])
            except (FieldError, ShapeError) as error:
                self.probe.refused(version, error)
                return tokens
            tokens += tokens_of(answers)
            if not self.probe.judge(answers[0].responses[0], version):
                return tokens
            self.hand_over_again(version)


@dataclasses.dataclass
class EngineWeights(ModelWeights):
    """The weights of a worker whose engine alone holds the actor; `targets` are the critic's, and `probe` is set.

    Attributes:
        first: Returns the actor's published tensors of the start of the run, for an engine that wakes before the first
            version.
    """

    probe: PublishedProbe = dataclasses.field(kw_only=True)
    first: Callable[[], Mapping[str, Tensor]] = dict
    _source: WeightsReader | None = None

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the weights by the newest version, the engine's straight from shared memory.

        Raises:
            WeightsMismatchError: If the weights do not fit the engine's model.
            WeightsError: If each version was overwritten before the engine had taken it.
        """
        self._source = reader = cast("WeightsReader", source)
        self._engine.pause()
        for _ in range(_FETCH_ATTEMPTS):
            fetched = reader.fetch(self.targets, partial=True) if self.targets else reader.newest()
            # Twice, for a header is read in words; and the version may be overwritten before the engine has it.
            is_whole = bool(self.targets) or fetched == reader.newest()
            if fetched is not None and is_whole and self._has_taken(reader, fetched):
                self._engine.resume()
                self.probe.published = fetched
                return fetched
        raise WeightsError(f"no version of the weights was held until the engine had it, in {_FETCH_ATTEMPTS} attempts")

    def hand_over_again(self, version: int) -> None:
        """Have the engine take a version once more: the one fetched last, or that of the start of the run.

        Raises:
            WeightsError: If it is not held any more.
        """
        self._engine.pause()
        if self._source is None:
            self._engine.update_weights(self.first(), version)
        elif (fetched := self.probe.published) is None or not self._has_taken(self._source, fetched):
            raise WeightsError(f"version {version} is no longer held, and the engine must have it again")
        self._engine.resume()

    def _has_taken(self, reader: WeightsReader, wanted: WeightsVersion) -> bool:
        try:
            return bool(self._engine.fetch_weights(reader.path, wanted.age) == wanted.age)
        except WeightsError:
            return False

    @property
    def _engine(self) -> Any:
        return self.engine


def hand_over(engine: Engine, source: Any, fetched: WeightsVersion, targets: Mapping[str, Tensor]) -> None:
    """Have a paused engine compute with the version that a worker has fetched.

    An engine with weights of its own takes them from shared memory, if it has a method `fetch_weights` and the version
    is held there still. One that took another version, because the trainer overwrote this one during the copy, takes
    this one from the worker's tensors.

    Args:
        engine: The worker's.
        source: The source of the fetch; a `WeightsReader` has the path of a weights file.
        fetched: The version.
        targets: The tensors that hold it now, by published name.
    """
    path, fetch = getattr(source, "path", None), getattr(engine, "fetch_weights", None)
    if path is not None and fetch is not None:
        try:
            if fetch(path, fetched.age) == fetched.age:
                return
        except WeightsError:
            # Overwritten since: `targets` have it.
            pass
    actor = {name.removeprefix("actor."): tensor for name, tensor in targets.items() if name.startswith("actor.")}
    engine.update_weights(actor, fetched.version)
