"""Several reward models: the weighted sum of their scores is that of plain transformers in float32, row by row."""

# ruff: noqa: F811 - fixtures
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from pipeline.config.schema import Config
from pipeline.experience.types import Experience
from pipeline.models import packing as packing_module
from pipeline.models.loading import load_tokenizer
from pipeline.models.packing import packs_scored_rows
from pipeline.prompts.source import PromptSource
from pipeline.rollout.loader import load_roller
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.reward.summed import SummedReward, load_reward
from pipeline.rollout.reward.trial import RewardTrial
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.rows import Rows
from tests.rollout.reward.test_own_tokenizer import PAD, config, plain_score, refusing_chats, reward_folder  # noqa: F401 - fixtures
from tests.support.told import Told, events_of

CPU = torch.device("cpu")
FUNCTION = "pipeline.sort_digits:exact_answer"


@pytest.fixture(scope="module")
def token_folder(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of the actor's token ids."""
    folder = tmp_path_factory.mktemp("tokens")
    size = len(AutoTokenizer.from_pretrained(task / "model"))
    described = LlamaConfig(
        vocab_size=size, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(11)
        LlamaForSequenceClassification(described).save_pretrained(folder)
    return folder


def with_models(config: Config, *tables: dict[str, Any], **sections: Any) -> Config:
    """The configuration with these tables in the place of `model.reward`."""
    values = config.model_dump(mode="json") | {"rewards": list(tables)} | sections
    values["model"] |= {"reward": None, "reward_tokenizer": "policy"}
    return Config.model_validate(values)


@pytest.fixture
def two(config: Config, token_folder: Path, reward_folder: Path) -> Config:
    """A model of the actor's tokens, a function, and a model of texts."""
    return with_models(
        config,
        {"name": "model", "path": str(token_folder), "weight": -0.75, "label": "kind"},
        {"name": FUNCTION, "weight": 2.0},
        {"name": "model", "path": str(reward_folder), "weight": 3.5, "tokenizer": "own"},
    )


def loaded(config: Config) -> LocalRoller:
    # As a worker on another machine reads it.
    config = Config.model_validate_json(config.model_dump_json())
    return load_roller(config, load_tokenizer(config.model.actor), NodeTelemetry(), texts=True, device=CPU)


def reward_of(roller: LocalRoller) -> SummedReward:
    reward = roller.maker.reward_model  # type: ignore[attr-defined]
    assert isinstance(reward, SummedReward)
    return reward


def rolled(roller: LocalRoller) -> Experience:
    experience = roller.roll(0, 4).rows.padded()
    assert experience is not None and experience.info is not None and experience.action_mask is not None
    return experience


def score_of_ids(folder: Path, ids: list[int]) -> float:
    """The score of token ids at the last one, by nothing but transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, -1, 0])


def by_hand(config: Config, experience: Experience, token_folder: Path, text_folder: Path) -> list[list[float]]:
    """Return the scores of each row, before weights: that of the tokens, that of the text."""
    tokenizer = load_tokenizer(config.model.actor)
    assert experience.action_mask is not None and experience.attention_mask is not None
    columns, found = experience.action_mask.shape[1], []
    source = PromptSource(config.prompts, config.daemon.seed)
    for row, (tokens, mask) in enumerate(zip(experience.sequences, experience.attention_mask, strict=True)):
        response = tokens[-columns:][experience.action_mask[row]].tolist()
        text = tokenizer.decode([one for one in response if one not in (tokenizer.eos_token_id, PAD)])
        prompt: Any = source.at(row // 3).prompt
        found.append([score_of_ids(token_folder, tokens[mask != 0].tolist()), plain_score(text_folder, prompt, text)])
    source.close()
    return found


def test_the_reward_is_the_weighted_sum_of_models_and_functions(
    two: Config, token_folder: Path, reward_folder: Path
) -> None:
    roller = loaded(two)
    experience = rolled(roller)
    roller.close()
    # A worker that was restarted loads the same.
    restarted = loaded(two)
    again = rolled(restarted)
    restarted.close()

    assert experience.info is not None and again.info is not None and experience.reward is not None
    expected = torch.tensor(by_hand(two, experience, token_folder, reward_folder), dtype=torch.float64)
    parts = {name: column for name, column in experience.info.items() if name.startswith("reward.")}
    right = experience.info["reward.exact_answer"]
    assert list(parts) == ["reward.exact_answer", "reward.kind", "reward.model"]
    assert len(expected) == 12 and len(set(expected[:, 0].tolist())) > 4
    torch.testing.assert_close(parts["reward.kind"].double(), expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts["reward.model"].double(), expected[:, 1], atol=1e-5, rtol=1e-5)
    sums = -0.75 * expected[:, 0] + 2.0 * right.double() + 3.5 * expected[:, 1]
    torch.testing.assert_close(experience.info["score"].double(), sums, atol=1e-5, rtol=1e-5)
    assert torch.equal(again.sequences, experience.sequences)
    assert torch.equal(again.info["score"], experience.info["score"])


def test_one_model_in_a_table_is_model_reward_with_a_weight(config: Config, reward_folder: Path) -> None:
    table = {"name": "model", "path": str(reward_folder), "tokenizer": "own", "label": "texts"}
    found = {}
    for name, one in {
        "short": config,
        "same": with_models(config, table),
        "half": with_models(config, {**table, "weight": 0.5}),
    }.items():
        roller = loaded(one)
        found[name] = rolled(roller).info
        roller.close()
    short, same, half = found["short"], found["same"], found["half"]

    assert short is not None and same is not None and half is not None
    assert torch.equal(short["score"], same["score"]) and torch.equal(half["score"], same["score"] * 0.5)
    assert not [name for name in (*short, *half) if name.startswith("reward.")], "the score is the one part"


def test_a_trial_shows_each_model_and_their_sum_is_the_reward(
    two: Config, token_folder: Path, reward_folder: Path
) -> None:
    source, tokenizer = PromptSource(two.prompts, two.daemon.seed), load_tokenizer(two.model.actor)
    prompt: Any = next(one for one in map(source.at, range(4)) if isinstance(one.prompt, str))

    parts = RewardTrial(two).score(prompt, "37").parts

    ids = [*tokenizer(prompt.prompt)["input_ids"], *tokenizer("37", add_special_tokens=False)["input_ids"]]
    assert list(parts) == [FUNCTION, "kind", "model"]
    of_tokens = score_of_ids(token_folder, [*ids, tokenizer.eos_token_id])
    assert parts["kind"] == pytest.approx(-0.75 * of_tokens, abs=1e-5)
    assert parts["model"] == pytest.approx(3.5 * plain_score(reward_folder, prompt.prompt, "37"), abs=1e-5)
    source.close()


def test_functions_of_one_name_are_told_apart_in_a_trial(config: Config) -> None:
    rows = [{"name": "regex", "pattern": "3"}, {"name": "regex", "pattern": "7", "weight": 0.25}, {"name": FUNCTION}]
    source = PromptSource(config.prompts, config.daemon.seed)

    parts = RewardTrial(with_models(config, *rows[:2])).score(source.at(0), "37").parts

    assert parts == {"regex": 1.0, "regex-2": 0.25}
    source.close()


def test_a_row_without_the_score_of_one_model_has_no_reward_and_is_counted_with_its_cause(
    two: Config, tmp_path: Path, reward_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = refusing_chats(reward_folder, tmp_path)
    kind, function, texts = two.model_dump(mode="json")["rewards"]
    roller = loaded(with_models(two, kind, function, {**texts, "path": str(refusing)}))
    source = PromptSource(two.prompts, two.daemon.seed)
    prompts = [source.at(position) for position in range(4)]
    chats = [prompt for prompt in prompts if not isinstance(prompt.prompt, str)]
    telemetry = roller.telemetry
    assert isinstance(telemetry, NodeTelemetry)
    telemetry.take()

    found = roller.roll(0, 4)

    roller.close()
    source.close()
    assert found.rows is not None
    assert len(found.rows) == 3 * (4 - len(chats)) == 6
    assert np.isfinite(found.rows.columns["reward"]).all()
    assert events_of(telemetry.take(), "reward_errored") == ["invalid"] * 6
    # Once, the rollout before the first ticket included.
    (said,) = [text for record in caplog.records if (text := record.getMessage()).startswith("reward errored:")]
    assert "reason=invalid: no score of rewards.model.path, its chat template refuses the row: " in said
    assert said.rpartition(" prompt=")[2] in {prompt.location for prompt in chats}


@pytest.mark.parametrize("name", ["kind", "model", FUNCTION])
def test_an_evaluation_counts_by_the_score_of_one_part(two: Config, name: str) -> None:
    evaluation = {"files": [two.prompts.path], "pass_function": name, "pass_reward": 0.01, "num_generations": 3}
    rollout = {**two.rollout.model_dump(mode="json"), "inference_batch_size": None}
    rewards = two.model_dump(mode="json")["rewards"]
    roller = loaded(with_models(two, *rewards, rollout=rollout, evaluation={**evaluation, "batch_size": 4}))

    results = roller.of(0).roll(0, 4).results

    reward = reward_of(roller)
    part = reward.parts[:, reward.labels.index(name.rpartition(":")[2])].reshape(4, 3)
    assert [result.right for result in results] == (part >= 0.01).sum(dim=1).tolist()
    assert [result.reward for result in results] == pytest.approx(reward.exact.reshape(4, 3).mean(dim=1).tolist())
    roller.close()


@pytest.mark.parametrize("packing", [None, False])
def test_on_a_card_the_models_are_packed_unless_the_trainer_pads(
    config: Config, token_folder: Path, packing: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "kernel_of", lambda *_: "torch varlen")
    trainer = config.trainer.model_copy(update={"packing": packing})
    one = with_models(config, {"name": "model", "path": str(token_folder)}).model_copy(update={"trainer": trainer})

    reward = load_reward(one, load_tokenizer(one.model.actor), CPU, None, Told())

    assert isinstance(reward, SummedReward)
    assert [packs_scored_rows(model.model) for model in reward.models] == [packing is None]


def test_a_heartbeat_is_written_after_each_pass_of_a_model(config: Config, token_folder: Path) -> None:
    tables = [{"name": "model", "path": str(token_folder), "weight": weight} for weight in (0.5, 0.25)]
    one, told = with_models(config, *tables), Told()
    reward = load_reward(one, load_tokenizer(one.model.actor), CPU, None, told)
    assert isinstance(reward, SummedReward) and reward.labels == ["model", "model-2"]
    rows = Rows(torch.tensor([2, 3, 4, 2, 3]), np.array([1, 1]), np.array([2, 1]), 1, 2, PAD, torch.zeros(2))

    scores = ModelPasses(1, None, True, told).scores(reward, rows, [None] * 2, keep_errored=False)

    assert [beat[:2] for beat in told.beats] == [(1, 2), (2, 2)] * 2
    expected = [0.75 * score_of_ids(token_folder, ids) for ids in ([2, 3, 4], [2, 3])]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
