"""Lines and samples of a run as a tracker gets them, through rollbacks and restarts of the tracker."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

from pipeline.telemetry.samples import Sample, SampledResponse, SampleWriter, folder_of
from pipeline.tracking.records import (
    COLUMNS,
    LineFollower,
    Progress,
    SampleFollower,
    read_progress,
    record_of,
    write_progress,
)


def line(step: int, unix_s: float, **fields: Any) -> bytes:
    return json.dumps({"step": step, "time_unix_s": unix_s, **fields}).encode() + b"\n"


def add(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(lines))


def steps(follower: LineFollower) -> list[int]:
    return [record.step for record in follower.read()]


def test_numbers_of_a_step_and_of_an_evaluation_have_names_of_their_own() -> None:
    step = record_of(line(7, 1.5, loss=0.25, rows=8, kl_loss=None, nonfinite=[], name="x", flag=True))
    summary = {"name": "all", "prompts": 3, "pass_at_1": 0.5, "cut_ratio": None}
    files = [{**summary, "name": "math"}, {**summary, "name": "aime", "pass_at_1": 0.0}]
    evaluation = record_of(line(7, 1.6, evaluation={"version": 7, "total": summary, "files": files}))

    assert step is not None and (step.step, step.unix_s) == (7, 1.5)
    assert step.values == {"train/loss": 0.25, "train/rows": 8.0}
    assert evaluation is not None and evaluation.values == {
        "evaluation/prompts": 3.0, "evaluation/pass_at_1": 0.5, "evaluation/math/prompts": 3.0,
        "evaluation/math/pass_at_1": 0.5, "evaluation/aime/prompts": 3.0, "evaluation/aime/pass_at_1": 0.0,
    }  # fmt: skip


def test_what_is_no_line_of_a_step_is_left_out() -> None:
    for data in (b"\n", b"{}\n", b"[1]\n", b'{"step": "x", "time_unix_s": 1}\n', b"\xff\n", b'{"step": 1'):
        assert record_of(data) is None


def test_each_line_comes_once_and_a_torn_one_once_it_is_whole(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", LineFollower(tmp_path)
    assert steps(follower) == []

    add(path, line(1, 1.0), line(2, 2.0)[:9])
    assert steps(follower) == [1]
    add(path, line(2, 2.0)[9:], line(3, 3.0))
    assert steps(follower) == [2, 3]
    assert steps(follower) == []


def test_steps_that_are_taken_again_come_again(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", LineFollower(tmp_path)
    add(path, *(line(step, float(step)) for step in (1, 2, 3)))
    assert steps(follower) == [1, 2, 3]

    # Cut behind step 1, then longer than before between two reads.
    path.write_bytes(line(1, 1.0))
    add(path, *(line(step, step + 10.0) for step in (2, 3, 4, 5)))

    assert steps(follower) == [2, 3, 4, 5]
    path.write_bytes(path.read_bytes()[: len(line(1, 1.0))])
    assert steps(follower) == []
    add(path, line(2, 30.0))
    assert steps(follower) == [2]


def test_a_successor_goes_on_behind_the_last_line_that_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, *(line(step, float(step)) for step in range(1, 6)))

    assert steps(LineFollower(tmp_path, after_unix_s=3.0)) == [4, 5]


def test_a_line_of_more_than_a_mebibyte_and_those_behind_it_come(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", LineFollower(tmp_path)
    add(path, line(1, 1.0), line(2, 2.0, nonfinite=["x" * (3 << 20)])[:-1])

    assert steps(follower) == [1]
    add(path, b"\n", line(3, 3.0))
    assert steps(follower) == [2, 3]


def test_the_lines_of_a_long_run_are_not_held_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, *(line(step, float(step), loss=0.5, name="x" * 1000) for step in range(1, 16 << 10)))
    tracemalloc.start()

    seen = sum(1 for _ in LineFollower(tmp_path).read())

    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == (16 << 10) - 1 and most_bytes < path.stat().st_size / 4


def test_lines_and_samples_come_though_the_wall_clock_has_stepped_back(tmp_path: Path) -> None:
    path, writer = tmp_path / "metrics.jsonl", SampleWriter(folder_of(tmp_path), 0, 1 << 20)
    lines, samples = LineFollower(tmp_path), SampleFollower(tmp_path)
    add(path, line(1, 5000.0))
    writer.write(sample(5000.0, "2"))
    assert (steps(lines), len(samples.read())) == ([1], 1)

    add(path, line(2, 1000.0))
    writer.write(sample(1000.0, "3"))

    assert (steps(lines), len(samples.read())) == ([2], 1)
    writer.close()


def test_progress_is_kept_and_a_damaged_one_is_that_of_a_new_run(tmp_path: Path) -> None:
    path = tmp_path / "tracking" / "wandb.json"
    assert read_progress(path) == Progress()

    write_progress(path, Progress("abc", 2.5, 1.0, 7))
    assert read_progress(path) == Progress("abc", 2.5, 1.0, 7)
    path.write_bytes(b'{"run_id"')
    assert read_progress(path) == Progress()


def sample(unix_s: float, *responses: str) -> Sample:
    made = [SampledResponse(list(text), [], [], [], len(text), True, 0.5) for text in responses]
    return Sample(unix_s, 0, 3, 40, 7, "1+1=", 4, '"2"', 2, made)


def test_new_samples_are_rows_of_a_table(tmp_path: Path) -> None:
    writer = SampleWriter(folder_of(tmp_path), 0, 1 << 20)
    follower = SampleFollower(tmp_path)
    writer.write(sample(1.0, "2", "3"))

    rows = follower.read()

    assert [dict(zip(COLUMNS, row, strict=True)) for row in rows] == [
        {"version": 7, "position": 40, "prompt": "1+1=", "response": text, "answer": '"2"', "reward": 0.5,
         "stopped": True}
        for text in ("2", "3")
    ]  # fmt: skip
    assert follower.read() == []
    writer.write(sample(2.0, "4"))
    assert len(SampleFollower(tmp_path, after_unix_s=follower.after_unix_s).read()) == 1
    writer.close()
