"""`rlhfd try-reward`: the parts of a reward as a run has them, and mistakes with file and line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main as cli
from pipeline.config.user_modules import FOLDER_VARIABLE
from pipeline.errors import ExitCode

REWARDS = """
def length(input_ids, attention_mask, *, response_start, response_end, **_):
    return 0.1 * float(response_end - response_start)


def right(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    response = tokenizer.decode(input_ids[response_start:response_end])
    if response.endswith("0"):
        return None
    return float(response == gt_answer + tokenizer.eos_token) + gt_answer.count("9")
"""


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch, task: Path) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    # A name of its own: modules stay loaded in this process.
    module = f"rewards_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(REWARDS)
    (folder / "run.toml").write_text(
        f"rewards = ['{module}:length', '{module}:right']\n"
        f"[model]\nactor = '{task / 'model'}'\n[prompts]\npath = '{task / 'prompts.jsonl'}'\n"
        f"[rollout]\nmax_length = 12\n"
        f"[daemon]\nstate_dir = 'state'\n"
    )
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["try-reward", "--config", "run.toml", *arguments])


def write_rows(folder: Path, *rows: object) -> None:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def test_rows_of_a_file_need_no_prompts(folder: Path) -> None:
    write_rows(folder, {"prompt": "21>", "response": "12", "answer": "12"})
    config = folder / "run.toml"
    config.write_text(re.sub(r"(?m)^(\[prompts\]|path = .*)\n", "", config.read_text()))

    scored, refused = run("rows.jsonl"), run("--response", "12")

    assert scored.exit_code == 0, scored.output
    assert not (folder / "state").exists(), "no embedded model was made for another one"
    assert (refused.exit_code, refused.stderr) == (
        78, "run.toml:3:9: prompts.path: must be set with a model of its own, or prompts.sources\n",
    )  # fmt: skip


def test_reward_functions_beside_the_configuration_are_found_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder, {"prompt": "21>", "response": "12", "answer": "12"})
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    scored = CliRunner().invoke(cli.main, ["try-reward", "--config", "../run.toml", "../rows.jsonl", "--json"])

    assert scored.exit_code == 0, scored.output
    assert json.loads(scored.stdout)["reward"] == pytest.approx(1.3)


def test_a_mistake_in_a_module_is_told_before_the_embedded_model_is_made(folder: Path) -> None:
    module = f"rewards_{folder.name.replace('-', '_')}"
    (folder / "run.toml").write_text(f"rewards = ['{module}:wrong']\n[daemon]\nstate_dir = 'state'\n")

    refused = run("--response", "12")

    assert (refused.exit_code, refused.stderr) == (
        78, f"run.toml:1:11: rewards: {module} has no function wrong: {folder / module}.py\n"
    )  # fmt: skip
    assert not (folder / "state").exists()


def test_each_part_of_a_row_is_shown_and_their_sum(folder: Path) -> None:
    write_rows(
        folder,
        {"prompt": "21>", "response": "12", "answer": "12"},
        {"prompt": "21>", "response": "12", "answer": "12", "cut": True},
        {"prompt": "7302>", "response": "77777777", "answer": "9"},
    )
    module = f"rewards_{folder.name.replace('-', '_')}"

    scored = run("rows.jsonl", "--json")
    table = run("rows.jsonl").stdout.splitlines()

    rows = [json.loads(line) for line in scored.stdout.splitlines()]
    assert scored.exit_code == 0
    # The stop token is a token of the response, unless it was cut: 12 columns leave 7 to a prompt of 5 tokens.
    assert [(row["tokens"], row["cut"]) for row in rows] == [(3, False), (2, True), (7, True)]
    parts = [(row["parts"][f"{module}:length"], row["parts"][f"{module}:right"]) for row in rows]
    assert parts == [(pytest.approx(0.3), 1.0), (pytest.approx(0.2), 0.0), (pytest.approx(0.7), 1.0)]
    assert [row["reward"] for row in rows] == [pytest.approx(sum(one)) for one in parts]
    assert table[0].split()[:4] == ["row", "reward", f"{module}:length", f"{module}:right"]
    assert table[1].split()[:5] == ["rows.jsonl:1", "1.3000", "0.3", "1", "3"]
    assert table[-1] == "3 of 3 rows have a reward: mean 1.0667, 0.2 to 1.7"


def test_a_function_that_raises_is_named_with_its_line_and_one_that_returns_none_is_left_out(folder: Path) -> None:
    write_rows(folder, {"prompt": "1>", "response": "1"}, {"prompt": "1>", "response": "0", "answer": "1", "cut": True})
    module = f"rewards_{folder.name.replace('-', '_')}"

    scored = run("rows.jsonl")

    (first,) = scored.stderr.splitlines()
    assert scored.exit_code == ExitCode.FAILED
    assert first.startswith(f"rows.jsonl:1: {module}:right raised TypeError(")
    assert first.endswith(f" ({folder / module}.py:10)")
    assert scored.stdout.splitlines()[1].split()[:4] == ["rows.jsonl:1", "none", "0.2", "–"]
    assert scored.stdout.splitlines()[2].split()[:4] == ["rows.jsonl:2", "0.1000", "0.1", "–"]


def test_a_function_that_takes_too_long_or_ends_the_process_is_told(folder: Path) -> None:
    module = f"ending_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(
        "import sys, threading\ndef late(input_ids, attention_mask, *, response, **_):\n"
        "    if response == 'end':\n        sys.exit(3)\n"
        "    [one.join(60) for one in threading.enumerate() if isinstance(one, threading.Timer)]\n    return 1.0\n"
    )
    write_rows(folder, {"prompt": "1>", "response": "1"}, {"prompt": "1>", "response": "end"})

    scored = run("rows.jsonl", "--set", f"rewards={module}:late", "--set", "rollout.reward_timeout_s=0.2")

    late, ended = scored.stderr.splitlines()
    assert scored.exit_code == ExitCode.FAILED
    assert late.startswith("rows.jsonl:1: no score within 0.2 s (rollout.reward_timeout_s): a run leaves the row out")
    assert ended == f"rows.jsonl:2: {module}:late ended its process: sys.exit(3)"


def test_a_sum_that_no_run_takes_is_no_reward(folder: Path) -> None:
    module = f"large_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text("def one(*_, **__): return 3e38\ndef other(*_, **__): return 2e38\n")
    write_rows(folder, {"prompt": "1>", "response": "1"})

    scored = run("rows.jsonl", "--set", f"rewards={module}:one,{module}:other", "--json")

    assert scored.exit_code == ExitCode.FAILED and json.loads(scored.stdout)["reward"] is None
    assert scored.stderr == "rows.jsonl:1: the sum of the weighted scores is beyond float32: 3e+38 + 2e+38\n"


def test_without_a_limit_no_row_is_told_to_be_late(folder: Path) -> None:
    write_rows(folder, {"prompt": "1>", "response": "1", "answer": "1"})

    scored = run("rows.jsonl", "--set", "rollout.reward_timeout_s=0")

    assert (scored.exit_code, scored.stderr) == (0, "")


def test_prompts_of_the_run_are_scored_with_given_responses(folder: Path) -> None:
    scored = run("--response", "1", "--response", "2", "--prompts", "2", "--json")

    rows = [json.loads(line) for line in scored.stdout.splitlines()]
    assert scored.exit_code == 0 and [row["response"] for row in rows] == ["1", "2", "1", "2"]
    assert rows[0]["prompt"] == rows[1]["prompt"] != rows[2]["prompt"] and rows[0]["place"].startswith("prompt ")


def test_every_mistake_in_the_rows_is_told_before_anything_is_scored(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(
        '{"prompt": "1>", "response": "1"}\n{"response": "1"}\n\n{"prompt": "1>"}\n{"prompt": "1>", "response": 1}\n'
        '{"prompt": "1>", "response": "1", "cut": 1}\n{"prompt": \n{"prompt": "1>", "response": "\\ud83d"}\n'
    )

    refused = run("rows.jsonl")

    assert refused.exit_code == ExitCode.BAD_CONFIG and refused.stdout == ""
    assert refused.stderr.splitlines() == [
        'rows.jsonl:2:1: no key "prompt" among response',
        'rows.jsonl:4:1: no key "response" among prompt',
        "rows.jsonl:5:1: response is no text",
        "rows.jsonl:6:1: cut is neither true nor false",
        "rows.jsonl:7:11: not JSON: Expecting value",
        "rows.jsonl:8:1: response holds half of a surrogate pair, which no tokenizer takes",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "rows.jsonl:1:1: no row in the file"), (None, "cannot read rows.jsonl: No such file or directory")],
)
def test_a_file_without_rows_is_refused(folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "rows.jsonl").write_text(text)

    refused = run("rows.jsonl")

    assert refused.exit_code == ExitCode.BAD_CONFIG and refused.stderr.startswith(message)


def test_a_function_that_does_not_import_has_the_place_of_its_key(folder: Path) -> None:
    (folder / "run.toml").write_text(
        (folder / "run.toml").read_text().replace("rewards = [", "rewards = ['nosuch:at_all', ")
    )

    refused = run("--response", "1")

    assert refused.exit_code == ExitCode.BAD_CONFIG
    assert refused.stderr.startswith("run.toml:1:11: rewards: ") and "nosuch" in refused.stderr


@pytest.mark.parametrize("arguments", [[], ["rows.jsonl", "--response", "1"], ["--response", "\udcff"]])
def test_rows_come_from_a_file_or_from_responses(folder: Path, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == ExitCode.USAGE


def test_a_row_that_needs_a_chat_template_is_named_by_its_line(folder: Path) -> None:
    write_rows(
        folder, {"prompt": "1>", "response": "1"}, {"prompt": [{"role": "user", "content": "1"}], "response": "1"}
    )

    refused = run("rows.jsonl")

    assert refused.exit_code == ExitCode.BAD_CONFIG
    assert refused.stderr.startswith("rows.jsonl:2: prompt 1 needs a chat template and the tokenizer has none")


def test_a_folder_is_no_file_of_rows(folder: Path) -> None:
    refused = run(".")

    assert (refused.exit_code, refused.stderr) == (78, ". is a folder: give a file of JSON lines\n")


def test_a_module_that_ends_the_process_at_its_import_is_told(folder: Path) -> None:
    module = f"ends_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n")
    config = folder / "run.toml"
    config.write_text(config.read_text().replace("rewards = [", f"rewards = ['{module}:score', "))

    refused = run("--response", "1")

    assert refused.exit_code == ExitCode.BAD_CONFIG
    assert f"rewards: cannot import {module}: it calls sys.exit(2)" in refused.stderr
