"""The probe: tokens whose log-prob must be equal in trainer and worker, which proves that weights are in use.

A fingerprint proves that the bytes in shared memory are the published ones. It does not prove that a worker's model
computes with them: a tensor may have been copied into a buffer that the model no longer uses, or into another dtype. So
the trainer publishes its model's result with a version, and a worker compares its own result with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.errors import WeightsMismatchError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.storage.weights_header import Probe, WeightsVersion

# Each result has the rounding errors of its own kernels, which sum in another order on another device. A logit is the
# result of some 300 roundings (10 a layer, 32 layers); as a random walk they grow the error by a factor of 18, from a
# unit roundoff of 2**-24, 2**-12 and 2**-9 of logits up to 20. That is 2e-5, 0.09 and 0.7 nats for the worst token of
# each precision, and a third of that on average over tokens whose errors differ in sign; float32 has a tenfold margin.
_TOLERANCE_NATS_A_TOKEN = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


@without_cudnn_attention()
def answer(model: Callable[..., Any], tokens: Sequence[int], device: torch.device) -> Probe:
    """Return the summed log-prob of all tokens but the first, each given the tokens before it.

    Args:
        model: A causal language model in eval mode.
        tokens: At least two token ids.
        device: The model's device.
    """
    ids = torch.tensor([tokens], device=device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
        log_probs = torch.log_softmax(logits.double(), dim=-1)
    return Probe(float(log_probs.gather(1, ids[0, 1:, None]).sum()), len(tokens))


def tolerance_nats(dtype: torch.dtype, tokens: int) -> float:
    """Return the largest difference that rounding explains between two results for the same weights."""
    return tolerance_nats_a_token(dtype) * (tokens - 1)


def tolerance_nats_a_token(dtype: torch.dtype) -> float:
    """Return the largest mean difference a token that rounding explains."""
    return _TOLERANCE_NATS_A_TOKEN.get(dtype, _TOLERANCE_NATS_A_TOKEN[torch.float32])


def check(published: WeightsVersion, mine: Probe, dtype: torch.dtype) -> None:
    """Compare a model's probe with the probe published with its weights.

    Args:
        published: The version that the model should compute with; without a probe nothing is compared.
        mine: The model's probe.
        dtype: Dtype of the model, which sets the tolerance.

    Raises:
        WeightsMismatchError: If they differ by more than rounding explains, or have different numbers of tokens.
    """
    expected = published.probe
    if expected is None:
        return
    limit = tolerance_nats(dtype, expected.tokens)
    both_nan = math.isnan(mine.log_prob) and math.isnan(expected.log_prob)
    # A NaN on one side fails this comparison; a NaN on both sides is not an error of the copy.
    is_equal = abs(mine.log_prob - expected.log_prob) <= limit or both_nan
    if mine.tokens != expected.tokens or not is_equal:
        raise WeightsMismatchError(
            f"this model does not compute with the weights that it was given: version={published.version} "
            f"fingerprint={published.fingerprint:016x} log_prob={mine.log_prob:.6f} over {mine.tokens} tokens, "
            f"the trainer's {expected.log_prob:.6f} over {expected.tokens}, may differ by {limit:g}"
        )
