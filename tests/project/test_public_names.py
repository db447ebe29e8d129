"""The names that `from pipeline import ...` gives, and the modules that it loads."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

ROOT = Path(__file__).parents[2]
# The seeds' names, as they stand in the seeds' pages, and the trainer's way in.
SEEDS = {
    "experience.types": ["Experience", "ExperienceVL", "BufferItem", "BufferItemVL", "is_vl_experience"],
    "experience.batching": [
        "zero_pad_sequences",
        "split_experience_batch",
        "make_experience_batch",
        "remove_padding_in_sequences",
    ],
    "rollout.maker": ["ExperienceMaker", "NaiveExperienceMaker"],
    "replay.buffer": ["DetachedReplayBuffer"],
    "trainer.connect": ["connect"],
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names_for_type_checkers() -> list[str]:
    """Return the names that the package imports under TYPE_CHECKING."""
    tree = ast.parse(Path(pipeline.__file__).read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return [alias.name for node in imports if (node.module or "").startswith("pipeline.") for alias in node.names]


def test_the_page_of_the_api_lists_each_public_name_once() -> None:
    table = [line.split("|")[1] for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("|")]
    listed = [name for cell in table for name in re.findall(r"`(\w+)`", cell)]

    assert sorted(listed) == sorted(pipeline.__all__)


def test_a_public_name_is_the_object_of_its_module(subtests: pytest.Subtests) -> None:
    for module, name in [(module, name) for module, names in SEEDS.items() for name in names]:
        with subtests.test(name):
            scope: dict[str, object] = {}
            exec(f"from pipeline import {name}", scope)
            assert scope[name] is getattr(importlib.import_module(f"pipeline.{module}"), name)
            assert name in pipeline.__all__ and name in dir(pipeline)


def test_every_name_is_there_for_type_checkers_and_at_run_time_alike() -> None:
    assert sorted(names_for_type_checkers()) == sorted(pipeline.__all__)
    assert all(hasattr(pipeline, name) for name in pipeline.__all__)


def test_the_package_alone_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, pipeline; dir(pipeline); print(*sys.modules)"

    loaded = subprocess.check_output([sys.executable, "-P", "-c", program], text=True).split()

    assert not {"torch", "numpy", "transformers", "pydantic", "zmq"} & set(loaded)


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="module 'pipeline' has no attribute 'DetachedBuffer'"):
        pipeline.DetachedBuffer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'DetachedBuffer' from 'pipeline'"):
        exec("from pipeline import DetachedBuffer")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_and_the_examples_import_from_the_package_alone(page: Path) -> None:
    text = page.read_text()
    imported = re.findall(r"from pipeline import ([\w, ]+)", text)
    names = [name for line in imported for name in re.split(r", *", line.strip())]

    assert re.findall(r"(?:from|import) pipeline\.\S+", text) == []
    assert [name for name in names if name and name not in pipeline.__all__] == []
    # `pipeline.sort_digits:exact_answer` is a value of the configuration; python -m pipeline.x regenerates a page.
    used = set(re.findall(r"(?<!-m )\bpipeline\.([A-Za-z]\w*)\b(?![.:/])", text)) - {"sort_digits"}
    assert used <= set(pipeline.__all__)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_from_the_package_alone(example: Path) -> None:
    tree = ast.parse(example.read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]

    assert [module for module in modules if (module or "").startswith("pipeline.")] == []
