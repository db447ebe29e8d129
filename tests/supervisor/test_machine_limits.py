"""Limits of the machine at the size of one decision: open files, a full disk, clocks that step, nothing to learn."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import logging
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipeline
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, GaveUpError
from pipeline.models.weights.held import HeldVersion
from pipeline.models.weights.store import WeightsPublisher
from pipeline.progress import Telemetry
from pipeline.runtime.child_process import allow_descriptors
from pipeline.storage.arena import Arena
from pipeline.supervisor.fleet import Fleet
from pipeline.supervisor.placement import Devices
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.saving.background import Point
from tests.buffer.test_quarantine import place
from tests.trainer.test_checkpoints import files_of_at_most
from tests.trainer.test_trainer import Bench

__all__ = ["place"]
PACKAGE = Path(pipeline.__file__).parent
DAY_S = 86400.0

SHOWN_TO_PEOPLE = {
    "buffer/metrics.py": 1,
    "supervisor/status.py": 1,
    "telemetry/log.py": 2,
    "telemetry/log_lines.py": 3,
    "telemetry/reader.py": 1,
    "supervisor/page.py": 1,
    "buffer/quarantine.py": 2,
    "supervisor/reload.py": 2,
    "rollout/metrics.py": 1,
    "rollout/sample_recorder.py": 1,
    "cli/samples.py": 2,
    "trainer/metrics.py": 2,
    "trainer/external_metrics.py": 1,
    "trainer/recording/recorder.py": 1,
    "trainer/recording/replay.py": 1,
    "trainer/step_log.py": 1,
    "runtime/run_folder.py": 3,
    "cli/runs.py": 2,
    "rollout/evaluation/alone.py": 1,
    "telemetry/evaluations.py": 1,
    "tracking/adapters.py": 2,
    # A type of values in tables.
    "prompts/tables.py": 1,
    # How long ago another process began to make a folder: a file's time has no other clock.
    "replay/client.py": 1,
}
"""Calls of the wall clock: names of files, log lines and gauges that say when."""

_WALL_CLOCK = {"time", "time_ns", "localtime", "gmtime", "strftime", "now", "utcnow", "today", "ctime"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@contextmanager
def open_files_of_at_most(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Shared memory.


@pytest.mark.parametrize("name", ["arena", "weights", "metrics"])
def test_every_page_is_allocated_when_a_file_is_made(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "arena":
        Arena.create(path, payload_bytes=1 << 20, ledger_bytes=1 << 16, layout=1)
    elif name == "weights":
        # The training state's file is of the same make.
        WeightsPublisher(path, {"w": torch.zeros(1 << 16)}).close()
    else:
        MetricsSlab.create(path, [SlotName("supervisor"), SlotName("buffer")]).close()

    found = path.stat()
    # A page that is missing is a SIGBUS at the first write to it, once others have filled the file system.
    assert found.st_blocks * 512 >= found.st_size > 0


# File descriptors.


def limits_after(soft: int, hard: int, children: int, scorers: int, clients: int) -> str:
    """Return the limit of open files of a fresh process after `allow_descriptors`, or why it was refused."""
    code = f"""
import resource
from pipeline.errors import ConfigError
from pipeline.progress import Telemetry
from pipeline.runtime.child_process import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    allow_descriptors({children}, {scorers}, {clients})
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
except ConfigError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_a_low_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    # 128 and 8 for each of 3 processes.
    assert limits_after(64, 152, children=3, scorers=1, clients=0) == "152 152"


@pytest.mark.parametrize(
    ("children", "scorers", "clients", "needed"), [(3, 1, 0, 152), (3, 1, 256, 408), (3, 100, 256, 528)]
)
def test_a_limit_of_open_files_that_stays_too_low_is_refused_with_both_numbers(
    children: int, scorers: int, clients: int, needed: int
) -> None:
    words = limits_after(64, needed - 1, children, scorers, clients)

    assert words == f"the limit of open files is {needed - 1}, {needed} are needed: raise it (ulimit -n, LimitNOFILE=)"


def test_a_limit_that_may_not_be_raised_is_left_alone_where_it_is_enough() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    with pytest.raises(ConfigError, match="are needed"):
        allow_descriptors(1, 1 << 20)

    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_child_for_which_there_is_no_descriptor_ends_the_run_and_leaves_none_open(tmp_path: Path) -> None:
    slots = [SlotName("supervisor"), SlotName("buffer")]
    slab = MetricsSlab.create(tmp_path / "metrics", slots)
    slab.begin("supervisor")
    fleet = Fleet(
        str(tmp_path),
        slab,
        Config(),
        clock=time.monotonic,
        on_reaped=lambda: None,
        on_end=lambda slot, code: None,
        on_change=lambda slot: None,
        on_line=lambda slot, line: None,
    )
    slot = fleet.add("buffer", 0, Devices("", ()))

    def open_now() -> set[int]:
        # The one by which the list was read is in it, and gone.
        return {int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").is_symlink()}

    async def start() -> None:
        before = open_now()
        free = [number for number in range(1000) if number not in before]
        # Two pipes take four, and to start a process takes three.
        for room in range(7):
            with open_files_of_at_most(free[room]), pytest.raises(GaveUpError, match=r"^buffer cannot be started: "):
                fleet.start(slot)
            assert open_now() == before

    asyncio.run(start())

    assert slot.child is None
    slab.close()


# A full disk, and steps that teach nothing.


def test_a_full_disk_costs_the_copy_in_quarantine_and_leaves_no_half_of_it(
    place: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with files_of_at_most(1000):
        place.quarantine.keep([(place.records[0], [0])], "checksum", "torn")

    assert place.counted == ["error"]
    assert list(place.folder.iterdir()) == []
    assert "not kept in quarantine: " in caplog.text


def test_a_checkpoint_that_failed_is_tried_again_when_the_next_is_due_and_at_the_end(bench: Bench) -> None:
    tried: list[int] = []

    def save(point: Point, held: HeldVersion | None, telemetry: Telemetry) -> Path:
        tried.append(point.progress.step)
        raise CheckpointError("the disk is full")

    bench.save = save  # type: ignore[method-assign]
    trainer = bench.trainer(save_every=3, max_steps=8)

    while not trainer.finished:
        bench.turns(trainer, 1)

    assert not trainer.close()
    bench.house.turn(work=False)
    assert tried == [3, 6, 8]


def idle(bench: Bench, steps: list[int]) -> None:
    """Let these steps of the bench's learner train on nothing."""
    update = bench.learner.update
    bench.learner.update = lambda experiences, **more: dataclasses.replace(  # type: ignore[method-assign]
        stats := update(experiences, **more), tokens_trained=0 if stats.step in steps else stats.tokens_trained
    )


def test_steps_that_teach_nothing_are_told_once_and_versions_go_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    idle(bench, list(range(2, 30)))
    trainer = bench.trainer(max_steps=30)

    with caplog.at_level(logging.WARNING, "pipeline.trainer.step_stats"):
        bench.run(trainer)

    told = [record.getMessage() for record in caplog.records if record.name == "pipeline.trainer.step_stats"]
    assert told == ["nothing to learn from, in every group all rewards are equal: steps_in_a_row=20"]
    assert trainer.step == 30 and trainer.version.version == 30


def test_steps_without_a_token_name_the_responses_that_were_cut_if_those_are_left_out(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    idle(bench, list(range(1, 30)))
    trainer = bench.trainer(max_steps=21, mask_cut_responses=True)
    means = trainer._row_means.means
    trainer._row_means.means = lambda ranks: {**means(ranks), "cut_ratio": 1.0}  # type: ignore[method-assign]

    with caplog.at_level(logging.WARNING, "pipeline.trainer.step_stats"):
        bench.run(trainer)

    (told,) = [record.getMessage() for record in caplog.records if record.name == "pipeline.trainer.step_stats"]
    assert "trainer.mask_cut_responses leaves out" in told and told.endswith("steps_in_a_row=20 cut_ratio=1.00")


def test_a_step_that_teaches_something_begins_the_count_anew(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    idle(bench, [*range(1, 20), *range(21, 40)])

    with caplog.at_level(logging.WARNING, "pipeline.trainer.step_stats"):
        bench.run(bench.trainer(max_steps=40))

    assert not [record for record in caplog.records if record.name == "pipeline.trainer.step_stats"]


@pytest.mark.parametrize(("first", "count"), [(0.0, 1), (0.25, 0)])
def test_rewards_that_are_all_0_from_the_start_are_told_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, first: float, count: int
) -> None:
    update = bench.learner.update
    bench.learner.update = lambda experiences, **more: dataclasses.replace(  # type: ignore[method-assign]
        stats := update(experiences, **more), reward_mean=first if stats.step == 1 else 0.0, reward_stddev=0.0
    )

    with caplog.at_level(logging.WARNING, "pipeline.trainer.step_stats"):
        bench.run(bench.trainer(max_steps=12))

    told = [message for message in caplog.messages if message.startswith("all rewards so far are 0")]
    assert [message.endswith("steps=5") for message in told] == [True] * count


# Clocks.


def reads_the_wall_clock(node: ast.AST) -> bool:
    """Whether a node is a reference to a function that reads the wall clock."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in _WALL_CLOCK
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) in ("time", "datetime", "date")
    )


def test_the_wall_clock_is_read_for_what_people_are_shown_and_for_no_decision() -> None:
    found, imported = Counter[str](), []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            found[name] += reads_the_wall_clock(node)
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                imported.append(path.name)

    assert +found == SHOWN_TO_PEOPLE
    assert imported == [], "by name, a call would not be found here"


def test_a_clock_that_steps_changes_nothing_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str) -> tuple[object, ...]:
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name)
        trainer = bench.trainer(max_steps=6, save_every=2)
        bench.run(trainer)
        totals = dataclasses.astuple(bench.house.ledger.totals)
        bench.close()
        return trainer.progress, bench.saved, totals

    steady = run("steady")
    real, calls = time.time, iter(range(1 << 30))
    # Back and forth by days, at each look.
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(calls) * 5 * DAY_S)

    assert run("stepping") == steady
    assert next(calls) > 0, "the clock was read"
