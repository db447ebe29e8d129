"""Replicas that sum the gradients of an update whose last batch has no row to train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.experience.ragged import ragged_rows
from pipeline.experience.types import Experience
from pipeline.progress import Telemetry
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.learner import Learner
from pipeline.trainer.sharding.ranks import RankGroup, in_step
from pipeline.trainer.sharding.replicas import Replica
from tests.support import forked_ranks
from tests.trainer.sharding import crew
from tests.trainer.test_learner import changed, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.ranks]

CASES = ("grpo", "ppo", "lora-bfloat16")
ORDERS = ((True, False), (False, True), (False, False), (True, False))
"""For each step, for each of its batches, whether its rows are trained."""


class Phases(Telemetry):
    """The phase of a step, and those in which this rank has waited for the largest number of passes of all ranks."""

    def __init__(self) -> None:
        self.waits: set[str] = set()
        self._phase = ""
        self._all_reduce = dist.all_reduce

    def phase(self, name: str) -> None:
        self._phase = name

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            self.waits.add(self._phase)
        return self._all_reduce(tensor, op, **options)


def learner_of(models: dict[str, Any], name: str, process_group: Any = None, **options: Any) -> Learner:
    return Learner(
        crew.TRAINER.model_copy(update={"mask_cut_responses": True}),
        crew.algorithm_of(name),
        models["actor"],
        models.get("critic"),
        process_group=process_group,
        **options,
    )


def batches(folder: Path, name: str, rows: slice) -> Iterator[list[Experience]]:
    for step, order in enumerate(ORDERS):
        experience = rows_of(torch.load(folder / f"{name}-{step % crew.STEPS}.pt", weights_only=False), rows)
        count = len(experience.sequences)
        yield [
            changed(experience, info={**experience.info, "cut": torch.full((count,), not trained)}) for trained in order
        ]


def steps(learner: Learner, folder: Path, name: str, rows: slice) -> list[dict[str, Any]]:
    found = []
    for of_step in batches(folder, name, rows):
        stats = learner.update(of_step)
        norms = {"norm": stats.gradient_norm, "critic_norm": stats.critic_gradient_norm or 0.0}
        found.append({**norms, "loss": stats.loss, "nonfinite": len(stats.nonfinite)})
    return found


def passes(model: Any, experience: Experience, trained: list[Any], phases: Phases) -> int:
    """Return how many passes a last batch without a row takes."""
    batch = TrainingBatch.of(ragged_rows(experience), "grpo", crew.CPU)
    return len(list(in_step(iter(()), batch, model, trained, meeting=lambda: phases.phase("reduce"))))


def train_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    folder = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    try:
        results: dict[Any, Any] = {}
        phases = Phases()
        dist.all_reduce = phases.all_reduce  # type: ignore[assignment]
        for replicas in (1, 2):
            replica = Replica.of(crew.CPU, replicas)
            for name in CASES:
                models = crew.sharded_models(folder / name, name, replica)
                learner = learner_of(models, name, dist.group.WORLD, telemetry=phases)
                found = steps(learner, folder, name, crew.ROWS[2][rank])
                weights = crew.whole_tensors(models, RankGroup(crew.CPU, process_group=replica.group))
                (first, *_) = next(batches(folder, name, slice(8)))
                actor = models["actor"]
                taken = tuple(passes(actor, first, trained, phases) for trained in ([], [actor]))
                results[replicas, name] = {"steps": found, "weights": weights, "passes": taken}
        results["waits"] = phases.waits
        if rank == 0:
            torch.save(results, folder / "results.pt")
    finally:
        dist.destroy_process_group()
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    for name in CASES:
        crew.write_model(folder / name, name)
        crew.write_experience(folder, name)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    forked_ranks.run(2, f"{__name__}:train_rank", folder, timeout_s=300)
    return torch.load(folder / "results.pt", weights_only=False)


def test_a_rank_that_waits_for_the_passes_of_another_is_no_hung_one(results: Any) -> None:
    """The other one's replica may write a checkpoint for longer than `daemon.hang_timeout_s`."""
    assert results["waits"] == {"reduce"}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_step_are_its_own_whichever_of_its_batches_have_rows(
    folder: Path, results: Any, replicas: int, name: str
) -> None:
    whole = crew.whole_models(folder / name, name)
    expected = steps(learner_of(whole, name), folder, name, slice(8))

    found = results[replicas, name]

    tolerance = 6e-2 if "bfloat16" in name else 1e-5
    assert [step["norm"] > 0 for step in expected] == [True, True, False, True]
    for step, wanted in zip(found["steps"], expected, strict=True):
        assert step == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    trained = {f"{model}.{key}": t for model in whole for key, t in whole[model].state_dict().items()}
    for key, tensor in found["weights"].items():
        assert torch.allclose(tensor.float(), trained[key].float(), atol=tolerance, rtol=0), key


def test_a_last_batch_without_a_row_costs_a_pass_of_replicas_that_are_trained_alone(results: Any) -> None:
    assert results[1, "grpo"]["passes"] == (0, 0)
    assert results[2, "grpo"]["passes"] == (0, 1)
