"""The oldest torch and transformers that are admitted: those that CONTRIBUTING's command tests, not the pinned ones."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_command_of_contributing_installs_the_oldest_release_that_is_admitted(package: str) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = (match[1] for one in dependencies if (match := re.match(rf"{package}>=([\d.]+)", one)))
    (command,) = re.findall(r"sed (.+?) constraints\.txt >\.venv-oldest/", (ROOT / "CONTRIBUTING.md").read_text())

    constraints = (ROOT / "constraints.txt").read_text()
    for pattern, pinned in re.findall(r"-e 's/(\S+)/(\S+)/'", command):
        constraints = re.sub(pattern, pinned, constraints, flags=re.MULTILINE)

    assert re.findall(rf"^{package}==.*", constraints, flags=re.MULTILINE) == [f"{package}=={oldest}.0"]
