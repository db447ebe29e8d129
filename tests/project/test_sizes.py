"""The tables of sizes in docs/operations.md: from the real files of a small model, and each from the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeline.config.schema import TrainerConfig
from pipeline.models.weights.shards import as_shards
from pipeline.models.weights.store import flatten
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.optimizer import ModelOptimizer
from pipeline.trainer.saving.lower_halves import LowerHalves

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
# Qwen2.5: parameters, layers, KV heads x head size, MB of activations a token.
MODELS = {
    "0.5 B": (494_032_768, 24, 2 * 64, 1.6),
    "1.5 B": (1_543_714_304, 28, 2 * 128, 3.3),
    "7 B": (7_615_616_512, 28, 4 * 128, 7.3),
    "14 B": (14_770_033_664, 48, 8 * 128, 12.8),
}


def table(heading: str) -> dict[str, list[str]]:
    """Return the cells of the table with this heading, by the first cell of each row."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def bytes_a_parameter(dtype: torch.dtype) -> dict[str, float]:
    column = {torch.bfloat16: 0, torch.float32: 1}[dtype]
    found = table("| bytes a parameter |")
    return {name.strip(" *"): float(cells[column]) for name, cells in found.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_files_in_shared_memory_have_the_documented_bytes_a_parameter(tmp_path: Path, dtype: torch.dtype) -> None:
    parameters = 1 << 20
    model = torch.nn.Linear(1 << 10, 1 << 10, bias=False, dtype=dtype)
    optimizer = ModelOptimizer(model, learning_rate=1.0, betas=(0.9, 0.95), weight_decay=0.0, clip_norm=1.0)
    versions = PolicyVersions(tmp_path / "weights", weight_slots=TrainerConfig().weight_slots)
    weights = as_shards(flatten(actor=model.state_dict()))
    state = {f"actor.{name}": tensor for name, tensor in optimizer.tensors().items()}
    versions.publish(WeightsVersion(0), weights, LowerHalves(weights, state).stored())
    versions.close()
    documented = bytes_a_parameter(dtype)

    files = {path.name: path.stat().st_size / parameters for path in tmp_path.iterdir()}
    held = sum(tensor.nbytes for tensor in [*model.state_dict().values(), *optimizer.tensors().values()]) / parameters
    assert files["weights"] == pytest.approx(documented["`/dev/shm`: weights"], rel=0.02)
    assert files["training"] == pytest.approx(documented["`/dev/shm`: training state"], rel=0.02)
    assert held == pytest.approx(documented["each trainer rank's card, between steps"], rel=0.02)
    assert held == pytest.approx(documented["a checkpoint on disk"], rel=0.02)
    model(torch.ones(1, 1 << 10, dtype=dtype)).sum().backward()
    last = model.weight.grad.nbytes
    optimizer.collect()
    gradients = last + (0 if dtype is torch.float32 else 4 * parameters)
    assert held + gradients / parameters == pytest.approx(
        documented["each trainer rank's card, in a step, without activations"], rel=0.02
    )


def test_the_table_of_models_is_that_of_bytes_a_parameter() -> None:
    documented, found = bytes_a_parameter(torch.bfloat16), table("| | 0.5 B |")
    heads = re.findall(r"[\d.]+ B", PAGE[PAGE.index("| | 0.5 B |") :].split("\n")[0])
    assert heads == list(MODELS)
    for place, (parameters, layers, width, activations_mb) in enumerate(MODELS.values()):
        expected = {
            "`/dev/shm`: weights": documented["`/dev/shm`: weights"] * parameters,
            "`/dev/shm`: training state": documented["`/dev/shm`: training state"] * parameters,
            "trainer's card between steps": documented["each trainer rank's card, between steps"] * parameters,
            "trainer's card in a step": documented["each trainer rank's card, in a step, without activations"]
            * parameters,
            "activations of 8 x 2,048 tokens, kept whole": activations_mb * 1e6 * 8 * 2048,
            "worker's card": documented["each worker's card, without its KV cache"] * parameters,
            "KV cache of 128 x 2,048 tokens": 2 * layers * width * 2 * 128 * 2048,
            "a checkpoint": documented["a checkpoint on disk"] * parameters,
        }
        assert found.keys() == expected.keys()
        for name, nbytes in expected.items():
            assert float(found[name][place]) == pytest.approx(nbytes / 1e9, rel=0.02), (name, place)
