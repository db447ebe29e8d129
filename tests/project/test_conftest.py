"""The rules that tests/conftest.py holds every test to, seen from outside on tests made for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def outcome(folder: Path, body: str, **environment: str) -> str:
    """Return pytest's output for one test under the project's rules; it runs in `folder`."""
    test = folder / "test_one.py"
    test.write_text(f"import os, subprocess, warnings\nimport pytest\n{body}\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "--rootdir",
        folder,
        "-p",
        "tests.conftest",
    ]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", test],
        env=inherited | environment | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return ran.stdout


NEEDING = '@pytest.mark.needs("no-such-program")\ndef test_one(): pass'


def test_a_missing_program_skips_on_a_workstation(tmp_path: Path) -> None:
    printed = outcome(tmp_path, NEEDING)

    assert "1 skipped" in printed
    assert "not on this machine: no-such-program" in printed


def test_a_missing_program_fails_in_ci(tmp_path: Path) -> None:
    printed = outcome(tmp_path, NEEDING, CI="true")

    assert "1 error" in printed
    assert "not on this machine: no-such-program" in printed


def test_a_test_may_be_a_coroutine(tmp_path: Path) -> None:
    body = """
import asyncio
@pytest.mark.parametrize("value", [0, 1])
async def test_one(value):
    await asyncio.sleep(0)
    assert value == 0
"""

    assert "1 failed, 1 passed" in outcome(tmp_path, body)


NO_GRACE = "from tests.support.leaks import Holdings\nHoldings.leaks.__kwdefaults__['grace_s'] = 0.0"
"""Deadline of a test that leaks for certain, and need not be given time to end."""


GARBAGE = """
import gc
class Held:
    def __init__(self): self.itself, self.number = self, os.open('/dev/null', os.O_RDONLY)
    def __del__(self): os.close(self.number)
@pytest.fixture(scope="module", autouse=True)
def garbage():
    gc.disable()
    Held()
"""
"""A descriptor of before the test, which only a collection closes; none comes but the one that is asked for."""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{NO_GRACE}\ndef test_one(): os.dup(0)", "is still open"),
        (f"{NO_GRACE}{GARBAGE}def test_one(): os.dup(0)", "is still open"),
        ("def test_one(): warnings.warn('odd')", "UserWarning: odd"),
        ("@pytest.mark.typo\ndef test_one(): pass", "'typo' not found in `markers`"),
    ],
    ids=["leak", "leak beside garbage of before", "warning", "unknown marker"],
)
def test_what_is_not_allowed_fails(tmp_path: Path, body: str, expected: str) -> None:
    printed = outcome(tmp_path, body)

    assert "1 error" in printed or "1 failed" in printed
    assert expected in printed


def test_the_garbage_collector_does_not_walk_what_was_collected_for_a_run(tmp_path: Path) -> None:
    body = """
import gc
def test_one():
    assert gc.isenabled() and gc.is_tracked(test_one)
    assert not any(one is test_one for one in gc.get_objects())
"""

    assert "1 passed" in outcome(tmp_path, body)


@pytest.mark.parametrize("slow", ["the example", "its making"])
def test_an_example_takes_as_long_as_it_takes(tmp_path: Path, slow: str) -> None:
    made = "st.integers()" if slow == "the example" else "st.builds(lambda: time.sleep(0.6))"
    body = f"""
import time
from hypothesis import given, settings, strategies as st
@settings(max_examples=3)
@given({made})
def test_one(_): time.sleep(0.3)
"""

    assert "1 passed" in outcome(tmp_path, body)
