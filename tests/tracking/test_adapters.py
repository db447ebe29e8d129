"""The real libraries, offline: values, tables and the same run after a restart of the process."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.schema import Config
from pipeline.config.sections import missing_tracker
from pipeline.telemetry.samples import SampleWriter, folder_of
from pipeline.tracking.adapters import Mlflow, TrackedRun, mlflow_name, open_tracker
from pipeline.tracking.records import flat, read_progress, read_settings, tracking_dir, write_settings
from tests.tracking.test_records import add, line, sample

PROCESS = """
import sys
from pathlib import Path
from pipeline.tracking import process
process.follow(Path(sys.argv[1]), sys.argv[2],
               lambda place, folder: process.open_tracker(sys.argv[2], process.TrackedRun(
                   place.run_id, "grpo-1", "p", folder, process.read_settings(Path(sys.argv[1])), place.step)),
               wait=lambda _: True)
"""


def needs(name: str) -> None:
    """Skip without a tracker's package; in CI, which installs it, fail."""
    if missing_tracker(name):
        (pytest.fail if os.environ.get("CI") and name == "tensorboard" else pytest.skip)(missing_tracker(name))


def live(run_dir: Path, name: str) -> str:
    """Have a process send all that is new; return the run's id."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(run_dir)}
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS, str(run_dir), name], env=environment, capture_output=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr.decode()[-3000:]
    return read_progress(run_dir / "tracking" / f"{name}.json").run_id


def two_lives(run_dir: Path, name: str) -> str:
    """Have two processes, one after the other, send steps 1 and 2, then 3 and an evaluation; return the run's id."""
    needs(name)
    writer = SampleWriter(folder_of(run_dir), 0, 1 << 20)
    writer.write(sample(1.0, "2", "3|4"))
    writer.close()
    add(run_dir / "metrics.jsonl", line(1, 101.0, loss=0.5), line(2, 102.0, loss=0.25))
    ids = []
    for more in ((line(3, 103.0, loss=0.125), line(3, 104.0, evaluation={"total": {"pass_at_1": 0.75}})), ()):
        ids.append(live(run_dir, name))
        add(run_dir / "metrics.jsonl", *more)
    assert ids[0] and ids[0] == ids[1]
    return ids[0]


READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]); events.Reload()
scalars = {tag: [(e.step, e.wall_time, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
tables = [events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]]
print(json.dumps([scalars, tables]))
"""


def shown_by_tensorboard(run_dir: Path, run_id: str) -> tuple[dict[str, list[list[float]]], list[str]]:
    """Return step, time and value of each scalar, and the tables."""
    folder = run_dir / "tracking" / "tensorboard" / run_id
    shown = subprocess.run(
        [sys.executable, "-c", READ, str(folder)], capture_output=True, check=True, text=True, timeout=200
    )
    scalars, tables = json.loads(shown.stdout.splitlines()[-1])
    return scalars, tables


def test_tensorboard_reads_back_what_was_sent(tmp_path: Path) -> None:
    run_id = two_lives(tmp_path, "tensorboard")

    scalars, (table,) = shown_by_tensorboard(tmp_path, run_id)

    assert scalars == {
        "train/loss": [[1, 101.0, 0.5], [2, 102.0, 0.25], [3, 103.0, 0.125]],
        "evaluation/pass_at_1": [[3, 104.0, 0.75]],
    }
    assert table.splitlines()[0] == "|version|position|prompt|response|answer|reward|stopped|"
    assert [row.split("|")[4] for row in table.splitlines()[2:]] == ["2", "3\\"], "a bar in a cell is escaped"


def settings(run_dir: Path, **trainer: Any) -> None:
    """Write the configuration of a start."""
    tracking_dir(run_dir).mkdir(exist_ok=True)
    judge = {"name": "remote", "url": "http://judge:8000/score"}
    write_settings(run_dir, Config.model_validate({"trainer": trainer, "rewards": ["math", judge]}))


def two_starts(run_dir: Path, name: str) -> str:
    """Have two processes of one run begin with another learning rate each; return the run's id."""
    needs(name)
    ids = []
    for rate in (1e-5, 2e-6):
        settings(run_dir, learning_rate=rate, betas=[0.9, 0.95])
        ids.append(live(run_dir, name))
    assert ids[0] == ids[1]
    return ids[0]


def test_the_configuration_has_a_name_for_each_value(tmp_path: Path) -> None:
    settings(tmp_path, learning_rate=1e-5)

    found = flat(read_settings(tmp_path))

    assert (found["trainer.learning_rate"], found["rollout.algorithm"]) == (1e-5, "grpo")
    assert (found["rewards.0.name"], found["rewards.1.url"]) == ("math", "http://judge:8000/score")
    assert flat({"a": {"b": []}, "c": 1}) == {"a.b": [], "c": 1}


def test_tensorboard_has_the_configuration_of_each_start(tmp_path: Path) -> None:
    run_id = two_starts(tmp_path, "tensorboard")

    _, (first,) = shown_by_tensorboard(tmp_path, run_id)

    assert "|trainer.learning_rate|1e-05|" in first.splitlines() and "|rewards.0.name|math|" in first.splitlines()


def test_mlflow_has_the_configuration_as_parameters_and_what_a_later_start_has_changed_as_tags(tmp_path: Path) -> None:
    run_id = two_starts(tmp_path, "mlflow")

    with sqlite3.connect(tmp_path / "tracking" / "mlflow" / "mlflow.db") as database:
        parameters = dict(database.execute("select key, value from params where run_uuid = ?", [run_id]).fetchall())
        tags = dict(database.execute("select key, value from tags where run_uuid = ?", [run_id]).fetchall())
    database.close()
    assert (parameters["trainer.learning_rate"], parameters["trainer.betas"]) == ("1e-05", "[0.9, 0.95]")
    assert tags["trainer.learning_rate"] == "2e-06" and "trainer.betas" not in tags


def test_a_setting_of_mlflow_that_becomes_the_first_one_again_is_in_force_by_its_tag() -> None:
    parameters: dict[str, str] = {}
    tags: dict[str, str] = {}
    tracker = Mlflow.__new__(Mlflow)
    tracker.run_id = "run"
    tracker._entities = SimpleNamespace(Param=lambda key, value: (key, value))
    tracker._client = SimpleNamespace(
        get_run=lambda _: SimpleNamespace(data=SimpleNamespace(params=dict(parameters), tags=dict(tags))),
        log_batch=lambda _, params: parameters.update(params),
        set_tag=lambda _, key, value: tags.__setitem__(key, value),
    )

    seen = []
    for rate in ("1e-06", "1e-06", "2e-06", "1e-06"):
        tracker._set({"trainer.learning_rate": rate})
        seen.append((parameters["trainer.learning_rate"], tags.get("trainer.learning_rate")))

    assert seen == [("1e-06", None), ("1e-06", None), ("1e-06", "2e-06"), ("1e-06", "1e-06")]


def test_wandb_and_trackio_get_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, config=SimpleNamespace(
        update=lambda values, *, allow_val_change: given.append((values, allow_val_change))))  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda *, config, **_: given.append(config)))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))

    for name in ("wandb", "trackio"):
        open_tracker(name, TrackedRun("", "r", "p", tmp_path, {"trainer": {"seed": 7}}))

    assert given == [({"trainer": {"seed": 7}}, True), {"trainer": {"seed": 7}}]


@pytest.mark.parametrize("sent", [3, 2])
def test_tensorboard_hides_steps_that_were_taken_again_while_no_tracker_ran(tmp_path: Path, sent: int) -> None:
    needs("tensorboard")
    path, evaluation = tmp_path / "metrics.jsonl", {"total": {"pass_at_1": 0.75}}
    add(path, *(line(step, 100.0 + step, loss=float(step)) for step in (1, 2, 3)[:sent]))
    live(tmp_path, "tensorboard")

    path.write_bytes(path.read_bytes()[: len(line(1, 101.0, loss=1.0))])
    add(path, line(2, 112.0, loss=12.0), line(2, 112.5, evaluation=evaluation), line(3, 113.0, loss=13.0))
    scalars, _ = shown_by_tensorboard(tmp_path, live(tmp_path, "tensorboard"))

    assert scalars == {
        "train/loss": [[1, 101.0, 1.0], [2, 112.0, 12.0], [3, 113.0, 13.0]],
        "evaluation/pass_at_1": [[2, 112.5, 0.75]],
    }


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("evaluation/math-500/pass_at_1", "evaluation/math-500/pass_at_1"),
        ("evaluation/gsm8k+math (hard)/pass@1", "evaluation/gsm8k_math _hard_/pass_1"),
        ("evaluation/../pass_at_1", "evaluation/_/pass_at_1"),
    ],
)
def test_a_metric_has_a_name_that_mlflow_takes(name: str, taken: str) -> None:
    assert mlflow_name(name) == taken


def test_mlflow_takes_the_values_of_a_file_of_any_name(tmp_path: Path) -> None:
    needs("mlflow")
    files = [{"name": name, "pass_at_1": 0.5} for name in ("gsm8k+math", "..")]
    add(tmp_path / "metrics.jsonl", line(1, 101.0, evaluation={"total": {}, "files": files}))

    live(tmp_path, "mlflow")

    with sqlite3.connect(tmp_path / "tracking" / "mlflow" / "mlflow.db") as database:
        names = database.execute("select key from metrics order by key").fetchall()
    database.close()
    assert names == [("evaluation/_/pass_at_1",), ("evaluation/gsm8k_math/pass_at_1",)]


def test_mlflow_has_one_run_with_all_values_and_the_table(tmp_path: Path) -> None:
    run_id = two_lives(tmp_path, "mlflow")
    folder = tmp_path / "tracking" / "mlflow"

    with sqlite3.connect(folder / "mlflow.db") as database:
        runs = database.execute("select run_uuid, name, status from runs").fetchall()
        metrics = database.execute("select key, step, timestamp, value from metrics order by timestamp").fetchall()
    database.close()
    assert runs == [(run_id, "grpo-1", "FINISHED")]
    assert metrics == [
        ("train/loss", 1, 101000, 0.5), ("train/loss", 2, 102000, 0.25), ("train/loss", 3, 103000, 0.125),
        ("evaluation/pass_at_1", 3, 104000, 0.75),
    ]  # fmt: skip
    (table,) = folder.rglob("samples/step-000002.json")
    assert [row[3] for row in json.loads(table.read_text())["data"]] == ["2", "3|4"]


def test_mlflow_keeps_each_table_of_a_step() -> None:
    kept: dict[str, Any] = {}
    tracker = Mlflow.__new__(Mlflow)
    tracker.run_id, tracker._table_step = "run", -1
    tracker._client = SimpleNamespace(log_dict=lambda _, content, name: kept.setdefault(name, content))

    for step, prompt in ((1, "a"), (1, "b"), (2, "c")):
        tracker.table(step, [(prompt,)])

    assert [content["data"] for content in kept.values()] == [[["a"]], [["b"]], [["c"]]]
    first, second, third = kept
    assert (first, third) == ("samples/step-000001.json", "samples/step-000002.json")
    assert second.startswith("samples/step-000001-")


def test_wandb_writes_two_parts_of_the_same_run_offline(tmp_path: Path) -> None:
    run_id = two_lives(tmp_path, "wandb")

    parts = sorted((tmp_path / "tracking" / "wandb" / "wandb").glob("offline-run-*"))
    assert [part.name.rpartition("-")[2] for part in parts] == [run_id] * len(parts) and parts
    assert [table for part in parts for table in part.rglob("*.table.json")]


@pytest.mark.parametrize(
    ("variables", "host", "options"),
    [
        ({}, "api.github.com", {"mode": "offline"}),
        ({}, "api.wandb.ai", {}),
        ({"NETRC": "other"}, "api.wandb.ai", {"mode": "offline"}),
        ({"WANDB_BASE_URL": "http://here:8080"}, "api.wandb.ai", {"mode": "offline"}),
        ({"WANDB_BASE_URL": "http://here:8080"}, "here", {}),
        ({"WANDB_API_KEY": "key"}, "api.github.com", {}),
        ({"WANDB_MODE": "online"}, "api.github.com", {}),
    ],
)
def test_wandb_is_offline_without_a_key_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str, options: dict[str, str]
) -> None:
    started: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        started.append(given)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / ".netrc").write_text(f"machine {host} login user password key\n")
    (tmp_path / "other").write_text("machine api.github.com login user password key\ndefault login a password b\n")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)

    open_tracker("wandb", TrackedRun("", "r", "p", tmp_path / "files"))

    (given,) = started
    assert {name: value for name, value in given.items() if name == "mode"} == options


@pytest.mark.parametrize("content", [None, b"machine", b"\xff\xfe"])
def test_wandb_is_offline_with_a_netrc_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    modes: list[str] = []

    def init(*, mode: str, **_: Any) -> Any:
        modes.append(mode)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if content is not None:
        (tmp_path / "netrc").write_bytes(content)

    open_tracker("wandb", TrackedRun("", "r", "p", tmp_path / "files"))

    assert modes == ["offline"]


def test_trackio_has_one_run_with_all_values(tmp_path: Path) -> None:
    run_id = two_lives(tmp_path, "trackio")

    found: list[tuple[Any, ...]] = []
    for path in (tmp_path / "tracking" / "trackio").rglob("*.db"):
        with sqlite3.connect(path) as database:
            found += database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        database.close()
    assert {row[0] for row in found} == {run_id}
    values = [(row[1], json.loads(row[2])) for row in found]
    losses = [(step, value["train/loss"]) for step, value in values if "train/loss" in value]
    assert losses == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert missing_tracker("mlflow") == f"mlflow needs the package mlflow: {sys.executable} -m pip install mlflow"
    assert (
        missing_tracker("tensorboard")
        == f"tensorboard needs the package tensorboard: {sys.executable} -m pip install tensorboard"
    )
