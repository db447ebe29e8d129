"""The files that a configuration names: one that cannot be looked at is a mistake with its place, and no traceback.

A name that is too long is refused by the kernel for root as well, where a folder without permission is not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.supervisor.preflight import problems_of_files
from tests.support.folders import save_shell

LONG = "m" * 300


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        ((f"model.actor={LONG}",), "model.actor"),
        ((f"model.reference={LONG}",), "model.reference"),
        ((f"model.lora_adapter={LONG}", "model.lora_rank=8"), "model.lora_adapter"),
    ],
)
def test_a_model_that_cannot_be_looked_at_is_named_with_its_key(sets: tuple[str, ...], key: str) -> None:
    found = problems_of_files(load(None, sets, {}))

    (problem,) = [line for line in found if LONG in line]
    assert problem.startswith(f"--set {key}: cannot read {Path.cwd() / LONG} as uid {os.geteuid()}: File name too long")


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (f"prompts.path={LONG}", "prompts.path"),
        (f'prompts.sources=[{{path = "{LONG}"}}]', "prompts.sources"),
        (f'evaluation.files=["{LONG}"]', "evaluation.files"),
    ],
)
def test_prompts_that_cannot_be_looked_at_are_named_with_their_key(sets: str, key: str, tmp_path: Path) -> None:
    save_shell(tmp_path / "model")

    found = problems_of_files(load(None, (sets, f"model.actor={tmp_path / 'model'}"), {}))

    assert f"--set {key}: cannot read {Path.cwd() / LONG}: File name too long" in found
    assert len([line for line in found if LONG in line]) == 1
