"""The Containerfile, checked without a container engine: each file, key and command that it names exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipeline.config.schema import Config

ROOT = Path(__file__).parents[2]
STEPS = [
    (words[0], words[1])
    for line in re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text()).splitlines()
    if line and not line.startswith("#") and (words := line.split(None, 1))
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def settings() -> dict[str, str]:
    return dict(word.split("=", 1) for rest in arguments("ENV") for word in rest.split())


def test_every_file_that_it_copies_exists_and_reaches_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [source for rest in arguments("COPY") for source in rest.split()[:-1]]

    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


def test_the_files_that_it_copies_are_a_package_that_can_be_installed(tmp_path: Path) -> None:
    """The files that pyproject.toml names are among them: licence and module, nothing of the rest of the checkout."""
    for rest in arguments("COPY"):
        *sources, target = rest.split()
        for source in sources if not target.startswith("/") else []:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path)

    assert [name for name in PROJECT["project"]["license-files"] if not (tmp_path / name).is_file()] == []
    assert "readme" not in PROJECT["project"]
    assert (tmp_path / PROJECT["tool"]["flit"]["module"]["name"] / "__init__.py").is_file()
    shown = subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", "start", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "Usage:" in shown.stdout


def test_its_python_is_one_that_the_project_supports() -> None:
    (image,) = arguments("FROM")
    major, minor = map(int, re.findall(r"python:(\d+)\.(\d+)-slim$", image)[0])

    least = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
    assert (major, minor) >= least
    assert f"{major}.{minor}" in (ROOT / "constraints.txt").read_text().splitlines()[0]


def test_its_settings_are_keys_and_its_configuration_is_one_that_it_copies() -> None:
    found = settings()
    keys = {name: value for name, value in found.items() if name != "RLHFD_CONFIG"}

    for name in keys:
        section, key = name.removeprefix("RLHFD_").lower().split("__")
        assert key in Config.model_fields[section].annotation.model_fields, name
    assert any(rest.endswith(" " + found["RLHFD_CONFIG"]) for rest in arguments("COPY"))
    assert arguments("VOLUME") == [found["RLHFD_DAEMON__STATE_DIR"]]
    made = " ".join(arguments("RUN"))
    assert found["RLHFD_DAEMON__STATE_DIR"] in made
    assert found["RLHFD_DAEMON__RUNTIME_DIR"] in made


@pytest.mark.parametrize("instruction", ["ENTRYPOINT", "CMD", "HEALTHCHECK"])
def test_its_programs_and_commands_exist(instruction: str) -> None:
    from pipeline.cli.main import main

    (rest,) = arguments(instruction)
    words = json.loads(rest[rest.index("[") :])

    if instruction != "CMD":
        assert words.pop(0) in PROJECT["project"]["scripts"]
    assert all(word in main.commands for word in words)


def test_it_runs_as_a_user_of_its_own_and_is_told_to_drain() -> None:
    (user,) = arguments("USER")

    assert any(rest.startswith("useradd ") and f" {user} " in rest for rest in arguments("RUN"))
    assert arguments("STOPSIGNAL") == ["SIGTERM"]
