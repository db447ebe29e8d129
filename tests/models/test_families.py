"""Model families of transformers: the engine, a padded pass and a packed pass give the log-probs of a row alone.

Each model is a tiny random one, with weights large enough that a wrong mask, position or state shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.sections import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models.chunked_log_probs import plain_head
from pipeline.models.critic import Critic
from pipeline.models.loading import ignores_padding, load_actor, shell
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.lora import adapt, adapter_of
from pipeline.models.packing import prepare_packing
from pipeline.models.shared_prefix import prepare_shared_prefix
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Request, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator, can_replace_generate
from tests.support import tiny
from tests.support.padded_passes import log_probs_by_packing

CPU = torch.device("cpu")
PROMPTS = [[5, 9], [7, 3, 11, 2], [6, 6, 4]]
SIZES = {
    "vocab_size": tiny.VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": tiny.PAD, "eos_token_id": tiny.EOS, "bos_token_id": tiny.EOS,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
SLIDING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATENT = {
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATE_SPACE = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
BOTH_AT_ONCE = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}

ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": WINDOW, "gemma": {}, "gemma2": SLIDING, "gemma3_text": SLIDING,
    "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "olmo3": WINDOW, "smollm3": {}, "granite": {}, "glm4": {},
    "gpt_neox": {}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "cohere": {}, "cohere2": WINDOW,
    "starcoder2": {}, "seed_oss": {}, "mixtral": EXPERTS, "qwen2_moe": EXPERTS, "qwen3_moe": EXPERTS, "olmoe": EXPERTS,
    "granitemoe": EXPERTS, "gpt_oss": {**EXPERTS, **WINDOW}, "deepseek_v3": {**EXPERTS, **LATENT},
    "stablelm": {}, "nemotron": {}, "bloom": {"n_layer": 3, "n_head": 4}, "llama4_text": EXPERTS, "doge": {},
}  # fmt: skip
"""Families whose layers all have attention."""
UNPACKED = {"bloom", "gpt_oss", "llama4_text"}
"""Models whose packed rows would attend to each other, count tokens from the start of a pass or lose their mask."""
MASKED = {"stablelm", "nemotron", "doge"}
"""Models that are packed by a block mask alone, where it is asked for: no kernel learns the starts of their rows."""
UNSHARED = {*UNPACKED, *MASKED, "mistral", "gemma2", "gemma3_text", "olmo3", "cohere2"}
"""Models that compute a prompt once a row: their layers slide a window, or do not pass the layout on to attention."""
UNGRAPHED = {"bloom", "llama4_text"}
"""Models of sdpa whose steps have no fixed shapes: biases from a mask of two dimensions, and chunks of tokens."""
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": CONVOLUTION, "bamba": STATE_SPACE, "falcon_h1": BOTH_AT_ONCE, "qwen3_next": {**EXPERTS, **LINEAR},
    "recurrent_gemma": {}, "mamba": {"state_size": 4},
}  # fmt: skip
"""Families with layers of another kind, which keep a state."""


def built(family: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **options})).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            # Of their usual size the weights of three layers of 32 change little: a wrong mask would hide in rounding.
            weight.mul_(4 if weight.dim() > 1 else 1)
    made: PreTrainedModel = model
    return made


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 2 to 14 tokens, padded on both sides; ids, attention mask and action mask of the last 8 columns."""
    draws = torch.Generator().manual_seed(3)
    starts, ends = torch.tensor([[0], [5], [3], [2], [0]]), torch.tensor([[14], [7], [10], [8], [9]])
    columns = torch.arange(14)
    real = (columns >= starts) & (columns < ends)
    return torch.randint(0, tiny.VOCABULARY_SIZE, real.shape, generator=draws) * real, real.long(), real[:, 6:]


@torch.no_grad()
def alone(model: PreTrainedModel, ids: Tensor, mask: Tensor, actions: Tensor) -> Tensor:
    """The log-probs of the actions of each row, computed without other rows and padding."""
    found = torch.zeros(actions.shape)
    for row in range(len(ids)):
        tokens, count = ids[row][mask[row].bool()].unsqueeze(0), int(actions[row].sum())
        found[row][actions[row]] = action_log_probs(model, tokens, torch.ones_like(tokens), count)[0]
    return found


def check_fixed_shapes(family: str, rows: list[tuple[Tensor, Tensor | None]]) -> None:
    """The steps that a card replays as graphs sample the rows of the others."""
    model = built(family, ATTENTION[family])
    has_fixed_shapes = model.config._attn_implementation == "sdpa" and family not in UNGRAPHED
    engine = TransformersGenerator(model, fixed_shapes=True)

    fixed = sampled_by(engine, PROMPTS)

    assert (engine._decoder is not None) == has_fixed_shapes
    for (found, log_probs), (expected, its) in zip(fixed, rows, strict=True):
        assert torch.equal(found, expected)
        torch.testing.assert_close(log_probs, its, atol=1e-5, rtol=0)


@torch.no_grad()
def check_padded(model: PreTrainedModel) -> None:
    ids, mask, actions = ragged()
    padded = action_log_probs(model, ids, mask, actions.shape[1]).masked_fill(~actions, 0)

    torch.testing.assert_close(padded, alone(model, ids, mask, actions), atol=2e-4, rtol=0)
    assert ignores_padding(model)


@torch.no_grad()
def check_packed(model: PreTrainedModel) -> None:
    ids, mask, actions = ragged()
    expected = alone(model, ids, mask, actions)
    prepare_packing([model], CPU)

    packed, _ = log_probs_by_packing(model, ids, mask, actions)

    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def check_shared(model: PreTrainedModel) -> None:
    """Two prompts of 3 and 5 tokens, three rows each."""
    draws = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, tiny.VOCABULARY_SIZE, (2, 6), generator=draws).repeat(3, 1)
    starts, ends = torch.tensor([[1], [3]] * 3), torch.tensor([[14], [7], [10], [8], [9], [14]])
    columns = torch.arange(14)
    real = (columns >= starts) & (columns < ends)
    ids = torch.cat([prompts, torch.randint(0, tiny.VOCABULARY_SIZE, (6, 8), generator=draws)], dim=1) * real
    rows = ids, real.long(), real[:, 6:]
    expected = alone(model, *rows)
    prepare_shared_prefix([model], CPU, True, key="trainer.shared_prefix")

    shared, _ = log_probs_by_packing(model, *rows, shared=True)

    torch.testing.assert_close(shared, expected, atol=1e-5, rtol=0)


def sampled(model: PreTrainedModel, prompts: list[list[int]]) -> list[tuple[Tensor, Tensor | None]]:
    """Whole rows and log-probs of responses of the engine that such a model gets."""
    return sampled_by((TransformersGenerator if can_replace_generate(model) else ActorGenerator)(model), prompts)


def sampled_by(
    generator: TransformersGenerator | ActorGenerator, prompts: list[list[int]]
) -> list[tuple[Tensor, Tensor | None]]:
    engine = BlockingEngine(generator)
    sampling = Sampling(max_length=40, pad_token_id=tiny.PAD, eos_token_ids=(tiny.EOS,), seed=5)
    for key, prompt in enumerate(prompts):
        engine.submit(Request(key, torch.tensor(prompt), 2, 9, sampling, first_row=2 * key))
    rows: list[tuple[Tensor, Tensor | None]] = []
    while engine.load.running + engine.load.waiting:
        for ended in engine.step():
            prompt_ids = torch.tensor(prompts[ended.key])
            rows += [(torch.cat([prompt_ids, one.token_ids]), one.log_probs) for one in ended.responses]
    engine.close()
    return rows


@pytest.mark.parametrize("family", ATTENTION)
def test_a_family_with_attention_gives_the_log_probs_of_a_row_alone_however_it_is_computed(family: str) -> None:
    model = built(family, ATTENTION[family])
    rows = sampled(model, PROMPTS)

    assert len(rows) == 6
    for row, log_probs in rows:
        assert log_probs is not None and len(log_probs) > 0
        with torch.no_grad():
            ids = row.unsqueeze(0)
            expected = action_log_probs(model, ids, torch.ones_like(ids), len(log_probs))[0]
        torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)
    check_fixed_shapes(family, rows)
    check_padded(model)
    if family in UNSHARED:
        with pytest.raises(ConfigError, match=r"^trainer\.shared_prefix: a \w+ cannot share prompts: [^\n]*$"):
            prepare_shared_prefix([model], CPU, True, key="trainer.shared_prefix")
    else:
        check_shared(model)
    if family in UNPACKED:
        with pytest.raises(
            ConfigError,
            match=r"^trainer\.packing: .* (attend to the row before it|from the start of a pass|has a mask of its own)",
        ):
            prepare_packing([model], CPU)
    else:
        if family in MASKED:
            # What the trial has found is not forgotten.
            assert not prepare_packing([model], CPU, None) and not prepare_packing([model], CPU, None)
        check_packed(model)


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_keeps_a_state_is_sampled_by_generate_and_not_packed(family: str) -> None:
    model = built(family, OTHERS[family])

    assert not can_replace_generate(model)
    assert [len(row) > 0 and log_probs is None for row, log_probs in sampled(model, [[5, 9], [7, 3, 11, 2]])] == [
        True
    ] * 4
    check_padded(model)
    with pytest.raises(ConfigError, match=r"^trainer\.packing: "):
        prepare_packing([model], CPU)
    with pytest.raises(ConfigError, match=r"^trainer\.shared_prefix: "):
        prepare_shared_prefix([model], CPU, True, key="trainer.shared_prefix")


def test_the_router_of_a_llama_4_is_no_layer_that_can_be_adapted() -> None:
    """It is a linear layer by its class, and returns two tensors."""
    model = built("llama4_text", EXPERTS)
    ids, mask, actions = ragged()
    expected = action_log_probs(model, ids, mask, actions.shape[1])

    adapt(model, ModelConfig(lora_rank=2, lora_targets="all-linear"), seed=0)

    torch.testing.assert_close(action_log_probs(model, ids, mask, actions.shape[1]), expected)
    parts = {part for name in adapter_of(model) for part in name.split(".")}
    assert {"q_proj", "down_proj"} <= parts and "router" not in parts


def test_a_critic_of_a_model_that_projects_its_states_has_a_head_of_their_size() -> None:
    model = built("opt", {"ffn_dim": 64, "word_embed_proj_dim": 16})
    ids, mask, _ = ragged()

    assert Critic.from_actor(model)(ids, mask).shape == ids.shape


def test_a_state_space_model_in_16_bits_loads(tmp_path: Any) -> None:
    """Its last states are float32, and its head is not."""
    built("mamba", {"state_size": 4}).save_pretrained(tmp_path)

    model = load_actor(tmp_path, dtype="bfloat16", device="cpu")

    ids, mask, actions = ragged()
    found = action_log_probs(model, ids, mask, actions.shape[1])
    assert plain_head(model, CPU) is None and bool(found[actions].isfinite().all())


def test_a_model_without_weights_has_the_dtypes_of_a_loaded_one(tmp_path: Any) -> None:
    """Deepseek's router keeps a bias in float32."""
    built("deepseek_v3", {**EXPERTS, **LATENT}).save_pretrained(tmp_path)

    loaded = load_actor(tmp_path, dtype="bfloat16", device="cpu").state_dict()

    described = shell(tmp_path, dtype="bfloat16", field="model.actor").state_dict()
    assert {name: tensor.dtype for name, tensor in described.items()} == {
        name: tensor.dtype for name, tensor in loaded.items()
    }
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16, torch.float32}


def test_a_model_without_a_cache_is_sampled_by_its_own_generate() -> None:
    model = built("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64})

    rows = sampled(model, [[5, 9], [7, 3, 11, 2]])

    assert not can_replace_generate(model)
    assert [len(row) > 0 for row, _ in rows] == [True] * 4


def test_the_part_of_a_llama_4_below_its_head_is_found_for_chunked_logits_and_for_a_critic() -> None:
    model = built("llama4_text", EXPERTS)
    ids, mask, actions = ragged()

    critic = Critic.from_actor(model)

    assert model.base_model is model, "without which this test is of nothing"
    assert plain_head(model, CPU) is model.get_output_embeddings()
    values = action_values(critic, ids, mask, actions.shape[1])
    assert values.shape == actions.shape and not values.any()


def test_a_model_that_reads_padding_as_tokens_is_refused(tmp_path: Any) -> None:
    model = built("rwkv", {})
    model.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"^model\.actor: the RwkvForCausalLM in .* reads the padding before a row"):
        load_actor(tmp_path, dtype="float32", device="cpu")
