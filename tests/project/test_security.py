"""Access: modes of a live instance's files, attempts by another user, and calls that the code never makes."""

import ast
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import SMALL, Daemon, rlhfd

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "pipeline").rglob("*.py"))
_NOBODY = 65534
_ATTEMPTS = """
import glob, os, signal, socket, sys
folder, sockets, files, pids = (part.split(";") for part in sys.argv[1:])
done = []
def attempt(what, act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return
    done.append(what)
attempt("list the folder", os.listdir, folder[0])
for path in sockets:
    attempt("connect to " + path, socket.socket(socket.AF_UNIX).connect, path)
for path in files:
    attempt("read " + path, open, path, "rb")
    attempt("write " + path, open, path, "r+b")
for pid in pids:
    attempt("signal " + pid, os.kill, int(pid), signal.SIGTERM)
print(os.getuid(), *done)
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def open_path(tmp_path):
    """Every folder above the test's opened to others, so that only the instance's own modes refuse them."""
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in (tmp_path, *tmp_path.parents)}
    changed = {parent: mode for parent, mode in modes.items() if mode & 0o005 != 0o005}
    for parent, mode in changed.items():
        parent.chmod(mode | 0o005)
    yield tmp_path
    for parent, mode in changed.items():
        parent.chmod(mode)


@pytest.mark.integration
@pytest.mark.needs("/usr/bin/python3")
@as_root
def test_what_a_live_instance_has_is_for_its_user_alone_and_another_user_is_refused(open_path, task):
    with Daemon(open_path, *SMALL, "trainer.save_every=1", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        shared = [*daemon.shm_dir.rglob("*")]
        sockets = [path for path in shared if path.is_socket()]
        files = [path for path in shared if path.is_file()]

        assert stat.S_IMODE(daemon.shm_dir.stat().st_mode) == 0o700
        assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (*sockets, *files)} == {
            path.name: "0o600" for path in (*sockets, *files)
        }
        assert {path.name for path in sockets} == {"buffer.sock", "control.sock", "trainer-0.sock", "worker-0.sock"}
        assert {"arena", "weights", "metrics", "config.json", "run.json"} <= {path.name for path in files}
        assert stat.S_IMODE(daemon.runtime_dir.stat().st_mode) & 0o077 == 0
        files += [daemon.runtime_dir / "instance.json", daemon.runtime_dir / "lock"]
        files += [daemon.run_dir / "checkpoints" / "latest.json", daemon.state_dir / "log" / "rlhfd.log"]
        pids = [daemon.pid, *daemon.family()]
        told = [str(daemon.shm_dir), *(";".join(map(str, part)) for part in (sockets, files, pids))]
        # The system's own python: this one may lie where another user cannot reach it.
        ended = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", _ATTEMPTS, *told],
            cwd="/", user=_NOBODY, group=_NOBODY, extra_groups=[], capture_output=True, text=True, timeout=30,
        )  # fmt: skip

        assert (ended.stdout, ended.stderr) == (f"{_NOBODY}\n", "")
        assert daemon.status()["state"] == "ready"


@as_root
def test_a_folder_that_another_user_made_under_the_instances_name_is_refused(tmp_path):
    daemon = Daemon(tmp_path)
    daemon.shm_dir.mkdir(mode=0o777)
    try:
        os.chown(daemon.shm_dir, _NOBODY, _NOBODY)

        ended = rlhfd(*daemon.command[1:], folder=tmp_path)

        assert ended.returncode == 78
        assert ended.stderr.strip().endswith(f"{daemon.shm_dir} belongs to another user")
        assert ended.stderr.count("\n") == 1
        assert daemon.shm_dir.stat().st_uid == _NOBODY
    finally:
        daemon.shm_dir.rmdir()


@pytest.fixture(scope="module")
def nodes():
    """Each node of each module with the module's path."""
    return [(path, node) for path in MODULES for node in ast.walk(ast.parse(path.read_text()))]


def of_kind(nodes, kind):
    return [(path, node) for path, node in nodes if isinstance(node, kind)]


def test_nothing_is_pickled_or_marshalled(nodes):
    imported = {(path.name, alias.name) for path, node in of_kind(nodes, ast.Import) for alias in node.names}
    imported |= {(path.name, node.module or "") for path, node in of_kind(nodes, ast.ImportFrom)}
    refused = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

    assert len(imported) > 300
    assert {found for found in imported if found[1].partition(".")[0] in refused} == set()


def test_no_code_of_a_model_is_run_and_torch_loads_weights_alone(nodes):
    calls = of_kind(nodes, ast.Call)
    keywords = {(path.name, k.arg, ast.unparse(k.value)) for path, node in calls for k in node.keywords}
    loads = [node for _, node in calls if ast.unparse(node.func) in ("torch.load", "torch.jit.load")]

    assert {found for found in keywords if found[1] == "trust_remote_code" and found[2] != "False"} == set()
    assert all("weights_only=True" in ast.unparse(node) for node in loads)
    # Programs of responses run in the sandbox of a process without rights alone.
    assert {path.name for path, node in calls if ast.unparse(node.func) in ("eval", "exec")} == {"sandbox.py"}
