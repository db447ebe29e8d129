"""The README's own model, prompts and reward, word for word, with a model of more than 100 M parameters made here."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from pipeline.runtime.latest_checkpoint import read_latest
from tests.support.daemon import Daemon, rlhfd

pytestmark = [pytest.mark.integration, pytest.mark.variant, pytest.mark.timeout(3600)]

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README[README.index("## Your own model, prompts and reward") : README.index("## Your own trainer")]
CHARACTERS = [chr(code) for code in range(32, 127)]


def block(start: str) -> str:
    """Return the indented block of the section that begins with a text."""
    found = re.search(rf"^    {re.escape(start)}(?:.*\n(?:    .*\n|\n(?=    ))*)", SECTION, re.MULTILINE)
    assert found is not None, start
    return textwrap.dedent(found[0])


def commands() -> list[list[str]]:
    """Return the arguments of each `bin/rlhfd` line that names the configuration."""
    lines = re.findall(r"^    bin/rlhfd (.*--config grpo\.toml.*)$", SECTION, re.MULTILINE)
    return [shlex.split(re.split(r"\s{3,}", line)[0]) for line in lines]


def save_model(folder: Path) -> int:
    """Save a causal LM with random weights and its tokenizer; return its parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = {symbol: number for number, symbol in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(symbols, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=768, intermediate_size=2304, num_hidden_layers=14, num_attention_heads=12,
        max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def test_the_readme_holds_word_for_word_with_a_model_of_100_million_parameters(tmp_path: Path) -> None:
    assert save_model(tmp_path / "models/my-model") > 100_000_000
    (tmp_path / "grpo.toml").write_text(block("# grpo.toml; relative paths"))
    (tmp_path / "my_rewards.py").write_text(block("def exact("))
    (line,) = re.findall(r'`(\{"prompt": .*?\})`', SECTION)[:1]
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n" * 8)
    seen = []

    for words in commands():
        seen.append(words[0])
        if words[0] != "start":
            done = rlhfd(*words, folder=tmp_path, timeout_s=600.0)
            assert done.returncode == 0, done.stderr
            continue
        arguments = (*words[1:], "--set", "trainer.max_steps=1")
        with Daemon(tmp_path, arguments=arguments, name=f"start-{len(seen)}") as daemon:
            assert daemon.wait(1500.0) == 0, daemon.errors
        assert "hung" not in daemon.errors and "out of memory" not in daemon.errors
        (run,) = (tmp_path / "state/runs").glob("ppo-*" if "rollout.algorithm=ppo" in words else "grpo-*")
        latest = read_latest(run / "checkpoints")
        assert latest is not None and (latest.step, latest.complete) == (1, True)

    assert sorted(set(seen)) == ["config", "plan", "start", "try-reward"]
    from transformers import AutoModelForCausalLM

    runs = sorted((tmp_path / "state/runs").iterdir())
    assert [run.name.split("-")[0] for run in runs] == ["grpo", "ppo"], "another algorithm is another run"
    for run in runs:
        model = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-000001")
        assert model.num_parameters() > 100_000_000
