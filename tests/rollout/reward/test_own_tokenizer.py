"""A reward model with another vocabulary: its scores are those of plain transformers on the texts, row by row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from pipeline.config.load import load
from pipeline.config.rewards import OwnReward
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models.loading import load_tokenizer
from pipeline.prompts.source import PromptSource
from pipeline.rollout.loader import load_roller
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.reward.trial import RewardTrial
from pipeline.supervisor.preflight import problems_of_files

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
PAD = 0
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "73>"},
    {"prompt": [{"role": "user", "content": "41"}]},
    {"prompt": [{"role": "user", "content": "9"}, {"role": "assistant", "content": "8"}]},
    {"prompt": "20651>"},
]


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model over pairs of bytes, which a trainer has learned from digits."""
    folder = tmp_path_factory.mktemp("reward")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([f"[user] {number}\n[assistant] {number}\n" for number in range(300)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def config(task: Path, tmp_path: Path, reward_folder: Path) -> Config:
    actor = tmp_path / "model"
    actor.mkdir()
    for file in (task / "model").iterdir():
        (actor / file.name).write_bytes(file.read_bytes())
    (actor / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% if not loop.last or m['role'] == 'user' %}>{% endif %}{% endfor %}"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return Config.model_validate(
        {
            "model": {"actor": str(actor), "reward": str(reward_folder), "reward_tokenizer": "own"},
            "prompts": {"path": str(tmp_path / "prompts.jsonl")},
            "trainer": {"kl_coef": 0.0},
            "rollout": {
                "num_generations": 3, "max_length": 20, "temperature": 1.5, "inference_batch_size": 5,
            },
            "rewards": [],
        }
    )  # fmt: skip


def plain_score(folder: Path, prompt: str | list[dict[str, str]], response: str) -> float:
    """The score of one text, by nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        ids = tokenizer(prompt + response)["input_ids"]
    else:
        *before, last = prompt
        turns = [*before, {"role": "assistant", "content": last["content"] + response}]
        turns = turns if last["role"] == "assistant" else [*prompt, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("functions", [[], ["pipeline.sort_digits:exact_answer"]])
def test_texts_and_chats_are_scored_as_the_reward_model_reads_them(
    config: Config, reward_folder: Path, functions: list[str]
) -> None:
    config = config.model_copy(update={"rewards": [OwnReward(name=name) for name in functions]})
    telemetry, tokenizer = NodeTelemetry(), load_tokenizer(config.model.actor)
    roller = load_roller(config, tokenizer, telemetry, texts=True, device=torch.device("cpu"))
    source = PromptSource(config.prompts, config.daemon.seed)

    experience = roller.roll(0, 4).rows.padded()

    assert experience is not None and experience.info is not None and experience.action_mask is not None
    columns = experience.action_mask.shape[1]
    prompts = [source.at(row // 3).prompt for row in range(12)]
    texts = []
    for row, mask in zip(experience.sequences, experience.action_mask, strict=True):
        # A special token of the policy's is text of the response, as for reward functions.
        ids = [token for token in row[-columns:][mask].tolist() if token not in (tokenizer.eos_token_id, PAD)]
        texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    expected = [plain_score(reward_folder, *pair) for pair in zip(prompts, texts, strict=True)]  # type: ignore[arg-type]
    found = experience.info["reward.model" if functions else "score"]
    assert len(found) == 12 and len(set(texts)) > 4
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    tried = [(source.at(row // 3), text) for row, text in enumerate(texts)][::3]
    for prompt, text in [*tried, *((source.at(position), "1<unk>2") for position in range(4))]:
        part = RewardTrial(config).score(prompt, text).parts["model"]
        assert part == pytest.approx(plain_score(reward_folder, prompt.prompt, text), abs=1e-5)  # type: ignore[arg-type]
    roller.close()
    source.close()


def refusing_chats(reward_folder: Path, tmp_path: Path) -> Path:
    """A copy of a reward model whose chat template refuses each chat."""
    folder = tmp_path / "refusing"
    folder.mkdir()
    for file in reward_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    return folder


def test_a_chat_that_its_template_refuses_has_no_score(config: Config, tmp_path: Path, reward_folder: Path) -> None:
    folder = refusing_chats(reward_folder, tmp_path)
    trial = RewardTrial(config.model_copy(update={"model": config.model.model_copy(update={"reward": str(folder)})}))
    with PromptSourceOf(config) as prompts:
        results = {isinstance(prompt.prompt, str): trial.score(prompt, "1") for prompt in prompts}

    assert "model" in results[True].parts and not results[True].problem
    assert "model" not in results[False].parts
    assert re.fullmatch(
        r"no score of model\.reward, its chat template refuses the row: .*prompts\.jsonl:\d: .* no chats",
        results[False].problem,
    )


class PromptSourceOf:
    """The four prompts of a configuration."""

    def __init__(self, config: Config) -> None:
        self._source = PromptSource(config.prompts, config.daemon.seed)

    def __enter__(self) -> list[Any]:
        return [self._source.at(position) for position in range(4)]

    def __exit__(self, *_: object) -> None:
        self._source.close()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ((), 'model.reward: .* has another tokenizer .*; model.reward_tokenizer = "own" gives it texts'),
        (("rollout.environment=a:B",), "model.reward: .* has another tokenizer .* there\n"),
        (("model.reward_tokenizer=own", "rollout.environment=a:B"),
         'model.reward_tokenizer: must be "policy" with rollout.environment: '),
        (("model.reward_tokenizer=theirs",), 'model.reward_tokenizer: must be "policy" or "own", got "theirs"'),
        (("model.reward_tokenizer=own", "images"), 'model.reward_tokenizer: must be "policy" with a model.actor that '),
    ],
)  # fmt: skip
def test_refusals_name_the_key(config: Config, sets: tuple[str, ...], message: str) -> None:
    actor = Path(config.model.actor)
    if "images" in sets:
        described = json.loads((actor / "config.json").read_bytes())
        (actor / "config.json").write_text(json.dumps({**described, "vision_config": {}}))
    given = [one for one in sets if one != "images"]

    with pytest.raises(ConfigError, match=message):
        load(None, [f"model.actor={actor}", f"model.reward={config.model.reward}", *given], {},
             check_files=problems_of_files)  # fmt: skip


def test_a_tokenizer_of_its_own_needs_a_reward_model() -> None:
    with pytest.raises(ConfigError, match=r"model\.reward_tokenizer: needs model\.reward"):
        load(None, ["model.reward_tokenizer=own"], {})
