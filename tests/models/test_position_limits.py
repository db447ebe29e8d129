"""Positions that depend on the longest row of a pass: such a pass is refused, all others equal plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PhimoeConfig, PhimoeForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline import NaiveExperienceMaker
from pipeline.config.positions import problem_of_positions, row_limit
from pipeline.errors import FieldError
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.reward_model import SequenceReward
from pipeline.models.varlen_attention import use_varlen_attention
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.support import tiny
from tests.support.padded_passes import log_probs_by_packing, values_by_packing

BOUNDARY = 16
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": BOUNDARY},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": BOUNDARY
    },
    "longrope": {
        "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0], "original_max_position_embeddings": BOUNDARY
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
DEPENDENT = ("dynamic", "longrope")


def config_of(rope: str) -> LlamaConfig:
    positions = BOUNDARY if rope == "dynamic" else 4 * BOUNDARY
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    return LlamaConfig(
        vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=positions, rope_parameters=parameters, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip


def seeded(model_class: Any, config: Any) -> Any:
    model = tiny.seeded(model_class, config, 1)
    return model


def rows_of(*lengths: int) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """Return rows, and them padded on the left, their mask, and the mask of their actions: all but two tokens."""
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, tiny.VOCABULARY_SIZE, (length,), generator=draws).tolist() for length in lengths]
    width = max(lengths)
    sequences = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    actions = torch.tensor([[0] * (width - len(row)) + [1] * (len(row) - 2) for row in rows]).bool()
    return rows, sequences, mask, actions


def reference(rope: str, rows: list[list[int]]) -> Tensor:
    """Log-probs of all tokens but two of each row, each row by a model of its own that has seen nothing before."""
    found = []
    for row in rows:
        model = seeded(LlamaForCausalLM, config_of(rope)).double()
        log_probs = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        found += [float(log_probs[place - 1, row[place]].detach()) for place in range(2, len(row))]
    return torch.tensor(found)


def passes(rope: str, sequences: Tensor, mask: Tensor, actions: Tensor) -> dict[str, Any]:
    """Return the kinds of passes over rows, each a function without arguments."""
    plain, packed = (seeded(LlamaForCausalLM, config_of(rope)) for _ in range(2))
    use_varlen_attention(packed)
    return {
        "padded": lambda: action_log_probs(plain, sequences, mask, actions.shape[1])[actions],
        "packed": lambda: log_probs_by_packing(packed, sequences, mask, actions)[0][actions],
        "shared": lambda: log_probs_by_packing(packed, sequences, mask, actions, shared=True)[0][actions],
    }


def test_all_kinds_of_positions_that_transformers_has_are_tried() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPES)


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("lengths", [(9, BOUNDARY), (9, 24), (20, 24), (24, 24)])
def test_a_pass_equals_plain_transformers_or_is_refused(rope: str, lengths: tuple[int, int]) -> None:
    rows, sequences, mask, actions = rows_of(*lengths)
    longest, shortest = max(lengths), min(lengths)
    refused = longest > BOUNDARY and (rope == "dynamic" or (rope == "longrope" and shortest <= BOUNDARY))
    expected = reference(rope, rows)

    for name, run in passes(rope, sequences, mask, actions).items():
        if refused:
            with pytest.raises(FieldError, match=rf'beyond 16 tokens the positions .* \(rope_type "{rope}"\)'):
                run()
        else:
            torch.testing.assert_close(run(), expected, atol=1e-4, rtol=0, msg=name)


@torch.no_grad()
def test_neighbours_change_the_log_probs_of_plain_transformers() -> None:
    rows, sequences, mask, _ = rows_of(9, 24)
    for rope in DEPENDENT:
        model = seeded(LlamaForCausalLM, config_of(rope))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions).logits
        found = logits[:, :-1].log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)

        # The last 7 tokens of the short row.
        assert (found[0, -7:] - reference(rope, rows)[:7]).abs().max() > 0.01, rope


@pytest.mark.parametrize("rope", DEPENDENT)
def test_critics_and_reward_models_refuse_rows_on_both_sides(rope: str) -> None:
    _, sequences, mask, actions = rows_of(9, 24)
    critic = Critic(seeded(LlamaForCausalLM, config_of(rope)).model)
    config = config_of(rope)
    config.num_labels = 1
    reward = SequenceReward(seeded(LlamaForSequenceClassification, config))

    for run in (
        lambda: action_values(critic, sequences, mask, actions.shape[1] - 2),
        lambda: critic(sequences, mask),
        lambda: values_by_packing(critic, sequences, mask, actions),
        lambda: reward(sequences, mask),
    ):
        with pytest.raises(FieldError, match=r"rows of (9 to 24|8 to 23) tokens in one pass"):
            run()


@pytest.mark.parametrize("rope", DEPENDENT)
@pytest.mark.parametrize("engine", [TransformersGenerator, ActorGenerator])
def test_no_engine_lets_a_row_grow_over_the_boundary(rope: str, engine: Any) -> None:
    actor = seeded(LlamaForCausalLM, config_of(rope))
    _, prompts, mask, _ = rows_of(5, 9)

    def sample(most: int) -> Any:
        sampling = Sampling(max_length=most, pad_token_id=0, seed=1)
        return engine(actor).generate(prompts, mask, sampling)

    with pytest.raises(FieldError, match="a row that grows beyond 16 tokens gets other positions"):
        sample(BOUNDARY + 1)
    assert sample(BOUNDARY).sequences.shape == (2, BOUNDARY)


def test_what_is_sampled_up_to_the_boundary_is_what_is_trained() -> None:
    actor = seeded(LlamaForCausalLM, config_of("longrope"))
    _, prompts, mask, _ = rows_of(5, 9)
    sampling = Sampling(max_length=BOUNDARY, pad_token_id=0, seed=1)

    made = TransformersGenerator(actor).generate(prompts, mask, sampling)

    whole = torch.cat([mask, torch.ones(2, BOUNDARY - 9, dtype=mask.dtype)], dim=1)
    with torch.no_grad():
        trained = action_log_probs(actor, made.sequences, whole, BOUNDARY - 9)
    assert made.log_probs is not None
    torch.testing.assert_close(made.log_probs, trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", DEPENDENT)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_rows_with_limits_of_their_own_may_each_reach_the_boundary(rope: str, fixed_shapes: bool) -> None:
    actor = seeded(LlamaForCausalLM, config_of(rope))
    _, prompts, mask, _ = rows_of(5, 9)
    generator = TransformersGenerator(actor, fixed_shapes=fixed_shapes)
    sampling = Sampling(max_length=9 + BOUNDARY - 5, pad_token_id=0, seed=1)

    made = generator.generate(prompts, mask, sampling, row_seeds=[1, 2], row_limits=[BOUNDARY - 5, BOUNDARY - 9])

    assert made.log_probs is not None
    for row, length in enumerate((5, 9)):
        tokens, actions = made.sequences[row : row + 1, 9 - length : 9 - length + BOUNDARY], BOUNDARY - length
        with torch.no_grad():
            alone = action_log_probs(actor, tokens, torch.ones_like(tokens), actions)
        torch.testing.assert_close(made.log_probs[row : row + 1, :actions], alone, atol=1e-4, rtol=0)
    with pytest.raises(FieldError, match="rows of up to 17 tokens"):
        generator.generate(prompts, mask, sampling, row_seeds=[1, 2], row_limits=[BOUNDARY - 5, BOUNDARY - 8])


def test_a_maker_refuses_prompts_whose_rows_can_cross_the_boundary() -> None:
    actor = seeded(LlamaForCausalLM, config_of("longrope"))
    _, prompts, mask, _ = rows_of(5, 9)

    class Tokenizer:
        pad_token_id, eos_token_id = 0, 1

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

    maker = NaiveExperienceMaker(
        actor, None, lambda input_ids, attention_mask, **_: torch.zeros(len(input_ids)), None, Tokenizer(),
        kl_coef=0, use_grpo=True, num_generation=2,
    )  # fmt: skip

    with pytest.raises(FieldError, match="grows beyond 16 tokens"):
        maker.make_experience(prompts, mask, max_length=24, seed=1)


def test_a_model_with_positions_of_its_own_is_refused_too() -> None:
    parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "short_mscale": 1.0, "long_mscale": 1.3, "original_max_position_embeddings": BOUNDARY,
    }  # fmt: skip
    config = PhimoeConfig(
        vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64,
        rope_parameters=parameters, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = seeded(PhimoeForCausalLM, config)
    _, sequences, mask, actions = rows_of(9, 24)

    with pytest.raises(FieldError, match="beyond 16 tokens the positions of a Phimoe"):
        action_log_probs(model, sequences, mask, actions.shape[1] - 2)


PHI3 = {"model_type": "phi3", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
LIMITS: list[tuple[dict[str, Any], int | None, str]] = [
    ({**PHI3, "rope_scaling": {"type": "longrope"}}, 4096, 'rope_type "longrope"'),
    ({**PHI3, "rope_scaling": {"type": "su"}}, 4096, 'rope_type "su"'),
    ({**PHI3, "rope_scaling": None}, None, ""),
    (
        {
            "model_type": "phi3", "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32},
        },
        32, 'rope_type "longrope"',
    ),
    (
        {"model_type": "llama", "max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        2048, 'rope_type "dynamic"',
    ),
    (
        {
            "model_type": "gemma3_text", "max_position_embeddings": 2048,
            "rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": {"rope_type": "default"}},
        },
        2048, 'rope_type "dynamic"',
    ),
    ({"model_type": "llama", "max_position_embeddings": 2048, "rope_scaling": {"type": "yarn"}}, None, ""),
    ({"model_type": "gpt2", "n_positions": 1024}, 1024, "its table of positions ends there (n_positions)"),
    ({"model_type": "opt", "max_position_embeddings": 2048}, 2048, "(max_position_embeddings)"),
    ({"model_type": "mpt", "max_seq_len": 2048}, 2048, "(max_seq_len)"),
    ({"model_type": "roberta", "max_position_embeddings": 514}, 512, "(max_position_embeddings)"),
    ({"model_type": "longformer", "max_position_embeddings": 4098, "pad_token_id": 1}, 4096, "positions ends there"),
    ({"model_type": "distilbert", "max_position_embeddings": 512, "pad_token_id": 0}, 512, "positions ends there"),
    ({"model_type": "deberta-v2", "max_position_embeddings": 512}, 512, "positions ends there"),
    ({"model_type": "deberta-v2", "max_position_embeddings": 512, "position_biased_input": False}, None, ""),
    ({"model_type": "llama4_text", "floor_scale": 8192}, 4031, "(floor_scale)"),
    ({"model_type": "llama4_text", "attn_temperature_tuning": False}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("described", "tokens", "reason"), LIMITS)
@pytest.mark.parametrize("in_part", [False, True])
def test_rows_beyond_a_models_limit_are_refused_by_its_config_json(
    tmp_path: Path, described: dict[str, Any], tokens: int | None, reason: str, in_part: bool
) -> None:
    written = {"model_type": "other", "text_config": described} if in_part else described
    (tmp_path / "config.json").write_text(json.dumps(written))

    limit = row_limit(described)

    assert (None if limit is None else limit.tokens) == tokens
    if limit is not None:
        assert reason in limit.reason
        assert problem_of_positions(tmp_path, limit.tokens, engine="transformers", packed=False) == ""
        problem = problem_of_positions(tmp_path, limit.tokens + 1, engine="transformers", packed=False)
        assert problem.endswith(f"rollout.max_length = {tokens} at most, or another model") and reason in problem
    else:
        assert problem_of_positions(tmp_path, 10**6, engine="transformers", packed=False) == ""


def test_packing_of_llama_4_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": {"floor_scale": 8192}}))

    assert problem_of_positions(tmp_path, 64, engine="transformers", packed=False) == ""
    assert "trainer.packing = false" in problem_of_positions(tmp_path, 64, engine="transformers", packed=True)


def test_positions_that_vllm_computes_in_another_way_are_refused_for_it(tmp_path: Path) -> None:
    described = {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(described))

    assert problem_of_positions(tmp_path, 64, engine="transformers", packed=False) == ""
    assert 'take rollout.engine = "transformers"' in problem_of_positions(tmp_path, 64, engine="vllm", packed=False)
