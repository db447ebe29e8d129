"""Publishes that workers could not use are refused before they reach shared memory."""

import math

import msgspec
import pytest
import torch
from torch import distributed
from torch.distributed.tensor import distribute_tensor

from pipeline.config.schema import Config
from pipeline.errors import UnreachableError, WeightsError
from pipeline.models.critic import Critic
from pipeline.models.weights.store import WeightsReader
from pipeline.runtime.workspace import RunId
from pipeline.storage.arena import Arena
from pipeline.trainer.publish_check import PublishCheck
from tests.support import tiny
from tests.support.protocol import HOUSE_LAYOUT, House


def prepare(folder, **rollout):
    """Make a model, and the files of an instance that runs it; return the model."""
    model = tiny.llama()
    model.save_pretrained(folder / "model")
    config = Config.model_validate({"model": {"actor": str(folder / "model")}, "rollout": rollout})
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "run.json").write_bytes(msgspec.json.encode(RunId("a1b2c3d4", "same", "", 1)))
    return model


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.close()


def test_after_a_refused_publish_the_right_one_is_the_first_version(tmp_path, house):
    model = prepare(tmp_path)
    connection = house.connect(check=PublishCheck(tmp_path))
    state = model.state_dict()

    for wrong in (
        state | {"lm_head.weight": torch.zeros(24, 16)},
        {f"module.{name}": tensor for name, tensor in state.items()},
        {name: tensor.bfloat16() for name, tensor in state.items()},
    ):
        with pytest.raises(WeightsError, match=r"^nothing is published: actor: "):
            connection.publish(actor=wrong)
        assert not house.weights_path.exists()
        assert connection.newest() is None
    published = connection.publish(actor=state)

    assert published.version == 1
    into = {f"actor.{name}": torch.empty_like(tensor) for name, tensor in state.items()}
    reader = WeightsReader(house.weights_path)
    assert reader.fetch(into).version == 1
    reader.close()
    assert all(torch.equal(into[f"actor.{name}"], tensor) for name, tensor in state.items())


def test_a_later_wrong_publish_leaves_the_version_before_it(tmp_path, house):
    state = prepare(tmp_path).state_dict()
    connection = house.connect(check=PublishCheck(tmp_path))
    first = connection.publish(actor=state)

    with pytest.raises(WeightsError, match=r"missing tensors \(1 of 21\): lm_head\.weight$"):
        connection.publish(actor={name: tensor for name, tensor in state.items() if name != "lm_head.weight"})

    assert connection.newest() == first
    assert connection.publish(actor=state).version == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused_and_named(tmp_path, house, value):
    state = prepare(tmp_path).state_dict()
    connection = house.connect(check=PublishCheck(tmp_path))
    diverged = {name: tensor.clone() for name, tensor in state.items()}
    diverged["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    with pytest.raises(WeightsError, match=r"^nothing is published: actor: NaN or infinity in 1 of 21 tensors: "):
        connection.publish(actor=diverged)

    assert connection.publish(actor=state).version == 1


@pytest.mark.parametrize("kind", ["DTensor", "meta", "sparse"])
def test_weights_that_are_not_whole_here_are_refused_and_cost_no_version(tmp_path, house, kind):
    """As a state dict of FSDP2: names that seem tied were left out, and a new file took the place of the published."""
    state = prepare(tmp_path).state_dict()
    connection = house.connect(check=PublishCheck(tmp_path))
    first = connection.publish(actor=state)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        made = {
            "DTensor": lambda tensor: distribute_tensor(tensor, mesh),
            "meta": lambda tensor: tensor.to("meta"),
            "sparse": lambda tensor: tensor.to_sparse(),
        }[kind]

        with pytest.raises(WeightsError, match=r"full_tensor\(\), taken on all|it is torch\.\w+ on the device"):
            house.connect(check=PublishCheck(tmp_path)).publish(
                actor={name: made(tensor) for name, tensor in state.items()}
            )
    finally:
        distributed.destroy_process_group()

    assert connection.newest() == first


def test_a_model_in_place_of_its_weights_is_told_the_right_call(tmp_path, house):
    model, connection = prepare(tmp_path), house.connect(check=PublishCheck(tmp_path))

    for done, call in (("published", connection.publish), ("restored", connection.restore)):
        said = rf"nothing is {done}: actor is a LlamaForCausalLM, pass its state dict: actor\.state"
        with pytest.raises(WeightsError, match=said):
            call(actor=model)


def test_names_of_peft_are_accepted_where_adapters_are_published(tmp_path, house):
    prepare(tmp_path)
    config = Config.model_validate(
        {"model": {"actor": str(tmp_path / "model"), "lora_rank": 2, "lora_targets": ["q_proj"]}}
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    connection = house.connect(check=PublishCheck(tmp_path))
    names = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_" for layer in (0, 1)]

    adapters = {
        name + matrix: torch.ones(shape)
        for name in names
        for matrix, shape in (("A.weight", (2, 16)), ("B.weight", (16, 2)))
    }

    assert connection.publish(actor=adapters).version == 1


def test_a_critic_is_refused_without_ppo_and_checked_with_it(tmp_path, house):
    state = prepare(tmp_path).state_dict()
    with pytest.raises(WeightsError, match=r"critic: rollout\.algorithm is grpo, there is none"):
        house.connect(check=PublishCheck(tmp_path)).publish(actor=state, critic={})

    prepare(tmp_path, algorithm="ppo")

    with pytest.raises(WeightsError, match=r"critic: missing tensors \(22 of 22\)"):
        house.connect(check=PublishCheck(tmp_path)).publish(actor=state, critic={})


def test_a_critic_that_the_first_publish_did_not_have_is_refused_and_not_left_out(tmp_path, house):
    model = prepare(tmp_path, algorithm="ppo")
    critic = Critic.from_actor(model).state_dict()
    connection = house.connect(check=PublishCheck(tmp_path))
    connection.publish(actor=model.state_dict())

    with pytest.raises(WeightsError, match=r"^nothing is published: critic: the first publish of this connection had"):
        connection.publish(actor=model.state_dict(), critic=critic)

    assert connection.newest().version == 1
    connection.close()
    following = house.connect(check=PublishCheck(tmp_path))
    following.publish(actor=model.state_dict(), critic=critic)
    reader = WeightsReader(house.weights_path)
    assert any(name.startswith("critic.") for name in reader.views((2, 0)))
    reader.close()


@pytest.mark.parametrize("is_published", [False, True], ids=["before the first publish", "after it"])
def test_a_publish_to_a_daemon_that_ended_or_was_started_anew_says_so(tmp_path, house, is_published):
    state = prepare(tmp_path).state_dict()
    connection = house.connect(check=PublishCheck(tmp_path))
    if is_published:
        connection.publish(actor=state)

    (tmp_path / "arena").unlink()
    with pytest.raises(UnreachableError, match=r"^nothing is published: the daemon has ended, .* is gone"):
        connection.publish(actor=state)

    Arena.create(
        tmp_path / "arena", payload_bytes=1 << 20, ledger_bytes=HOUSE_LAYOUT.nbytes, layout=HOUSE_LAYOUT.identity
    )
    with pytest.raises(UnreachableError, match=r"started anew after this connection was made \(run a1b2c3d4\)"):
        connection.publish(actor=state)
