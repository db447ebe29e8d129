"""PPO and GRPO from prompts to advantages, each number derived on this page and none taken from the program.

The models are tables (tests/support/tables.py). Vocabulary: 0 pad, 1 eos, 2 and 3 words, 4 and 5 prompt tokens. The
actor and the reference choose the next token by the one before; these are probabilities, logits are their logarithms:

    after   actor: P(1) P(2) P(3)     reference: P(1) P(2) P(3)
      4            0.1  0.8  0.1                 0.2  0.4  0.4
      5            0.2  0.4  0.4                 0.2  0.4  0.4
      2            0.5  0.1  0.4                 0.25 0.55 0.2
      3            0.8  0.1  0.1                 0.8  0.1  0.1

Natural logarithms used below: ln 0.8 = -0.223144, ln 0.5 = -0.693147, ln 0.4 = -0.916291, ln 0.25 = -1.386294,
ln 0.2 = -1.609438, ln 2 = 0.693147.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.experience.types import Experience
from pipeline.rollout.maker import NaiveExperienceMaker
from tests.support.tables import EOS, PAD, TableActor, TableCritic, TableReward
from tests.support.tiny import Tokenizer

ACTOR = {4: (0.1, 0.8, 0.1), 5: (0.2, 0.4, 0.4), 2: (0.5, 0.1, 0.4), 3: (0.8, 0.1, 0.1)}
REFERENCE = {4: (0.2, 0.4, 0.4), 5: (0.2, 0.4, 0.4), 2: (0.25, 0.55, 0.2), 3: (0.8, 0.1, 0.1)}


def logits(table: dict[int, tuple[float, float, float]]) -> Tensor:
    """Logarithms of the table's probabilities, in columns 1 to 3; there are no other ids."""
    result = torch.full((6, 6), -1e9)
    for token, probabilities in table.items():
        result[token, 1:4] = torch.tensor(probabilities).log()
    return result


def maker(
    responses: dict[int, list[list[int]]], scores: dict[tuple[tuple[int, ...], tuple[int, ...]], float], **changes: Any
) -> Any:
    arguments: dict[str, Any] = {
        "actor": TableActor(logits(ACTOR), responses),
        "critic": TableCritic({4: 1.0, 5: 2.0, 2: 0.5, 3: -1.0, EOS: 99.0}),
        "reward_model": TableReward(scores),
        "initial_model": TableActor(logits(REFERENCE)),
        "tokenizer": Tokenizer(),
        **changes,
    }
    return NaiveExperienceMaker(**arguments)


def expect(experience: Experience, **fields: list[Any]) -> None:
    """The fields are these decimals, to the six digits that they are given with."""
    for name, expected in fields.items():
        value = getattr(experience, name)
        torch.testing.assert_close(value, torch.tensor(expected), atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_ppo_from_prompts_to_advantages() -> None:
    """Prompts [4], padded on the left, and [5, 4]; max_length 5, so A = 3; kl_coef 0.1, gamma 0.9, lambda 0.5.

    Row 0: prompt [pad, 4], response 2 eos (score 7), then one column of padding.
    Row 1: prompt [5, 4], response 2 3 2, cut off at max_length (score -1).

    Log-probs of the actor, of the reference, and k = logp - logp_ref, each read at the token BEFORE the action:

        row 0, 2 after 4:    ln 0.8  = -0.223144   ln 0.4  = -0.916291   k = ln 2 =  0.693147
        row 0, eos after 2:  ln 0.5  = -0.693147   ln 0.25 = -1.386294   k = ln 2 =  0.693147
        row 1, 2 after 4:    as above                                    k =         0.693147
        row 1, 3 after 2:    ln 0.4  = -0.916291   ln 0.2  = -1.609438   k = ln 2 =  0.693147
        row 1, 2 after 3:    ln 0.1  = -2.302585   ln 0.1  = -2.302585   k =         0

    kl, unscaled k3 = exp(-k) - 1 + k: exp(-ln 2) - 1 + ln 2 = 0.5 - 1 + 0.693147 = 0.193147; of k = 0 it is 0.

    Values of the state before each action, that is, at the token before it (4: 1.0, 2: 0.5, 3: -1.0):

        row 0:  V(4), V(2)        = 1.0, 0.5           the value 99 of eos, the last token, is never read
        row 1:  V(4), V(2), V(3)  = 1.0, 0.5, -1.0

    Rewards, -0.1 k, and at the last action the score clipped to [-5, 5], 7 to 5 and -1 to -1:

        row 0:  -0.0693147,  5 - 0.0693147 = 4.9306853
        row 1:  -0.0693147,  -0.0693147,   -1 - 0 = -1

    GAE with gamma 0.9 and gamma lambda 0.45, from the end, V past the end 0:

        row 0:  t = 1: 4.9306853 - 0.5                            =  4.4306853
                t = 0: -0.0693147 + 0.9 * 0.5 - 1.0 = -0.6193147,  + 0.45 * 4.4306853 (1.9938084)  =  1.3744937
        row 1:  t = 2: -1 + 1.0                                   =  0
                t = 1: -0.0693147 + 0.9 * -1.0 - 0.5              = -1.4693147  + 0.45 * 0         = -1.4693147
                t = 0: -0.0693147 + 0.9 * 0.5 - 1.0 = -0.6193147,  + 0.45 * -1.4693147 (-0.6611916) = -1.2805063
    """
    maker_ = maker(
        {4: [[2, EOS], [2, 3, 2]]}, {((4,), (2, EOS)): 7.0, ((5, 4), (2, 3, 2)): -1.0}, kl_coef=0.1, gamma=0.9, lam=0.5
    )

    experience = maker_.make_experience(
        input_ids=torch.tensor([[PAD, 4], [5, 4]]), attention_mask=torch.tensor([[0, 1], [1, 1]]), max_length=5
    )

    expect(
        experience,
        sequences=[[PAD, 4, 2, EOS, PAD], [5, 4, 2, 3, 2]],
        attention_mask=[[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        action_mask=[[True, True, False], [True, True, True]],
        action_log_probs=[[-0.223144, -0.693147, 0.0], [-0.223144, -0.916291, -2.302585]],
        base_action_log_probs=[[-0.916291, -1.386294, 0.0], [-0.916291, -1.609438, -2.302585]],
        kl=[[0.193147, 0.193147, 0.0], [0.193147, 0.193147, 0.0]],
        values=[[1.0, 0.5, 0.0], [1.0, 0.5, -1.0]],
        reward=[7.0, -1.0],
        advantages=[[1.374494, 4.430685, 0.0], [-1.280506, -1.469315, 0.0]],
    )
    assert experience.info is not None
    assert experience.info["score"].tolist() == [7.0, -1.0]


def test_grpo_from_prompts_to_advantages() -> None:
    """Prompts [4], padded on the left, and [4, 5], with two responses each; max_length 5, so A = 3; kl_coef 0.1.

    Prompt 0, [pad, 4]: response 2 eos (score 7; no clip in GRPO), and response 3 eos (score 1).
    Prompt 1, [4, 5]:   response 2 eos (score 1), and response 3 eos (score 1): equal scores.

    k of each action, as above; after 5, and after 3, both models agree:

        row 0:  2 after 4: ln 0.8 - ln 0.4 =  0.693147    eos after 2: ln 0.5 - ln 0.25 = 0.693147
        row 1:  3 after 4: ln 0.1 - ln 0.4 = -1.386294    eos after 3: ln 0.8 - ln 0.8  = 0
        row 2:  2 after 5: 0                              eos after 2:                    0.693147
        row 3:  3 after 5: 0                              eos after 3:                    0

    kl = sum(-0.1 k) / n with n = 2 tokens, the stop included:

        -0.1 * 1.386294 / 2 = -0.069315,   0.1 * 1.386294 / 2 = 0.069315,   -0.1 * 0.693147 / 2 = -0.034657,   0

    r' = score + kl: 6.930685, 1.069315; 0.965343, 1. Two numbers a > b lie h = (a - b) / 2 to both
    sides of their mean, and their unbiased deviation is sqrt(2 h^2 / 1) = h sqrt 2. The advantage is then
    +-h / (h sqrt 2 + 0.0001):

        prompt 0:  h = 5.861371 / 2 = 2.930685,  2.930685 / (4.144615 + 0.0001) = 0.707090
        prompt 1:  h = 0.034657 / 2 = 0.0173287, 0.0173287 / (0.0245065 + 0.0001) = 0.704233
    """
    maker_ = maker(
        {4: [[2, EOS], [3, EOS]], 5: [[2, EOS], [3, EOS]]},
        {((4,), (2, EOS)): 7.0, ((4,), (3, EOS)): 1.0, ((4, 5), (2, EOS)): 1.0, ((4, 5), (3, EOS)): 1.0},
        critic=None,
        kl_coef=0.1,
        use_grpo=True,
        num_generation=2,
    )

    experience = maker_.make_experience(
        input_ids=torch.tensor([[PAD, 4], [4, 5]]), attention_mask=torch.tensor([[0, 1], [1, 1]]), max_length=5
    )

    rewards = [6.930685, 1.069315, 0.965343, 1.0]
    expect(
        experience,
        sequences=[[PAD, 4, 2, EOS, PAD], [PAD, 4, 3, EOS, PAD], [4, 5, 2, EOS, PAD], [4, 5, 3, EOS, PAD]],
        action_mask=[[True, True, False]] * 4,
        action_log_probs=[
            [-0.223144, -0.693147, 0.0],
            [-2.302585, -0.223144, 0.0],
            [-0.916291, -0.693147, 0.0],
            [-0.916291, -0.223144, 0.0],
        ],
        base_action_log_probs=[
            [-0.916291, -1.386294, 0.0],
            [-0.916291, -0.223144, 0.0],
            [-0.916291, -1.386294, 0.0],
            [-0.916291, -0.223144, 0.0],
        ],
        kl=[-0.069315, 0.069315, -0.034657, 0.0],
        reward=rewards,
        values=rewards,
        advantages=[0.707090, -0.707090, -0.704233, 0.704233],
    )
    assert experience.info is not None
    assert experience.info["score"].tolist() == [7.0, 1.0, 1.0, 1.0]
    assert experience.info["group_mixed"].tolist() == [True, True, False, False]
