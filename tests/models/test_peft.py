"""Our LoRA against the library peft: the same numbers, gradients, merged weights and files, in both directions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import PEFT_PREFIX, Saved, adapt, adapter_of, described, merged, without_adapters
from tests.support import tiny, tiny_vision

if not os.environ.get("CI"):
    pytest.importorskip("peft", reason="peft is not installed: pip install 'rlhfd[test]'")

import peft

# peft asks transformers in a way that it will not answer from its version 6 on.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.randint(2, tiny.VOCABULARY_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))
KINDS = ["lora", "rslora"]


def settings(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"lora_rank": 4, "lora_alpha": 6.0, **changes})


def fill(parameters: dict[str, Tensor], seed: int = 3) -> None:
    """Give adapters values: B is zero at first, and nothing would be compared."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in sorted(parameters):
            parameters[name].copy_(torch.randn(parameters[name].shape, generator=draws) * 0.3)


def ours_and_its(folder: Path, **changes: Any) -> tuple[nn.Module, Any]:
    """Return a model with our adapters, saved into a folder, and its base with the adapter that peft loads there."""
    ours = adapt(tiny.qwen2(), settings(**changes), seed=1)
    fill(adapter_of(ours))
    Saved(ours, settings(**changes)).save_pretrained(folder)
    its = peft.PeftModel.from_pretrained(tiny.qwen2(), folder / "adapter", is_trainable=True)
    return ours, its.eval()


def log_probs(model: Any) -> Tensor:
    return action_log_probs(model, IDS, torch.ones_like(IDS), 8)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapter_and_computes_and_learns_as_we_do(tmp_path: Path, kind: str) -> None:
    ours, its = ours_and_its(tmp_path, lora_kind=kind)

    mine, theirs = log_probs(ours), log_probs(its.base_model.model)
    mine.square().mean().backward()
    theirs.square().mean().backward()

    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    gradients = {name: one.grad for name, one in ours.named_parameters() if one.grad is not None}
    found = {
        name.removeprefix(PEFT_PREFIX).replace(".default", ""): one.grad
        for name, one in its.named_parameters() if one.grad is not None
    }  # fmt: skip
    assert gradients.keys() == found.keys() == adapter_of(ours).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, found[name], atol=1e-6, rtol=1e-5, msg=name)
    with torch.no_grad(), without_adapters(ours), its.disable_adapter():
        assert torch.equal(log_probs(ours), log_probs(its.base_model.model))
        assert (log_probs(ours) - mine).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_pefts(tmp_path: Path, kind: str) -> None:
    ours, its = ours_and_its(tmp_path, lora_kind=kind)

    expected = its.merge_and_unload().state_dict()

    found = merged(ours)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_an_adapter_that_peft_has_trained_and_saved(tmp_path: Path, kind: str) -> None:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        use_rslora=kind == "rslora",
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    its = peft.get_peft_model(tiny.qwen2(), config).eval()
    fill({name: one for name, one in its.named_parameters() if one.requires_grad})
    its.save_pretrained(tmp_path)

    ours = adapt(tiny.qwen2(), settings(lora_kind=kind, lora_adapter=str(tmp_path)), seed=1)

    with torch.no_grad():
        torch.testing.assert_close(log_probs(ours), log_probs(its.base_model.model), atol=1e-6, rtol=1e-6)
        assert (log_probs(ours) - log_probs(tiny.qwen2())).abs().max() > 0.1
    assert adapter_of(ours).keys() == {
        name.removeprefix(PEFT_PREFIX) for name in peft.get_peft_model_state_dict(its)
    }, "all-linear are the same layers"


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen2])
def test_all_linear_layers_are_those_of_peft(make: Any) -> None:
    its = peft.get_peft_model(make(), peft.LoraConfig(target_modules="all-linear"))

    ours = adapt(make(), settings(), seed=1)

    assert settings().lora_targets == "all-linear"
    assert adapter_of(ours).keys() == {name.removeprefix(PEFT_PREFIX) for name in peft.get_peft_model_state_dict(its)}
    assert not any("lm_head" in name for name in adapter_of(ours))


# The vision tower of 30 layers is larger than the decoder, as in models of less than a billion.
@pytest.mark.parametrize("depth", [2, 30])
def test_of_a_vision_language_model_the_decoder_alone_is_adapted_and_peft_finds_the_same(
    tmp_path: Path, depth: int
) -> None:
    ours = adapt(tiny_vision.relative("qwen2_5_vl", depth=depth), settings(), seed=1)
    names = {name.rpartition(".lora_")[0] for name in adapter_of(ours)}
    fill(adapter_of(ours))
    Saved(ours, settings()).save_pretrained(tmp_path)

    its = peft.PeftModel.from_pretrained(tiny_vision.relative("qwen2_5_vl", depth=depth), tmp_path / "adapter")

    assert names and all("language_model" in name for name in names)
    linears = {name for name, one in ours.named_modules() if isinstance(one, nn.Linear) and "visual" in name}
    assert {name.rpartition(".")[2] for name in linears} & {name.rpartition(".")[2] for name in names}, (
        "names are shared"
    )
    found = peft.get_peft_model_state_dict(its)
    assert {name.removeprefix(PEFT_PREFIX) for name in found} == adapter_of(ours).keys()
    assert all(torch.equal(found[PEFT_PREFIX + name], tensor) for name, tensor in adapter_of(ours).items())


def test_the_layers_are_described_by_the_ends_of_their_names_where_no_other_layer_has_them() -> None:
    model = adapt(tiny.qwen2(), settings(), seed=1)

    assert described(model, settings())["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    peft.get_peft_model(tiny.qwen2(), config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("described_as", "changes", "problem"),
    [
        ({}, {"lora_rank": 8}, "has lora_rank = 4, model.lora_rank is 8"),
        ({}, {"lora_alpha": 8.0}, "has lora_alpha = 6, model.lora_alpha is 8.0"),
        ({}, {"lora_kind": "rslora"}, 'has lora_kind = "lora", model.lora_kind is "rslora"'),
        ({"use_dora": True}, {}, 'has lora_kind = "dora", model.lora_kind is "lora"'),
        ({"peft_type": "IA3"}, {}, "has an adapter of the kind IA3, none of LoRA"),
        ({"alpha_pattern": {"q_proj": 2}}, {}, "has an alpha of its own for some layers (alpha_pattern)"),
        (
            {"init_lora_weights": "pissa"}, {},
            'has init_lora_weights = "pissa", which changes the base model: convert it to plain LoRA',
        ),
        (
            {}, {"lora_targets": ["q_proj", "k_proj"]},
            "is of other layers: model.layers.0.mlp.down_proj.lora_A.weight is 4 x 24 there, absent by "
            "model.lora_targets and model.actor (20 tensors differ)",
        ),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_an_adapter_of_other_settings_is_refused_in_one_line(
    adapter: Path, tmp_path: Path, described_as: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    folder = tmp_path / "changed"
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | described_as))
    (folder / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())

    with pytest.raises(ConfigError) as refused:
        adapt(tiny.qwen2(), settings(lora_adapter=str(folder), **changes), seed=1)

    assert str(refused.value) == f"model.lora_adapter: {folder} {problem}"


@pytest.mark.parametrize("start", [True, "gaussian", "eva", "orthogonal"])
def test_an_adapter_begun_in_a_way_that_keeps_the_base_model_is_taken(
    adapter: Path, tmp_path: Path, start: object
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())

    adapt(tiny.qwen2(), settings(lora_adapter=str(tmp_path)), seed=1)


def test_an_adapter_that_cannot_be_read_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())

    with pytest.raises(ConfigError, match=r"model\.lora_adapter: no adapter of peft can be read in .*: "):
        adapt(tiny.qwen2(), settings(lora_adapter=str(tmp_path)), seed=1)


def test_adapters_that_peft_adds_beside_a_and_b_are_refused(adapter: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(adapter / "adapter_model.safetensors")
    name = f"{PEFT_PREFIX}lm_head.weight"
    save_file({**state, name: torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())

    with pytest.raises(ConfigError, match=r"of other layers: lm_head\.weight is 2 there, absent by"):
        adapt(tiny.qwen2(), settings(lora_adapter=str(tmp_path)), seed=1)
