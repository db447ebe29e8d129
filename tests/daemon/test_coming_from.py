"""The conversions of docs/coming-from.md: its commands, word for word, on runs as users of the other trainers write."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from benches import peers
from pipeline import recorded_batches
from pipeline.config.foreign.lookup import PAGE, TRAINERS
from tests.support.daemon import Daemon, clean_environment, rlhfd

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "coming-from"
# A message is a prompt of the embedded task, whose tokenizer has no template.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Advantages are of float32; 2.4e-7 was the largest difference.
TOLERANCE = 1e-6


def commands(word: str) -> tuple[list[str], list[str]]:
    """Return the words of both commands of a trainer, without the program."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    init, start = [shlex.split(line)[1:] for line in block.splitlines() if f" {word}" in line]
    return init, start


def run(folder: Path, task: Path, word: str, *sets: str) -> Daemon:
    """Convert and run a trainer's file in a folder with what it names; return the daemon, which has ended."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    shutil.copytree(task / "model", folder / "models/my-model")
    (folder / "models/my-model/chat_template.jinja").write_text(TEMPLATE)
    lines = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()[:256]]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "data").mkdir()
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": line["prompt"]}],
            "ability": "sorting",
            "reward_model": {"style": "rule", "ground_truth": line["answer"]},
            "extra_info": {"index": number},
        }
        for number, line in enumerate(lines)
    ]
    for name, kept in (("train", rows[8:]), ("test", rows[:8])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(kept), folder / f"data/{name}.parquet")
    init, start = commands(word)
    made = rlhfd(*init, folder=folder)
    assert made.returncode == 0, made.stderr
    own = [start[number + 1] for number, each in enumerate(start) if each == "--set"]
    with Daemon(folder, *own, *sets, arguments=("--config", start[start.index("--config") + 1])) as daemon:
        assert daemon.wait() == 0, daemon.errors
    return daemon


def steps_of(daemon: Daemon) -> list[dict[str, float]]:
    """Return the lines of steps, without those of evaluations."""
    lines = [json.loads(line) for line in (daemon.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward_mean" in line]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Daemon:
    """The run of TRL's file, which has ended, with its rows recorded."""
    return run(tmp_path_factory.mktemp("trl"), task, "trl", "trainer.record=rows")


def test_a_run_of_trl_is_trained(trl: Daemon) -> None:
    steps = steps_of(trl)

    assert [step["step"] for step in steps] == [1, 2] and all(step["rows"] == 64 for step in steps), trl.errors
    assert "errored" not in trl.errors


def test_rewards_and_advantages_of_a_step_are_those_that_trl_computes_for_its_rows(trl: Daemon) -> None:
    if not peers.TRL.folder.exists() and not os.environ.get("CI"):
        pytest.skip("the environment of TRL is made by `bin/bench rollout`, and in CI")
    folder = trl.folder
    python = peers.python_of(peers.TRL)
    batch = next(recorded_batches(trl.run_dir / "recording"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "models/my-model")
    answers = {
        line["prompt"]: line["answer"] for line in map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    }
    tokens = [row[mask.bool()].tolist() for row, mask in zip(batch.sequences, batch.attention_mask, strict=True)]
    actions = batch.action_mask.sum(dim=1).tolist()
    prompts = [
        tokenizer.decode(row[:-count], skip_special_tokens=True) for row, count in zip(tokens, actions, strict=True)
    ]
    rows = [
        {"prompt": prompt, "answer": answers[prompt], "completion_ids": row[-count:]}
        for prompt, row, count in zip(prompts, tokens, actions, strict=True)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))

    command = [python, "-m", "tests.daemon.trl_step", str(folder)]
    environment = {**clean_environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=600, cwd=ROOT, env=environment)

    theirs = json.loads((folder / "trl.json").read_text())
    # Groups of one prompt, of different rewards: the comparison has something to compare.
    assert len({tuple(prompts[start : start + 8]) for start in range(0, 64, 8)}) == 8
    assert len({round(reward, 3) for reward in theirs["rewards"]}) > 4
    assert batch.info["score"].tolist() == pytest.approx(theirs["rewards"], abs=TOLERANCE)
    assert batch.advantages.tolist() == pytest.approx(theirs["advantages"], abs=TOLERANCE)
    (table,) = (trainer for trainer in TRAINERS if trainer.word == "trl")
    assert [name for name in theirs["options"] if not name.startswith("_") and table.find(name) is None] == []


def test_a_run_of_verl_is_trained_and_evaluated(tmp_path: Path, task: Path) -> None:
    daemon = run(tmp_path, task, "verl")

    steps = steps_of(daemon)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["rows"] == 32 for step in steps), daemon.errors
    assert daemon.run_dir.name == "verl-digits"
    evaluations = [json.loads(line) for line in (daemon.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [evaluation["version"] for evaluation in evaluations] == [0, 2]
    assert "errored" not in daemon.errors and any(step["reward_mean"] > 0 for step in steps)


def test_a_run_of_openrlhf_is_trained_with_its_critic(tmp_path: Path, task: Path) -> None:
    daemon = run(tmp_path, task, "openrlhf")

    steps = steps_of(daemon)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["rows"] == 32 for step in steps), daemon.errors
    assert "errored" not in daemon.errors and any(step["reward_mean"] > 0 for step in steps)
