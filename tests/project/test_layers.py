"""The folders of `pipeline`: docstrings, and the modules loaded at run time, unseen by import-linter."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "pipeline").rglob("*/__init__.py"))
MODULES = sorted((ROOT / "pipeline").rglob("*.py"))
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "ray", "vllm"}


def contracts() -> dict[str, dict[str, Any]]:
    """Return import-linter's contracts by id."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}


def torch_free_modules() -> list[str]:
    """Return the modules of the packages that the contract keeps free of torch, but for its two exceptions."""
    contract = contracts()["torch-free"]
    exceptions = {line.split(" -> ")[0] for line in contract["ignore_imports"]} - {"pipeline.cli.main"}
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES]
    sources = contract["source_modules"]
    return [
        name
        for name in names
        if name not in exceptions and any(name == source or name.startswith(f"{source}.") for source in sources)
    ]


def listed(package: Path) -> list[str]:
    """Return the names that a package's docstring lists, one a line."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""
    return re.findall(r"^(\w+) {2,}\S", docstring, re.MULTILINE)


def test_what_runs_without_torch_does_not_load_it() -> None:
    program = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([*sys.modules]))
"""
    modules = torch_free_modules()

    loaded = json.loads(subprocess.check_output([sys.executable, "-P", "-c", program, *modules]))

    assert len(modules) > 60
    assert not HEAVY & set(loaded)


def test_the_docstring_of_each_package_lists_its_modules(subtests: pytest.Subtests) -> None:
    for package in PACKAGES:
        with subtests.test(str(package.relative_to(ROOT))):
            modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
            folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
            assert listed(package) == sorted(modules | folders)


def test_the_root_holds_what_everybody_uses_and_nothing_else() -> None:
    files = {path.name for path in (ROOT / "pipeline").iterdir() if path.is_file()}

    assert files == {"__init__.py", "errors.py", "progress.py", "serial.py", "sort_digits.py", "py.typed"}
