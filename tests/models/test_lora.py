"""LoRA: adapters alone are trained, published and saved, and trainer and worker compute with them alike."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from pipeline.config.schema import TrainerConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import (
    Saved,
    adapt,
    adapter_of,
    load_adapter,
    merged,
    published,
    without_adapters,
    without_peft_names,
)
from pipeline.models.varlen_attention import use_varlen_attention
from pipeline.models.weights.store import WeightsPublisher, WeightsReader, flatten
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.trainer.learner import Learner
from tests.models.test_families import EXPERTS, built
from tests.support import tiny
from tests.support.adapted_reference import reference_log_probs
from tests.support.daemon import SMALL, Daemon, telling_reward
from tests.support.fake_card import CARD, fake_card, to_fake_card
from tests.support.padded_passes import log_probs_by_packing

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 2]])
MASK = (PROMPTS != 0).long()


def settings(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), kind="lora", adapter=None):
    targets = targets if isinstance(targets, str) else list(targets)
    return SimpleNamespace(lora_rank=rank, lora_alpha=alpha, lora_targets=targets, lora_kind=kind, lora_adapter=adapter)


def trained(seed=3, tie_word_embeddings=False, **changes):
    """An adapted model whose adapters are not zero."""
    model = adapt(tiny.llama(tie_word_embeddings=tie_word_embeddings), settings(**changes), seed=seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter_of(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.3)
    return model


def test_a_layer_computes_what_the_paper_says():
    model = trained()
    layer = model.model.layers[1].self_attn.q_proj
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))

    expected = x @ layer.weight.T + (8.0 / 4) * (x @ layer.lora_A.weight.T) @ layer.lora_B.weight.T

    torch.testing.assert_close(layer(x), expected)
    assert layer.lora_A.weight.shape == (4, 16)
    assert layer.lora_B.weight.shape == (16, 4)


@torch.no_grad()
def test_an_adapter_is_three_launches_of_a_card_beside_its_layer():
    model = adapt(tiny.llama(), settings(targets=["q_proj"]), seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    with fake_card() as operations:
        to_fake_card(layer)
        operations.clear()
        layer(torch.empty(3, 16, device=CARD))

    assert operations == ["mm", "mm", "mm", "add"]


@torch.no_grad()
def test_without_its_adapters_a_model_computes_as_its_base_and_with_them_again_afterwards():
    model, base = trained(), tiny.llama()
    before = model(input_ids=PROMPTS).logits

    def fail():
        with without_adapters(model):
            assert torch.equal(model(input_ids=PROMPTS).logits, base(input_ids=PROMPTS).logits)
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert not torch.equal(before, base(input_ids=PROMPTS).logits)
    assert torch.equal(model(input_ids=PROMPTS).logits, before)


@torch.no_grad()
def test_an_adapter_changes_nothing_at_first_and_is_the_same_for_the_same_seed():
    plain, adapted, again, other = (
        tiny.llama(), *(adapt(tiny.llama(), settings(), seed=seed) for seed in (5, 5, 6))
    )  # fmt: skip

    assert torch.equal(plain(input_ids=PROMPTS).logits, adapted(input_ids=PROMPTS).logits)
    first, second, third = (adapter_of(model) for model in (adapted, again, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.layers.0.mlp.down_proj.lora_A.weight"],
                           third["model.layers.0.mlp.down_proj.lora_A.weight"])  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_log_probs_with_an_adapter_of_the_head_are_those_of_w_plus_b_a_in_every_kind_of_pass(tied, chunk):
    base = tiny.llama(tie_word_embeddings=tied)
    model = adapt(tiny.llama(tie_word_embeddings=tied), settings(targets=("lm_head", "q_proj")), seed=3)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in adapter_of(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.3)
    rows = [[5, 9, 3, 17, 8], [7, 3, 11, 2, 14, 6, 5], [5, 9, 3, 4, 6, 2]]
    expected = reference_log_probs(base, adapter_of(model), 8.0 / 4, rows, temperature=0.7)
    without = reference_log_probs(base, {}, 0.0, rows, temperature=0.7)
    width = max(map(len, rows))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    actions = _last(rows, width)
    wanted = torch.tensor([value for row in expected for value in row[1:]])
    base_alone = torch.tensor([value for row in without for value in row[1:]])
    use_varlen_attention(model)
    passes = {
        "padded": action_log_probs(model, padded, mask, width - 2, temperature=0.7, chunk_tokens=chunk),
        "packed": log_probs_by_packing(model, padded, mask, actions, temperature=0.7)[0],
        "shared": log_probs_by_packing(model, padded, mask, actions, temperature=0.7, shared=True)[0],
    }

    assert (wanted - base_alone).abs().max() > 0.5
    for name, found in passes.items():
        torch.testing.assert_close(found[actions], wanted, atol=1e-4, rtol=0, msg=name)
    with without_adapters(model):
        found = action_log_probs(model, padded, mask, width - 2, temperature=0.7, chunk_tokens=chunk)
    torch.testing.assert_close(found[actions], base_alone, atol=1e-4, rtol=0)


def _last(rows, width):
    """Return the action mask, ``(B, S - 2)``: all tokens but the first two of each row."""
    return torch.tensor([[0] * (width - len(row)) + [1] * (len(row) - 2) for row in rows]).bool()


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_merged_checkpoint_with_an_adapted_head_loads_in_plain_transformers_with_the_same_logits(
    tmp_path, tied, given
):
    model = trained(tie_word_embeddings=tied, targets=("lm_head", "q_proj"))
    expected = model(input_ids=PROMPTS).logits

    Saved(model, settings(targets=("lm_head", "q_proj")), published(model) if given else None).save_pretrained(tmp_path)

    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=PROMPTS).logits, expected, atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    files = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(files["lm_head.weight"], files["model.embed_tokens.weight"])
    # The model that goes on is as it was.
    assert model.config.tie_word_embeddings is tied


def test_an_adapter_names_the_model_that_it_changes(tmp_path):
    of_run = SimpleNamespace(**vars(settings()), actor="/models/base")

    Saved(adapt(tiny.llama(), of_run, seed=0), of_run).save_pretrained(tmp_path)

    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "/models/base"


def test_rank_0_is_off_and_an_unknown_layer_is_refused():
    model = tiny.llama()

    assert adapt(model, settings(rank=0), seed=0) is model
    assert published(model).keys() == tiny.llama().state_dict().keys()
    with pytest.raises(ConfigError, match="no linear layer is called 'c_attn', only down_proj, gate_proj, k_proj, lm_"):
        adapt(model, settings(targets=("q_proj", "c_attn")), seed=0)


def test_layers_of_experts_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"called 'gate_proj', only .*; the experts of a mixture have no adapters"):
        adapt(built("qwen3_moe", EXPERTS), settings(targets=("q_proj", "gate_proj")), seed=0)


@torch.no_grad()
def test_only_adapters_travel_and_a_worker_then_computes_as_the_trainer():
    trainer, worker = trained(), adapt(tiny.llama(), settings(), seed=0)

    names = published(trainer).keys()

    assert len(names) == 2 * 3 * 2
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    for name, tensor in published(worker).items():
        tensor.copy_(published(trainer)[name])
    assert torch.equal(worker(input_ids=PROMPTS).logits, trainer(input_ids=PROMPTS).logits)
    assert not torch.equal(tiny.llama()(input_ids=PROMPTS).logits, trainer(input_ids=PROMPTS).logits)


def test_a_version_holds_the_adapters_bytes_and_its_fingerprint_covers_them(tmp_path):
    trainer, worker = trained(), adapt(tiny.llama(), settings(), seed=0)
    publisher = WeightsPublisher(tmp_path / "weights", flatten(actor=published(trainer)))

    version = publisher.publish(1, flatten(actor=published(trainer)))
    reader = WeightsReader(tmp_path / "weights")
    fetched = reader.fetch(flatten(actor=published(worker)))

    assert fetched == version
    with torch.no_grad():
        next(iter(published(trainer).values()))[0, 0] += 1
    assert publisher.publish(2, flatten(actor=published(trainer))).fingerprint != version.fingerprint
    assert {spec.name for spec in reader._mapping.specs} == {f"actor.{name}" for name in published(trainer)}
    reader.close()
    publisher.close()


@pytest.mark.gpu
@pytest.mark.parametrize("is_published", [False, True])
def test_a_checkpoint_merges_in_host_memory(tmp_path, is_published):
    """A card that trains has no room for the whole model once more."""
    model = trained().cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    Saved(model, settings(), published(model) if is_published else None).save_pretrained(tmp_path)

    assert torch.cuda.max_memory_allocated() == before


def test_names_of_peft_are_ours_with_a_prefix():
    ours = published(trained())
    its = {f"base_model.model.{name}": tensor for name, tensor in ours.items()}
    live = {name.replace(".weight", ".default.weight"): tensor for name, tensor in its.items()}

    for state in (its, live, ours):
        assert without_peft_names(state).keys() == ours.keys()


def test_a_step_trains_the_adapters_alone_and_fresh_experience_has_ratio_1():
    actor = trained()
    maker = NaiveExperienceMaker(
        actor, None, lambda **row: torch.arange(len(row["input_ids"])) * 1.0, tiny.llama(),
        SimpleNamespace(pad_token_id=tiny.PAD, eos_token_id=tiny.EOS), use_grpo=True, num_generation=4,
    )  # fmt: skip
    experience = maker.make_experience(PROMPTS, MASK, max_length=12, seed=1)
    before = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    learner = Learner(TrainerConfig(warmup_steps=0), "grpo", actor)

    stats = learner.update([experience])

    assert stats.importance_ratio == pytest.approx(1.0, abs=1e-6)
    changed = {name for name, tensor in actor.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == adapter_of(actor).keys()
    assert all("lora_" in name for name in learner.tensors() if "model.layers" in name)


@torch.no_grad()
def test_a_saved_model_is_merged_and_its_adapter_lies_beside_it(tmp_path):
    model = trained()

    Saved(model, settings()).save_pretrained(tmp_path)

    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids=PROMPTS).logits, model(input_ids=PROMPTS).logits, atol=1e-4, rtol=1e-5)
    assert loaded.state_dict().keys() == tiny.llama().state_dict().keys() == merged(model).keys()
    found = load_adapter(tmp_path)
    assert found.keys() == adapter_of(model).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter_of(model).items())
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (4, 8.0, "LORA")
    with pytest.raises(CheckpointError, match="adapter_model"):
        load_adapter(tmp_path / "nowhere")


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_run_with_lora_publishes_adapters_and_goes_on_from_its_checkpoint(tmp_path, task):
    lora = ("model.lora_rank=2", 'model.lora_targets=["q_proj", "v_proj"]', *telling_reward(tmp_path))
    with Daemon(tmp_path, *SMALL, *lora, "trainer.max_steps=3", task=task) as daemon:
        assert daemon.wait(150.0) == 0, daemon.errors
    first = daemon.run_dir / "checkpoints" / "step-000003"
    with Daemon(tmp_path, *SMALL, *lora, "trainer.max_steps=5", task=task) as daemon:
        assert daemon.wait(150.0) == 0, daemon.errors
        assert "resuming: step=3" in daemon.errors

    base, now = (load_file(folder / "model.safetensors") for folder in (task / "model", first))
    moved = {name for name in base if not torch.equal(base[name], now[name])}
    assert moved
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in moved)
    adapters = [load_adapter(first.with_name(name)) for name in ("step-000003", "step-000005")]
    assert any(not torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
