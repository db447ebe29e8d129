"""The embedded task: the files of `prepare`, its behaviour if interrupted or called twice, and the reward."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipeline import sort_digits
from pipeline.config.model_files import model_sizes
from pipeline.config.prompts import PromptsConfig
from pipeline.config.schema import Config, DaemonConfig, ModelConfig
from pipeline.errors import DeadlineError
from pipeline.prompts.check import check
from pipeline.trainer import setup

FEW_STEPS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = sort_digits.directory_of(tmp_path_factory.mktemp("state"))
    setup.prepare(directory, warmup_steps=FEW_STEPS)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(sort_digits.model_directory(directory))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def reward(tokenizer: PreTrainedTokenizerFast, response: str, answer: str) -> float:
    token_ids = tokenizer("7302>" + response)["input_ids"]
    input_ids = torch.tensor([*token_ids, tokenizer.pad_token_id, tokenizer.pad_token_id])
    return sort_digits.exact_answer(
        input_ids,
        input_ids != tokenizer.pad_token_id,
        gt_answer=answer,
        response_start=5,
        response_end=len(token_ids),
        tokenizer=tokenizer,
        added_later="ignored",
    )


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("0237<eos>", 1.0),
        ("0237", 0.0),
        ("0273<eos>", 0.0),
        ("237<eos>", 0.0),
        ("02377<eos>", 0.0),
        ("0237<eos><eos>", 0.0),
        ("0237<pad><eos>", 0.0),
        ("<eos>", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_ended_by_eos_is_rewarded(
    tokenizer: PreTrainedTokenizerFast, response: str, expected: float
) -> None:
    assert reward(tokenizer, response, "0237") == expected


def test_builtin_names_become_paths_under_the_state_directory_and_others_stay() -> None:
    embedded = Config(daemon=DaemonConfig(state_dir=Path("somewhere")))
    own = Config(model=ModelConfig(actor="own/model"), prompts=PromptsConfig(path="own.jsonl"))

    resolved = sort_digits.with_paths(embedded)

    assert sort_digits.is_used(embedded) and not sort_digits.is_used(own)
    assert resolved.model.actor == "somewhere/sort-digits/model"
    assert resolved.model.reference is None
    assert resolved.prompts.path == "somewhere/sort-digits/prompts.jsonl"
    assert sort_digits.with_paths(own) == own


def test_the_answers_are_the_digits_in_ascending_order(directory: Path) -> None:
    path = sort_digits.prompts_path(directory)

    lines = [json.loads(line) for line in path.read_text().splitlines()]

    assert check(path) == len(lines) == sort_digits.PROMPT_COUNT
    assert all(line["prompt"].endswith(">") for line in lines)
    assert all(line["answer"] == "".join(sorted(line["prompt"][:-1])) for line in lines)
    assert {len(line["answer"]) for line in lines} == {3, 4, 5, 6, 7, 8}


def test_the_prompts_are_fixed_for_ever(directory: Path) -> None:
    lines = sort_digits.prompts_path(directory).read_text().splitlines()

    assert [json.loads(line)["prompt"] for line in lines[:3]] == ["74254734>", "952762>", "98937864>"]


def test_the_tokenizer_reads_characters_and_pads_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = tokenizer(["10>", "3210>"], padding=True)

    assert encoded["input_ids"] == [[0, 0, 4, 3, 40], [6, 5, 4, 3, 40]]
    assert encoded["attention_mask"] == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert tokenizer.decode(encoded["input_ids"][1]) == "3210>"
    assert tokenizer.eos_token_id == 1
    assert len(tokenizer) == 50


def test_the_model_is_the_small_llama(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(sort_digits.model_directory(directory))

    assert model.config.model_type == "llama"
    assert sum(parameter.numel() for parameter in model.parameters()) == 859_520
    assert model.generation_config.eos_token_id == 1
    assert model.dtype == torch.float32


def test_the_sizes_of_the_model_are_known_before_it_is_made(directory: Path) -> None:
    found = model_sizes(sort_digits.model_directory(directory), "model.actor")

    assert sort_digits.sizes() == found


def test_prepared_again_nothing_is_written(directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}

    setup.prepare(directory, warmup_steps=FEW_STEPS)

    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_the_same_seed_makes_the_same_weights_and_leaves_the_random_state(directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    seen: list[tuple[int, int]] = []

    setup.prepare(tmp_path / "again", warmup_steps=FEW_STEPS, progress=lambda *done: seen.append(done))

    weights = [sort_digits.model_directory(path) / "model.safetensors" for path in (directory, tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_half_made_and_outdated_directories_are_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "sort-digits"
    setup.prepare(directory, warmup_steps=1)
    (tmp_path / ".sort-digits.partial").mkdir()
    (tmp_path / ".sort-digits.partial" / "left by a killed process").touch()
    os.truncate(directory / "model" / "model.safetensors", 100)
    half_made = sort_digits.is_prepared(directory, warmup_steps=1)

    setup.prepare(directory, warmup_steps=1)
    made_again = sort_digits.is_prepared(directory, warmup_steps=1)
    of_other_steps = sort_digits.is_prepared(directory, warmup_steps=2)
    setup.prepare(directory, warmup_steps=2)

    assert (half_made, made_again, of_other_steps) == (False, True, False)
    assert sort_digits.is_prepared(directory, warmup_steps=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".sort-digits.lock", "sort-digits"]


def test_a_second_caller_waits_for_the_first_until_its_deadline(tmp_path: Path) -> None:
    with (tmp_path / ".sort-digits.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(DeadlineError, match=r"\.sort-digits\.lock is locked by another process for 0 s"):
            setup.prepare(tmp_path / "sort-digits", timeout_s=0)

    setup.prepare(tmp_path / "sort-digits", warmup_steps=0, timeout_s=0)


def test_to_see_whether_it_is_prepared_torch_is_not_imported(directory: Path) -> None:
    code = (
        "import sys; from pipeline import sort_digits; from pipeline.trainer import setup;"
        f"assert sort_digits.is_prepared({str(directory)!r}, warmup_steps={FEW_STEPS});"
        f"setup.prepare({str(directory)!r}, warmup_steps={FEW_STEPS});"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
