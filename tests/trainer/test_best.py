"""Evaluations as the trainer sees them: a line of metrics.jsonl each, and the checkpoint of the best one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.latest_checkpoint import best_checkpoint, mark_best, read_latest
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.evaluations import EvaluationFile, PromptResult
from pipeline.trainer.saving.best import EvaluationFollower
from pipeline.trainer.step_log import StepLog
from pipeline.trainer.trainer import Trainer
from tests.trainer.test_checkpoints import save
from tests.trainer.test_step_log import taken

PLAN = EvaluationPlan(10, 10, 1, ("held",), (1,), 1, "plan")


def evaluation(
    version: int, right: int, *, reward: float = 0.0, fingerprint: int = 11, plan: EvaluationPlan = PLAN
) -> Any:
    return plan.evaluation(version, f"{fingerprint:016x}", [[PromptResult(0, 10, right, reward, 1.0, 0)]])


class Follower:
    """A follower with its files; each call of `complete` is an evaluation of the version of that number."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.checkpoints = folder / "checkpoints"
        self.file = EvaluationFile(folder / "evaluations.jsonl")
        self.follower = EvaluationFollower(folder / "evaluations.jsonl", self.checkpoints, every=10, **options)

    def complete(self, version: int, right: int, **options: Any) -> Any:
        self.file.add(evaluation(version, right, **options))
        found = self.follower.take(WeightsVersion(version, options.get("fingerprint", 11)))
        assert found is not None
        return found

    def keep_if_best(self, version: int, right: int, **options: Any) -> bool:
        is_best = self.follower.is_best(self.complete(version, right, **options))
        if is_best:
            self.follower.keep(save(self.checkpoints, version, version=version, fingerprint=f"{11:016x}"))
        return is_best


def test_an_evaluation_is_taken_once_and_only_that_of_exactly_these_weights(tmp_path: Path) -> None:
    bench = Follower(tmp_path)
    due, other = WeightsVersion(10, 11), WeightsVersion(10, 12)
    assert bench.follower.awaits(due) and not bench.follower.awaits(WeightsVersion(7, 11))
    assert bench.follower.take(due) is None

    bench.file.add(evaluation(10, 3))

    assert bench.follower.take(other) is None and bench.follower.awaits(other)
    assert bench.follower.take(due) == bench.file.newest(99) and not bench.follower.awaits(due)
    assert bench.follower.take(due) is None


def test_a_rank_whose_machine_has_no_files_takes_what_the_first_one_reads(tmp_path: Path) -> None:
    bench, due = Follower(tmp_path), WeightsVersion(10, 11)
    bench.file.add(evaluation(10, 3))
    read = [bench.file.newest(99), True]
    far = EvaluationFollower(
        tmp_path / "nowhere" / "evaluations.jsonl", tmp_path / "nowhere", every=10, reads=False,
        of_first=lambda call: read.pop(0),
    )  # fmt: skip

    assert not far.awaits(due), "it waits in `take` for the others"
    found = far.take(due)

    assert found == bench.file.newest(99)
    assert found is not None and far.is_best(found) and not read


def test_the_best_checkpoint_has_the_highest_pass_rate_then_the_highest_reward(tmp_path: Path) -> None:
    bench = Follower(tmp_path)

    kept = [
        bench.keep_if_best(version, right, reward=reward)
        for version, right, reward in ((10, 3, 0.1), (20, 2, 0.9), (30, 3, 0.1), (40, 3, 0.2), (50, 4, 0.0))
    ]

    assert kept == [True, False, False, True, True]
    best = best_checkpoint(bench.checkpoints)
    assert best == bench.checkpoints / "step-000050"
    assert (bench.checkpoints / "best").resolve() == best.resolve(), "a link for from_pretrained"
    assert bench.follower.is_best(evaluation(60, 10)) and not bench.follower.is_best(evaluation(60, 0))


def test_a_successor_marks_the_best_checkpoint_that_a_killed_trainer_had_written_and_not_marked(tmp_path: Path) -> None:
    bench, successor = Follower(tmp_path), Follower(tmp_path).follower
    assert bench.keep_if_best(10, 3)
    bench.file.add(evaluation(20, 9))
    save(bench.checkpoints, 20, version=20, fingerprint=f"{11:016x}")

    successor.began(cast("Trainer", SimpleNamespace(saved_step=10)))
    assert best_checkpoint(bench.checkpoints) == bench.checkpoints / "step-000010", "training goes on from another one"
    successor.began(cast("Trainer", SimpleNamespace(saved_step=20)))
    assert best_checkpoint(bench.checkpoints) == bench.checkpoints / "step-000020"

    bench.file.add(evaluation(30, 4))
    save(bench.checkpoints, 30, version=30, fingerprint=f"{11:016x}")
    successor.began(cast("Trainer", SimpleNamespace(saved_step=30)))
    assert best_checkpoint(bench.checkpoints) == bench.checkpoints / "step-000020"


def test_an_evaluation_without_a_result_is_never_the_best(tmp_path: Path) -> None:
    bench = Follower(tmp_path)

    assert not bench.follower.is_best(PLAN.evaluation(10, "0b", [[]]))


def test_scores_of_another_plan_are_not_compared(tmp_path: Path) -> None:
    bench = Follower(tmp_path)
    assert bench.keep_if_best(10, 9)
    other = EvaluationPlan(10, 10, 1, ("held",), (1,), 1, "harder prompts")

    assert bench.follower.is_best(evaluation(20, 1, plan=other))


def test_nothing_is_the_best_unless_it_is_kept_and_all_ranks_agree(tmp_path: Path) -> None:
    for number, options in enumerate(({"keep_best": False}, {"agree": lambda ready: False})):
        assert not Follower(tmp_path / str(number), **options).follower.is_best(evaluation(10, 9))


def test_ranks_take_an_evaluation_together_or_not_at_all(tmp_path: Path) -> None:
    """The line of an evaluation may come between the reads of two ranks."""
    passed: list[bool] = []
    others = [True, False, True]
    bench = Follower(tmp_path, agree=lambda ready: passed.append(ready) or (ready and others[len(passed) - 1]))
    due = WeightsVersion(10, 11)

    assert bench.follower.take(WeightsVersion(7, 11)) is None and not passed, "no rank asks about it"
    assert bench.follower.take(due) is None, "this rank has not found it, another one has"
    bench.file.add(evaluation(10, 3))
    assert bench.follower.take(due) is None, "another rank has not found it"
    assert bench.follower.take(due) == bench.file.newest(99)
    assert bench.follower.take(due) is None
    assert passed == [False, True, True]


def test_a_best_checkpoint_that_was_moved_aside_is_none(tmp_path: Path) -> None:
    bench = Follower(tmp_path)
    assert bench.keep_if_best(10, 9)
    (bench.checkpoints / "step-000010").rename(tmp_path / "aside")

    assert best_checkpoint(bench.checkpoints) is None
    assert bench.follower.is_best(evaluation(20, 1))


@pytest.mark.parametrize("name", ["best", "step-000010/trainer_state.json", "../evaluations.jsonl"])
def test_a_best_checkpoint_that_cannot_be_looked_up_stays_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bench = Follower(tmp_path)
    assert bench.keep_if_best(10, 5)
    (bench.checkpoints / name).unlink()
    (bench.checkpoints / name).symlink_to("n" * 300)

    assert not bench.follower.is_best(evaluation(20, 9))
    assert "cannot be looked up, and stays the best" in caplog.text


@pytest.mark.parametrize("best", [10, 20])
def test_the_best_checkpoint_is_kept_beside_the_newest_ones(tmp_path: Path, best: int) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    mark_best(tmp_path, tmp_path / f"step-{best:06d}")

    for step in (30, 40, 50):
        save(tmp_path, step, keep=2)

    latest = read_latest(tmp_path)
    assert latest is not None and latest.step == 50
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == [
        f"step-{best:06d}", "step-000040", "step-000050"
    ]  # fmt: skip


def test_the_former_best_one_goes_with_the_old_ones(tmp_path: Path) -> None:
    bench = Follower(tmp_path)
    assert bench.keep_if_best(10, 3) and bench.keep_if_best(20, 4)

    save(bench.checkpoints, 30, keep=1)

    assert sorted(folder.name for folder in bench.checkpoints.glob("step-*")) == ["step-000020", "step-000030"]


def lines_in(path: Path) -> list[tuple[int, bool]]:
    return [(line["step"], "evaluation" in line) for line in map(json.loads, path.read_text().splitlines())]


def test_an_evaluation_has_one_line_behind_its_step_whatever_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = StepLog(path, after_step=0)
    first.evaluated(0, evaluation(0, 1))
    for step in (1, 2):
        first.taken(taken(step))
    first.evaluated(2, evaluation(2, 1))
    first.evaluated(2, evaluation(2, 1))
    first.close()

    second = StepLog(path, after_step=2)
    second.evaluated(2, evaluation(2, 1))
    second.taken(taken(3))
    second.close()
    assert lines_in(path) == [(0, True), (1, False), (2, False), (2, True), (3, False)]

    third = StepLog(path, after_step=1)
    third.taken(taken(2))
    third.evaluated(2, evaluation(2, 5))
    third.close()
    assert lines_in(path) == [(0, True), (1, False), (2, False), (2, True)]
    assert json.loads(path.read_text().splitlines()[-1])["evaluation"]["total"]["pass_at_1"] == 0.5
