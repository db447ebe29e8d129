"""The folders of `pipeline`: docstrings, sizes, and the modules loaded at run time, unseen by import-linter."""

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
# Signatures that the seeds fix.
SEEDS_CONSTRUCTORS = {"NaiveExperienceMaker", "ExperienceMaker", "DetachedReplayBuffer"}


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


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_docstring_of_a_package_lists_its_modules(package: Path) -> None:
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert listed(package) == sorted(modules | folders)


def test_the_root_holds_what_everybody_uses_and_nothing_else() -> None:
    files = {path.name for path in (ROOT / "pipeline").iterdir() if path.is_file()}

    assert files == {"__init__.py", "errors.py", "serial.py", "sort_digits.py", "py.typed"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_holds_at_most_20_files(package: Path) -> None:
    assert len([path for path in package.iterdir() if path.is_file()]) <= 20


def test_a_file_has_at_most_450_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}

    assert {name: count for name, count in lines.items() if count > 450} == {}


def test_a_constructor_takes_at_most_12_parameters() -> None:
    classes = [
        node for path in MODULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    constructors = {
        (kind.name, function.lineno): len([*function.args.args, *function.args.kwonlyargs]) - 1
        for kind in classes
        for function in kind.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    }

    assert len(constructors) > 50
    assert {
        name: count for (name, _), count in constructors.items() if count > 12 and name not in SEEDS_CONSTRUCTORS
    } == {}
