"""The probe of an engine outside of a stream: asked, and judged, until there is a verdict."""

from __future__ import annotations

from pipeline.rollout.generation.weights import WorkerWeights
from pipeline.rollout.prompt_batch import sample_all


def prove(weights: WorkerWeights, version: int) -> None:
    """Ask the engine about a version; there must be no request in hand.

    Raises:
        WeightsMismatchError: If the engine does not compute with it (`EngineProbe.judge`).
    """
    assert weights.probe is not None
    while weights.probe.judge(sample_all(weights.engine, [weights.probe.request(0)])[0].responses[0], version):
        weights.hand_over_again(version)
