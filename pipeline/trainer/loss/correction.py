"""Weights that correct for an engine that is not the trainer's own function.

An engine samples with the probabilities that its kernels and its precision give, not with those that the trainer
computes from the same weights. The ratio k = exp(logp - logp_behaviour), both of the policy that sampled, corrects for
the difference; the ratio inside the policy loss goes from there to the policy that is trained.

    token          weight min(k, cap)                           truncated importance sampling (TIS)
    sequence       the same of the product over the response    truncated importance sampling by sequence
    token_mask     weight k, 0 above the cap                    masked importance sampling (MIS)
    sequence_mask  the same of the product over the response    masked importance sampling by sequence
    icepop         weight k, 0 outside floor ... cap            IcePop, arXiv:2510.18855
    none           weight 1

TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
(https://fengyao.notion.site/off-policy-rl). MIS: Liu et al. 2025, "When speed kills stability: demystifying RL collapse
from the training-inference mismatch" (https://richardli.xyz/rl-collapse).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from pipeline.trainer.loss.policy import ratios_of
from pipeline.trainer.loss.row_sums import of_actions, row_sums

ICEPOP_FLOOR: Final = 0.5
"""Weight below which `icepop` masks an action, as in its paper."""


class Correction(NamedTuple):
    """The correction of some rows.

    Attributes:
        weights: ``(N,)`` float32, factors of the policy loss of each action.
        ratios: ``(N,)`` float32, k of the action, or of its whole response.
        cut: ``(N,)`` bool, the actions whose weight is not their ratio.
    """

    weights: Tensor
    ratios: Tensor
    cut: Tensor


def importance_weights(
    log_probs: Tensor, behaviour_log_probs: Tensor, counts: Tensor, kind: str, *, cap: float, floor: float
) -> Correction:
    """Return the weights of the actions of some rows, whole rows.

    Args:
        log_probs: ``(N,)`` float32, of the policy that sampled, computed as the trainer computes them.
        behaviour_log_probs: ``(N,)`` float32, of the same policy, computed by the engine that sampled.
        counts: ``(B,)`` int64, the actions of each row.
        kind: A name of the module's docstring.
        cap: Largest weight.
        floor: Smallest weight that is not masked; of `icepop` only.

    Returns:
        The weights, the ratios, and the actions whose weight was cut; all without gradient.

    Raises:
        ValueError: If there is no such kind.
    """
    log_ratios = (log_probs - behaviour_log_probs).detach()
    if kind.startswith("sequence"):
        log_ratios = of_actions(row_sums(log_ratios, counts), counts, len(log_ratios))
    ratios = ratios_of(log_ratios)
    if kind == "none":
        return Correction(torch.ones_like(ratios), ratios, torch.zeros_like(ratios, dtype=torch.bool))
    if kind in ("token", "sequence"):
        return Correction(ratios.clamp(max=cap), ratios, ratios > cap)
    if kind in ("token_mask", "sequence_mask"):
        cut = ratios > cap
    elif kind == "icepop":
        cut = (ratios > cap) | (ratios < floor)
    else:
        raise ValueError(f"importance_correction is {kind!r}")
    return Correction(ratios.masked_fill(cut, 0.0), ratios, cut)
