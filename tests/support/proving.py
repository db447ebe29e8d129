"""The probe of an engine outside of a stream: asked, and judged, until there is a verdict."""

from __future__ import annotations

from pipeline.errors import FieldError, ShapeError
from pipeline.rollout.generation.weights import WorkerWeights
from pipeline.rollout.prompt_batch import sample_all


def prove(weights: WorkerWeights, version: int) -> None:
    """Ask the engine about a version, if there is a request; there must be none in hand.

    Raises:
        WeightsMismatchError: If the engine does not compute with it (`EngineProbe.judge`).
    """
    assert weights.probe is not None
    try:
        request = weights.probe.request(0)
    except (FieldError, ShapeError) as error:
        # As a stream does.
        weights.probe.refused(version, error)
        return
    while weights.probe.judge(sample_all(weights.engine, [request])[0].responses[0], version):
        weights.hand_over_again(version)
