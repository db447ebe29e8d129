"""`rlhfd init`: what it writes is a right configuration, and nothing is overwritten."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main as cli
from pipeline.errors import ExitCode
from pipeline.supervisor import preflight
from tests.support.folders import save_shell

FILES = {"grpo.toml", "my_rewards.py", "prompts.jsonl"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in list(os.environ):
        if variable.startswith("RLHFD_") and variable != "RLHFD_TEST_SESSION":
            monkeypatch.delenv(variable)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def test_the_files_are_a_configuration_without_a_mistake(folder: Path) -> None:
    made = run("init", "deep/my-run")

    assert made.exit_code == 0 and {path.name for path in (folder / "deep/my-run").iterdir()} == FILES
    assert run("config", "check", "--config", "deep/my-run/grpo.toml").stdout == "deep/my-run/grpo.toml: ok\n"
    assert "\n  cd deep/my-run\n" in made.stdout and "\n  rlhfd start --config grpo.toml\n" in made.stdout
    prompts = [json.loads(line) for line in (folder / "deep/my-run/prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 64
    assert all(sorted(prompt["prompt"].removesuffix(">")) == list(prompt["answer"]) for prompt in prompts)


def test_nothing_is_overwritten_and_nothing_is_written_beside(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text("mine")

    refused = run("init")

    assert (refused.exit_code, refused.stderr) == (
        ExitCode.FAILED, "nothing was written, there is already prompts.jsonl\n",
    )  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["prompts.jsonl"]
    assert (folder / "prompts.jsonl").read_text() == "mine"


def test_a_model_of_ones_own_is_named_wherever_the_run_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shell of a model, whose tokenizer is none.
    monkeypatch.setattr(preflight, "findings_of_start", lambda loaded: ([], []))
    model = save_shell(folder / 'a "model"')

    assert run("init", "my-run", "--model", model.name).exit_code == 0
    written = tomllib.loads((folder / "my-run/grpo.toml").read_text())

    assert written["model"]["actor"] == str(model) and written["trainer"]["learning_rate"] == 1e-6
    assert run("config", "check", "--config", "my-run/grpo.toml").exit_code == 0
    assert run("init", "other", "--model", "nosuch").exit_code == 2 and not (folder / "other").exists()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "file").write_text("")

    refused = run("init", "file/below")

    assert refused.exit_code == ExitCode.FAILED and refused.stderr.endswith("file/below: Not a directory\n")
