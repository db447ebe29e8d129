"""Sharded models: loaded, stepped and computed as whole ones, on two ranks, four, and two replicas of two each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.models.loading import load_actor, load_critic
from pipeline.models.lora import adapter_of, load_adapter, merged
from pipeline.models.weights.store import WeightsPublisher, WeightsReader
from pipeline.runtime.checkpoint_note import read_note, verify
from pipeline.trainer.checkpoints import load_state
from pipeline.trainer.state import Progress, tensors_of
from tests.trainer.sharding import crew

# Ranks are processes; the other tests are spread over workers, each of which would start the ranks again.
pytestmark = [pytest.mark.integration, pytest.mark.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    if request.config.getoption("--variants"):
        (folder / "variants").touch()
    for name in crew.MODELS:
        crew.write_model(folder / name, name)
        crew.write_experience(folder, name)
    return folder


# Four ranks take the same code as two, in twice the time.
MARKS: dict[str, Any] = {"2": (), "4": pytest.mark.variant, "2x2": (), "2x1": pytest.mark.variant}
RANKS = [pytest.param(ranks, marks=marks) for ranks, marks in MARKS.items()]
CASES = [
    pytest.param(ranks, name, marks=pytest.mark.variant if ranks == "2" and name in crew.VARIANTS else marks)
    for ranks, marks in MARKS.items()
    for name in crew.CASES[ranks]
]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Callable[[str], Any]:
    """Return a function that runs all cases of a crew, once, also if they fail."""
    started = set[str]()

    @functools.cache
    def run(ranks: str) -> Any:
        if ranks == "4":
            # Which resume the checkpoints of two.
            run("2")
        assert ranks not in started, "the ranks have failed in an earlier test"
        started.add(ranks)
        return crew.start(folder, ranks)

    return run


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_sharded_model_is_loaded_and_trained_as_a_whole_one(
    runs: Callable[[str], Any], folder: Path, ranks: str, name: str
) -> None:
    whole = crew.whole_models(folder / name, name)
    loaded = {f"{model}.{key}": t.clone() for model in whole for key, t in whole[model].state_dict().items()}
    expected = crew.steps(crew.new_learner(whole, name), folder, name, slice(8))

    found = runs(ranks)[name]

    assert found["loaded"].keys() <= loaded.keys()
    assert all(torch.equal(tensor.to(loaded[key].dtype), loaded[key]) for key, tensor in found["loaded"].items())
    # In bfloat16 the gradients of a whole model are rounded before they are summed over its micro-batches.
    tolerance = 6e-2 if "bfloat16" in name else 1e-5
    for step, wanted in zip(found["steps"], expected, strict=True):
        assert step == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    trained = {f"{model}.{key}": t for model in whole for key, t in whole[model].state_dict().items()}
    for key, tensor in found["weights"].items():
        assert torch.allclose(tensor.float(), trained[key].float(), atol=tolerance, rtol=0), key


@pytest.mark.parametrize(("name", "dtype"), [("reference", torch.float32), ("reference-bfloat16", torch.bfloat16)])
def test_a_reference_is_held_in_shards_of_its_own_dtype(
    runs: Callable[[str], Any], folder: Path, name: str, dtype: torch.dtype
) -> None:
    whole = load_actor(folder / name / "reference", dtype="float32", device=crew.CPU).num_parameters()

    elements, dtypes = runs("2")[name]["reference"]

    assert elements < 0.6 * whole and dtypes == {dtype}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_publish_by_shards_is_the_publish_of_one_rank_byte_for_byte(
    runs: Callable[[str], Any], folder: Path, ranks: str, name: str
) -> None:
    found = runs(ranks)[name]
    expected = published(crew.MODELS[name], found["weights"])
    publisher = WeightsPublisher(folder / f"{name}-{ranks}" / "whole", expected)
    whole = publisher.publish(1, expected)
    publisher.close()

    into = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
    reader = WeightsReader(folder / f"{name}-{ranks}" / "weights")
    newest = reader.fetch(into)
    reader.close()

    first, second = found["versions"]
    assert newest == second and (first.version, second.version) == (1, 2)
    assert (first.trained_through, second.trained_through) == (5, 6)
    assert first.fingerprint == second.fingerprint == whole.fingerprint
    assert all(torch.equal(tensor, expected[key]) for key, tensor in into.items())
    assert found["restored"]
    assert not any(found["different"])


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_checkpoint_of_shards_is_one_of_a_whole_trainer(
    runs: Callable[[str], Any], folder: Path, ranks: str, name: str
) -> None:
    found = runs(ranks)[name]
    path, settings = found["path"], crew.MODELS[name]
    whole = crew.whole_models(folder / name, name)
    learner = crew.new_learner(whole, name)
    state = tensors_of(learner, Progress())

    verify(path, read_note(path))
    load_state(path, state)
    actor = load_actor(path, dtype=settings.dtype, device=crew.CPU)

    assert Progress(*state["progress"].tolist()) == Progress(crew.STEPS, 7, 11)
    assert actor.config.architectures == [type(whole["actor"]).__name__]
    if settings.lora_rank:
        adapter = load_adapter(path)
        assert adapter.keys() == adapter_of(whole["actor"]).keys()
        assert all(torch.equal(t, found["weights"][f"actor.{key}"].to(t.dtype)) for key, t in adapter.items())
        whole["actor"].load_state_dict(adapter, strict=False)
        expected = merged(whole["actor"])
    else:
        keys = actor.state_dict().keys() & {key.removeprefix("actor.") for key in found["weights"]}
        expected = {key: found["weights"][f"actor.{key}"].to(actor.dtype) for key in keys}
    assert expected and all(torch.equal(actor.state_dict()[key], tensor) for key, tensor in expected.items())
    if name.startswith("ppo"):
        critic = load_critic(path / "critic", dtype=settings.dtype, device=crew.CPU).state_dict()
        assert all(torch.equal(tensor, found["weights"][f"critic.{key}"]) for key, tensor in critic.items())
    for key, tensor in state.items():
        if key.startswith("actor.float32.") and not settings.lora_rank:
            assert torch.equal(tensor, found["weights"][f"actor.{key.removeprefix('actor.float32.')}"])
    assert not any(found["different_again"])


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_checkpoint_from_shared_memory_is_that_of_all_ranks_byte_for_byte(
    runs: Callable[[str], Any], folder: Path, ranks: str, name: str
) -> None:
    together = runs(ranks)[name]["path"]
    held = folder / f"{name}-{ranks}" / "held" / together.name

    if crew.MODELS[name].lora_rank:
        assert not held.exists(), "no rank holds the base model whole"
        return
    files = [path.relative_to(together) for path in together.rglob("*.safetensors")]
    assert len(files) == (4 if name.startswith("ppo") else 2)
    assert all((held / file).read_bytes() == (together / file).read_bytes() for file in files)
    verify(held, read_note(held))


@pytest.mark.variant
@pytest.mark.parametrize("name", crew.CASES["4"])
def test_a_checkpoint_of_two_ranks_is_resumed_by_four(runs: Callable[[str], Any], name: str) -> None:
    runs("2")

    assert runs("4")[name]["resumed"] == set()


@pytest.mark.parametrize("name", crew.CASES["2x2"])
def test_replicas_hold_the_same_bits_and_the_first_one_alone_writes(
    runs: Callable[[str], Any], folder: Path, name: str
) -> None:
    found = runs("2x2")[name]

    first, second = found["digests"][:2], found["digests"][2:]
    assert first == second and first[0] != first[1]
    assert {path.name for path in (folder / f"{name}-2x2").glob("training*")} == {"training", "training-1"}
    # Four ranks of one replica resume the checkpoint.
    assert found["resumed"] == set()


@pytest.mark.parametrize("name", crew.CASES["2x2"])
def test_replicas_sum_each_gradient_once_a_step_however_many_passes_it_has(
    runs: Callable[[str], Any], name: str
) -> None:
    found = runs("2x2")[name]

    # One of each layer, and of a model's embedding, head and norm where these are trained; rank 0 takes two passes.
    layers = sum(".input_layernorm." in key for key in found["loaded"])
    a_step = layers if name.startswith("lora") else layers + 6
    assert len(found["sums"]) == a_step * crew.STEPS, found["sums"]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_that_rank_0_cannot_write_fails_on_every_rank_and_none_hangs(
    runs: Callable[[str], Any], ranks: str
) -> None:
    assert runs(ranks)["ppo"]["failures"] == [
        "the disk is full",
        *["rank 0 could not write the checkpoint"] * (crew.ranks_of(ranks)[1] - 1),
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_share_of_a_model(runs: Callable[[str], Any], ranks: str) -> None:
    found = runs(ranks)["ppo"]

    whole = sum(tensor.numel() for tensor in found["loaded"].values())
    assert found["held"] < 1.1 * whole / crew.ranks_of(ranks)[1]


def published(settings: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that a whole trainer with these weights publishes."""
    dtype = getattr(torch, settings.dtype)
    chosen = {key: t for key, t in weights.items() if not settings.lora_rank or ".lora_" in key}
    return {key: t if ".value_head." in key else t.to(dtype) for key, t in chosen.items()}
