"""Runs of one state directory: none is lost whatever is started after it, and each says where its model is."""

import json

import pytest
from transformers import AutoModelForCausalLM

from pipeline.runtime.latest_checkpoint import read_latest
from tests.support.daemon import SMALL, Daemon, rlhfd

pytestmark = pytest.mark.integration


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent != folder}


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_finished_run_stays_whatever_is_started_after_it(tmp_path, task):
    settings = (*SMALL, "trainer.save_every=1", "samples.per_minute=0")
    with Daemon(tmp_path, *settings, "trainer.max_steps=3", task=task) as daemon:
        assert daemon.wait() == 0, daemon.errors
    grpo = daemon.run_dir
    model = grpo / "checkpoints" / "step-000003"
    assert daemon.errors.splitlines()[-1].endswith(f"checkpoint, a folder for from_pretrained: {model}")
    AutoModelForCausalLM.from_pretrained(model)
    finished = files_of(grpo)

    with Daemon(tmp_path, *settings, "trainer.max_steps=3", task=task, name="again") as daemon:
        assert daemon.wait() == 0, daemon.errors
    assert "is complete: step 3 of trainer.max_steps = 3; raise trainer.max_steps to go on" in daemon.output
    assert str(model) in daemon.output and files_of(grpo) == finished

    listed = rlhfd("runs", "--json", "--config", configured(tmp_path), folder=tmp_path)
    runs = json.loads(listed.stdout)
    assert [(run["algorithm"], run["step"], run["state"]) for run in runs] == [("grpo", 3, "complete")]
    assert runs[0]["name"] == grpo.name and runs[0]["checkpoint"] == str(model)

    back = ("--from", "step-2")
    with Daemon(tmp_path, *settings, "trainer.max_steps=4", task=task, arguments=back, name="back") as daemon:
        assert daemon.wait() == 0, daemon.errors
        assert "resuming: step=2 " in daemon.errors
    aside = grpo / "aside" / "1-from-step-000002" / "checkpoints" / "step-000003"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == {
        path.name: content for path, content in finished.items() if path.parent == model
    }
    assert read_latest(grpo / "checkpoints").step == 4

    with Daemon(tmp_path, *settings, "trainer.max_steps=1", task=task, arguments=("--fresh",), name="fresh") as daemon:
        assert daemon.wait() == 0, daemon.errors
        assert f"run={grpo.name} checkpoints=" in daemon.errors
    assert [path.name for path in (grpo / "checkpoints").glob("step-*")] == ["step-000001"]


def configured(folder):
    """Return a configuration by which commands find the state directory of no running instance."""
    file = folder / "config.toml"
    file.write_text('[daemon]\nruntime_dir = "run"\nstate_dir = "state"\n')
    return str(file)
