"""The state directory of earlier releases: each part moves to the folder of its run, and is used there."""

import pytest

from pipeline.config.identity import identity_of, run_dir, run_name
from pipeline.runtime.former_layout import adopt
from pipeline.runtime.latest_checkpoint import checkpoints_dir, read_latest
from pipeline.runtime.run_folder import RunFolder, read_note, runs_of
from pipeline.runtime.run_start import open_run
from tests.runtime.test_run_folder import config, save


@pytest.fixture
def state(tmp_path):
    """A state directory of two runs: GRPO took steps 2 and 4, then PPO began and took step 3."""
    state = tmp_path / "state"
    root = state / "checkpoints"
    for step in (2, 4):
        save(config(tmp_path), step, f"grpo {step}", root=root)
    (root / "latest.json").unlink()
    ppo = config(tmp_path, rollout={"algorithm": "ppo"})
    save(ppo, 3, "ppo 3", root=root)
    for name in ("spool", "journal"):
        (state / name).mkdir()
        (state / name / f"{identity_of(ppo)}.safetensors").write_text(name)
    for name in ("samples", "quarantine"):
        (state / name).mkdir()
    (state / "samples" / "rollout-0.samples").write_text("recorded")
    (state / "history.msgpack").write_text("history")
    (state / "log").mkdir()
    return state


def test_each_part_of_an_earlier_releases_state_moves_to_its_run(tmp_path, state):
    grpo, ppo = config(tmp_path), config(tmp_path, rollout={"algorithm": "ppo"})

    open_run(ppo, tmp_path / "shm")

    assert sorted(path.name for path in state.iterdir()) == ["log", "runs"]
    assert sorted(path.name for path in (state / "runs").iterdir()) == sorted([run_name(grpo), run_name(ppo)])
    assert read_latest(checkpoints_dir(ppo)).path == "step-000003"
    assert read_latest(checkpoints_dir(grpo)).path == "step-000004", "it had none: the PPO run had removed it"
    assert (checkpoints_dir(grpo) / "step-000002" / "token").read_text() == "grpo 2"
    for name in ("spool", "journal"):
        assert (run_dir(ppo) / name / f"{identity_of(ppo)}.safetensors").read_text() == name
    assert (run_dir(ppo) / "samples" / "rollout-0.samples").read_text() == "recorded"
    assert (run_dir(ppo) / "history.msgpack").read_text() == "history"


def test_a_run_found_there_is_continued_by_its_own_start(tmp_path, state):
    open_run(config(tmp_path, rollout={"algorithm": "ppo"}), tmp_path / "shm")
    grpo = config(tmp_path, trainer={"max_steps": 4})

    said = open_run(grpo, tmp_path / "shm")

    assert "complete: step 4 of trainer.max_steps = 4" in said
    assert read_note(run_dir(grpo)).identity == identity_of(grpo)
    assert sorted(run.latest.step for run in runs_of(state)) == [3, 4]


def test_the_rows_of_another_run_wait_for_the_start_of_that_run(tmp_path, state):
    grpo, ppo = config(tmp_path), config(tmp_path, rollout={"algorithm": "ppo"})

    open_run(grpo, tmp_path / "shm")
    waiting = state / "spool" / f"{identity_of(ppo)}.safetensors"
    assert waiting.exists()
    open_run(ppo, tmp_path / "shm")

    assert not waiting.exists()
    assert (run_dir(ppo) / "spool" / waiting.name).read_text() == "spool"


def test_a_part_whose_place_is_taken_stays(tmp_path, state, caplog):
    grpo = config(tmp_path)
    RunFolder(grpo).claim()
    save(grpo, 4, "of this release")

    adopt(grpo)

    assert (checkpoints_dir(grpo) / "step-000004" / "token").read_text() == "of this release"
    assert (state / "checkpoints" / "step-000004" / "token").read_text() == "grpo 4"
    assert "its place is taken" in caplog.text


def test_the_record_names_the_latest_not_the_highest_step(tmp_path):
    """Another run of the same configuration, begun afresh, was at a lower step."""
    of = config(tmp_path)
    root = tmp_path / "state" / "checkpoints"
    save(of, 9, "before", root=root)
    (root / "latest.json").unlink()
    save(of, 2, "now", root=root)

    open_run(of, tmp_path / "shm")

    assert read_latest(checkpoints_dir(of)).path == "step-000002"
