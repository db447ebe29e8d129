"""The oldest torch that is admitted: the one that CONTRIBUTING's command tests, in place of the pinned one."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_command_of_contributing_installs_the_oldest_torch_that_is_admitted():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = (match[1] for one in dependencies if (match := re.fullmatch(r"torch>=([\d.]+)", one)))
    pattern, pinned = re.findall(
        r"sed -e 's/(\S+)/(torch==\S+)/' -e '/\^setuptools==/d' constraints\.txt",
        (ROOT / "CONTRIBUTING.md").read_text(),
    )[0]

    constraints = re.sub(pattern, pinned, (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)

    assert re.findall(r"^torch==.*", constraints, flags=re.MULTILINE) == [f"torch=={oldest}.0"]
