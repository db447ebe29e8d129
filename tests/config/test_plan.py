"""The bytes that a run needs: from the headers of a model's files, by the table of docs/operations.md."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipeline.config import plan
from pipeline.config.losses import answers_every, worker_holds_actor
from pipeline.config.model_files import json_object, model_sizes, problem_of_model
from pipeline.config.plan import checkpoint_bytes, kept_bytes_a_token, models_of, needs, row_bucket
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models import tokenizer_file
from pipeline.models.lora import adapt, adapter_of
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.generation.vllm import engine as vllm_engine
from pipeline.supervisor.capacity.budgets import budgets_of
from pipeline.supervisor.capacity.machine import Machine
from tests.models.test_families import ATTENTION, OTHERS, built
from tests.project.test_sizes import MODELS, bytes_a_parameter, table
from tests.support import tiny

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
SHAPES = {"0.5 B": (896, 4864), "1.5 B": (1536, 8960), "7 B": (3584, 18944), "14 B": (5120, 13824)}


def configured(folder: Path, **sections: Any) -> Config:
    model = {"actor": str(folder), **sections.pop("model", {})}
    return Config.model_validate({"model": model, **sections})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    tiny.llama().save_pretrained(folder)
    return folder


def test_parameters_and_layers_are_those_of_the_model(folder: Path) -> None:
    model = tiny.llama()

    sizes = model_sizes(folder, "model.actor")

    assert sizes.parameters == model.num_parameters()
    assert sizes.layer_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert sizes.backbone_parameters == sum(parameter.numel() for parameter in model.model.parameters())
    assert (sizes.layers, sizes.hidden, sizes.inner, sizes.cached, sizes.vocabulary) == (2, 16, 24, 32, 23)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixtral", {"intermediate_size": 352, "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("olmoe", {"intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 8}),
        ("qwen3_moe", {"intermediate_size": 384, "moe_intermediate_size": 48, "num_experts_per_tok": 8}),
        (
            "qwen2_moe",
            {
                "intermediate_size": 384, "moe_intermediate_size": 88, "shared_expert_intermediate_size": 352,
                "num_experts": 16, "num_experts_per_tok": 4,
            },
        ),
        ("llama", {"intermediate_size": 352}),
    ],
)  # fmt: skip
def test_the_activations_of_a_mixture_are_those_of_all_experts_of_a_token(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """By the tensors that a pass keeps for its backward pass: between two thirds of the plan and the plan."""
    common = {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **sizes), attn_implementation="sdpa")
    model.save_pretrained(tmp_path)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.arange(512).reshape(4, 128) % 64)

    measured = sum(nbytes for nbytes, _ in kept.values()) / 512
    planned = kept_bytes_a_token(model_sizes(tmp_path, "model.actor"), "float32", checkpointed=False)
    assert output.last_hidden_state.requires_grad
    assert 0.65 * planned < measured < planned


def test_adapters_have_the_parameters_of_the_adapted_model(folder: Path) -> None:
    config = configured(folder, model={"lora_rank": 3})
    model = adapt(tiny.llama(), config.model, seed=0)

    adapters = model_sizes(folder, "model.actor").adapter_parameters(3, config.model.lora_targets)

    assert adapters == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("family", "share"),
    [
        ("mixtral", 0.867),
        ("qwen2_moe", 0.639),
        ("gpt_oss", 0.867),
        ("deepseek_v3", 0.473),
        ("granitemoe", 0.867),
        ("lfm2", 0.0),
        ("bamba", 0.0),
    ],
)
def test_experts_of_a_mixture_have_no_adapters(tmp_path: Path, family: str, share: float) -> None:
    config = configured(tmp_path, model={"lora_rank": 3})
    model = built(family, {**ATTENTION, **OTHERS}[family])
    model.save_pretrained(tmp_path)
    sizes = model_sizes(tmp_path, "model.actor")

    trained = adapter_of(adapt(model, config.model, seed=0)).values()

    assert sizes.adapter_parameters(3, "all-linear") == sum(tensor.numel() for tensor in trained)
    assert sizes.expert_parameters("all-linear") == pytest.approx(share * sizes.parameters, rel=1e-3)
    assert sizes.expert_parameters(["q_proj"]) == 0


def test_a_model_in_two_files_is_counted_once(folder: Path, tmp_path: Path) -> None:
    state = tiny.llama().state_dict()
    names = sorted(state)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"other": state[names[0]]}, tmp_path / "training.safetensors")

    assert model_sizes(tmp_path, "x").parameters == model_sizes(folder, "x").parameters


def test_a_file_that_config_json_names_is_the_one_that_counts(folder: Path, tmp_path: Path) -> None:
    """As transformers loads it, whatever else lies there."""
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "own.safetensors")
    assert "transformers does not load own.safetensors" in problem_of_model(tmp_path, is_actor=False, is_trained=False)
    config = json.loads((tmp_path / "config.json").read_text()) | {"transformers_weights": "own.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert problem_of_model(tmp_path, is_actor=False, is_trained=False) == ""
    assert model_sizes(tmp_path, "x").parameters == model_sizes(folder, "x").parameters
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in tiny.llama().state_dict().items())


def test_a_checkpoint_has_the_parameters_of_its_model_alone(folder: Path, tmp_path: Path) -> None:
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    save_file({f"moment.{name}": value for name, value in model.state_dict().items()},
              tmp_path / "trainer_state.safetensors")  # fmt: skip

    assert model_sizes(tmp_path, "x").parameters == model_sizes(folder, "x").parameters


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": b"{"}, "does not give the model's sizes"),
        ({"config.json": b'{"hidden_size": 8, "num_attention_heads": 2}'}, "has no safetensors file"),
        ({"config.json": b'{"hidden_size": 8, "num_attention_heads": 0}'}, "does not give the model's sizes"),
        ({"config.json": b'{"hidden_size": 8}', "model.safetensors": b"\xff" * 9}, "does not give the model's sizes"),
        (
            {"config.json": b'{"hidden_size": 8, "num_attention_heads": 2}', "model.safetensors": b"\xff" * 9},
            "model.safetensors is no safetensors file",
        ),
        (
            {
                "config.json": b'{"hidden_size": 8, "num_attention_heads": 2}',
                "model.safetensors": b"version https://git-lfs.github.com/spec/v1\n",
            },
            "model.safetensors is a pointer of Git LFS without the content: run git lfs pull",
        ),
        ({"config.json": b"[" * 200_000}, "config.json does not give the model's sizes: it is nested too deeply"),
    ],
)
def test_a_folder_that_is_no_model_is_named_in_one_line(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=r"^model\.critic: ") as raised:
        model_sizes(tmp_path, "model.critic")

    assert message in str(raised.value) and str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"^model\.critic: no such directory: .*/nope$"):
        model_sizes(tmp_path / "nope", "model.critic")


def test_a_settings_file_nested_too_deeply_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"[" * 200_000)

    assert json_object(path) == tokenizer_file.json_object(path) == {}
    assert problem_of_model(tmp_path, is_actor=True, is_trained=True) == (
        f"config.json in {tmp_path} cannot be read: it is nested too deeply"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_a_parameter_are_those_of_the_table(folder: Path, dtype: str) -> None:
    documented = bytes_a_parameter(getattr(torch, dtype))
    config = configured(folder, model={"dtype": dtype})
    models = models_of(config)
    parameters = models.actor.parameters

    found = needs(config, models, on_cards=True)

    rank, worker, shared = found.rank, found.worker, found.shared
    between = rank["weights"] + rank["float32 copies"] + rank["moments"]
    assert between == documented["each trainer rank's card, between steps"] * parameters
    in_step = documented["each trainer rank's card, in a step, without activations"]
    assert between + rank["gradients"] == in_step * parameters
    assert shared["weights"] == documented["`/dev/shm`: weights"] * parameters
    assert shared["training state"] == pytest.approx(documented["`/dev/shm`: training state"] * parameters, abs=2)
    assert worker["actor"] + worker["reference"] == documented["each worker's card, without its KV cache"] * parameters


@pytest.mark.parametrize("name", SHAPES)
def test_the_activations_are_those_of_the_table(folder: Path, name: str) -> None:
    hidden, inner = SHAPES[name]
    layers = MODELS[name][1]
    sizes = model_sizes(folder, "x")._replace(hidden=hidden, inner=inner, layers=layers)
    documented = float(table("| | 0.5 B |")["activations of 8 x 2,048 tokens, kept whole"][list(SHAPES).index(name)])

    nbytes = 8 * 2048 * plan.kept_bytes_a_token(sizes, "bfloat16", checkpointed=False)
    checkpointed = 8 * 2048 * plan.kept_bytes_a_token(sizes, "bfloat16", checkpointed=True)

    assert nbytes / 1e9 == pytest.approx(documented, rel=0.04)
    left = re.search(r"leaves ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) GB of these 8 x 2,048", OPERATIONS.read_text())
    assert left is not None
    assert checkpointed / 1e9 == pytest.approx(float(left[list(SHAPES).index(name) + 1]), rel=0.04)


@pytest.mark.parametrize(
    ("trainer", "on_cards", "tokens"),
    [
        ({}, True, 16_384),
        ({"activation_checkpointing": False}, True, 8_192),
        ({"micro_batch_tokens": 5_000}, True, 5_000),
        ({"micro_batch_tokens": 7}, True, 512),
        ({"micro_batch_size": 3}, True, 3 * 512),
        ({}, False, 2_048),
    ],
)
def test_the_tokens_of_a_micro_batch_are_those_of_the_trainer(
    folder: Path, trainer: dict[str, Any], on_cards: bool, tokens: int
) -> None:
    config = configured(folder, trainer=trainer, rollout={"max_length": 512})
    models = models_of(config)
    is_checkpointed = on_cards if config.trainer.activation_checkpointing is None else False

    found = needs(config, models, on_cards=on_cards)

    a_token = plan.kept_bytes_a_token(models.actor, "float32", checkpointed=is_checkpointed)
    assert found.rank["activations of a micro-batch"] == tokens * a_token


def test_shards_are_a_share_of_the_model_and_what_is_gathered(folder: Path) -> None:
    whole = configured(folder, model={"dtype": "bfloat16"}, trainer={"world_size": 4})
    sharded = configured(folder, model={"dtype": "bfloat16"}, trainer={"world_size": 4, "sharding": "full"})
    models = models_of(whole)
    parameters, layer = models.actor.parameters, models.actor.layer_parameters

    found = needs(sharded, models, on_cards=True)

    parts = [found.rank[name] for name in ("weights", "moments", "gradients")]
    assert sum(parts) == pytest.approx(16 * parameters / 4, abs=3)
    # Beside its two layers: embedding and head, gathered apart, and the root, the norm at the end.
    end = tiny.VOCABULARY_SIZE * 16
    assert parameters == 2 * layer + 2 * end + 16
    assert found.rank["gathered layers and root"] == 2 * 2 * (16 + layer + max(layer, end))
    assert found.shared == needs(whole, models, on_cards=True).shared

    adapted = sharded.model_copy(update={"model": sharded.model.model_copy(update={"lora_rank": 3})})
    trained = models.actor.adapter_parameters(3, adapted.model.lora_targets)
    weights = needs(adapted, models, on_cards=True).rank["weights"]
    assert weights == pytest.approx((4 * trained + 2 * parameters) / 4, abs=1)


def test_copies_of_shards_on_two_machines_are_a_share_of_the_ranks_of_one(folder: Path) -> None:
    full = configured(folder, trainer={"world_size": 4, "sharding": "full"})
    hybrid = configured(folder, trainer={"world_size": 8, "nodes": 2, "sharding": "hybrid"}, cluster={"engine": "ray"})
    models = models_of(full)

    found, expected = (needs(one, models, on_cards=True) for one in (hybrid, full))

    assert found.rank == expected.rank and found.shared == expected.shared


@pytest.mark.parametrize(("configured_rows", "rows"), [({}, 8), ({"inference_batch_size": 3}, 3),
                                                      ({"inference_batch_size": 99}, 8)])  # fmt: skip
def test_the_rows_of_a_worker_are_at_most_those_of_a_ticket(
    folder: Path, configured_rows: dict[str, int], rows: int
) -> None:
    rollout = {"num_generations": 4, "batch_size": 2, "max_length": 10, **configured_rows}
    config = configured(folder, rollout=rollout)

    on_card, on_cpu = (needs(config, models_of(config), on_cards=on_cards) for on_cards in (True, False))

    # Two layers with 32 elements a token, in float32; on a card the engine's tensors have a power of two of rows.
    assert on_cpu.worker["KV cache"] == rows * 10 * 2 * 32 * 4
    assert on_card.worker["KV cache"] == row_bucket(rows) * 10 * 2 * 32 * 4


@pytest.mark.parametrize("build", [tiny.llama, tiny.mistral, tiny.gemma3, "deepseek_v3"])
def test_the_cache_of_a_worker_is_that_of_the_engines_tensors(build: Any, tmp_path: Path) -> None:
    """8 rows of 80 tokens, and windows of 4 and 5; the plan knows the files alone."""
    model = build() if callable(build) else built(build, ATTENTION[build])
    model.save_pretrained(tmp_path)
    config = configured(tmp_path, rollout={"num_generations": 4, "batch_size": 2, "max_length": 80})
    engine = TransformersGenerator(model, fixed_shapes=True)
    prompts = torch.full((2, 9), 7)

    engine.generate(
        prompts, torch.ones_like(prompts), Sampling(max_length=80, pad_token_id=0, eos_token_ids=()), group_size=4
    )

    assert engine._decoder is not None
    tensors = [held for name, held in engine._decoder._memory.items() if name.startswith(("keys", "values"))]
    expected = needs(config, models_of(config), on_cards=True).worker["KV cache"]
    assert sum(tensor.nbytes for tensor in tensors) == expected


def test_layers_that_no_file_says_to_slide_count_with_whole_rows(tmp_path: Path) -> None:
    """Files of earlier transformers have a window and no kinds of layers."""
    tiny.gemma3().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    found = model_sizes(tmp_path, "model.actor")
    assert (found.sliding, found.window, found.cached_of_row(80)) == (2, 5, 2 * 8 * (80 + 2 * 5))

    path.write_text(json.dumps({name: value for name, value in described.items() if name != "layer_types"}))

    assert model_sizes(tmp_path, "model.actor").cached_of_row(80) == 2 * 8 * 3 * 80


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        ({"sliding_window": -1}, 2 * 3 * 8),
        ({"sliding_window": [4, 5]}, 2 * 3 * 8),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 0}, 16),
        ({"kv_lora_rank": 16}, 16),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 4, "index_head_dim": 6}, 26),
    ],
)
def test_sizes_that_a_model_has_not_count_as_none(
    options: dict[str, Any], cached: int, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kinds = ["sliding_attention"] * 2
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "layer_types": kinds}
    described = json.loads((folder / "config.json").read_text()) | sizes | options
    (tmp_path / "config.json").write_text(json.dumps(described))

    found = model_sizes(tmp_path, "model.actor")

    assert (found.cached, found.sliding, found.window) == (cached, 0, 0)


@pytest.mark.parametrize(
    ("options", "a_token"), [({"num_key_value_heads": 2}, 2 * 8), ({"kv_lora_rank": 16, "qk_rope_head_dim": 4}, 20)]
)
def test_cards_beyond_the_heads_of_a_cache_have_copies_of_it(
    options: dict[str, int], a_token: int, folder: Path, tmp_path: Path
) -> None:
    """Four cards, and two heads of keys and values of 8 elements, or a latent of 20 for all heads."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    described = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 4, "head_dim": 8} | options
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = configured(tmp_path, rollout={"engine": "vllm", "max_length": 10, "tensor_parallel": 4})

    found = needs(config, models_of(config), on_cards=True)

    # Two layers in float32.
    assert found.worker["KV cache"] == found.shard["KV cache"] == 10 * 2 * a_token * 4


def test_the_rows_of_a_worker_are_those_of_an_evaluation_where_its_ticket_is_larger(folder: Path) -> None:
    rollout = {"num_generations": 4, "batch_size": 2, "max_length": 10}
    evaluation = {"files": [str(folder / "held-out.jsonl")], "batch_size": 5, "num_generations": 3}
    (folder / "held-out.jsonl").write_text('{"prompt": "1"}\n')
    config = configured(folder, rollout=rollout, evaluation=evaluation)

    found = needs(config, models_of(config), on_cards=False)

    assert found.worker["KV cache"] == 15 * 10 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("bounds", "tokens"),
    [
        ({}, 16_384),
        # Rows bound a pass in place of tokens.
        ({"inference_batch_size": 20}, 20 * 1024),
        ({"inference_batch_size": 20, "logits_forward_batch_size": 18}, 18 * 1024),
        ({"inference_batch_size": 20, "logits_forward_tokens": 5_000}, 5_000),
        ({"inference_batch_size": 99}, 32 * 1024),
    ],
)
def test_the_passes_of_a_worker_are_bounded_as_it_bounds_them(
    folder: Path, bounds: dict[str, int], tokens: int
) -> None:
    # Its own model alone: no reference is beside it.
    rollout = {"num_generations": 8, "batch_size": 4, "max_length": 1024, "kl_coef": 0.0, **bounds}
    config = configured(folder, rollout=rollout, trainer={"kl_coef": 0.0})
    sizes = models_of(config).actor

    found = needs(config, models_of(config), on_cards=True)

    assert found.worker["passes over rows"] == plan._pass_bytes(sizes, 4, tokens) + 4 * plan._PASS_LOGITS * min(
        plan._LOGITS, tokens * sizes.vocabulary
    )


def test_a_critic_that_is_larger_than_the_actor_bounds_the_passes_of_a_rank(folder: Path, tmp_path: Path) -> None:
    tiny.llama(0, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    config = configured(folder, rollout={"algorithm": "ppo"}, trainer={"world_size": 2, "sharding": "full"})
    models, larger = models_of(config), model_sizes(tmp_path, "model.critic")

    small, large = (
        needs(config, models._replace(critic=critic), on_cards=True).rank for critic in (models.critic, larger)
    )

    a_token, more = (plan.kept_bytes_a_token(one, "float32", checkpointed=True) for one in (models.actor, larger))
    assert more > a_token
    assert large["activations of a micro-batch"] * a_token == small["activations of a micro-batch"] * more
    assert large["gathered layers and root"] == 4 * 2 * plan._at_once(larger) > small["gathered layers and root"]


@pytest.mark.parametrize(
    ("cache", "on_cards", "nbytes"),
    [
        ({"cache_bytes": 123_456}, True, 123_456),
        ({"cache_bytes": 123_456}, False, 123_456),
        ({}, False, 1 << 30),
        # What is free is not known: a row is the least.
        ({}, True, 10 * 2 * 32 * 4),
    ],
)
def test_vllm_has_a_cache_and_weights_of_its_own(
    folder: Path, cache: dict[str, int], on_cards: bool, nbytes: int
) -> None:
    config = configured(folder, rollout={"engine": "vllm", "max_length": 10, **cache})
    models = models_of(config)

    found = needs(config, models, on_cards=on_cards)

    assert found.worker["KV cache"] == nbytes
    assert found.worker["weights of the engine"] == found.worker["actor"] == 4 * models.actor.parameters
    assert vllm_engine._CPU_CACHE_BYTES == plan.VLLM_CPU_CACHE_BYTES


def test_quantized_weights_have_a_byte_a_value_and_one_layer_as_it_is_published(folder: Path) -> None:
    plain, quantized = (
        configured(
            folder,
            model={"dtype": "bfloat16"},
            rollout={"engine": "vllm", "max_length": 10, "quantization": one},
        )
        for one in ("none", "fp8")
    )
    models = models_of(plain)
    matrices = {name: shape for name, shape in models.actor.tensors.items() if ".layers." in name and len(shape) == 2}
    first = [math.prod(shape) for name, shape in models.actor.tensors.items() if ".layers.0." in name]

    before, after = (needs(one, models, on_cards=True).worker["weights of the engine"] for one in (plain, quantized))

    assert before - after == sum(map(math.prod, matrices.values())) - 2 * sum(first)


def test_each_card_of_a_worker_has_its_part_of_the_engine_and_the_first_one_the_workers_models(folder: Path) -> None:
    rollout = {"engine": "vllm", "max_length": 10}
    cards, parted = Machine(3, 10**12, 10**12, 10**12), {**rollout, "tensor_parallel": 2}
    whole, parts = (configured(folder, rollout=one) for one in (rollout, parted))
    models = models_of(whole)
    trainer, first, second, shm, host = budgets_of(parts, models, cards)
    (alone,) = [one for one in budgets_of(whole, models, cards) if one.name.startswith("GPU of rollout")]

    assert (first.name, second.name) == ("GPU of rollout 0 (1 like it)", "GPU of shard of rollout 0 (1 like it)")
    for card, name in ((first, "rollout 0"), (second, "shard of rollout 0")):
        for term in ("weights of the engine", "KV cache"):
            assert card.terms[f"{name}: {term}"] == alone.terms[f"rollout 0: {term}"] / 2
    assert first.terms["rollout 0: actor"] == alone.terms["rollout 0: actor"]
    assert not any("actor" in term or "reference" in term for term in second.terms)
    # Worker, engine and rank; the rank.
    assert first.terms["rollout 0: contexts and libraries"] == 3 * plan.CONTEXT_BYTES
    assert second.terms["shard of rollout 0: contexts and libraries"] == plan.CONTEXT_BYTES
    engine_and_ranks = 3 * plan.VLLM_PROCESS_BYTES
    assert host.terms["processes without their models"] == plan.DAEMON_BYTES + 2 * plan.PROCESS_BYTES + engine_and_ranks
    assert not any(term.startswith("shard") for term in host.terms)
    assert {budget.name for budget in (trainer, shm)} == {"GPU of trainer 0 (1 like it)", "/dev/shm"}

    on_cpu = needs(parts, models, on_cards=False)
    assert on_cpu.worker["weights of the engine"] == 4 * models.actor.parameters, "of both ranks"
    assert on_cpu.worker["KV cache"] == 2 * plan.VLLM_CPU_CACHE_BYTES


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, False),
        ({"rollout": {"log_probs": "engine"}}, False),
        ({"rollout": {"log_probs": "worker"}}, True),
        ({"rollout": {"log_probs": None}}, True),
        ({"rollout": {"engine": "transformers"}}, True),
        ({"model": {"lora_rank": 4, "lora_targets": ["q_proj"]}}, True),
        ({"model": {"lora_rank": 4, "lora_targets": ["q_proj"], "reference_device": "trainer"}}, False),
        ({"model": {"reference_device": "worker"}}, False),
        ({"trainer": {"kind": "external"}, "rollout": {"log_probs": "engine"}}, True),
    ],
)
def test_a_worker_holds_the_actor_beside_vllm_only_where_it_computes_with_it(
    folder: Path, changes: dict[str, Any], holds: bool
) -> None:
    rollout = {"engine": "vllm", "max_length": 10, "log_probs": "trainer", **changes.pop("rollout", {})}
    config = configured(folder, rollout=rollout, **changes)

    found = needs(config, models_of(config), on_cards=False)

    assert ("actor" in found.worker, worker_holds_actor(config)) == (holds, holds)
    assert answers_every(config) == (16 if holds else 1)


def test_a_process_loads_its_largest_model_through_host_memory(folder: Path, tmp_path: Path) -> None:
    large = tiny.llama(hidden_size=64, intermediate_size=256)
    large.save_pretrained(tmp_path)
    config = configured(folder, model={"reward": str(tmp_path)})
    external = configured(folder, trainer={"kind": "external", "kl_coef": 0.0})
    sharded = configured(folder, trainer={"world_size": 2, "sharding": "full"})

    found = [needs(one, models_of(one), on_cards=True) for one in (config, external, sharded)]

    actor = 4 * models_of(config).actor.parameters
    assert [one.rank_load for one in found] == [actor, 0, 0]
    assert [one.worker_load for one in found] == [4 * large.num_parameters(), actor, actor]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_reference_is_counted_where_it_is_held(folder: Path, tmp_path: Path, ranks: int) -> None:
    large = tiny.llama(hidden_size=64, intermediate_size=256)
    large.save_pretrained(tmp_path)
    nbytes, trainer = 4 * large.num_parameters(), {"world_size": ranks, "sharding": "full"}
    theirs, ours, none = (
        configured(
            folder,
            model={"reference": str(tmp_path), "reference_device": role},
            trainer={**trainer, "kl_coef": kl_coef},
        )
        for role, kl_coef in (("worker", 0.1), ("trainer", 0.1), ("trainer", 0.0))
    )

    on_worker, on_trainer, nowhere = (needs(one, models_of(one), on_cards=True) for one in (theirs, ours, none))

    actor = 4 * models_of(none).actor.parameters
    assert on_worker.worker["reference"] == nbytes and "reference" not in on_worker.rank
    assert on_trainer.rank["reference"] == nbytes / ranks and "reference" not in on_trainer.worker
    assert not {"reference"} & {*nowhere.rank, *nowhere.worker}
    assert [one.worker_load for one in (on_worker, on_trainer, nowhere)] == [nbytes, actor, actor]
    assert [one.rank_load for one in (on_worker, on_trainer, nowhere)] == (
        [actor, nbytes, actor] if ranks == 1 else [0, 0, 0]
    )
    if ranks > 1:
        # Its two layers and the norm at the end, without gradients, are more than the actor's with theirs.
        gathered = nbytes - 2 * models_of(theirs).reference.end_parameters * 4
        assert on_trainer.rank["gathered layers and root"] == gathered > on_worker.rank["gathered layers and root"]


def test_ends_that_are_one_tensor_are_gathered_with_the_root(tmp_path: Path) -> None:
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    config = configured(tmp_path, trainer={"world_size": 2, "sharding": "full"})
    models = models_of(config)

    # Both layers and the rest, with their gradients.
    assert needs(config, models, on_cards=True).rank["gathered layers and root"] == 2 * 4 * models.actor.parameters


@pytest.mark.parametrize("on_cards", [True, False])
def test_a_reference_in_host_memory_has_two_layers_on_the_card(folder: Path, tmp_path: Path, on_cards: bool) -> None:
    large = tiny.llama(hidden_size=64, intermediate_size=256, num_hidden_layers=8)
    large.save_pretrained(tmp_path)
    layers = [sum(4 * one.numel() for one in layer.parameters()) for layer in large.base_model.layers]
    config = configured(folder, model={"reference": str(tmp_path), "reference_device": "host"})
    silent = configured(
        folder, model={"reference": str(tmp_path), "reference_device": "host"}, trainer={"kl_coef": 0.0}
    )

    found, nothing = (needs(one, models_of(one), on_cards=on_cards) for one in (config, silent))

    assert found.worker["reference"] == 4 * large.num_parameters() - sum(layers) + 2 * layers[0]
    assert found.worker_host == {"layers of the reference": sum(layers)}
    assert "reference" not in found.rank and found.worker_load == 4 * models_of(config).actor.parameters
    assert "reference" not in nothing.worker and not nothing.worker_host


def test_the_reference_of_adapters_needs_nothing_on_either_role(folder: Path) -> None:
    for role in ("worker", "trainer"):
        config = configured(folder, model={"reference_device": role, "lora_rank": 2, "reference": str(folder)})
        found = needs(config, models_of(config), on_cards=True)
        assert "reference" not in found.rank and "reference" not in found.worker


QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
# The first run on a card (docs/measured.md): one H200 with both roles, 128 rows of 64 + 256 tokens a step.
MEASURED = {
    "rollout": {"num_generations": 8, "batch_size": 8, "max_prompt_length": 64, "max_new_tokens": 256},
    "buffer": {"sample_batch_size": 128},
    "trainer": {"micro_batch_tokens": 16_384, "activation_checkpointing": True, "packing": False},
    "model": {"dtype": "bfloat16", "reference_device": "worker"},
}


def test_the_plan_of_the_measured_runs_lies_above_what_they_took_by_five_percent_at_most(tmp_path: Path) -> None:
    """By role the allocator's reserve, in all the card's memory in use; ten percent for a worker, of 3.8 GB."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_05B))
    described(tmp_path, {name: list(weight.shape) for name, weight in model.named_parameters()})
    vllm = {**MEASURED["rollout"], "batch_size": 4, "engine": "vllm", "cache_bytes": "8GiB"}
    machine = Machine(gpus=1, gpu_bytes=141 * 10**9, ram_bytes=10**12, shm_bytes=10**12)

    configs = [configured(tmp_path, **{**MEASURED, **more}) for more in ({}, {"rollout": vllm})]
    (plain, *_), (of_vllm, *_) = (budgets_of(config, models_of(config), machine) for config in configs)

    assert 19.3 <= plain.total_bytes / 1e9 <= 19.3 * 1.05
    assert 31.4 <= of_vllm.total_bytes / 1e9 <= 31.4 * 1.05
    by_role = {"trainer": 0.0, "rollout": 0.0}
    for term, nbytes in plain.terms.items():
        by_role[term.split()[0]] += 0.0 if "contexts" in term else nbytes / 1e9
    assert 13.2 <= by_role["trainer"] <= 13.2 * 1.05
    assert 3.8 <= by_role["rollout"] <= 3.8 * 1.10


def described(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Write config.json and a file of tensors without their bytes: a plan reads the header alone."""
    (folder / "config.json").write_text(json.dumps(QWEN_05B))
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * math.prod(shape)]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def test_each_process_on_a_card_has_its_context_vllms_too_and_none_on_a_cpu(folder: Path) -> None:
    for engine, processes in (("transformers", 1), ("vllm", 2)):
        config = configured(folder, rollout={"engine": engine, "max_length": 10})
        models = models_of(config)
        card, _, host = budgets_of(config, models, Machine(1, 10**12, 10**12, 10**12))
        (cpu,) = [
            budget for budget in budgets_of(config, models, Machine(0, 0, 10**12, 10**12)) if "host" in budget.name
        ]

        assert card.terms["trainer 0: contexts and libraries"] == plan.CONTEXT_BYTES
        assert card.terms["rollout 0: contexts and libraries"] == processes * plan.CONTEXT_BYTES
        assert not any("contexts" in term or "kept" in term for term in (*cpu.terms, *host.terms))
        own = plan.VLLM_PROCESS_BYTES * (processes - 1)
        assert cpu.terms["processes without their models"] == plan.DAEMON_BYTES + 2 * plan.PROCESS_BYTES + own


_LOAD = """
import sys, threading
from pipeline.models.loading import load_actor

def anonymous():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])

# Libraries, and what the first pass of a model allocates for good.
load_actor(sys.argv[1], dtype="bfloat16", device="cpu")
for folder in sys.argv[2:]:
    before, seen, done = anonymous(), [], threading.Event()

    def watch():
        while not done.wait(0.002):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_actor(folder, dtype="bfloat16", device="cpu")
    done.set()
    watcher.join()
    print(max([*seen, anonymous()]) - before)
"""


def test_a_process_takes_no_more_host_memory_to_load_than_is_planned(folder: Path, tmp_path: Path) -> None:
    """Weights that are saved in `model.dtype` are pages of the file, which all processes share; others are a copy."""
    import torch

    large = tiny.llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    # The mapped one first: it leaves no memory behind that the other could use.
    saved = [tmp_path / "bfloat16", tmp_path / "float32"]
    large.save_pretrained(saved[1])
    large.to(torch.bfloat16).save_pretrained(saved[0])
    planned = []
    for one in saved:
        config = configured(one, model={"dtype": "bfloat16"}, trainer={"kl_coef": 0.0}, rollout={"kl_coef": 0.0})
        planned.append(needs(config, models_of(config), on_cards=True).worker_load)

    shown = subprocess.run(
        [sys.executable, "-c", _LOAD, str(folder), *map(str, saved)], capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    mapped, copied = map(int, shown.stdout.split()[-2:])
    assert min(planned) > 50_000_000
    assert mapped < planned[0] / 2
    assert copied < planned[1] + 16_000_000


def test_what_a_run_does_not_have_needs_nothing(folder: Path) -> None:
    config = configured(
        folder, model={"lora_rank": 2}, trainer={"kl_coef": 0.0, "keep_state": "disk"}, rollout={"kl_coef": 0.0}
    )
    models = models_of(config)

    found = needs(config, models, on_cards=False)

    adapters = models.actor.adapter_parameters(2, config.model.lora_targets)
    assert "reference" not in found.worker
    assert found.shared["training state"] == 0
    assert found.publish == {"weights": 4 * adapters, "training state": 0}
    assert found.rank["moments"] == 8 * adapters
    assert found.rank["weights"] == 4 * (adapters + models.actor.parameters)


@pytest.mark.parametrize(("optimizer", "of_matrix", "of_other"), [("adamw_8bit", 65 / 32, 65 / 32), ("muon", 4, 8)])
def test_moments_are_those_of_the_optimizer(folder: Path, optimizer: str, of_matrix: float, of_other: float) -> None:
    config = configured(folder, model={"dtype": "bfloat16"}, trainer={"optimizer": optimizer})
    models = models_of(config)

    found = needs(config, models, on_cards=True)

    sizes = {name: math.prod(shape) for name, shape in models.actor.tensors.items()}
    matrices = sum(size for name, size in sizes.items() if ".layers." in name and "norm" not in name)
    total = sum(sizes.values())
    assert 0 < matrices < total
    moments = round(of_matrix * matrices + of_other * (total - matrices))
    assert found.rank["moments"] == moments
    assert found.shared["training state"] == 2 * (math.ceil(2.125 * total) + moments)
    assert checkpoint_bytes(config, models) == 6 * total + moments


def test_a_checkpoint_of_adapters_has_the_merged_model_too(folder: Path) -> None:
    config = configured(folder, model={"dtype": "bfloat16", "lora_rank": 2})
    models = models_of(config)
    adapters = models.actor.adapter_parameters(2, config.model.lora_targets)

    # Weights and adapters in 16 bits; of the adapters float32 copies and moments.
    assert checkpoint_bytes(config, models) == 2 * models.actor.parameters + (2 + 4 + 8) * adapters


def test_a_publish_writes_the_training_state_of_every_nth_version(folder: Path) -> None:
    trainer = {"keep_state_every": 4, "world_size": 2}
    every = needs(configured(folder), models_of(configured(folder)), on_cards=False)
    config = configured(folder, trainer=trainer)
    sharded = configured(folder, trainer={**trainer, "sharding": "full"})

    fourth = needs(config, models_of(config), on_cards=False)

    assert fourth.publish["training state"] == every.publish["training state"] // 4 > 0
    assert fourth.shared["training state"] == every.shared["training state"], "two states are held as before"
    assert 2 * fourth.shared["weights"] == 3 * every.shared["weights"], "a third slot has the weights of the state"
    of_shards = needs(sharded, models_of(sharded), on_cards=False)
    assert of_shards.publish == fourth.publish
