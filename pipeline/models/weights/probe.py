"""One question that trainer and worker must answer alike, so that weights are not only copied but in force.

A fingerprint says that the bytes in shared memory are those that were published. It does not say that a worker's model
computes with them: a tensor may have been copied into a buffer that the model has let go of, or into another type. So
the trainer publishes with a version what its model answers, and a worker compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.errors import WeightsMismatchError
from pipeline.storage.weights_header import Probe, WeightsVersion

# Both answers carry the rounding of their own kernels, which sum in another order on another device. Some 300 roundings
# lie on the way to a logit (10 a layer, 32 layers); as a random walk they grow it by a factor of 18, from a unit
# roundoff of 2**-24, 2**-12 and 2**-9 of logits up to 20. That is 2e-5, 0.09 and 0.7 nats for the worst token of the
# lowest precision, a third of that on average over tokens whose errors differ in sign; and tenfold room for float32.
_TOLERANCE_NATS_A_TOKEN = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


def answer(model: Callable[..., Any], tokens: Sequence[int], device: torch.device) -> Probe:
    """Return the summed log-prob of all tokens but the first, each after those before it.

    Args:
        model: A causal language model in eval mode.
        tokens: At least two.
        device: The model's.
    """
    ids = torch.tensor([tokens], device=device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
        log_probs = torch.log_softmax(logits.double(), dim=-1)
    return Probe(float(log_probs.gather(1, ids[0, 1:, None]).sum()), len(tokens))


def tolerance_nats(dtype: torch.dtype, tokens: int) -> float:
    """Return how far two honest answers may lie apart."""
    return _TOLERANCE_NATS_A_TOKEN.get(dtype, _TOLERANCE_NATS_A_TOKEN[torch.float32]) * (tokens - 1)


def check(published: WeightsVersion, mine: Probe, dtype: torch.dtype) -> None:
    """Compare a model's answer with the one that was published with its weights.

    Raises:
        WeightsMismatchError: If they lie further apart than rounding explains, or are to different questions.
    """
    its = published.probe
    if its is None:
        return
    limit = tolerance_nats(dtype, its.tokens)
    # Written so that a NaN on one side is refused, and one on both is no one's fault here.
    alike = abs(mine.log_prob - its.log_prob) <= limit or (math.isnan(mine.log_prob) and math.isnan(its.log_prob))
    if mine.tokens != its.tokens or not alike:
        raise WeightsMismatchError(
            f"this model does not compute with the weights that it was given: version={published.version} "
            f"fingerprint={published.fingerprint:016x} log_prob={mine.log_prob:.6f} over {mine.tokens} tokens, "
            f"the trainer's {its.log_prob:.6f} over {its.tokens}, may differ by {limit:g}"
        )
