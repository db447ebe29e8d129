"""`metrics.jsonl` holds each step once, in order, whatever is killed and wherever training continues."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.telemetry.evaluations import Evaluation, summary
from pipeline.trainer.hooks import TakenStep
from pipeline.trainer.state import Progress
from pipeline.trainer.step_log import StepLog, line_of
from pipeline.trainer.step_stats import StepStats


def stats_of(**values: Any) -> StepStats:
    zeros: dict[str, Any] = {field.name: 0.0 for field in dataclasses.fields(StepStats)}
    rows = {"row_importance_ratios": (1.0,), "row_kl_nats": (), "row_gap_nats": ()}
    empty = {"nonfinite": (), **rows}
    return StepStats(**{**zeros, "kl_loss": None, **empty, **values})


def taken(step: int, **values: Any) -> TakenStep:
    return TakenStep(step, stats_of(**values), [], Progress(step))


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in lines_in(path)]


def write_steps(path: Path, steps: range, *, after_step: int, is_new_run: bool = False) -> None:
    step_log = StepLog(path, after_step=after_step, is_new_run=is_new_run)
    for step in steps:
        step_log.taken(taken(step, loss=float(step)))
    step_log.close()


def test_a_line_has_the_statistics_of_all_ranks_and_null_for_what_is_no_number() -> None:
    stats = stats_of(loss=float("nan"), policy_loss=0.25, gradient_norm=float("inf"), nonfinite=("loss",), rows=8)

    line = json.loads(line_of(7, stats, 1234.5678))

    assert line["step"] == 7 and line["time_unix_s"] == 1234.568
    assert line["policy_loss"] == 0.25 and line["rows"] == 8 and line["nonfinite"] == ["loss"]
    assert line["loss"] is None and line["gradient_norm"] is None and line["kl_loss"] is None
    assert {"entropy_nats", "kl_nats", "response_length_mean_tokens", "clipped_ratio", "reward_mean"} <= line.keys()
    assert not [name for name in line if name.startswith("row_")]


def test_a_line_has_the_means_over_rows_and_the_response_tokens_a_second(tmp_path: Path) -> None:
    now_s = iter([100.0, 102.5, 102.5])
    step_log = StepLog(tmp_path / "metrics.jsonl", after_step=0, monotonic_s=lambda: next(now_s))
    means = {"cut_ratio": 0.25, "staleness_mean_versions": 1.5, "groups_without_signal_ratio": math.nan}
    for step in (1, 2, 3):
        stats = taken(step, response_length_mean_tokens=7.5, rows=8)
        step_log.taken(stats._replace(row_means={**means, "reward/exact": step / 2}))
    step_log.close()

    lines = lines_in(tmp_path / "metrics.jsonl")
    assert [line["reward/exact"] for line in lines] == [0.5, 1.0, 1.5]
    # 60 tokens in 2.5 s; the first step of a start, and one without a span, have no speed.
    assert [line["tokens_per_s"] for line in lines] == [None, 24.0, None]
    assert (lines[0]["cut_ratio"], lines[0]["staleness_mean_versions"]) == (0.25, 1.5)
    assert lines[0]["groups_without_signal_ratio"] is None


def test_the_line_of_a_step_that_trained_nothing_says_so() -> None:
    line = json.loads(line_of(7, stats_of(rows=8, rows_trained=0, tokens_trained=0), 0.0))

    assert (line["rows"], line["rows_trained"], line["tokens_trained"]) == (8, 0, 0)


@given(
    lives=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 400), st.integers(0, 3), st.binary(max_size=8)), max_size=8
    )
)
def test_each_step_has_one_line_whatever_is_torn_and_taken_again(lives: list[tuple[int, int, int, bytes]]) -> None:
    """Each life takes some steps, dies in a line or leaves rubbish; the next one continues some steps earlier."""
    with tempfile.TemporaryDirectory() as folder:
        path, step = Path(folder) / "metrics.jsonl", 0
        for taken, torn_bytes, back, rubbish in lives:
            write_steps(path, range(step + 1, step + taken + 1), after_step=step)
            step += taken
            # The step after the last one died in its line, or a power failure left bytes that nobody wrote.
            with path.open("ab") as file:
                file.write(line_of(step + 1, stats_of(), 0.0)[:torn_bytes] + rubbish)
            step = max(0, step - back)
        write_steps(path, range(step + 1, step + 3), after_step=step)

        assert steps_in(path) == list(range(1, step + 3))


def test_the_lines_of_each_other_run_are_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "state" / "metrics.jsonl"
    write_steps(path, range(1, 4), after_step=0, is_new_run=True)

    write_steps(path, range(1, 3), after_step=0, is_new_run=True)
    write_steps(path, range(1, 2), after_step=0, is_new_run=True)

    assert steps_in(path) == [1]
    assert steps_in(path.with_name("metrics.jsonl.before")) == [1, 2, 3]
    assert steps_in(path.with_name("metrics.jsonl-2.before")) == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("left", "last_step", "size_bytes"), [("", 0, 0), ('{"step":3}\n{"step":9}\n', 3, 22), ('{"step":8}\n', None, 11)]
)
def test_lines_that_are_missing_are_named_in_the_log(
    left: str, last_step: int | None, size_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)

    StepLog(path, after_step=8).close()

    named = f"path={path} last_step={last_step} continues_after_step=8 size_bytes={size_bytes}"
    expected = [] if last_step is None else [f"lines of steps are missing: {named}"]
    assert [record.getMessage() for record in caplog.records] == expected


def test_lines_wait_while_the_disk_is_full_and_none_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step_log = StepLog(tmp_path / "metrics.jsonl", after_step=0)
    write, room = os.pwrite, [10_000]

    def write_some(descriptor: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]], offset)
        room[0] -= written
        return written

    def logged(text: str) -> int:
        return sum(text in record.message for record in caplog.records)

    caplog.set_level("INFO")
    monkeypatch.setattr(os, "pwrite", write_some)
    step_log.taken(taken(1))
    room[0] = 100
    for step in (2, 3):
        step_log.taken(taken(step))
        assert logged("was not written") == 1, "once a cause, at its first step"
    assert logged("written again") == 0
    assert steps_in_whole_lines(tmp_path / "metrics.jsonl") == [1]
    room[0] = 10_000
    step_log.taken(taken(4))
    step_log.close()

    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4] and step_log.lost == 0
    assert (logged("was not written"), logged("written again")) == (1, 1)


@pytest.mark.parametrize("how", ["removed", "moved", "folder", "replaced"])
def test_lines_go_on_in_a_new_file_where_another_program_has_moved_or_removed_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    step_log = StepLog(path := tmp_path / "run" / "metrics.jsonl", after_step=0)
    step_log.taken(taken(1))
    if how == "removed":
        path.unlink()
    elif how == "moved":
        path.rename(tmp_path / "moved")
    elif how == "folder":
        path.parent.rename(tmp_path / "moved")
    else:
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)

    step_log.taken(taken(2))
    step_log.taken(taken(3))
    step_log.close()

    assert steps_in(path) == ([1, 2, 3] if how == "replaced" else [2, 3])
    told = f"the file of steps' lines was moved or removed, they go to a new one: path={path}"
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_lines_that_wait_are_written_before_the_checkpoint_of_their_step_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    step_log = StepLog(tmp_path / "metrics.jsonl", after_step=0)
    step_log.taken(taken(1))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        step_log.taken(taken(2))

    getattr(step_log, end)()

    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2] and step_log.lost == 0
    step_log.close()


def test_lines_that_are_lost_with_the_end_of_a_trainer_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "metrics.jsonl"
    step_log = StepLog(path, after_step=0)
    monkeypatch.setattr(os, "pwrite", refuse)
    step_log.taken(taken(1))
    step_log.taken(taken(2))

    step_log.close()

    assert step_log.lost == 2
    assert caplog.messages[-1] == f"lines of steps are lost: path={path} lines=2"


def test_lines_wait_for_a_file_that_a_start_cannot_open_and_each_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a trainer that starts again while its disk is read-only."""
    path = tmp_path / "metrics.jsonl"
    of_two = Evaluation(2, "", "", 0.0, 4, 1, summary("all", [], 1, 1), [])
    write_steps(path, range(1, 3), after_step=0)
    before = StepLog(path, after_step=2)
    before.evaluated(2, of_two)
    before.taken(taken(3))
    before.close()
    opened, is_read_only = os.open, [True]

    def open_unless_read_only(place: Any, *arguments: Any) -> int:
        if is_read_only[0] and Path(place) == path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(place, *arguments)

    monkeypatch.setattr(os, "open", open_unless_read_only)

    step_log = StepLog(path, after_step=2)
    step_log.evaluated(2, of_two)
    step_log.taken(taken(3))
    step_log.flush()
    is_read_only[0] = False
    step_log.taken(taken(4))
    step_log.close()

    assert [line["step"] for line in lines_in(path)] == [1, 2, 2, 3, 4]
    assert ["evaluation" in line for line in lines_in(path)] == [False, False, True, False, False]
    assert sum("cannot be opened, they wait" in record.message for record in caplog.records) == 1


def steps_in_whole_lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]
