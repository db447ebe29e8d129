"""A folder of its own for a test of commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in an environment without variables of rlhfd."""
    monkeypatch.chdir(tmp_path)
    for variable in list(os.environ):
        if variable.startswith("RLHFD_") and variable != "RLHFD_TEST_SESSION":
            monkeypatch.delenv(variable)
    return tmp_path
