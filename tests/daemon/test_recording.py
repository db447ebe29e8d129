"""Steps of a real run with kills, recorded and taken again: each has the recorded digests bit for bit."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipeline import recorded_batches
from pipeline.errors import ConfigError, DecodeError
from pipeline.runtime.run_folder import read_note, write_note
from pipeline.storage.recording import LINES, RecordLine, read_recording, rows_path
from pipeline.trainer.recording.replay import Replay, report, train
from pipeline.trainer.step_stats import StepStats
from tests.support.daemon import SMALL, Daemon, rlhfd, telling_reward, total
from tests.support.recording import rewrite

pytestmark = pytest.mark.integration

KILLS = 2


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def run_with_kills(folder: Path, task: Path, *sets: str) -> tuple[Path, tuple[str, str, str]]:
    """Run some steps through kills of the trainer and of the whole instance; return the run's folder and its end."""
    settings = (*SMALL, "trainer.save_every=4", "trainer.critic_warmup_steps=1", "trainer.warmup_steps=12",
                "daemon.restart_delay_s=0.05",
                "trainer.record=rows", *telling_reward(folder), *sets)  # fmt: skip
    with Daemon(folder, *settings, task=task) as daemon:
        for _ in range(KILLS):
            daemon.wait_ready()
            daemon.wait_step(daemon.status()["step"] + 2)
            before = daemon.pids()["trainer-0"]
            daemon.signal(signal.SIGKILL, "trainer-0")
            daemon.wait_until(lambda before=before: daemon.pids().get("trainer-0") not in (None, before), "restarted")
        daemon.wait_ready()
        daemon.wait_step(max(5, daemon.status()["step"] + 1))
        # Shared memory goes with the instance: training continues at the last checkpoint, some steps back.
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with Daemon(folder, *settings, task=task, name="again") as daemon:
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 3)
        metrics = daemon.metrics()
        daemon.signal(signal.SIGTERM)
        end = daemon.ended()
        assert not daemon.leftovers()
    assert total(metrics, "rlhfd_recordings_total", result="kept") >= 3
    assert total(metrics, "rlhfd_recording_bytes") > 0
    results = [dict(labels).get("result") for name, labels in metrics if name == "rlhfd_recordings_total"]
    assert sorted(filter(None, results)) == ["failed", "kept", "removed", "too_large"]
    return daemon.run_dir, end


@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.variant), "ppo"])
def test_recorded_steps_of_a_killed_run_are_replayed_bit_for_bit(
    tmp_path: Path,
    task: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
) -> None:
    normalized = ("trainer.normalize_values=true", "rollout.reward_scale=running") if algorithm == "ppo" else ()
    run, (steps, weights, experiences) = run_with_kills(tmp_path, task, f"rollout.algorithm={algorithm}", *normalized)
    last, folder = int(steps), run / "recording"
    middle = last - 2

    recording = read_recording(folder)
    assert [*recording.steps] == list(range(1, last + 1)), "each step once, in order"
    assert all(recording.has_rows(step) for step in recording.steps) and len(recording.starts) >= 2
    assert (recording.weights[last].weights, recording.steps[last].experiences) == (weights, experiences)
    assert len({found.weights for found in recording.weights.values()}) == last + 1, "each step changed the weights"
    for step in (middle, last):
        answer = rlhfd("replay", "--step", str(step), "--run", str(run), folder=tmp_path)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        recorded = f"weights={recording.weights[step].weights} experiences={recording.steps[step].experiences}"
        assert answer.stdout.splitlines()[-1] == f"step {step}: {recorded}: equal to the recorded ones"

    answer = rlhfd("record", "--run", str(run), "--last", "3", "--json", folder=tmp_path)
    listed = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [entry["step"] for entry in listed] == [last - 2, last - 1, last], answer.stderr
    assert listed[-1]["weights"] == weights and listed[-1]["rows"] == 32 and listed[-1]["bytes"] > 0
    assert listed[-1]["replayed_from"] == f"step-{Replay(run, last).base:06d}"

    skips_checkpoints_that_are_damaged_or_of_another_history(run, last)
    lines: list[str] = []
    shutil.rmtree(run / "checkpoints")
    assert report(run, 2, "cpu", debug=False, write=lines.append), lines
    assert lines[0] == "step 2 from the start of the run, on cpu" and len(lines) == 4
    batches = [*recorded_batches(folder)]
    assert [len(batch.sequences) for batch in batches] == [32] * last

    # Under pdb, which stops in the step with its rows at hand.
    monkeypatch.setattr(sys, "stdin", io.StringIO("p [len(each) for each in batches]\ncontinue\n"))
    assert report(run, 2, "cpu", debug=True, write=lines.append), lines
    assert "(Pdb) [32]" in capsys.readouterr().out

    # A trainer without a worker or a daemon learns the same from the rows: each statistic of each step.
    trained: list[str] = []
    train(Replay(run, last).config, run, "cpu", write=trained.append)
    logged = (run / "metrics.jsonl").read_text().splitlines()
    assert [lasting(line) for line in trained] == [lasting(line) for line in logged]

    # A flipped byte is found, in rows and in a line; so is another value in a whole line.
    path = rows_path(folder, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with pytest.raises(DecodeError, match="is not the one that was saved"):
        report(run, 2, "cpu", debug=False, write=lines.append)
    path.write_bytes(whole)
    text = (folder / LINES).read_text()
    known = recording.weights[2].weights
    (folder / LINES).write_text(text.replace(known, f"{int(known, 16) ^ 1:016x}"))
    with pytest.raises(ConfigError, match=r"steps\.jsonl:\d+: damaged: its seal is not"):
        report(run, 2, "cpu", debug=False, write=lines.append)
    (folder / LINES).write_text(text)
    rewrite(folder, lambda line: with_weights(line, 2, int(known, 16) ^ 1))
    assert not report(run, 2, "cpu", debug=False, write=lines.append)
    assert lines[-1].startswith(f"step 2: weights={known}") and "differs, weights=" in lines[-1]
    (folder / LINES).write_text(text)
    refuses_what_it_cannot_replay(run, last)


def with_weights(line: RecordLine, step: int, weights: int) -> RecordLine:
    """Return a line, that of a step's published weights with these."""
    if line.step != step or line.published is None:
        return line
    published = msgspec.structs.replace(line.published, weights=f"{weights:016x}")
    return msgspec.structs.replace(line, published=published)


def lasting(line: str) -> dict[str, Any]:
    """Return the statistics of a step without its times and without those of its rows, which a replay lacks."""
    of_step = {"step", *(field.name for field in dataclasses.fields(StepStats))}
    found = {name: value for name, value in json.loads(line).items() if name in of_step and not name.endswith("_s")}
    assert len(found) > 10
    return found


def skips_checkpoints_that_are_damaged_or_of_another_history(run: Path, last: int) -> None:
    """Take them away from the run, the newest before its last step first."""
    replay = Replay(run, last)
    steps = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert replay.base == max(step for step in steps if step < last)
    before = max((step for step in steps if step < replay.base), default=0)
    checkpoint = run / "checkpoints" / f"step-{replay.base:06d}"
    note = checkpoint / "trainer_state.json"
    text = note.read_text()
    digest = json.loads(text)["digest"]
    note.write_text(text.replace(digest, f"{int(digest, 16) ^ 1:016x}"))
    assert Replay(run, last).base == before
    note.write_text(text)
    model = checkpoint / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert Replay(run, last).base == before
    model.write_bytes(whole)
    assert Replay(run, last).base == replay.base


def refuses_what_it_cannot_replay(run: Path, last: int) -> None:
    """Take one thing after the other from a run without checkpoints."""
    folder = run / "recording"
    with pytest.raises(ConfigError, match=f"step {last + 1} is not recorded: steps 1 to {last} are"):
        Replay(run, last + 1)
    rows = rows_path(folder, 1).read_bytes()
    rows_path(folder, 1).unlink()
    with pytest.raises(ConfigError, match=r"is the start of the run, and 1 of .* first step 1: its rows were removed"):
        Replay(run, 3)
    lines = (folder / LINES).read_bytes()
    (folder / LINES).write_bytes(b"".join(line for line in lines.splitlines(True) if b'"step":2,' not in line))
    with pytest.raises(ConfigError, match=f"step 2 is not recorded: steps 1 to {last} are, but for 1 of them"):
        Replay(run, 2)
    (folder / LINES).write_bytes(lines)
    note = read_note(run)
    assert note is not None
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"run\.json is missing"):
        Replay(run, 2)
    write_note(run, msgspec.structs.replace(note, identity="0" * 32))
    with pytest.raises(ConfigError, match="is of another run"):
        Replay(run, 2)
    write_note(run, note)
    rows_path(folder, 1).write_bytes(rows)
    first = read_recording(folder).starts[0][1]
    first.config["trainer"] |= {"learning_rate": 0.5, "of_another_release": 1}
    rewrite(folder, lambda line: msgspec.structs.replace(line, start=first) if line.start and not line.step else line)
    with pytest.raises(ConfigError, match=r"this release: trainer\.of_another_release: Extra [^\n]*$"):
        Replay(run, 2)
    del first.config["trainer"]["of_another_release"]
    rewrite(folder, lambda line: msgspec.structs.replace(line, start=first) if line.start and not line.step else line)
    with pytest.raises(ConfigError, match=r"step \d+ was taken with other settings of \[model\], \[rollout\]"):
        Replay(run, last)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="no recording in"):
        Replay(run, 2)
