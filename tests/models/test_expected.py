"""The tensors that a publish must hold, and the sentences about one that does not."""

import pytest
import torch

from pipeline.config.schema import ModelConfig
from pipeline.models.critic import Critic
from pipeline.models.expected import expected_tensors, faults
from pipeline.models.lora import adapt, published
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with two models: untied embeddings (llama) and tied ones (gpt2)."""
    path = tmp_path_factory.mktemp("models")
    tiny.llama().save_pretrained(path / "llama")
    tiny.gpt2().save_pretrained(path / "gpt2")
    return path


def expected(path, *, dtype="float32", **changes):
    critic = changes.pop("with_critic", False)
    settings = ModelConfig(actor=str(path), **changes)
    return expected_tensors(path, dtype=dtype, lora=settings, with_critic=critic, critic_path=None)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_models_own_state_dict_has_no_fault(folder, name):
    model = getattr(tiny, name)()

    found = expected(folder / name)

    assert faults("actor", model.state_dict(), found["actor"]) == []
    assert all(tensor.device.type == "meta" for tensor in found["actor"].values())


def test_one_name_of_tied_tensors_is_enough(folder):
    state = tiny.gpt2().state_dict()
    wanted = expected(folder / "gpt2")["actor"]

    only_head = {name: tensor for name, tensor in state.items() if name != "transformer.wte.weight"}
    neither = {name: tensor for name, tensor in only_head.items() if name != "lm_head.weight"}

    assert faults("actor", only_head, wanted) == []
    assert faults("actor", neither, wanted) == ["actor: missing tensors (1 of 28): transformer.wte.weight"]


def test_a_critic_is_compared_with_backbone_and_value_head(folder):
    found = expected(folder / "llama", dtype="bfloat16", with_critic=True)
    critic = Critic.from_actor(tiny.llama().to(torch.bfloat16))

    assert faults("critic", critic.state_dict(), found["critic"]) == []
    assert faults("critic", {}, found["critic"])[0].startswith("critic: missing tensors (22 of 22): ")


def test_with_lora_the_adapters_alone_are_expected(folder):
    settings = ModelConfig(actor=str(folder), lora_rank=2, lora_targets=["q_proj"])
    model = adapt(tiny.llama(), settings, seed=0)
    wanted = expected(folder / "llama", lora_rank=2, lora_targets=["q_proj"])["actor"]

    assert len(wanted) == 4
    assert faults("actor", published(model), wanted) == []
    assert faults("actor", tiny.llama().state_dict(), wanted) == [
        "actor: names that are no adapters' (21), as model.embed_tokens.weight: with model.lora_rank the adapters "
        "alone are published (get_peft_model_state_dict)"
    ]
    (text,) = faults("actor", published(model), expected(folder / "llama")["actor"])
    assert text.endswith("publish the merged weights, or set model.lora_rank and model.lora_targets")


@pytest.mark.parametrize(
    ("renamed", "cause"),
    [
        (lambda name: f"module.{name}",
         "as module.model.embed_tokens.weight: `module.` comes from DistributedDataParallel, "
         "publish model.module.state_dict()"),
        (lambda name: f"_orig_mod.{name}",
         "as _orig_mod.model.embed_tokens.weight: `_orig_mod.` comes from torch.compile, "
         "publish model._orig_mod.state_dict()"),
        (lambda name: f"module._orig_mod.{name}",
         "as module._orig_mod.model.embed_tokens.weight: `module.` comes from DistributedDataParallel, "
         "publish model.module.state_dict(); `_orig_mod.` comes from torch.compile, "
         "publish model._orig_mod.state_dict()"),
    ],
    ids=["ddp", "compile", "both"],
)  # fmt: skip
def test_the_wrapper_that_changed_the_names_is_named(folder, renamed, cause):
    state = {renamed(name): tensor for name, tensor in tiny.llama().state_dict().items()}

    assert faults("actor", state, expected(folder / "llama")["actor"]) == [
        f"actor: names that are not the model's (21), {cause}"
    ]


def test_each_other_fault_is_named_with_the_model_side(folder):
    state, wanted = tiny.llama().state_dict(), expected(folder / "llama")["actor"]
    without = {name: tensor for name, tensor in state.items() if "layers.1" not in name}

    assert faults("actor", without, wanted) == [
        "actor: missing tensors (9 of 21): model.layers.1.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.v_proj.weight and 6 more"
    ]
    assert faults("actor", state | {"value_head.weight": torch.zeros(1)}, wanted) == [
        "actor: names that are not the model's (1): value_head.weight"
    ]
    assert faults("actor", state | {"lm_head.weight": torch.zeros(24, 16)}, wanted) == [
        "actor: lm_head.weight has the shape (24, 16), the model's has (23, 16)"
    ]
    assert faults("actor", state | {"lm_head.weight": [1.0]}, wanted) == [
        "actor: lm_head.weight is a list, not a tensor"
    ]
    assert faults("actor", {name: tensor.bfloat16() for name, tensor in state.items()}, wanted) == [
        "actor: model.embed_tokens.weight is torch.bfloat16, the model's is torch.float32 (model.dtype): publish each "
        "tensor `.to(torch.float32)`, and 20 more"
    ]
