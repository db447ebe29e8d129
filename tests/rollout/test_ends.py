"""The end of a response: the ids of all files of the model's folder, and stop sequences and strings, to the counts."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.identity import run_dir
from pipeline.config.model_files import end_token_ids
from pipeline.config.schema import Config
from pipeline.config.types import stop_sequences_of
from pipeline.errors import ConfigError
from pipeline.models.loading import load_tokenizer
from pipeline.prompts.types import Prompt
from pipeline.rollout.loader import load_roller
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.reward.trial import RewardTrial
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.sample_recorder import RolloutSamples
from pipeline.rollout.sampling import end_tokens
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.runtime.messages import Ticket
from pipeline.telemetry.samples import SampleReader, folder_of

CPU = torch.device("cpu")
EOS, FOUR = 1, 7
"""Tokens of the embedded task: <eos>, and the digit 4 (after <pad>, <eos>, <unk>, 0, 1, 2, 3)."""


@pytest.fixture
def folder(task: Path, tmp_path: Path) -> Path:
    """A copy of the embedded task's model."""
    return Path(shutil.copytree(task / "model", tmp_path / "model"))


def config_of(folder: Path, task: Path, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "daemon": {"seed": 3, "state_dir": str(folder.parent / "state"), "run_name": "one"},
            "model": {"actor": str(folder)},
            "prompts": {"path": str(task / "prompts.jsonl")},
            "trainer": {"kl_coef": 0.0},
            **sections,
            "rollout": {
                "num_generations": 4, "max_length": 24, "temperature": 1.5, "reward_timeout_s": 0.0,
                **sections.get("rollout", {}),
            },
        }
    )  # fmt: skip


@pytest.fixture
def load(folder: Path, task: Path) -> Iterator[Callable[..., LocalRoller]]:
    made: list[LocalRoller] = []

    def loaded(**sections: dict[str, Any]) -> LocalRoller:
        config, telemetry = config_of(folder, task, **sections), NodeTelemetry()
        tokenizer = load_tokenizer(config.model.actor)
        made.append(load_roller(config, tokenizer, telemetry, texts=True, device=CPU))
        return made[-1]

    yield loaded
    for roller in made:
        roller.close()


def list_ends(folder: Path, file: str, ids: object) -> None:
    path = folder / file
    described = json.loads(path.read_bytes()) if path.is_file() else {}
    path.write_text(json.dumps({**described, "eos_token_id": ids}))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ids", [[EOS, FOUR], FOUR])
def test_a_response_ends_with_each_token_that_a_file_of_the_model_lists(
    load: Callable[..., LocalRoller], folder: Path, file: str, ids: object
) -> None:
    list_ends(folder, file, ids)
    roller = load()

    experience, stopped = rolled(roller)

    assert set(roller.sampling.eos_token_ids) == {EOS, FOUR}
    ended = [response[-1] for response in experience]
    assert all(not {EOS, FOUR} & set(response[:-1]) for response in experience)
    assert FOUR in ended and EOS in ended
    assert stopped == [last in (EOS, FOUR) for last in ended]


def rolled(roller: LocalRoller, prompts: int = 8) -> tuple[list[list[int]], list[bool]]:
    """Return the responses of the first prompts, and which of them ended by themselves."""
    found = roller.roll(0, prompts)
    experience = found.rows.padded()
    assert experience.action_mask is not None
    responses = experience.sequences[:, -experience.action_mask.shape[1] :]
    pairs = zip(responses, experience.action_mask, strict=True)
    return [response[mask].tolist() for response, mask in pairs], found.stopped.tolist()


def test_an_evaluation_counts_a_listed_end_as_a_stop(
    load: Callable[..., LocalRoller], folder: Path, task: Path
) -> None:
    """At last each token is an end, but the one that pads."""
    evaluation = {"files": [str(task / "prompts.jsonl")], "num_generations": 4}
    cut = []

    for ids in ([EOS], [*range(1, 13)]):
        list_ends(folder, "generation_config.json", ids)
        cut.append(sum(result.cut for result in load(evaluation=evaluation).of(0).roll(0, 8).results))

    assert cut[0] > 0 == cut[1]


def test_a_stop_at_the_last_possible_token_is_a_stop(load: Callable[..., LocalRoller], folder: Path) -> None:
    list_ends(folder, "generation_config.json", [EOS, FOUR])
    room = {"max_length": None, "max_prompt_length": 12, "max_new_tokens": 3}

    responses, stopped = rolled(load(rollout=room), 32)

    at_the_end = [row for row, response in enumerate(responses) if len(response) == 3 and response[-1] == FOUR]
    assert at_the_end and all(stopped[row] for row in at_the_end)
    assert not all(stopped)


def test_a_list_of_stop_tokens_means_either(load: Callable[..., LocalRoller]) -> None:
    three = FOUR - 1

    responses, _ = rolled(load(rollout={"stop_token_ids": [three, FOUR]}))

    assert {three, FOUR, EOS} >= {response[-1] for response in responses if len(response) < 12} >= {three, FOUR}
    assert all(not {three, FOUR} & set(response[:-1]) for response in responses)


@pytest.mark.parametrize(
    ("given", "sequences"),
    [(None, ()), ([], ()), (4, ((4,),)), ([4], ((4,),)), ([1, 4], ((1,), (4,))), ([[1, 4], [6]], ((1, 4), (6,)))],
)
def test_ids_are_alternatives_and_lists_are_sequences(given: Any, sequences: Any) -> None:
    assert stop_sequences_of(given) == sequences


def test_a_stop_string_ends_rollouts_and_evaluations_and_samples_name_it(
    load: Callable[..., LocalRoller], folder: Path, task: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_bytes(b"\n".join((task / "prompts.jsonl").read_bytes().splitlines()[:8]))
    sections: dict[str, Any] = {
        "rollout": {"stop": ["34"]}, "evaluation": {"files": [str(held_out)], "num_generations": 4},
    }  # fmt: skip
    roller, tokenizer = load(**sections), load_tokenizer(folder)

    responses, stopped = rolled(roller)

    texts = [tokenizer.decode(response) for response in responses]
    assert any(text.endswith("34") for text in texts)
    assert all("34" not in text[:-1] for text in texts)
    assert all(stopped[row] for row, text in enumerate(texts) if text.endswith("34"))
    for own, other in (("4", None), (None, "34")):
        evaluation = {**sections["evaluation"], **({} if own is None else {"stop": own})}
        held = load(**{**sections, "evaluation": evaluation}).of(0)
        assert held.sampling.stop_strings is not None and held.sampling.stop_strings.strings == (own or other,)
    without = load(**{**sections, "evaluation": {**sections["evaluation"], "stop": []}}).of(0)
    assert without.sampling.stop_strings is None

    config = config_of(folder, task, **sections, samples={"per_minute": 6000.0})
    recorder = RolloutSamples.of(config, tokenizer, 0)
    assert recorder is not None
    for position in range(6):
        found = roller.roll(position, 1)
        assert found.rows is not None
        recorder.sealed(Ticket(1, 0, position, 1, 0, 0, 0, 0, 0.0), found, 0)
        recorder._due_s = 0.0
    recorder.closing()
    kept = [response for sample in SampleReader(folder_of(run_dir(config))).read() for response in sample.responses]
    assert {response.stop for response in kept} == {"", "34"}
    assert all((response.stop == "34") == "".join(response.pieces).endswith("34") for response in kept)


def test_tokens_beside_the_tokenizers_are_named_and_ordinary_ones_warned_of(
    folder: Path, task: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(folder)
    list_ends(folder, "generation_config.json", [EOS, 0])
    list_ends(folder, "config.json", [FOUR, 10**6])

    ends = end_tokens(config_of(folder, task), tokenizer, 50)

    assert ends == (EOS, 0, FOUR)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "a response ends with tokens beside the tokenizer's eos: ids=[0] file=generation_config.json eos=1"),
        ("WARNING", "a response ends with tokens that are no special tokens: ids=[7] file=config.json"),
    ]


def test_a_stop_token_beyond_the_vocabulary_is_refused_by_every_worker(load: Callable[..., LocalRoller]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.stop_token_ids: model\.actor has no token 1,000,000"):
        load(rollout={"stop_token_ids": [[FOUR, 10**6]]})


def test_files_without_a_list_of_ends_name_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert end_token_ids(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "text_config": {"eos_token_id": [3, true, -1]}}')
    assert end_token_ids(tmp_path) == {"config.json": [2, 3]}
    (tmp_path / "generation_config.json").write_text("{")
    assert end_token_ids(tmp_path) == {"config.json": [2, 3]}


def test_a_trial_of_rewards_ends_a_response_with_its_stop_string(folder: Path, task: Path) -> None:
    prompt = Prompt(0, 0, 0, "43>", "34")

    whole = RewardTrial(config_of(folder, task)).score(prompt, "3456")
    ended = RewardTrial(config_of(folder, task, rollout={"stop": ["34"]})).score(prompt, "3456")

    assert (whole.tokens, ended.tokens) == (5, 2)


def test_the_digest_of_evaluations_knows_stops(folder: Path, task: Path) -> None:
    def digest(stop: Any = None, evaluation: Any = None, ids: Any = None) -> str:
        files = {"files": [str(task / "prompts.jsonl")], **({} if evaluation is None else {"stop": evaluation})}
        rollout = {**({} if stop is None else {"stop": stop}), "stop_token_ids": ids}
        plan = EvaluationPlan.of(config_of(folder, task, evaluation=files, rollout=rollout))
        assert plan is not None
        return plan.digest

    different = [digest(), digest(["a"]), digest(["b"]), digest(["a"], ["b"]), digest(ids=[1, 4]), digest(ids=[[1, 4]])]
    assert len(set(different)) == len(different)
    assert digest([]) == digest() and digest("a") == digest(["a"])
    assert digest(ids=[1, 4]) == digest(ids=[[1], [4]])
