"""A real daemon's forkserver: its forks are the supervisor's own children, and no running process depends on it."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.daemon import PROGRAM, SMALL, Daemon, is_alive, loaded_first, parent, title

pytestmark = pytest.mark.integration
SETTINGS = (*SMALL, "trainer.max_steps=0", "daemon.restart_delay_s=0.0002")
# The import of the libraries takes until a file is there.
HELD_UP = """
def change_pipeline_runtime_role_libraries(module):
    load = module.load
    def held_up(*arguments):
        while not os.path.exists("go"):
            time.sleep(0.02)
        load(*arguments)
    module.load = held_up
"""


def forkserver(daemon):
    """The pid of its forkserver, None while there is none."""
    return next((pid for pid in daemon.family() if title(pid) == "rlhfd: forkserver"), None)


def replaced(daemon, name, pid):
    """Wait until another process is in the place of one and training goes on."""
    daemon.wait_until(lambda: daemon.pids().get(name) not in (None, pid), f"{name} is started again")
    daemon.wait_ready()
    daemon.wait_step(daemon.status()["step"] + 2)
    return daemon.pids()[name]


def test_roles_are_the_supervisors_own_and_outlive_a_forkserver_that_is_killed_or_hangs(tmp_path, task):
    with Daemon(tmp_path, *SETTINGS, task=task, environment=loaded_first(tmp_path, HELD_UP)) as daemon:
        daemon.wait_answering()
        daemon.wait_until(
            lambda: any("forkserver (pid " in sentence for sentence in daemon.why()["sentences"]),
            "a run that waits for its forkserver says so",
        )
        (tmp_path / "go").touch()
        daemon.wait_ready()
        assert not any("forkserver" in sentence for sentence in daemon.why()["sentences"])
        daemon.wait_step(2)
        first, pids = forkserver(daemon), daemon.pids()
        assert [parent(pid) for pid in (first, *pids.values())] == [daemon.pid] * (1 + len(pids))
        assert os.listdir(f"/proc/{first}/task") == [str(first)], "a fork loses every thread but one"

        os.kill(first, signal.SIGUSR1)
        daemon.wait_logged("in next_request")
        assert forkserver(daemon) == first, "it tells its stack, as the watchdog asks it to"
        os.kill(first, signal.SIGKILL)
        daemon.wait_until(lambda: forkserver(daemon) not in (None, first), "there is another forkserver")
        os.kill(pids["rollout-0"], signal.SIGKILL)
        worker = replaced(daemon, "rollout-0", pids["rollout-0"])
        assert daemon.pids()["trainer-0"] == pids["trainer-0"], "no other process died of it"

        second = forkserver(daemon)
        os.kill(second, signal.SIGSTOP)
        os.kill(pids["trainer-0"], signal.SIGKILL)
        replaced(daemon, "trainer-0", pids["trainer-0"])
        assert not is_alive(second) and forkserver(daemon) != second, "one that does not answer is replaced"
        assert daemon.pids()["rollout-0"] == worker
        assert sum(title(pid).endswith(": trainer 0") for pid in daemon.family()) == 1
        assert "the forkserver does not answer" in daemon.errors

        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        assert not daemon.shm_dir.exists()


def test_the_supervisor_reaps_what_its_descendants_leave_behind(tmp_path, task):
    tmp_path.joinpath("leaving.py").write_text(
        "import os, subprocess, sys\n"
        "def score(*_, **__):\n"
        "    subprocess.run([sys.executable, '-c', 'import os; os.fork() or os._exit(0)'])\n"
        "    return 0.0\n"
    )
    own = ('rewards=["leaving:score"]', "rollout.batch_size=8", "buffer.sample_batch_size=8")
    with Daemon(tmp_path, *SETTINGS, *own, "rollout.num_generations=2", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)

        def zombies():
            states = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
            return [pid for pid in states if title(pid) == "" and Path(f"/proc/{pid}").exists()]

        daemon.wait_until(lambda: not zombies(), "no dead process is left unreaped", 10.0)


def test_a_stop_ends_what_a_reward_function_has_started_though_nothing_guards_it_any_more(tmp_path, task):
    tmp_path.joinpath("starting.py").write_text(
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "def score(*_, **__):\n"
        "    return 0.0\n"
    )
    with Daemon(tmp_path, *SETTINGS, 'rewards=["starting:score"]', task=task) as daemon:
        daemon.wait_ready()
        program = next(pid for pid in daemon.family() if title(pid) == "sleep\x001000")
        guard = parent(parent(program))
        pool = parent(guard)
        assert title(guard).startswith("rlhfd: guard of ") and title(pool).startswith("rlhfd: forkserver of ")
        os.kill(pool, signal.SIGSTOP)
        os.kill(guard, signal.SIGKILL)
        daemon.wait_until(lambda: parent(program) == pool, "its forkserver has adopted it")
        os.kill(pool, signal.SIGKILL)
        daemon.wait_until(lambda: parent(program) == daemon.pid, "the supervisor has adopted it")

        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        assert not is_alive(program)


@pytest.mark.needs("pandas", "pyarrow", "sklearn")
def test_beside_scikit_learn_pandas_and_pyarrow_the_forkserver_serves_and_a_killed_role_is_a_fork(tmp_path, task):
    # As an environment's own tools may: the allocator of pyarrow starts a thread.
    tmp_path.joinpath("sitecustomize.py").write_text("import pyarrow\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with Daemon(tmp_path, *SETTINGS, task=task, environment=environment, program=PROGRAM) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        served, worker = forkserver(daemon), daemon.pids()["rollout-0"]
        assert served is not None, daemon.errors
        assert os.listdir(f"/proc/{served}/task") == [str(served)], "a fork loses every thread but one"
        loaded = Path(f"/proc/{served}/maps").read_text()
        assert "/pyarrow/" in loaded
        assert not any(f"/{package}/" in loaded for package in ("sklearn", "scipy", "pandas"))

        os.kill(worker, signal.SIGKILL)
        worker = replaced(daemon, "rollout-0", worker)
        assert title(worker) == "rlhfd: rollout 0" and forkserver(daemon) == served
        assert "roles are started without it" not in daemon.errors


@pytest.mark.variant
def test_a_forkserver_that_must_not_be_forked_is_done_without_and_not_tried_again(tmp_path, task):
    # As a debugger or a tracer would that is installed into an environment.
    tmp_path.joinpath("sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='tracer', daemon=True).start()\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with Daemon(tmp_path, *SMALL, "trainer.max_steps=2", task=task, environment=environment, program=PROGRAM) as daemon:
        assert daemon.wait() == 0, daemon.errors
        first = daemon.errors
    with Daemon(tmp_path, *SMALL, "trainer.max_steps=3", task=task, environment=environment, program=PROGRAM) as daemon:
        assert daemon.wait() == 0, daemon.errors
        second = daemon.errors

    reason = "sitecustomize or a .pth file of this environment has started what a fork would lose: thread tracer"
    assert f"the forkserver has ended (1), roles are started without it: {reason}" in first
    assert "training ended: steps=2" in first
    assert f"the forkserver is not started, roles are started without it, as at an earlier start: {reason}" in second
    assert "training ended: steps=3" in second
