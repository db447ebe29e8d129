"""The examples of real sizes fit the cards that their names tell, by `rlhfd plan`; no weight exists."""

from __future__ import annotations

import json
import os
import re
import struct
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.config import load as config_load
from pipeline.config import own_model

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = sorted(EXAMPLES.glob("*/*-card*.toml"))


class Shape(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151_936, True),
    "7b": Shape(3584, 18_944, 28, 28, 4, 152_064, False),
}
PARAMETERS = {"0.5b": 0.494e9, "1.5b": 1.54e9, "7b": 7.62e9}


def write_model(folder: Path, shape: Shape) -> int:
    """Write config.json and the header of a safetensors file, without the bytes of a tensor; return the parameters."""
    keys = shape.kv_heads * (shape.hidden // shape.heads)
    layer = {
        "self_attn.q_proj.weight": (shape.hidden, shape.hidden), "self_attn.q_proj.bias": (shape.hidden,),
        "self_attn.k_proj.weight": (keys, shape.hidden), "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, shape.hidden), "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (shape.hidden, shape.hidden),
        "mlp.gate_proj.weight": (shape.inner, shape.hidden), "mlp.up_proj.weight": (shape.inner, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.inner),
        "input_layernorm.weight": (shape.hidden,), "post_attention_layernorm.weight": (shape.hidden,),
    }  # fmt: skip
    tensors = {f"model.layers.{n}.{name}": sizes for n in range(shape.layers) for name, sizes in layer.items()}
    tensors |= {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden), "model.norm.weight": (shape.hidden,)}
    if not shape.is_tied:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    header: dict[str, Any] = {}
    elements = 0
    for name, sizes in tensors.items():
        count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        offsets = [2 * elements, 2 * (elements + count)]
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": offsets}
        elements += count
    encoded = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    described = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": shape.hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary, "max_position_embeddings": 32_768,
        "tie_word_embeddings": shape.is_tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    return elements


def size_of(run: Path) -> str:
    return next(name for name in sorted(SHAPES, key=len, reverse=True) if f"-{name}" in run.parent.name)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_an_example_fits_its_cards(run: Path, tmp_path: Path) -> None:
    size = size_of(run)
    assert write_model(tmp_path / "model", SHAPES[size]) == pytest.approx(PARAMETERS[size], rel=0.01)
    machine = ("--gpus", run.stem.split("-")[0], "--gpu-memory", "80GB", "--ram", "1TB")

    result = CliRunner().invoke(
        main, ["plan", "--config", str(run), *machine, "--set", f"model.actor={tmp_path}/model"]
    )

    assert result.exit_code == 0, result.output
    assert "bfloat16" in result.output
    assert ("full by auto" in result.output) == (run.parent.name == "grpo-7b")


@pytest.mark.parametrize("cards", [1, 2])
def test_a_full_7b_does_not_fit_fewer_cards(cards: int, tmp_path: Path) -> None:
    write_model(tmp_path / "model", SHAPES["7b"])
    sets = ("--set", f"model.actor={tmp_path}/model", "--set", "trainer.world_size=1")
    machine = ("--gpus", str(cards), "--gpu-memory", "80GB", "--ram", "1TB")

    result = CliRunner().invoke(main, ["plan", "--config", str(EXAMPLES / "grpo-7b" / "8-cards.toml"), *machine, *sets])

    assert result.exit_code == 1
    assert "does not fit: GPU of trainer 0" in result.output and "model.lora_rank = 32" in result.output


def test_there_is_an_example_of_each_size_and_number_of_cards_that_it_fits() -> None:
    names = {(path.parent.name, path.stem.split("-")[0]) for path in RUNS}

    several = {(name, cards) for name in ("grpo-0.5b", "grpo-7b-lora", "ppo-1.5b") for cards in "128"}
    assert names == several | {("grpo-7b", "8")}


@pytest.mark.parametrize("run", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_the_rows_of_an_example_fit_its_arena(run: Path, tmp_path: Path) -> None:
    from pipeline.buffer.sizing import refuse_sizes

    refuse_sizes(config_load.load(run, [f"model.actor={tmp_path}"], {}, on_cards=True).config)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_all_that_an_example_lacks_is_the_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("RLHFD_") and name != "RLHFD_TEST_SESSION"]:
        monkeypatch.delenv(variable)

    result = CliRunner().invoke(main, ["config", "check", "--config", str(run)])

    problems = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert result.exit_code == 78 and problems
    assert all(re.search(r"^\S+: model\.(actor|reward|critic): no such directory: ", line) for line in problems), (
        problems
    )


class TestDefaults:
    """A model of its own has other defaults than the embedded run."""

    def loaded(self, folder: Path, *sets: str, on_cards: bool = True) -> config_load.LoadedConfig:
        if not (folder / "model").exists():
            write_model(folder / "model", SHAPES["0.5b"])
        return config_load.load(None, [f"model.actor={folder}/model", *sets], {}, on_cards=on_cards)

    def test_a_model_of_its_own_is_trained_at_a_constant_low_learning_rate_in_bfloat16(self, tmp_path: Path) -> None:
        config = self.loaded(tmp_path).config

        trainer = config.trainer
        assert (trainer.learning_rate, trainer.critic_learning_rate) == (1e-6, 1e-5)
        assert (trainer.warmup_steps, trainer.decay_steps, trainer.save_every) == (0, 0, 50)
        assert trainer.betas == (0.9, 0.999)
        assert (config.model.dtype, config.lengths.row) == ("bfloat16", 1024)

    def test_the_embedded_run_keeps_the_schemas(self) -> None:
        loaded = config_load.load(None, [], {}, on_cards=True)

        assert loaded.config.trainer.learning_rate == 4e-4 and loaded.config.trainer.decay_steps == 150
        assert loaded.config.model.dtype == "float32" and not loaded.reasons

    def test_what_is_set_is_kept(self, tmp_path: Path) -> None:
        sets = (
            "trainer.decay_steps=7",
            "model.dtype=float32",
            "rollout.max_prompt_length=4",
            "rollout.max_new_tokens=8",
        )

        loaded = self.loaded(tmp_path, *sets)

        assert loaded.config.trainer.decay_steps == 7 and loaded.config.model.dtype == "float32"
        assert loaded.config.lengths.row == 12
        assert loaded.reasons.keys() == {
            "trainer.learning_rate", "trainer.critic_learning_rate", "trainer.warmup_steps", "trainer.save_every",
            "trainer.betas", "rollout.engine",
        }  # fmt: skip

    def test_a_reward_model_or_an_environment_is_not_joined_by_the_embedded_tasks_reward(self, tmp_path: Path) -> None:
        for alone in (f"model.reward={tmp_path}/model", "rollout.environment=own:Game"):
            loaded = self.loaded(tmp_path, alone)
            assert loaded.config.rewards == []
            shown = config_load.render(loaded, effective=True, origin=True)
            assert "rewards = []  # default; the embedded task's reward is for that task alone\n" in shown
            assert "betas = [0.9, 0.999]  # default; for a model of its own\n" in shown

        both = self.loaded(tmp_path, f"model.reward={tmp_path}/model", 'rewards=["length"]')
        assert [reward.name for reward in both.config.rewards] == ["length"]

    def test_the_page_shows_each_default_of_a_model_of_its_own(self, tmp_path: Path) -> None:
        loaded = self.loaded(tmp_path, f"model.reward={tmp_path}/model")

        assert loaded.reasons.keys() | own_model.NEEDED.keys() == own_model.SHOWN.keys()
        for key in ("trainer.betas", "trainer.warmup_steps", "trainer.decay_steps", "trainer.critic_learning_rate"):
            shown = own_model.SHOWN[key].strip("`")
            assert (
                tomllib.loads(f"shown = {shown}")["shown"]
                == loaded.config.model_dump(mode="json")["trainer"][key.removeprefix("trainer.")]
            ), key

    def test_what_a_model_of_its_own_lacks_is_shown_in_place_of_the_embedded_tasks(self, tmp_path: Path) -> None:
        shown = config_load.render(self.loaded(tmp_path), effective=True, origin=True)

        needed = "must be set with a model of its own, or"
        assert f"# rewards are left out  # {needed} model.reward or rollout.environment\n" in shown
        assert f"# path is left out  # {needed} prompts.sources\n" in shown
        assert "sort_digits" not in shown.replace(str(tmp_path), "")

    def test_adapters_have_a_higher_rate_and_a_cpu_float32(self, tmp_path: Path) -> None:
        config = self.loaded(tmp_path, "model.lora_rank=8", on_cards=False).config

        assert (config.trainer.learning_rate, config.model.dtype) == (1e-5, "float32")

    def test_the_reasons_are_shown(self, tmp_path: Path) -> None:
        shown = config_load.render(self.loaded(tmp_path), effective=True, origin=False)

        assert "learning_rate = 1e-06  # for a model of its own\n" in shown
        assert "max_length = 1024  # the model has 32,768 positions, 1,024 are taken\n" in shown
        assert "learning_rate" not in config_load.render(self.loaded(tmp_path), effective=False, origin=False)

    def test_a_model_without_positions_keeps_the_schemas_length(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()

        assert self.loaded(tmp_path).config.rollout.max_length is None
