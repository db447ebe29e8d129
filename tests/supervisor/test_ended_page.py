"""The page's data of a run that is not running: from its folder alone, whatever of it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.identity import identity_of, run_dir
from pipeline.runtime.run_folder import RunFolder, read_note
from pipeline.supervisor.ended_page import LEARNING_FIELDS, EndedPage
from pipeline.telemetry.evaluations import EvaluationFile
from pipeline.telemetry.history import LEARNING, History, Point
from pipeline.telemetry.samples import Sample, SampledResponse, SampleWriter, folder_of
from pipeline.trainer.step_log import StepLog
from tests.runtime.test_run_folder import config, save
from tests.trainer.test_best import evaluation
from tests.trainer.test_step_log import taken

AT_S = 1e9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run of 3 steps, 2 s apart, whose daemon was down for an hour before the last one."""
    of = config(tmp_path)
    RunFolder(of).claim()
    folder = run_dir(of)
    times = iter([AT_S, AT_S + 2.0, AT_S + 3602.0])
    clock = iter([10.0, 12.0])

    def write(after_step: int, *steps: int) -> None:
        clocks = {"clock_s": lambda: next(times), "monotonic_s": lambda: next(clock)}
        log = StepLog(folder / "metrics.jsonl", after_step=after_step, **clocks)
        for step in steps:
            values = {"reward_mean": step / 4, "reward_stddev": 0.5, "loss": -float(step), "kl_nats": None}
            of_step = taken(step, rows=8, response_length_mean_tokens=6.0, **values)
            means = {"cut_ratio": 0.25, "staleness_mean_versions": step / 2, "reward/exact": 0.5, "reward/format": 1.0}
            log.taken(of_step._replace(row_means=means))
        log.close()

    write(0, 1, 2)
    clock = iter([50.0])
    write(2, 3)
    return folder


def page(folder: Path) -> EndedPage:
    note = read_note(folder)
    assert note is not None
    return EndedPage(folder, note)


def live(folder: Path, after_s: float = 0.0) -> dict[str, Any]:
    return dict(json.loads(page(folder).live(after_s)))


def test_each_value_of_the_charts_has_its_field() -> None:
    assert LEARNING_FIELDS.keys() | {"pass_at_1"} == LEARNING.keys()


def test_without_a_history_the_charts_are_those_of_the_steps(folder: Path) -> None:
    file = EvaluationFile(folder / "evaluations.jsonl", clock_s=lambda: AT_S + 3605.0)
    file.add(evaluation(3, 4))
    evaluated = file.newest(3)
    assert evaluated is not None
    log = StepLog(folder / "metrics.jsonl", after_step=3)
    log.evaluated(3, evaluated)
    log.close()

    points = live(folder)["history"]

    assert [point["step"] for point in points] == [1, 2, 3, 3]
    assert [point.get("reward") for point in points] == [0.25, 0.5, 0.75, None]
    assert [point.get("reward_spread") for point in points] == [0.5, 0.5, 0.5, None]
    assert [point.get("staleness") for point in points] == [0.5, 1.0, 1.5, None]
    assert [point.get("cut") for point in points] == [0.25, 0.25, 0.25, None]
    # 48 tokens in the 2 s since the step before; the first step of a start has no time of its own.
    assert [point.get("tokens_per_s") for point in points] == [None, 24.0, None, None]
    assert [point["seconds"] for point in points] == [0.0, 2.0, 0.0, 0.0]
    assert (points[1]["start_s"], points[1]["end_s"]) == (AT_S, AT_S + 2.0)
    assert points[2]["start_s"] - points[1]["end_s"] == 3600.0
    assert "kl" not in points[0] and points[-1]["pass_at_1"] == 0.4


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x81\xa8identity\xa1\xff"])
def test_a_damaged_history_is_no_obstacle(folder: Path, damage: bytes) -> None:
    whole = live(folder)["history"]
    (folder / "history.msgpack").write_bytes(damage)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"a": 1}\n[2]\n{"step": null, "time_unix_s": 1.0}\n{"step": 4, "time_unix_s"')

    assert live(folder)["history"] == whole


def test_an_evaluation_without_a_total_is_no_obstacle(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "time_unix_s": 1e9, "evaluation": {"total": null}}\n')

    assert [point.get("pass_at_1") for point in live(folder)["history"]] == [None] * 4


def test_an_evaluation_before_the_first_step_stands_at_its_own_time(folder: Path) -> None:
    line = b'{"step": 0, "time_unix_s": 1e9, "evaluation": {"total": {"pass_at_1": 0.5}}}\n'
    (folder / "metrics.jsonl").write_bytes(line)

    assert [(point["end_s"], point["pass_at_1"]) for point in live(folder)["history"]] == [(1e9, 0.5)]


def test_a_history_is_continued_by_the_steps_behind_its_end(folder: Path, tmp_path: Path) -> None:
    history = History(folder / "history.msgpack", identity_of(config(tmp_path)))
    history.add(Point(AT_S - 2.0, AT_S + 1.0, 3.0, 1, 1.0, 0.25, 0.0625))
    history.save()

    points = live(folder)["history"]

    assert [(point["step"], point["reward"]) for point in points] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    # The step's span begins where the history ends.
    assert (points[0]["seconds"], points[1]["start_s"], points[1]["seconds"]) == (3.0, AT_S + 1.0, 1.0)
    assert points[1]["tokens_per_s"] == 24.0
    assert [point["step"] for point in live(folder, AT_S + 1.5)["history"]] == [2, 3]


def test_merged_points_have_the_speed_of_their_steps(folder: Path) -> None:
    """Of a long run several steps are one point; the first of a start has no speed."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    first, second = (json.loads(line) for line in lines[:2])
    steps = [first, *({**second, "step": step, "time_unix_s": AT_S + 2.0 * (step - 1)} for step in range(2, 2001))]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))

    points = live(folder)["history"]

    assert len(points) < 2000 and points[0]["seconds"] > 0
    assert {round(point["tokens_per_s"]) for point in points} == {24}


def test_the_state_is_that_of_the_end(folder: Path, tmp_path: Path) -> None:
    checkpoint = save(config(tmp_path), 2, "a")
    EvaluationFile(folder / "evaluations.jsonl").add(evaluation(3, 4))

    answer = live(folder)

    status = answer["status"]
    assert (status["state"], status["step"], status["max_steps"], status["processes"]) == ("ended", 3, 0, [])
    assert (status["run"], status["checkpoint"]) == (folder.name, str(checkpoint))
    assert status["reward_mean"] == 0.75 and status["learning"]["loss"] == -3.0 and status["learning"]["cut"] == 0.25
    assert status["reward_functions"] == {"exact": 0.5, "format": 1.0}
    assert status["staleness_mean_versions"] == 1.0 and status["tokens_per_s"] is None
    assert status["evaluation"]["version"] == 3 and status["evaluation"]["pass_at_1"] == 0.4
    assert status["evaluation"]["cut_ratio"] == evaluation(3, 4).total.cut_ratio
    assert status["ended_unix_s"] >= AT_S + 3602.0
    assert answer["why"] == [
        "The run has stopped at step 3.", f"Its checkpoint of step 2, a folder for from_pretrained: {checkpoint}"
    ]  # fmt: skip


def test_the_evaluation_of_an_undone_version_is_not_shown(folder: Path) -> None:
    """The run went back behind version 4: its steps of then have no line, their evaluation still has its own."""
    file = EvaluationFile(folder / "evaluations.jsonl")
    file.add(evaluation(2, 4))
    file.add(evaluation(4, 5))
    with (folder / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"step": 3, "time_unix_s": 1e9, "evaluation": {"version": 2, "total": {"pass_at_1": 0.4}}}\n')

    shown = live(folder)["status"]["evaluation"]

    assert (shown["version"], shown["pass_at_1"]) == (2, 0.4)


def test_a_run_that_is_complete_has_taken_all_of_its_steps(folder: Path, tmp_path: Path) -> None:
    save(config(tmp_path), 3, "a", complete=True)

    answer = live(folder)

    assert (answer["status"]["step"], answer["status"]["max_steps"]) == (3, 3)
    assert answer["why"][0] == "The run has taken all of its 3 steps."


@pytest.mark.parametrize(
    ("means", "shown"),
    [
        ({"exact": 0.5}, {}),
        ({"exact": 0.5, "exact.steps": 7.0}, {"exact.steps": 7.0}),
        ({"exact": 0.5, "exact.steps": 7.0, "format": 1.0}, {"exact": 0.5, "exact.steps": 7.0, "format": 1.0}),
    ],
)
def test_of_a_single_reward_function_the_further_numbers_are_shown(
    folder: Path, means: dict[str, float], shown: dict[str, float]
) -> None:
    log = StepLog(folder / "metrics.jsonl", after_step=3)
    log.taken(taken(4)._replace(row_means={f"reward/{name}": mean for name, mean in means.items()}))
    log.close()

    assert live(folder)["status"]["reward_functions"] == shown


def test_a_run_without_a_step_and_one_with_numbers_that_are_none_are_shown(folder: Path, tmp_path: Path) -> None:
    log = StepLog(folder / "metrics.jsonl", after_step=0)
    nothing = {"reward_mean": float("nan"), "reward_stddev": float("nan"), "response_length_mean_tokens": float("nan")}
    log.taken(taken(1, **nothing))
    log.close()
    assert [point["step"] for point in live(folder)["history"]] == [1]
    assert live(folder)["status"]["reward_mean"] is None

    (folder / "metrics.jsonl").unlink()

    answer = live(folder)
    assert answer["history"] == [] and answer["status"]["step"] == 0
    assert answer["why"] == ["The run has stopped at step 0.", "It has no checkpoint."]


def test_a_run_of_an_external_trainer_has_the_step_and_the_reward_of_its_history(folder: Path, tmp_path: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    history = History(folder / "history.msgpack", identity_of(config(tmp_path)))
    history.add(Point(AT_S, AT_S + 2.0, 2.0, 7, 4.0, 2.0, 1.5))
    history.add(Point(AT_S + 2.0, AT_S + 4.0, 2.0, 8))
    history.save()

    status = live(folder)["status"]

    assert (status["step"], status["reward_mean"]) == (8, 0.5)


def test_rollouts_come_once(folder: Path) -> None:
    writer = SampleWriter(folder_of(folder), 0, 1 << 20)
    writer.write(Sample(AT_S, 0, 3, 40, 7, "1+1=", 4, '"2"', 1, [SampledResponse(["2"], [], [], [], 1, True, 0.5)]))
    writer.close()
    shown = page(folder)

    first = json.loads(shown.samples(""))
    again = json.loads(shown.samples(first["cursor"]))

    assert [sample["prompt"] for sample in first["samples"]] == ["1+1="] and again["samples"] == []
