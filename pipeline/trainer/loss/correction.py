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

ICEPOP_FLOOR: Final = 0.5
"""Weight below which `icepop` masks an action, as in its paper."""


class Correction(NamedTuple):
    """The correction of some rows.

    Attributes:
        weights: ``(B, A)`` float32, factors of the policy loss of each action; 1 outside the mask.
        ratios: ``(B, A)`` float32, k of the action, or of its whole response; 1 outside the mask.
        cut: ``(B, A)`` bool, the actions whose weight is not their ratio.
    """

    weights: Tensor
    ratios: Tensor
    cut: Tensor


def importance_weights(
    log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor, kind: str, *, cap: float, floor: float
) -> Correction:
    """Return the weights of the actions of some rows, whole rows.

    Args:
        log_probs: ``(B, A)`` float32, of the policy that sampled, computed as the trainer computes them.
        behaviour_log_probs: ``(B, A)`` float32, of the same policy, computed by the engine that sampled.
        mask: ``(B, A)`` bool.
        kind: A name of the module's docstring.
        cap: Largest weight.
        floor: Smallest weight that is not masked; of `icepop` only.

    Returns:
        The weights, the ratios, and the actions whose weight was cut; all without gradient.

    Raises:
        ValueError: If there is no such kind.
    """
    log_ratios = (log_probs - behaviour_log_probs).detach().masked_fill(~mask, 0.0)
    if kind.startswith("sequence"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand(mask.shape).masked_fill(~mask, 0.0)
    ratios = ratios_of(log_ratios)
    if kind == "none":
        weights, cut = torch.ones_like(ratios), torch.zeros_like(mask)
    elif kind in ("token", "sequence"):
        weights, cut = ratios.clamp(max=cap), ratios > cap
    elif kind in ("token_mask", "sequence_mask"):
        cut = ratios > cap
        weights = ratios.masked_fill(cut, 0.0)
    elif kind == "icepop":
        cut = (ratios > cap) | (ratios < floor)
        weights = ratios.masked_fill(cut, 0.0)
    else:
        raise ValueError(f"importance_correction is {kind!r}")
    # A floor or cap on the wrong side of 1 would reach the columns outside the mask.
    return Correction(weights.masked_fill(~mask, 1.0), ratios, cut & mask)
