"""A trainer that dies or is stopped goes on as if nothing had happened: the same weights, the same experience."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.daemon.test_ranks import strike
from tests.support.daemon import SMALL, Daemon, loaded_first

pytestmark = pytest.mark.integration
STEPS = 6
# The embedded model knows too little to score: where every response scores the same, nothing is learned.
# A row takes its time, without a core: the run does not end before its kills.
SCORE = """
import time
def of_first_token(input_ids, attention_mask, *, response_start, **_):
    time.sleep(0.01)
    return float(input_ids[response_start] % 5)
"""
IN_STEP = (
    *SMALL,
    "buffer.max_staleness=0",
    f"trainer.max_steps={STEPS}",
    "trainer.critic_warmup_steps=2",
    "daemon.restart_delay_s=0.0004",
    "daemon.restart_limit=50",
    'rewards=["score:of_first_token"]',
)
# Several updates a step. A KL far above its target: its weight rises in each step. Moments of returns and
# scores.
PPO = (
    "rollout.algorithm=ppo",
    "trainer.epochs=2",
    "trainer.mini_batches=2",
    "trainer.kl_coef=0.05",
    "trainer.kl_coef_target=1e-9",
    "trainer.normalize_values=true",
    "rollout.reward_scale=running",
)
# Only a trainer dies of it, counted over all its lives.
DIES_WHILE_PUBLISHING = """
def change_pipeline_models_weights_slot_copy(module):
    # Changed already where it has been taken from a module that was.
    told = getattr(module.combined, "told", module.combined)
    def fingerprint(digests):
        if "trainer" not in open("/proc/self/cmdline").read():
            return told(digests)
        with open({ledger!r}, "a+") as file:
            file.write(".")
        if os.path.getsize({ledger!r}) in {deaths}:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(digests)
    fingerprint.told = told
    module.combined = fingerprint

change_pipeline_models_weights_store = change_pipeline_models_weights_slot_copy
change_pipeline_models_weights_versions = change_pipeline_models_weights_slot_copy
"""
# A worker that copies weights to where its model does not look.
COPIES_ELSEWHERE = """
def change_pipeline_models_weights_store(module):
    fetch = module.WeightsReader.fetch
    def fetch_elsewhere(reader, into, **options):
        if "rollout" not in open("/proc/self/cmdline").read():
            return fetch(reader, into, **options)
        return fetch(reader, {name: tensor.clone() for name, tensor in into.items()}, **options)
    module.WeightsReader.fetch = fetch_elsewhere
"""


def daemon_in(folder: Path, *sets: str, **options) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "score.py").write_text(SCORE)
    return Daemon(folder, *IN_STEP, *sets, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, task):
    """The end of an undisturbed run."""
    with daemon_in(tmp_path_factory.mktemp("undisturbed"), *PPO, task=task) as daemon:
        return daemon.ended()


def test_a_trainer_killed_at_any_moment_ends_with_the_weights_of_an_undisturbed_run(tmp_path, task, undisturbed):
    with daemon_in(tmp_path, *PPO, task=task) as daemon:
        daemon.wait_step(2)
        killed = daemon.signal(signal.SIGKILL, "trainer-0")
        again = daemon.wait_replaced("trainer-0", killed)
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 1)
        os.kill(again, signal.SIGKILL)
        assert daemon.ended() == undisturbed
        assert len(re.findall(r"^\S+ INFO trainer-0 \S+ resumed from shared memory", daemon.errors, re.MULTILINE)) == 2


@pytest.mark.variant
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw_8bit", marks=pytest.mark.needs("bitsandbytes"))])
def test_with_another_optimizer_a_killed_trainer_ends_with_the_weights_of_an_undisturbed_run(tmp_path, task, optimizer):
    sets = (*PPO, f"trainer.optimizer={optimizer}")
    with daemon_in(tmp_path / "undisturbed", *sets, task=task) as daemon:
        expected = daemon.ended()

    with daemon_in(tmp_path / "killed", *sets, task=task) as daemon:
        daemon.wait_step(2)
        daemon.signal(signal.SIGKILL, "trainer-0")
        assert daemon.ended() == expected
        assert "resumed from shared memory" in daemon.errors


def test_a_trainer_killed_while_it_publishes_ends_with_the_weights_of_an_undisturbed_run(tmp_path, task, undisturbed):
    # Two a publish, the training state's and the weights'; two a restart.
    code = DIES_WHILE_PUBLISHING.format(ledger=str(tmp_path / "publishes"), deaths={3, 8})

    with daemon_in(tmp_path, *PPO, task=task, environment=loaded_first(tmp_path, code)) as daemon:
        assert daemon.ended() == undisturbed
        assert len(re.findall(r"trainer-0 ended \(killed by signal 9\)", daemon.errors)) == 2


def test_a_trainer_of_bfloat16_killed_while_it_publishes_has_its_float32_copies_again(tmp_path, task):
    sets = (*PPO, "model.dtype=bfloat16", "trainer.learning_rate=1e-5")
    with daemon_in(tmp_path / "undisturbed", *sets, task=task) as daemon:
        expected = daemon.ended()
    code = DIES_WHILE_PUBLISHING.format(ledger=str(tmp_path / "publishes"), deaths={3, 8})

    with daemon_in(tmp_path / "killed", *sets, task=task, environment=loaded_first(tmp_path, code)) as daemon:
        assert daemon.ended() == expected
        assert daemon.errors.count("resumed from shared memory") == 2


def test_a_trainer_without_the_state_of_each_version_goes_back_and_ends_with_the_same_weights(
    tmp_path, task, undisturbed
):
    # One a publish, two with a training state (versions 0, 3 and that of a rollback), two a restart. Killed at the
    # weights of version 2 and at those of version 5.
    code = DIES_WHILE_PUBLISHING.format(ledger=str(tmp_path / "publishes"), deaths={4, 14})
    settings = (*PPO, "trainer.keep_state_every=3")

    with daemon_in(tmp_path, *settings, task=task, environment=loaded_first(tmp_path, code)) as daemon:
        assert daemon.ended() == undisturbed
        undone = (
            r"^\S+ WARNING trainer-0 \S+ rolled back to the newest version with a training state: version=(\d -> \d)"
        )
        assert re.findall(undone, daemon.errors, re.MULTILINE) == ["1 -> 0", "4 -> 3"]
        sealed, trained, dropped = map(
            int, re.findall(r"experiences: sealed (\d+) = trained (\d+) \+ dropped (\d+)", daemon.errors)[-1]
        )
        assert sealed == trained + dropped
        assert trained == 32 * (STEPS + 1 + 1), "the steps of the versions that were undone, again"
        shown = [*map(int, re.findall(r"\bstep=(\d+)/", daemon.output))]
        assert (max(shown), shown[-1]) == (STEPS, STEPS), "a step that is taken again counts once"


def test_a_run_that_was_stopped_goes_on_where_it_was_and_says_so(tmp_path, task, undisturbed):
    with daemon_in(tmp_path, *PPO, task=task) as daemon:
        daemon.wait_step(2)
        daemon.signal(signal.SIGINT)
        stopped_at, weights, experience = daemon.ended()
    assert int(stopped_at) < STEPS, "stopped before its end"

    with daemon_in(tmp_path, *PPO, task=task, name="second") as daemon:
        assert daemon.ended() == undisturbed
        assert f"resuming: step={stopped_at} path={daemon.run_dir / 'checkpoints'}" in daemon.errors
        assert f"step={STEPS}/{STEPS}" in daemon.output

    notes = [
        json.loads((daemon.run_dir / "checkpoints" / f"step-{step:06d}" / "trainer_state.json").read_text())
        for step in (int(stopped_at), STEPS)
    ]
    assert (notes[0]["fingerprint"], notes[0]["digest"], notes[0]["complete"]) == (weights, experience, False)
    assert [note["version"] for note in notes] == [int(stopped_at), STEPS]
    assert notes[1]["complete"]


@pytest.mark.variant
def test_a_last_checkpoint_that_cannot_be_written_makes_the_exit_code_1(tmp_path, task):
    with daemon_in(tmp_path, "trainer.max_steps=0", task=task) as daemon:
        daemon.wait_step(1)
        daemon.state_dir.mkdir(exist_ok=True)
        (daemon.run_dir / "checkpoints").write_text("in the way")
        daemon.signal(signal.SIGINT)
        assert daemon.wait() == 1, daemon.errors
        assert f"ERROR trainer-0 pipeline.trainer.trainer: checkpoint {daemon.state_dir}" in daemon.errors
        assert "training ended: steps=" in daemon.errors
        assert "trainer-0 has not written the last checkpoint, its error is above" in daemon.errors.splitlines()[-1]

    # For the next start, which this test does not make.
    assert (daemon.shm_dir / "weights").exists()
    shutil.rmtree(daemon.shm_dir)


@pytest.mark.variant
def test_a_worker_whose_model_is_not_what_its_weights_say_ends_the_run_it_is_alone_in(tmp_path, task):
    settings = ("trainer.max_steps=0", "trainer.warmup_steps=0")

    with daemon_in(tmp_path, *settings, task=task, environment=loaded_first(tmp_path, COPIES_ELSEWHERE)) as daemon:
        daemon.wait_logged("does not compute with the weights that it was given: version=")
        assert daemon.wait() == 70, daemon.errors
        assert "rollout-0 failed (exit code 1): " in daemon.errors.splitlines()[-1]


@pytest.mark.variant
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_state_in_memory_a_killed_trainer_does_again_what_its_checkpoint_lacks(tmp_path, task, ranks):
    settings = ("trainer.save_every=4", "trainer.max_steps=8", f"trainer.world_size={ranks}")
    with daemon_in(tmp_path / "undisturbed", *settings, task=task) as daemon:
        expected = daemon.ended()

    with daemon_in(tmp_path, 'trainer.keep_state="disk"', *settings, task=task) as daemon:
        daemon.wait_step(5)
        # The worker has tickets of later prompts in hand.
        strike(daemon, f"trainer-{ranks - 1}", "wait_data")
        result = daemon.ended()
        assert result == expected, "the same prompts, the same weights"
        assert "prompts whose training is undone are issued again" in daemon.errors
        assert re.search(r"WARNING trainer-0 \S+ rolled back to a checkpoint: version=[567] -> 4 step=4", daemon.errors)
        sealed, trained, dropped = map(
            int, re.findall(r"experiences: sealed (\d+) = trained (\d+) \+ dropped (\d+)", daemon.errors)[-1]
        )
        assert sealed == trained + dropped
        assert trained >= 32 * ranks * 9, "steps 5 to 8 after the rollback, on top of 5 before it"
