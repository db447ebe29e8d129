"""Set-up on first use: real venv and pip, on a small project with the real programs of bin/ and no dependencies.

The project's build back end lies in its own tree, so that nothing is downloaded; it can be held in the middle of an
installation, which is how "interrupted" and "at the same time" are made to happen rather than hoped for.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for folder in ("bin", ".ci") for path in (ROOT / folder).iterdir())
# Where a venv under test must not be found by way of the one that runs this.
PATH = os.pathsep.join(
    folder
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)
    if Path(folder).resolve() != Path(sys.executable).parent
)

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "rlhfd"
version = "0"
"""

BACKEND = '''
"""Build an editable wheel; while `hold` exists, say `held` and wait in the middle of it."""
import os, pathlib, time, zipfile

METADATA = "Metadata-Version: 2.1\\nName: rlhfd\\nVersion: 0\\nProvides-Extra: test\\n"

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with open("builds", "a") as builds:
        builds.write(f"{os.getpid()}\\n")
    deadline = time.monotonic() + 60
    while os.path.exists("hold") and time.monotonic() < deadline:
        pathlib.Path("held").touch()
        time.sleep(0.01)
    name = "rlhfd-0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("rlhfd.pth", os.getcwd())
        wheel.writestr("rlhfd-0.dist-info/METADATA", METADATA)
        wheel.writestr("rlhfd-0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("rlhfd-0.dist-info/entry_points.txt", "[console_scripts]\\nrlhfd = pipeline.cli.main:main\\n")
        wheel.writestr("rlhfd-0.dist-info/RECORD", "")
    return name
'''

CLI = """
import json, os, sys

def main():
    seen = {name: os.environ.get(name) for name in ("HOME", "RLHFD_CONFIG")}
    print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "prefix": sys.prefix, "file": __file__, **seen}))
"""


ROLES = """
ROLES = {}

def load(modules, model):
    try:
        import used
    except ImportError:
        pass
"""


class Project:
    """A checkout with the real bin/ and a package that tells how it was started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pipeline" / "cli").mkdir(parents=True)
        shutil.copytree(ROOT / "bin", root / "bin")
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "constraints.txt").write_text("")
        (root / "constraints-vllm.txt").write_text("# for vLLM\n")
        (root / "backend.py").write_text(BACKEND)
        (root / "pipeline" / "cli" / "main.py").write_text(CLI)
        (root / "pipeline" / "runtime").mkdir()
        (root / "pipeline" / "runtime" / "role_libraries.py").write_text(ROLES)
        self.first_use_said = ""

    def start(
        self, *arguments: str, program: Path | None = None, cwd: Path | None = None, **environment: str | None
    ) -> subprocess.Popen[str]:
        inherited = {"PATH": PATH, "HOME": str(self.root), "PIP_NO_INDEX": "1"} | environment
        return subprocess.Popen(
            [program or self.root / "bin" / "rlhfd", *arguments],
            cwd=cwd or self.root,
            env={name: value for name, value in inherited.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **options: object) -> tuple[Mapping[str, object], str]:
        """Return the started program's report, and the output of the set-up."""
        with self.start(*arguments, **options) as process:  # type: ignore[arg-type]
            output, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        told = json.loads(output)
        assert told["pid"] == process.pid
        return told, said

    def builds(self) -> int:
        return len((self.root / "builds").read_text().splitlines())

    def hold(self) -> None:
        (self.root / "hold").touch()

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.root / "held").exists():
            assert time.monotonic() < deadline, "the installation never began"
            time.sleep(0.01)

    def release(self) -> None:
        (self.root / "hold").unlink()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a checkout")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that is set up; tests leave it so."""
    project = Project(tmp_path_factory.mktemp("ready") / "checkout")
    _, project.first_use_said = project.run()
    return project


def refusal(project: Project, **environment: str | None) -> str:
    with project.start(**environment) as process:
        output, said = process.communicate(timeout=300)
    assert (process.returncode, output) == (1, "")
    return said


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_are_valid_bash(program: Path) -> None:
    subprocess.run(["bash", "-n", program], check=True)
    is_sourced = program.name == "bootstrap"

    assert bool(program.stat().st_mode & stat.S_IXUSR) is not is_sourced


def test_first_use_says_what_it_does_and_the_second_is_silent(ready: Project) -> None:
    told, silence = ready.run("status", "--json")

    assert "==> making" in ready.first_use_said
    assert "==> installing" in ready.first_use_said
    assert silence == ""
    assert told["arguments"] == ["status", "--json"]
    assert told["prefix"] == str(ready.root / ".venv")


def test_the_program_keeps_its_pid_and_finds_the_checkout_from_any_folder(ready: Project, tmp_path: Path) -> None:
    link = tmp_path / "rlhfd"
    link.symlink_to(ready.root / "bin" / "rlhfd")

    told, said = ready.run(program=link, cwd=tmp_path)

    assert said == ""
    assert told["file"] == str(ready.root / "pipeline" / "cli" / "main.py")
    assert told["RLHFD_CONFIG"] == str(ready.root / "config.toml")


def test_a_configuration_that_is_set_stays(ready: Project) -> None:
    told, _ = ready.run(RLHFD_CONFIG="/etc/rlhfd.toml")

    assert told["RLHFD_CONFIG"] == "/etc/rlhfd.toml"


@pytest.mark.parametrize("home", [None, ""], ids=["unset", "empty"])
def test_runs_without_a_home(ready: Project, home: str | None) -> None:
    told, said = ready.run(HOME=home)

    assert (told["HOME"], said) == (None, "")


@pytest.mark.integration
def test_two_first_uses_at_once_make_one_environment(project: Project) -> None:
    project.hold()
    first = project.start()
    project.wait_until_held()
    second = project.start()
    assert second.stderr
    waiting = second.stderr.readline()
    project.release()
    with first, second:
        said = [json.loads(process.communicate(timeout=300)[0])["pid"] for process in (first, second)]

    assert "waiting for another set-up" in waiting
    assert said == [first.pid, second.pid]
    assert project.builds() == 1


@pytest.mark.integration
def test_an_interrupted_set_up_is_done_again_from_nothing(project: Project) -> None:
    project.hold()
    with project.start() as killed:
        project.wait_until_held()
        os.killpg(killed.pid, signal.SIGKILL)
    project.release()
    litter = project.root / ".venv" / "half-copied"
    litter.touch()

    _, said = project.run()

    assert "==> making" in said
    assert not litter.exists()
    assert project.run()[1] == ""


def test_modules_that_roles_import_are_compiled_and_all_where_python_keeps_none(ready: Project, tmp_path: Path) -> None:
    backend = ready.root / "backend.py"
    backend.write_text(BACKEND.replace("Version: 0\\nProvides", "Version: 0\\nRequires-Dist: thing\\nProvides"))
    with zipfile.ZipFile(tmp_path / "thing-1-py3-none-any.whl", "w") as wheel:
        for name in ("used", "unused"):
            wheel.writestr(f"{name}.py", "")
        wheel.writestr("thing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
        wheel.writestr("thing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("thing-1.dist-info/RECORD", "thing-1.dist-info/RECORD,,\nused.py,,\nunused.py,,\n")
    found = []
    for environment in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):
        (ready.root / "constraints.txt").write_text(f"# {environment}\n")
        ready.run(PIP_FIND_LINKS=str(tmp_path), **environment)
        kept = ready.root.glob(".venv/lib/python*/site-packages/__pycache__/*used.*.pyc")
        found.append(sorted(path.name.split(".")[0] for path in kept))
        subprocess.run([ready.root / ".venv/bin/pip", "uninstall", "--quiet", "--yes", "thing"], check=True)
    backend.write_text(BACKEND)

    assert found == [["used"], ["unused", "used"]]


def test_the_modules_that_are_compiled_are_the_roles() -> None:
    """The other tests compile a stand-in of the package."""
    (imported,) = re.findall(
        r'-c "from ([\w.]+) import ROLES, load; load\(ROLES', (ROOT / "bin" / "bootstrap").read_text()
    )
    module = importlib.import_module(imported)

    assert [*inspect.signature(module.load).parameters] == ["modules", "model"] and len(module.ROLES) == 3


def test_roles_that_cannot_be_imported_do_not_end_a_set_up(ready: Project) -> None:
    roles = ready.root / "pipeline" / "runtime" / "role_libraries.py"
    roles.write_text("import missing_library\n")
    (ready.root / "constraints.txt").write_text("# for roles without a library\n")

    _, said = ready.run()
    roles.write_text(ROLES)

    assert "missing_library" in said and "==> the roles' modules are compiled at their first import" in said
    assert ready.run()[1] == ""


def test_changed_requirements_are_installed_into_the_same_environment(ready: Project) -> None:
    with (ready.root / "constraints.txt").open("a") as constraints:
        constraints.write("# another version\n")

    _, said = ready.run()

    assert "==> making" not in said
    assert "==> installing" in said
    assert ready.run()[1] == ""


def test_a_failed_installation_says_so_and_what_was_there_still_serves(ready: Project) -> None:
    pyproject = ready.root / "pyproject.toml"
    pyproject.write_text(PYPROJECT.replace('"backend"', '"missing"'))
    said = refusal(ready)
    pyproject.write_text(PYPROJECT)

    assert said.splitlines()[-1] == f"rlhfd: pip could not install rlhfd into {ready.root}/.venv, see above"
    assert ready.run()[1] == ""


@pytest.fixture(scope="module")
def for_vllm(ready: Project) -> tuple[dict[str, str], Mapping[str, object], str]:
    """The variables of an environment for vLLM, and the report and the output of its first use, without a GPU."""
    variables = {"RLHFD_EXTRAS": "vllm", "RLHFD_GPU_NODE": str(ready.root / "nvidiactl")}
    return variables, *ready.run(**variables)


@pytest.mark.integration
def test_vllm_gets_an_environment_of_its_own_from_its_own_constraints(
    ready: Project, for_vllm: tuple[dict[str, str], Mapping[str, object], str]
) -> None:
    variables, told, said = for_vllm
    own = ready.root / ".venv-vllm"

    again, silence = ready.run(**variables)
    other, _ = ready.run()

    assert told["prefix"] == again["prefix"] == str(own)
    assert f"making {own} with" in said
    # pip names an extra that the project lacks; this one provides `test` alone.
    assert re.search(r"does not provide the extra 'vllm-cpu'", said)
    assert silence == ""
    assert other["prefix"] == str(ready.root / ".venv")
    (ready.root / "constraints-vllm.txt").write_text("# changed\n")
    assert "==> installing rlhfd" in ready.run(**variables)[1]
    assert ready.run()[1] == "", "the other environment is as it was"


@pytest.mark.integration
def test_the_environment_of_vllm_is_made_anew_where_gpus_came_or_went(
    ready: Project, for_vllm: tuple[dict[str, str], Mapping[str, object], str]
) -> None:
    variables, _, _ = for_vllm

    Path(variables["RLHFD_GPU_NODE"]).touch()
    _, said = ready.run(**variables)
    _, silence = ready.run(**variables)

    assert f"making {ready.root / '.venv-vllm'} with" in said
    assert re.search(r"does not provide the extra 'vllm'", said)
    assert silence == ""
    assert ready.run()[1] == "", "the other environment is as it was"


def test_an_extra_without_an_environment_is_refused(project: Project) -> None:
    assert refusal(project, RLHFD_EXTRAS="vision") == (
        "rlhfd: RLHFD_EXTRAS: unknown extra vision; vllm is the one with an environment of its own\n"
    )


def test_a_moved_checkout_is_set_up_anew(ready: Project, tmp_path: Path) -> None:
    moved = Project(tmp_path / "elsewhere")
    shutil.copytree(ready.root / ".venv", moved.root / ".venv", symlinks=True)

    told, said = moved.run()

    assert "==> making" in said
    assert told["file"] == str(moved.root / "pipeline" / "cli" / "main.py")


def test_an_environment_of_another_program_is_not_deleted(project: Project) -> None:
    foreign = project.root / ".venv" / "pyvenv.cfg"
    foreign.parent.mkdir()
    foreign.touch()

    assert "was made by another program" in refusal(project)
    assert foreign.exists()


def test_an_environment_that_is_only_linked_to_is_not_emptied(project: Project, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.joinpath("installing").touch()
    project.root.joinpath(".venv").symlink_to(theirs)

    assert "is a link to an environment" in refusal(project)
    assert [path.name for path in theirs.iterdir()] == ["installing"]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """An environment that was made ready elsewhere: no network reaches it, and its pip must not be called."""
    prefix = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    packages = next(prefix.glob("lib/python*/site-packages"))
    for name, version in (("pip", "26"), ("needed", "1.2")):
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (packages / "pip.py").write_text("raise SystemExit('pip was called')\n")
    (packages / "pipeline").mkdir()
    (packages / "pipeline" / "__init__.py").write_text("raise SystemExit('the rlhfd of another checkout')\n")
    return prefix


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def test_a_ready_environment_is_taken_as_it_is(project: Project, prepared: Path) -> None:
    project.root.joinpath("pyproject.toml").write_text(f'{PYPROJECT}dependencies = ["needed>=1"]\n')
    (project.root / "pipeline" / "__init__.py").touch()
    before = state_of(prepared)

    told, said = project.run("status", "--json", RLHFD_VENV=str(prepared), PYTHONDONTWRITEBYTECODE="1")

    assert said == ""
    assert told["prefix"] == str(prepared)
    assert told["file"] == str(project.root / "pipeline" / "cli" / "main.py")
    assert told["arguments"] == ["status", "--json"]
    assert state_of(prepared) == before
    assert not (project.root / ".venv").exists()


def test_tests_run_in_a_ready_environment(project: Project, prepared: Path) -> None:
    packages = next(prepared.glob("lib/python*/site-packages"))
    packages.joinpath("pytest.py").write_text("import sys; print('pytest of', sys.prefix, sys.argv[1:])\n")
    before = state_of(prepared)

    with project.start(
        "-k", "a", program=project.root / "bin" / "test", RLHFD_VENV=str(prepared), PYTHONDONTWRITEBYTECODE="1"
    ) as process:
        output, said = process.communicate(timeout=300)

    assert (output, said) == (f"pytest of {prepared} ['-k', 'a']\n", "")
    assert state_of(prepared) == before
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize(
    ("program", "lacking"), [("rlhfd", "missing-one"), ("test", "missing-one tool wrench")], ids=["runtime", "test"]
)
def test_a_ready_environment_that_lacks_packages_is_refused_with_their_names(
    project: Project, prepared: Path, program: str, lacking: str
) -> None:
    project.root.joinpath("pyproject.toml").write_text(
        f'{PYPROJECT}dependencies = ["needed>=1", "missing-one>=2,<3"]\n'
        '[project.optional-dependencies]\ntest = ["tool", "rlhfd[more,others]"]\nothers = ["wrench"]\n'
        "more = [\"needed[extra]; python_version > '3'\"]\n"
    )

    with project.start(program=project.root / "bin" / program, RLHFD_VENV=str(prepared)) as process:
        output, said = process.communicate(timeout=300)

    assert (process.returncode, output) == (1, "")
    assert said == f"rlhfd: RLHFD_VENV: {prepared} lacks {lacking}; nothing is installed into it\n"


def test_a_ready_environment_that_is_none_is_refused(project: Project, tmp_path: Path) -> None:
    assert refusal(project, RLHFD_VENV=f"{tmp_path}/none") == (
        f"rlhfd: RLHFD_VENV: there is no folder {tmp_path}/none\n"
    )
    assert refusal(project, RLHFD_VENV=str(tmp_path)) == f"rlhfd: RLHFD_VENV: there is no {tmp_path}/bin/python\n"
    (project.root / "empty").mkdir()
    relative = refusal(project, RLHFD_VENV="empty", CDPATH=str(project.root))
    assert relative == f"rlhfd: RLHFD_VENV: there is no {project.root}/empty/bin/python\n"


def test_a_checkout_whose_path_python_would_split_is_refused_with_a_ready_environment(
    tmp_path: Path, prepared: Path
) -> None:
    project = Project(tmp_path / "one:two")

    said = refusal(project, RLHFD_VENV=str(prepared))

    assert said == f"rlhfd: RLHFD_VENV: the path of this checkout has a colon: {project.root}; move or rename it\n"


def test_an_old_python_is_refused_in_one_line(project: Project, tmp_path: Path) -> None:
    old = executable(tmp_path / "old-python", '#!/bin/sh\ncase "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')

    said = refusal(project, RLHFD_PYTHON=str(old))

    assert said.startswith(f"rlhfd: needs Python 3.11 or newer ({old} is 3.9): ")
    assert said.count("\n") == 1


def test_a_python_without_venv_is_refused_with_the_package_to_install(project: Project, tmp_path: Path) -> None:
    # As Debian's python3 without python3-venv: the module venv is there, ensurepip is not.
    program = 'import sys; sys.modules["ensurepip"] = None; exec(sys.argv[2])'
    bare = executable(tmp_path / "bare-python", f"#!/bin/sh\nexec {sys.executable} -c '{program}' \"$@\"\n")
    version = "{}.{}".format(*sys.version_info)

    said = refusal(project, RLHFD_PYTHON=str(bare))

    assert said == f"rlhfd: Python {version} cannot make environments: apt-get install python{version}-venv\n"
