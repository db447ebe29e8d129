"""What import-linter cannot see: what an import really loads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

HEAVY = {"torch", "transformers", "ray", "vllm"}


def torch_free_modules() -> list[str]:
    """Return the modules of the contract in pyproject.toml that exist."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "torch-free")
    names = ["pipeline", *(f"pipeline.{name.strip().strip('()')}" for name in layers[-1].split(":"))]
    return [name for name in names if importlib.util.find_spec(name)]


def test_what_runs_without_torch_does_not_load_it() -> None:
    program = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([*sys.modules]))
"""

    loaded = json.loads(subprocess.check_output([sys.executable, "-P", "-c", program, *torch_free_modules()]))

    assert not HEAVY & set(loaded)
