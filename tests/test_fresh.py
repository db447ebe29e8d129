"""`.ci/fresh`: a command of CI finds nothing that was there before, and leaves nothing; refused, it is not run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("unshare", "mount")
ROOT = Path(__file__).parent.parent
# Not that of a virtual environment, which may lie below /tmp.
PYTHON = os.path.realpath(sys.executable)

LOOK = """
import json, os, pathlib, sys
home, checkout = pathlib.Path(os.environ["HOME"]), pathlib.Path.cwd()
seen = {
    "tmp": os.listdir("/tmp"),
    "home": os.listdir(home),
    "checkout": str(checkout),
    "environment": dict(os.environ),
}
for folder in (pathlib.Path("/tmp"), home, checkout):
    (folder / "left").touch()
print(json.dumps(seen))
sys.exit(3)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "fresh", checkout / ".ci")
    return checkout


def fresh(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / ".ci" / "fresh", *command],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_command_finds_nothing_that_was_there_and_leaves_nothing_but_in_the_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    home, folder = tmp_path / "home", tmp_path / "temporary"
    (home / ".cache" / "pip").mkdir(parents=True), folder.mkdir()

    found = fresh(checkout, PYTHON, "-c", LOOK, HOME=str(home), TMPDIR=str(folder), XDG_CACHE_HOME=str(home / ".cache"))

    assert found.returncode == 3, found.stderr
    seen = json.loads(found.stdout)
    # A checkout below /tmp keeps its path.
    assert seen["tmp"] == ([checkout.parts[2]] if checkout.parts[1] == "tmp" else [])
    assert (seen["home"], seen["checkout"]) == ([], str(checkout))
    assert not {"TMPDIR", "XDG_CACHE_HOME"} & seen["environment"].keys()
    assert (checkout / "left").exists() and not Path("/tmp/left").exists() and not (home / "left").exists()
    assert not Path(seen["environment"]["HOME"]).parent.exists()


def test_where_packages_come_from_is_still_known(checkout: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config" / "pip").mkdir(parents=True)
    for name in (".npmrc", ".config/pip/pip.conf"):
        (home / name).touch()

    seen = json.loads(fresh(checkout, PYTHON, "-c", LOOK, HOME=str(home)).stdout)["environment"]
    own = json.loads(fresh(checkout, PYTHON, "-c", LOOK, HOME=str(home), PIP_CONFIG_FILE="/elsewhere").stdout)[
        "environment"
    ]

    assert seen["NPM_CONFIG_USERCONFIG"] == str(home / ".npmrc")
    assert seen["PIP_CONFIG_FILE"] == str(home / ".config" / "pip" / "pip.conf")
    assert own["PIP_CONFIG_FILE"] == "/elsewhere"


def test_where_no_namespace_can_be_made_the_command_is_not_run(checkout: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "bin" / "unshare"
    refusing.parent.mkdir()
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    path = f"{refusing.parent}:{os.environ['PATH']}"

    found = fresh(checkout, "touch", "left", PATH=path, HOME=str(tmp_path))

    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("fresh: no mount namespace can be made here")
    assert not (checkout / "left").exists()
