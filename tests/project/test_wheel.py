"""A wheel of this tree in an environment of its own: every command works from any folder, without the checkout."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.support.daemon import END_TIMEOUT_S, SMALL, clean_environment
from tests.support.systemd_box import booted_box

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PACKAGES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
TIMEOUT_S = 300.0


def call(*words: object, cwd: Path) -> str:
    """Run a program without this tree on its path, and return its standard output."""
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{words}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def rlhfd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of a new environment, which has the wheel and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    # In an environment of its own pip fetches the build backend from the package index.
    isolated = ["--no-build-isolation"] if importlib.util.find_spec("flit_core") else []
    call(*pip, "wheel", "--quiet", "--no-deps", *isolated, "--wheel-dir", folder, ROOT, cwd=folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    (site_packages,) = (folder / "venv/lib").glob("python*/site-packages")
    site_packages.joinpath("packages.pth").write_text("\n".join(PACKAGES))
    (wheel,) = folder.glob("*.whl")
    call(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-compile", wheel, cwd=folder)
    return folder / "venv/bin/rlhfd"


@pytest.fixture(scope="module")
def run(rlhfd: Path, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that `rlhfd init` has written and `rlhfd start` has ended."""
    folder = tmp_path_factory.mktemp("any") / "my-run"
    call(rlhfd, "init", folder, "--model", task / "model", cwd=folder.parent)
    # The file that it writes has these two for longer rows.
    short = ("rollout.max_prompt_length=8", "rollout.max_new_tokens=8")
    sets = [word for item in (*SMALL, *short, "trainer.max_steps=1", "metrics.port=0") for word in ("--set", item)]
    call(rlhfd, "start", "--config", "grpo.toml", *sets, cwd=folder)
    return folder


def test_the_package_is_the_one_of_the_wheel_and_is_reported(rlhfd: Path, tmp_path: Path) -> None:
    report = json.loads(call(rlhfd, "collect-env", "--json", cwd=tmp_path))

    assert report["rlhfd"]["package"] == str(next(rlhfd.parents[1].glob("lib/python*/site-packages/pipeline")))
    assert report["rlhfd"]["commit"] == "none"
    assert report["packages"]["torch"].startswith("2.") and report["packages"]["pyzmq"] != "not installed"
    assert report["shared memory and disks"]["/dev/shm"].endswith(" free")


def test_a_run_that_init_wrote_is_trained_and_its_page_served(rlhfd: Path, run: Path) -> None:
    (entry,) = json.loads(call(rlhfd, "runs", "--config", "grpo.toml", "--json", cwd=run))
    assert (entry["state"], entry["step"]) == ("complete", 1)

    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    command = [str(rlhfd), "page", "--config", "grpo.toml"]
    with subprocess.Popen(command, cwd=run, env=environment, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            (url,) = re.findall(r"http://\S+/", page.stdout.readline())
            for name in ("", "page.js", "page.css", "api/live"):
                with urllib.request.urlopen(url + name, timeout=END_TIMEOUT_S) as answer:
                    assert answer.status == 200 and answer.read(), name
        finally:
            page.terminate()


def test_the_memory_of_a_run_is_planned(rlhfd: Path, run: Path) -> None:
    assert "a publish writes" in call(rlhfd, "plan", "--config", "grpo.toml", cwd=run)


def test_dashboards_and_alerts_are_those_of_the_tree(rlhfd: Path, tmp_path: Path) -> None:
    call(rlhfd, "dashboards", cwd=tmp_path)

    shipped = ROOT / "pipeline/telemetry/dashboards"
    written = {file.name: file.read_bytes() for file in (tmp_path / "dashboards").iterdir()}
    assert written == {file.name: file.read_bytes() for file in shipped.iterdir()}
    assert set(written) == {"alerts.yml", "prometheus.yml", "rlhfd.json", "rules.yml"}


def test_the_unit_of_an_environment_runs_its_program(rlhfd: Path, run: Path) -> None:
    for words, name in (((), "rlhfd.service"), (("--instance", "b"), "rlhfd@b.service")):
        unit = call(rlhfd, "systemd", "unit", "--config", "grpo.toml", "--user", "root", *words, cwd=run)

        assert unit.startswith(f"# /etc/systemd/system/{name}\n")
        assert f"ExecStart={rlhfd} start\n" in unit and f"Environment=RLHFD_CONFIG={run}/grpo.toml\n" in unit


@pytest.mark.needs("systemd-analyze", "unshare", "nsenter", "setpriv")
def test_the_unit_is_installed(rlhfd: Path, run: Path, tmp_path: Path) -> None:
    # Without the tree's path, which the box gives to the commands that it runs.
    own = ("env", "-u", "PYTHONPATH", str(rlhfd), "systemd")
    unit = call(rlhfd, "systemd", "unit", "--config", run / "grpo.toml", "--user", "root", cwd=tmp_path)
    with booted_box(tmp_path) as box:
        box.run(*own, "install", "--config", str(run / "grpo.toml"), "--user", "root")

        path, _, text = unit.removeprefix("# ").partition("\n")
        assert box.run("cat", path).stdout == text
        assert box.show("rlhfd", "LoadState") == {"LoadState": "loaded"}
        assert "rlhfd.service is stopped and removed" in box.run(*own, "uninstall").stdout
