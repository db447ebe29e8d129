"""What `from pipeline import ...` gives, and what it costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

# The seeds' names, as they stand in the seeds' pages, and the trainer's way in.
SEEDS = {
    "experience": ["Experience", "ExperienceVL", "BufferItem", "BufferItemVL", "is_vl_experience"],
    "batching": [
        "zero_pad_sequences",
        "split_experience_batch",
        "make_experience_batch",
        "remove_padding_in_sequences",
    ],
    "experience_maker": ["ExperienceMaker", "NaiveExperienceMaker"],
    "replay_buffer": ["DetachedReplayBuffer"],
    "stream": ["connect"],
}


def names_for_type_checkers() -> list[str]:
    """Return the names that the package imports under TYPE_CHECKING."""
    tree = ast.parse(Path(pipeline.__file__).read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return [alias.name for node in imports if (node.module or "").startswith("pipeline.") for alias in node.names]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in SEEDS.items() for name in names])
def test_a_public_name_is_the_object_of_its_module(module: str, name: str) -> None:
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
