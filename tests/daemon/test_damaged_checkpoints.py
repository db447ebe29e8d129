"""A start whose newest checkpoint, spool, snapshot or record is damaged ends as an undisturbed run, bit for bit."""

import shutil
from pathlib import Path

import pytest

from pipeline.runtime.latest_checkpoint import read_latest
from pipeline.runtime.lock import shm_directory
from pipeline.telemetry.evaluations import FILE_NAME, read_evaluations
from tests.support.daemon import SMALL, Daemon, loaded_first, only_run, telling_reward

pytestmark = pytest.mark.integration
STEPS = 7
# Checkpoints at 2, 3 (of the best evaluation) and 4; a stop after step 5 writes another one.
ENDS_AFTER = """
def change_pipeline_serial(serial):
    shown = serial._Serial._print_step
    def ending(self, step):
        shown(self, step)
        if step == 5:
            self._trainer.wait_for_checkpoint()
            os.kill(os.getpid(), signal.{signal})
    serial._Serial._print_step = ending
"""
# The trainer alone finds the damage, after all others have begun.
UNDECIDED = """
def change_pipeline_runtime_run_folder(module):
    module.RunFolder.settle = lambda *_: None
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory, task):
    folder = tmp_path_factory.mktemp("settings")
    held_out = folder / "held-out.jsonl"
    held_out.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:5]))
    return (
        *SMALL, "metrics.enabled=false", "buffer.max_staleness=0", "trainer.save_every=2",
        f"trainer.max_steps={STEPS}", "rollout.algorithm=ppo", "trainer.critic_warmup_steps=1",
        "buffer.journal_interval_s=0.01", f"evaluation.files=['{held_out}']", "evaluation.every=3",
    )  # fmt: skip


def run_in(folder, task, settings, *, before=""):
    """Run to the end in one process, which executes some code first."""
    folder.mkdir(exist_ok=True)
    settings = (*settings, *telling_reward(folder))
    first = loaded_first(folder, before)
    with Daemon(folder, *settings, task=task, arguments=("--serial",), environment=first) as run:
        run.wait()
    return run


def evaluated(folder):
    return [(one.version, one.fingerprint) for one in read_evaluations(only_run(folder / "state") / FILE_NAME)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, task, settings):
    """The end of an undisturbed run, and its evaluations."""
    folder = tmp_path_factory.mktemp("undisturbed")
    end = run_in(folder, task, settings).ended()
    assert end[0] == str(STEPS)
    return end, evaluated(folder)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory, task, settings):
    """A run whose machine has crashed after step 5: its shared memory is lost, a snapshot of its rows is there."""
    folder = tmp_path_factory.mktemp("crashed")
    assert run_in(folder, task, settings, before=ENDS_AFTER.format(signal="SIGKILL")).returncode == -9
    shutil.rmtree(shm_directory(folder / "run"))
    assert read_latest(only_run(folder / "state") / "checkpoints").step == 4
    assert list(only_run(folder / "state").glob("journal/*"))
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, task, settings):
    """A run stopped after step 5, with a checkpoint of that step and a spool."""
    folder = tmp_path_factory.mktemp("stopped")
    stopped = run_in(folder, task, settings, before=ENDS_AFTER.format(signal="SIGTERM"))
    assert stopped.returncode == 0, stopped.errors
    assert read_latest(only_run(folder / "state") / "checkpoints").step == 5
    assert list(only_run(folder / "state").glob("spool/*"))
    return folder


def flip(path, place=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 4
    path.write_bytes(content)


def flip_weights(run: Path):
    flip(run / read_newest(run) / "model.safetensors")


def flip_weights_without_snapshot(run: Path):
    flip(run / read_newest(run) / "critic" / "value_head.safetensors", -1)
    shutil.rmtree(run / "journal")


def remove_newest(run: Path):
    shutil.rmtree(run / read_newest(run))


def damage_rows_and_records(run: Path):
    for path in (*run.glob("spool/*"), run / "checkpoints" / "latest.json", run / "run.json"):
        flip(path, 40)


def read_newest(run):
    return Path("checkpoints") / read_latest(run / "checkpoints").path


CASES = [
    ("crashed", flip_weights, "", 3),
    pytest.param("crashed", flip_weights_without_snapshot, "", 3, marks=pytest.mark.variant),
    pytest.param("crashed", lambda run: flip(next(run.glob("journal/*")), 40), "", 4, marks=pytest.mark.variant),
    ("crashed", flip_weights, UNDECIDED, 3),
    ("stopped", remove_newest, "", 4),
    pytest.param("stopped", flip_weights, UNDECIDED, 4, marks=pytest.mark.variant),
    ("stopped", damage_rows_and_records, "", 5),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ended", "damage", "before", "from_step"), CASES)
def test_a_damaged_run_ends_as_an_undisturbed_one(
    tmp_path, request, task, settings, undisturbed, ended, damage, before, from_step
):
    shutil.copytree(request.getfixturevalue(ended) / "state", tmp_path / "state")
    damage(only_run(tmp_path / "state"))

    found = run_in(tmp_path, task, settings, before=before)

    assert (found.ended(), evaluated(tmp_path)) == undisturbed
    assert f"resuming: step={from_step} " in found.errors
