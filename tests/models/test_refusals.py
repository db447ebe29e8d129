"""Models that load and would compute something else than their user means: refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from pipeline.errors import ConfigError
from pipeline.models.critic import VALUE_HEAD_FILE, Critic
from pipeline.models.loading import (
    is_causal,
    load_actor,
    load_critic,
    load_reward_model,
    load_tokenizer,
    shell,
)
from tests.support import tiny

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def saved(folder: Path, **settings: Any) -> Path:
    tiny.llama(**settings).save_pretrained(folder)
    return folder


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def redescribe(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def test_weights_with_the_names_of_a_wrapper_are_refused_and_the_prefix_is_named(tmp_path: Path) -> None:
    """Transformers would train random numbers in their place, others in each process."""
    folder = saved(tmp_path)
    rewrite(folder, {f"module.{name}": tensor for name, tensor in weights_of(folder).items()})

    with pytest.raises(
        ConfigError, match=r"model\.actor: .* lack \d+ tensors of the model, such as lm_head\.weight"
    ) as e:
        load_actor(folder, **SETTINGS)

    assert 'they have module.lm_head.weight: remove the prefix "module." from the names' in str(e.value)


def test_weights_without_a_tensor_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    weights = weights_of(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, weights)

    for load in (load_actor, load_critic):
        with pytest.raises(
            ConfigError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj\.weight, which would be random"
        ):
            load(folder, **SETTINGS)


def test_a_language_model_as_reward_model_is_refused_for_its_random_head(tmp_path: Path) -> None:
    redescribe(saved(tmp_path), num_labels=1)

    with pytest.raises(ConfigError, match=r"model\.reward: .* lack 1 tensors of the model, such as score\.weight"):
        load_reward_model(tmp_path, **SETTINGS)


def test_weights_of_another_size_than_the_configuration_are_refused_with_both(tmp_path: Path) -> None:
    redescribe(saved(tmp_path), intermediate_size=32)

    with pytest.raises(
        ConfigError, match=r"down_proj\.weight is 16 x 24 in the weights in .*, and 16 x 32 by .* \(6 tensors differ\)"
    ):
        load_actor(tmp_path, **SETTINGS)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in weights_of(folder)

    load_actor(folder, **SETTINGS)


def test_weights_that_are_no_numbers_are_refused_by_their_cause(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    weights = weights_of(folder)
    weights["lm_head.weight"].fill_(math.nan)
    rewrite(folder, weights)

    with pytest.raises(ConfigError, match="gives log-probs that are no finite numbers: its files are damaged"):
        load_actor(folder, **SETTINGS)


def test_an_encoder_is_refused_because_it_reads_later_tokens(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="reads the tokens after a token too, as an encoder does"):
        load_actor(tmp_path, **SETTINGS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_causal_models_are_taken(tmp_path: Path, dtype: str) -> None:
    for number, model in enumerate((tiny.llama(), tiny.gpt2(), tiny.qwen2())):
        model.save_pretrained(tmp_path / str(number))

        assert is_causal(load_actor(tmp_path / str(number), dtype=dtype, device="cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "cannot load a model from"),
        ({"hidden_size": "16"}, "cannot load a model from .*hidden_size"),
        ({"num_attention_heads": 3}, "cannot load a model from .*multiple of the number of attention heads"),
        ({"hidden_act": "unheard"}, "cannot load a model from .*KeyError: 'unheard'"),
        ({"num_attention_heads": 0}, "cannot load a model from .*ZeroDivisionError"),
        (
            {"model_type": "of_their_own", "auto_map": {"AutoConfig": "theirs.Config"}},
            "needs Python code of its own folder, which rlhfd does not run",
        ),
    ],
    ids=["quantized", "no number", "heads", "no function", "no head", "code"],
)
def test_models_that_transformers_cannot_load_alone_are_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    redescribe(saved(tmp_path), **change)
    (tmp_path / "theirs.py").write_text("raise SystemExit('run')")

    with pytest.raises(ConfigError, match=message) as raised:
        load_actor(tmp_path, **SETTINGS)

    assert "\n" not in str(raised.value)
    if "quantization_config" not in change:
        # A start says it before any process loads weights.
        with pytest.raises(ConfigError, match=message):
            shell(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "head", [b"damaged", {"weight": 7, "bias": 1}, {"kernel": 16}], ids=["damaged", "shape", "name"]
)
def test_a_value_head_that_is_damaged_or_of_another_model_is_refused(tmp_path: Path, head: Any) -> None:
    Critic.from_actor(tiny.llama()).save_pretrained(tmp_path)
    if isinstance(head, bytes):
        (tmp_path / VALUE_HEAD_FILE).write_bytes(head)
    else:
        shapes = {name: (1, width) if width > 1 else (1,) for name, width in head.items()}
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / VALUE_HEAD_FILE)

    with pytest.raises(ConfigError, match=rf"model\.critic: .* value head .* {tmp_path / VALUE_HEAD_FILE}") as raised:
        load_critic(tmp_path, **SETTINGS)

    assert "\n" not in str(raised.value)


def test_a_damaged_file_of_weights_is_one_line_that_names_the_folder(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])

    with pytest.raises(ConfigError, match=f"model.actor: cannot load a model from {tmp_path}: "):
        load_actor(tmp_path, **SETTINGS)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a tokenizer from") as raised:
        load_tokenizer(saved(tmp_path))

    assert "\n" not in str(raised.value)
