"""A run with two reward models: through the kill of its worker each step's reward is their weighted sum."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from pipeline.errors import ExitCode
from pipeline.telemetry.samples import SampleReader, folder_of
from tests.support.daemon import SMALL, Daemon

pytestmark = pytest.mark.integration


def save_reward_model(folder: Path, task: Path, seed: int) -> str:
    """Save a reward model of the task's token ids, with random weights; return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(task / "model")), hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_labels=1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_the_reward_is_the_sum_of_two_models_and_another_one_in_a_folder_is_refused(tmp_path: Path, task: Path) -> None:
    kind, style = (save_reward_model(tmp_path / name, task, seed) for seed, name in enumerate(("kind", "style")))
    tables = (
        f'{{name = "model", path = "{kind}", label = "kind", weight = 0.5}}, '
        f'{{name = "model", path = "{style}", label = "style", weight = -2.0}}'
    )
    settings = (*SMALL, f"rewards=[{tables}]", "trainer.max_steps=0", "trainer.save_every=1", "samples.per_minute=6000")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        daemon.wait_replaced("rollout-0", daemon.signal(signal.SIGKILL, "rollout-0"))
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 3)
        _, shown = daemon.get("/metrics")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
    save_reward_model(tmp_path / "style", task, 9)
    with Daemon(tmp_path, *settings, task=task, name="again") as again:
        assert again.wait() == ExitCode.BAD_CONFIG, again.errors

    (run,) = tmp_path.glob("state/runs/*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 4 and all(line["reward/kind"] != line["reward/style"] for line in lines)
    for line in lines:
        expected = 0.5 * line["reward/kind"] - 2.0 * line["reward/style"]
        assert line["reward_mean"] == pytest.approx(expected, abs=1e-4)
    for label in ("kind", "style"):
        assert f'rlhfd_reward_function_mean{{function="{label}",role="trainer",worker="0"}}' in shown
    for sample in SampleReader(folder_of(run)).read():
        for response in sample.responses:
            assert list(response.parts) == ["kind", "style"]
            assert sum(response.parts.values()) == pytest.approx(response.reward, abs=1e-5)
    assert "--set rewards: the weights of rewards.style.path are not those" in again.errors
