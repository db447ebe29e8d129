"""Advantages by name, from the rewards of responses or, with a critic, of their actions.

grpo                (r - mean) / (standard deviation + eps) over the group    (GRPO, arXiv:2402.03300)
dr_grpo             r - mean over the group                                   (Dr. GRPO, arXiv:2503.20783)
rloo                r - mean over the others of the group                     (RLOO, arXiv:2402.14740)
reinforce_baseline  r - mean over the group; the trainer then normalizes over all actions of its step
(REINFORCE++, arXiv:2501.03262)
gae                 generalized advantages of a critic's values               (PPO, arXiv:1506.02438)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.advantages import generalized_advantages, group_advantages, in_groups, zero_if_equal


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The inputs of an estimator.

    Attributes:
        rewards: ``(B,)``, the reward of each response, its penalties of length and KL included, the KL as the mean over
            the actions in a group, as their sum with a critic; float64 in a group, whose rewards are compared.
        group_size: Responses per prompt (G), contiguous; 1 with a critic.
        action_mask: ``(B, A)`` bool.
        action_rewards: ``(B, A)`` float32, the reward of each action; None without a critic.
        values: ``(B, A)`` float32, the critic's value of the state before each action; None without a critic.
        gamma: Discount.
        lam: Lambda of generalized advantage estimation.
    """

    rewards: Tensor
    group_size: int
    action_mask: Tensor
    action_rewards: Tensor | None = None
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float = 0.95


AdvantageFunction = Callable[[AdvantageInputs], Tensor]
"""From inputs to advantages, ``(B,)``, one a response, or ``(B, A)``, one an action."""


def grpo(inputs: AdvantageInputs) -> Tensor:
    """Return each reward normalized within its group, ``(B,)``; see `group_advantages`."""
    return group_advantages(inputs.rewards, inputs.group_size)


def centered(inputs: AdvantageInputs) -> Tensor:
    """Return each reward less the mean of its group, ``(B,)`` (Dr. GRPO, arXiv:2503.20783 section 3.2).

    Also the first step of REINFORCE++ with baseline (arXiv:2501.03262): the second is the trainer's, which alone has
    the whole batch.
    """
    groups = in_groups(inputs.rewards, inputs.group_size)
    return zero_if_equal(groups - groups.mean(dim=1, keepdim=True), groups)


def rloo(inputs: AdvantageInputs) -> Tensor:
    """Return each reward less the mean of the others of its group, ``(B,)`` (RLOO, arXiv:2402.14740 section 3.2)."""
    groups = in_groups(inputs.rewards, inputs.group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (inputs.group_size - 1)
    return zero_if_equal(groups - others, groups)


def gae(inputs: AdvantageInputs) -> Tensor:
    """Return generalized advantages, ``(B, A)``; see `generalized_advantages`.

    Raises:
        FieldError: If there is no critic.
    """
    if inputs.values is None or inputs.action_rewards is None:
        raise FieldError("gae needs the values of a critic")
    return generalized_advantages(
        inputs.values, inputs.action_rewards, inputs.action_mask, gamma=inputs.gamma, lam=inputs.lam
    )


ADVANTAGES: Final[Mapping[str, AdvantageFunction]] = {
    "grpo": grpo,
    "dr_grpo": centered,
    "rloo": rloo,
    "reinforce_baseline": centered,
    "gae": gae,
}
"""The estimators by their names in `rollout.advantages`."""


def overlong_rewards(lengths: Tensor, longest: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Return the reward that each response loses by its length (soft overlong punishment, arXiv:2503.14476 eq. 13).

    0 up to longest - buffer_tokens, from there linear to -penalty at the longest length.

    Args:
        lengths: ``(B,)`` int64, tokens of each response.
        longest: Maximum tokens of a response.
        buffer_tokens: Tokens over which the penalty grows, above 0.
        penalty: The penalty at the longest length.

    Returns:
        ``(B,)`` float32, from -penalty to 0.
    """
    beyond = lengths.float() - (longest - buffer_tokens)
    return -penalty * (beyond / buffer_tokens).clamp(0.0, 1.0)
