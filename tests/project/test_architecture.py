"""ARCHITECTURE.md is true where that can be looked up: its modules, their layers, the tests it names, its length."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def modules() -> set[str]:
    """Return the modules and packages directly under `pipeline`."""
    found = {path.stem for path in (ROOT / "pipeline").glob("*.py")}
    return found - {"__init__"} | {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}


def listed() -> dict[str, int]:
    """Return the layer of each module in the page's table."""
    lines = re.findall(r"^ {4,5}(\d+)  (\w+(?:, \w+)*) +\S", PAGE, re.MULTILINE)
    return {name: int(layer) for layer, names in lines for name in names.split(", ")}


def contracted() -> dict[str, int]:
    """Return the layer of each module in import-linter's contract, the lowest 1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = (entry["layers"] for entry in project["tool"]["importlinter"]["contracts"] if entry["id"] == "layers")
    return {name: number for number, layer in enumerate(reversed(layers), 1) for name in re.findall(r"\w+", layer)}


def names_of_tests() -> set[str]:
    """Return the names of all tests."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_module_is_listed_once_in_the_layer_that_is_checked() -> None:
    assert listed() == {name: contracted()[name] for name in modules()}


def test_the_parts_of_each_package_are_named_on_its_line() -> None:
    for name in (path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")):
        (line,) = re.findall(rf"^ +\d+  {name} .*$", PAGE, re.MULTILINE)
        parts = {path.stem for path in (ROOT / "pipeline" / name).glob("*.py")} - {"__init__"}
        assert set(re.findall(r"`(\w+)`", line)) == parts


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\btest_\w+", PAGE))

    assert len(named) > 30
    assert named - names_of_tests() == set()


def test_every_invariant_names_a_test() -> None:
    (section,) = re.findall(r"^## Invariants\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    invariants = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]

    assert len(invariants) >= 10
    assert [text for text in invariants if "`test_" not in text] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda path: path.stem)
def test_a_decision_is_one_numbered_page(page: Path) -> None:
    title, *lines = page.read_text().splitlines()

    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", page.stem)
    assert title.startswith(f"# {page.stem[:4]} ")
    assert len(lines) <= 60
    assert len([*page.parent.glob(f"{page.stem[:4]}-*.md")]) == 1


def test_the_page_stays_within_200_lines() -> None:
    assert len(PAGE.splitlines()) <= 200
