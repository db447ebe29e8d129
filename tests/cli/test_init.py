"""`rlhfd init`: what it writes is a right configuration, and nothing is overwritten."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main as cli
from pipeline.cli.init import _program
from pipeline.errors import ExitCode
from pipeline.supervisor import preflight
from tests.support.folders import save_shell

BIN = Path(__file__).parents[2] / "bin/rlhfd"
VENV = sys.prefix
FILES = {"grpo.toml", "my_rewards.py", "prompts.jsonl"}


pytestmark = pytest.mark.usefixtures("folder")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def test_the_files_are_a_configuration_without_a_mistake(folder: Path) -> None:
    made = run("init", "deep/my-run")

    assert made.exit_code == 0 and {path.name for path in (folder / "deep/my-run").iterdir()} == FILES
    assert run("config", "check", "--config", "deep/my-run/grpo.toml").stdout == "deep/my-run/grpo.toml: ok\n"
    assert "\n  cd deep/my-run\n" in made.stdout and made.stdout.endswith("rlhfd start --config grpo.toml\n")
    prompts = [json.loads(line) for line in (folder / "deep/my-run/prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 64
    assert all(sorted(prompt["prompt"].removesuffix(">")) == list(prompt["answer"]) for prompt in prompts)


def test_a_disk_that_is_full_is_named_with_the_file_and_leaves_none_that_refuses_the_next_try() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        made = run("init", "my-run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert made.exit_code == 1 and "wrote" not in made.output
    assert re.fullmatch(r"nothing was written, my-run/\S+: File too large\n", made.stderr)
    assert run("init", "my-run").exit_code == 0


@pytest.mark.parametrize("is_on_path", [False, True])
def test_the_commands_that_are_printed_work_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_on_path: bool
) -> None:
    # The program of the environment, which a checkout's may lack, runs this code.
    environment = folder / "environment"
    environment.mkdir()
    (environment / "python").symlink_to(sys.executable)
    (environment / "rlhfd").write_text(f'#!/bin/sh\nexec {BIN} "$@"\n')
    (environment / "rlhfd").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    path = f"{environment}:{os.environ['PATH']}" if is_on_path else "/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)

    made = run("init", "my run")

    commands = [line.strip() for line in made.stdout.partition("Next:\n")[2].splitlines()]
    assert commands[0] == "cd 'my run'" and len(commands) == 4
    assert {shlex.split(line)[0] for line in commands[1:]} == {"rlhfd" if is_on_path else str(BIN)}
    script = "\n".join(["set -e", *commands[:2]])
    environ = {**os.environ, "RLHFD_VENV": VENV}
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "grpo.toml: ok\n"), done.stderr


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


def test_a_model_whose_path_is_not_utf_8_is_refused_and_nothing_is_written(folder: Path) -> None:
    (folder / "bad\udcff").mkdir()

    refused = run("init", "mine", "--model", "bad\udcff")

    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "nothing was written, grpo.toml cannot name a path that is not UTF-8\n"
    assert not (folder / "mine").exists()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "file").write_text("")

    refused = run("init", "file/below")

    assert refused.exit_code == ExitCode.FAILED and refused.stderr.endswith("file/below: Not a directory\n")


class TestFrom:
    """`rlhfd init --from`: a run of another trainer becomes a configuration."""

    def test_the_configuration_is_right_up_to_the_model_and_the_data(self, folder: Path) -> None:
        (folder / "c.yaml").write_text(
            "max_steps: 3\ndataset_name: p.jsonl\nreward_funcs: [accuracy_reward]\nadam_epsilon: 0.1\n"
        )

        made = run("init", "deep/er", "--from", "trl", "c.yaml")

        assert made.exit_code == 0, made.output
        assert made.stdout == (
            f"wrote deep/er/grpo.toml\nNext:\n  {_program()} config check --config deep/er/grpo.toml\n"
            f"  {_program()} start --config deep/er/grpo.toml\n"
        )
        assert "not carried: adam_epsilon = 0.1: AdamW's epsilon is 1e-8, TRL's default\n" in made.stderr
        assert made.stderr.endswith("docs/coming-from.md has all options of TRL\n")
        checked = run("config", "check", "--config", "deep/er/grpo.toml")
        assert checked.exit_code == ExitCode.BAD_CONFIG
        problems = [line.partition(": ")[2] for line in checked.stderr.splitlines()]
        assert [problem.partition(": ")[0] for problem in problems] == ["model.actor", "prompts.path"]
        assert f"cannot read {folder}/p.jsonl" in problems[1]

    def test_a_model_of_ones_own_takes_the_place_of_that_of_the_file(self, folder: Path) -> None:
        model = save_shell(folder / "model")
        (folder / "run.sh").write_text("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=x\n")

        assert run("init", ".", "--model", "model", "--from", "verl", "run.sh").exit_code == 0

        written = tomllib.loads((folder / "ppo.toml").read_text())
        assert written["model"]["actor"] == str(model) and written["rollout"]["algorithm"] == "ppo"

    def test_nothing_is_overwritten(self, folder: Path) -> None:
        (folder / "grpo.toml").write_text("mine")
        (folder / "c.json").write_text('{"beta": 0.0}')

        refused = run("init", "--from", "trl", "c.json")

        assert refused.exit_code == ExitCode.FAILED and "there is already grpo.toml" in refused.stderr
        assert (folder / "grpo.toml").read_text() == "mine"

    def test_a_bad_file_is_named_with_its_place_and_nothing_is_written(self, folder: Path) -> None:
        (folder / "c.json").write_text('{"beta": 0.0,}')

        refused = run("init", "made", "--from", "trl", "c.json")

        assert refused.exit_code == ExitCode.BAD_CONFIG and refused.stderr.startswith("c.json:1:")
        assert not (folder / "made").exists()
        assert run("init", "made", "--from", "coati", "c.json").exit_code == ExitCode.USAGE

    def test_keys_that_do_not_fit_each_other_are_told(self, folder: Path) -> None:
        (folder / "c.yaml").write_text("num_generations: 1\nmax_steps: 3\nreward_funcs: [tag_count]\n")

        made = run("init", "--from", "trl", "c.yaml")

        one, other = (line for line in made.stderr.splitlines() if line.startswith("to be mended: grpo.toml:"))
        assert "must be at least 2 with GRPO, got 1" in one and "must be one of" in other
