"""ARCHITECTURE.md and docs/failures.md agree with the tree: folders and their layers, files, tests, size."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
PACKAGE = ROOT / "pipeline"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FAILURES = (ROOT / "docs" / "failures.md").read_text()


def section(title: str) -> str:
    """Return the lines of a section of the page."""
    (text,) = re.findall(rf"^## {title}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def packages() -> set[str]:
    """Return each package below `pipeline`, as ``rollout/generation``."""
    return {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py")}


def root_modules() -> set[str]:
    """Return the modules directly in `pipeline`."""
    return {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}


def rows() -> list[tuple[int, str, str]]:
    """Return layer, folder and description of each row in the page's table."""
    found = re.findall(r"^\| (\d+) \| `([\w/]+)/` \| (.+) \|$", section("Folders"), re.MULTILINE)
    return [(int(layer), folder, text) for layer, folder, text in found]


def listed_modules() -> list[tuple[str, int]]:
    """Return each module of the root that the page names before its table, with its layer."""
    text = " ".join(section("Folders").partition("\n| ")[0].split()).partition("At the root: ")[2]
    return [(name, int(layer)) for name, layer in re.findall(r"`(\w+)\.py` \((?:layer )?(\d+)\b", text)]


def contracted() -> dict[str, int]:
    """Return the layer of each folder and root module in import-linter's contract, the lowest 1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = (entry["layers"] for entry in project["tool"]["importlinter"]["contracts"] if entry["id"] == "layers")
    return {name: number for number, layer in enumerate(reversed(layers), 1) for name in re.findall(r"\w+", layer)}


@functools.cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all tests."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    functions = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_every_folder_is_listed_once_in_the_layer_that_is_checked() -> None:
    folders = [folder for _, folder, _ in rows()]
    inside = [name for _, folder, text in rows() for name in re.findall(rf"`({folder}/[\w/]+)/`", text)]

    assert sorted(folders) == sorted({name for name in packages() if "/" not in name})
    assert sorted(inside) == sorted({name for name in packages() if "/" in name})
    assert {folder: layer for layer, folder, _ in rows()} == {folder: contracted()[folder] for folder in folders}


def test_every_module_of_the_root_is_listed_once_in_the_layer_that_is_checked() -> None:
    assert sorted(listed_modules()) == sorted((name, contracted()[name]) for name in root_modules())


def test_nothing_is_contracted_that_is_not_there() -> None:
    assert set(contracted()) == {name for name in packages() if "/" not in name} | root_modules()


@pytest.mark.parametrize("page", [PAGE, FAILURES], ids=["ARCHITECTURE.md", "docs/failures.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"\btest_\w+", page))

    assert len(named) > 30
    assert named - names_of_tests() == set()


def test_every_file_that_the_page_names_exists() -> None:
    named = {name for name in re.findall(r"`([\w/]+/\w+\.\w+)`", PAGE) if not name.startswith("docs/")}

    assert len(named) > 40
    assert [name for name in sorted(named) if not (PACKAGE / name).is_file()] == []


def test_where_a_change_is_said_to_go_its_names_are_there() -> None:
    lines = re.findall(r"^\| [a-z ]+ \| (.+) \|$", section("Where a change goes"), re.MULTILINE)
    named = [
        (file, name)
        for line in lines
        for file, names in re.findall(r"`([\w/]+\.py)` \((`\w+`(?:, `\w+`)*)\)", line)
        for name in re.findall(r"\w+", names)
    ]

    assert len(named) >= 6
    assert [(file, name) for file, name in named if not re.search(rf"\b{name}\b", (PACKAGE / file).read_text())] == []


def test_every_invariant_names_a_test() -> None:
    invariants = re.split(r"^\d+\. ", section("Invariants"), flags=re.MULTILINE)[1:]

    assert len(invariants) >= 10
    assert [text for text in invariants if "`test_" not in text] == []


def test_every_failure_names_a_test() -> None:
    failures = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", FAILURES, re.MULTILINE | re.DOTALL)

    assert len(failures) > 30
    assert [title for title, text in failures if "`test_" not in text] == []


def test_a_decision_is_one_numbered_page(subtests: pytest.Subtests) -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.stem[:4] for page in pages]
    for page, number in zip(pages, numbers, strict=True):
        with subtests.test(page.stem):
            title, *lines = page.read_text().splitlines()
            assert re.fullmatch(r"\d{4}-[a-z0-9-]+", page.stem)
            assert title.startswith(f"# {number} ")
            assert len(lines) <= 60
            assert numbers.count(number) == 1


def test_the_reading_order_has_each_file_once() -> None:
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py)` ", section("Reading order"), re.MULTILINE)

    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert 40 <= len(steps) <= 60
    assert len({file for _, file in steps}) == len(steps)
    assert [file for _, file in steps if not (PACKAGE / file).is_file()] == []
