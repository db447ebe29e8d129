"""A daemon whose engine sleeps while the trainer steps."""

import os
import shutil
import signal

import pytest

from tests.support import row_stream
from tests.support.daemon import SMALL, Daemon, loaded_first, telling_reward, total

pytestmark = pytest.mark.integration

# An engine that writes when it is awake.
ENGINE = """
import os
from my_engine import RowStream

def note(event):
    with open({log!r}, "a") as file:
        file.write(f"{{event}} {{os.getpid()}}\\n")

class Sleeper(RowStream):
    asleep = False

    def step(self):
        assert not self.asleep
        return super().step()

    def sleep(self):
        assert not self._rows
        self.asleep = True
        # What level 2 of vLLM leaves of the weights.
        for parameter in self._model.parameters():
            parameter.data.fill_(float("nan"))
        note("sleep")

    def wake(self):
        note("wake")
        self.asleep = False

def new_engine(actor, *, directory, device, on_progress):
    note("wake")
    return Sleeper(actor, on_progress, room_rows=64)
"""
# The trainer writes when it steps.
STEPS = """
def note(event):
    with open({log!r}, "a") as file:
        file.write(f"{{event}} {{os.getpid()}}\\n")

def change_pipeline_trainer_learner(module):
    update = module.Learner.update
    def noted(self, experiences, **more):
        note("step")
        time.sleep({pause_s})
        found = update(self, experiences, **more)
        note("stepped")
        return found
    module.Learner.update = noted
"""


def sleeping(folder, task, *sets, steps=6, pause_s=0.3, arguments=()):
    folder.mkdir()
    shutil.copy(row_stream.__file__, folder / "my_engine.py")
    log = folder / "turns.log"
    (folder / "sleeper.py").write_text(ENGINE.format(log=str(log)))
    settings = (
        *SMALL, f"trainer.max_steps={steps}", "buffer.max_staleness=0", "rollout.sleep=true",
        "rollout.engine=sleeper:new_engine", "rollout.batch_size=1", *telling_reward(folder), *sets,
    )  # fmt: skip
    environment = loaded_first(folder, STEPS.format(log=str(log), pause_s=pause_s))
    return Daemon(folder, *settings, task=task, arguments=arguments, environment=environment)


def lines(folder):
    log = folder / "turns.log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def kill(folder, pid):
    with open(folder / "turns.log", "a") as file:
        file.write(f"killed {pid}\n")
    os.kill(pid, signal.SIGKILL)


def check_turns(folder):
    """Check that no engine was awake during a step; return the steps and the wakes."""
    awake, stepping, steps, wakes = set(), set(), 0, 0
    for event, pid in lines(folder):
        if event in ("sleep", "stepped", "killed"):
            awake.discard(pid)
            stepping.discard(pid)
        elif event == "wake":
            wakes += 1
            awake.add(pid)
        else:
            steps += 1
            stepping.add(pid)
        assert not (awake and stepping), (awake, stepping)
    return steps, wakes


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_no_engine_is_awake_during_a_step_though_a_worker_dies_asleep_and_the_trainer_in_a_step(tmp_path, task):
    with sleeping(tmp_path / "undisturbed", task, "rollout.workers=2") as daemon:
        undisturbed = daemon.ended()
    assert check_turns(tmp_path / "undisturbed")[0] == 6

    folder = tmp_path / "killed"
    with sleeping(folder, task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        worker = daemon.pids()["rollout-0"]
        found = len(lines(folder))
        daemon.wait_until(lambda: ["step", str(daemon.pids()["trainer-0"])] in lines(folder)[found:], "a step")
        kill(folder, worker)
        daemon.wait_replaced("rollout-0", worker)
        trainer = daemon.pids()["trainer-0"]
        found = len(lines(folder))
        daemon.wait_until(lambda: ["step", str(trainer)] in lines(folder)[found:], "a step")
        kill(folder, trainer)
        daemon.wait_replaced("trainer-0", trainer)
        daemon.wait_step(4)
        metrics = daemon.metrics()
        killed = daemon.ended()

    steps, wakes = check_turns(folder)
    assert steps == 7, "the one that was cut is taken again"
    assert wakes >= 6
    assert killed == undisturbed, "the same bits"
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    assert total(metrics, "rlhfd_process_time_seconds_total", role="rollout", activity="asleep") > 0.3
    assert total(metrics, "rlhfd_engine_sleep_duration_seconds_count", phase="sleep") >= 2


@pytest.mark.timeout(400)
@pytest.mark.parametrize("arguments", [(), pytest.param(("--serial",), marks=pytest.mark.variant)])
def test_no_engine_is_awake_during_a_step(tmp_path, task, arguments):
    with sleeping(tmp_path / "run", task, steps=2, pause_s=0.1, arguments=arguments) as daemon:
        assert daemon.wait() == 0, daemon.errors

    steps, wakes = check_turns(tmp_path / "run")
    assert steps == 2 and wakes >= 2
