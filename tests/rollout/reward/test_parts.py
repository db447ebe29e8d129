"""The parts of rewards on their way from the functions to `info` and the metrics, and columns on their way to them."""

from __future__ import annotations

import contextlib
import json
import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config.lengths import Lengths
from pipeline.config.rewards import LengthReward, RewardModel, labels_of, part_labels, rewards_in_force
from pipeline.config.schema import Config
from pipeline.errors import ShapeError
from pipeline.experience.ragged import RaggedRows
from pipeline.progress import Telemetry
from pipeline.prompts.source import PromptSource
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.remote import NodeTelemetry
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.row_rewards import RewardProblems, RowRewards
from pipeline.rollout.reward.summed import SummedReward
from pipeline.rollout.reward.wire import RowScore
from pipeline.rollout.roller import LocalRoller, Rolled
from pipeline.telemetry.exposition import Exposition
from pipeline.telemetry.metrics import REWARD_LABELS, SlotName
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.rollout.test_maker import MASK, PROMPTS, RESPONSES, FakeReward, maker
from tests.support.told import events_of
from tests.support.whole_rows import WholeRows


def level(ids: Tensor, mask: Tensor, *, level: float, **_: Any) -> float:
    return level


def length(ids: Tensor, mask: Tensor, *, response_start: int, response_end: int, **_: Any) -> int:
    return response_end - response_start


def two(**options: Any) -> FunctionReward:
    return FunctionReward([level, length], None, weights=[2.0, -0.5], labels=["level", "length"], **options)


def of_model(scores: list[float], functions: RowRewards, telemetry: Telemetry = Telemetry.none()) -> SummedReward:
    class Model(FakeReward):
        model = torch.nn.Linear(1, 1)

        def __call__(self, *, vision: Any, columns: Any, **row: Any) -> Tensor:
            return super().__call__(**row)

    settings = RewardModel("model", "", 1.0, "policy", "model.reward", "model.reward_tokenizer")
    return SummedReward([(settings, Model(scores))], functions, telemetry)  # type: ignore[list-item]


def test_each_of_several_functions_has_a_column_before_its_weight() -> None:
    experience = maker(reward_model=two()).make_experience(
        PROMPTS, MASK, max_length=7, columns=[{"level": 1.5}, {"level": 3}]
    )

    assert experience.info is not None
    # Responses of 3 and 4 tokens.
    assert experience.info["reward.level"].tolist() == [1.5, 3.0]
    assert experience.info["reward.length"].tolist() == [3.0, 4.0]
    assert experience.info["score"].tolist() == [1.5, 4.0]


def test_mini_batches_and_groups_keep_columns_and_parts_in_place() -> None:
    maker_ = maker(
        critic=None, use_grpo=True, num_generation=2, inference_batch_size=3, reward_model=two(),
        responses=[RESPONSES[0], RESPONSES[1], RESPONSES[1], RESPONSES[0]],
    )  # fmt: skip

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7, columns=[{"level": 1}, {"level": 2}])

    assert experience.info is not None
    assert experience.info["reward.level"].tolist() == [1, 1, 2, 2]
    assert experience.info["reward.length"].tolist() == [3, 4, 4, 3]


def test_a_dropped_group_takes_its_parts_along() -> None:
    class Half(FunctionReward):
        def __call__(self, *arguments: Any, columns: Any = None, **keywords: Any) -> Tensor:
            scores = super().__call__(*arguments, columns=columns, **keywords)
            return torch.where(torch.arange(len(scores)) == 1, torch.nan, scores)

    reward = Half([level, length], None, labels=["level", "length"])
    maker_ = maker(critic=None, use_grpo=True, num_generation=2, reward_model=reward, drop_errored=True,
                   responses=[*RESPONSES, *RESPONSES])  # fmt: skip

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7, columns=[{"level": 1}, {"level": 2}])

    assert experience.info is not None
    assert experience.info["reward.level"].tolist() == [2, 2] and len(experience.sequences) == 2


def test_a_single_function_has_no_column_of_its_own() -> None:
    reward = FunctionReward([length], None, labels=["length"])

    experience = maker(reward_model=reward).make_experience(PROMPTS, MASK, max_length=7)

    assert experience.info is not None and set(experience.info) == {"score"}


def test_one_element_of_columns_a_prompt() -> None:
    with pytest.raises(ShapeError, match="columns has 1 elements, input_ids has 2 rows"):
        maker(reward_model=two()).make_experience(PROMPTS, MASK, max_length=7, columns=[{}])


def test_a_reward_model_is_a_part_beside_the_functions_and_gets_no_columns() -> None:
    summed = of_model([10.0, 20.0], two())

    experience = maker(reward_model=summed).make_experience(
        PROMPTS, MASK, max_length=7, columns=[{"level": 1}, {"level": 2}]
    )

    assert experience.info is not None
    assert experience.info["reward.model"].tolist() == [10.0, 20.0]
    assert experience.info["score"].tolist() == [10.5, 22.0]


@pytest.mark.parametrize(
    ("score", "level_of_row", "cause"),
    [
        (math.nan, 2, "reward model model gave no finite score: nan"),
        (3e38, 1e38, "the sum of the weighted scores is beyond float32: 2e+38 + 3e+38"),
        # Told once, with the cause of the functions.
        (math.nan, "much", "returned 'much'"),
    ],
)
def test_a_row_that_a_reward_model_gives_no_score_is_counted_once_and_its_cause_logged(
    caplog: pytest.LogCaptureFixture, score: float, level_of_row: float | str, cause: str
) -> None:
    telemetry = NodeTelemetry(log_texts=True)
    functions = FunctionReward(
        [lambda ids, mask, *, level, **_: level], None, telemetry, weights=[2.0], problems=RewardProblems(telemetry)
    )
    summed = of_model([10.0, score], functions, telemetry)

    experience = maker(reward_model=summed, drop_errored=True).make_experience(
        PROMPTS, MASK, max_length=7, columns=[{"level": 1}, {"level": level_of_row}]
    )

    assert len(experience.sequences) == 1
    assert events_of(telemetry.take(), "reward_errored") == ["invalid"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("reward errored: row=1 reason=invalid: ") and cause in said
    assert summed.problem is not None and cause in summed.problem.text


@pytest.mark.parametrize("in_processes", [False, True])
def test_the_score_of_a_reward_model_stands_alone_where_no_function_applies(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_processes: bool
) -> None:
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("def level(ids, mask, *, level, **_):\n    return level\n")
    monkeypatch.chdir(tmp_path)
    functions = RewardPool([f"{name}:level"], str(task / "model"), timeout_s=60.0) if in_processes else None
    with functions or contextlib.nullcontext():
        reward = functions or FunctionReward([level], None)
        summed = of_model([10.0, 20.0], reward)

        experience = maker(reward_model=summed, drop_errored=True).make_experience(
            PROMPTS, MASK, max_length=7, columns=[{"level": None}, {"level": 2}]
        )

    assert experience.info is not None
    assert experience.info["score"].tolist() == [10.0, 22.0] and summed.problem is None


def test_the_means_are_shown_by_name(tmp_path: Path) -> None:
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), SlotName("rollout", 1)])
    slab.begin("rollout", 1)
    metrics = RolloutMetrics(slab.writer("rollout", 1), reward_source="function", reward_labels=["level", "length"])
    experience = maker(reward_model=two()).make_experience(
        PROMPTS, MASK, max_length=7, columns=[{"level": 1.5}, {"level": 3}]
    )

    rows = RaggedRows.of(experience).with_info("cut", np.zeros(2, bool))
    metrics.rolled(Rolled(rows, 0), prompts=2, group_size=1)

    names = dict(zip(REWARD_LABELS, ["level", "length"], strict=False))
    lines = Exposition(MetricsReader(slab, names=names)).text().decode().splitlines()
    assert [line for line in lines if line.startswith("rlhfd_reward_function_mean{")] == [
        'rlhfd_reward_function_mean{function="level",role="rollout",worker="1"} 2.25',
        'rlhfd_reward_function_mean{function="length",role="rollout",worker="1"} 3.5',
    ]
    slab.close()


def test_columns_of_the_file_reach_the_maker(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "a", "answer": "1", "level": 3, "tags": ["x"]}, {"prompt": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[dict[str, Any]] = []

    class Ended(Exception):
        pass

    def begin(*_: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        raise Ended

    def encode(text: str) -> dict[str, list[int]]:
        return {"input_ids": [3] * len(text)}

    encode.pad_token_id = 0  # type: ignore[attr-defined]
    roller = LocalRoller(
        SimpleNamespace(begin=begin), PromptSource(path, 0), encode,
        ModelWeights({}, BlockingEngine(WholeRows(None))), seed=7,
        lengths=Lengths(8, 7, None), template="none", sampling=Sampling(8, 0), vocabulary=9,
    )  # fmt: skip
    with closing(PromptSource(path, 0)) as source:
        columns = {prompt.index: prompt.columns for prompt in map(source.at, range(2))}
    for position, count in ((0, 2), (0, 1), (1, 1)):
        with pytest.raises(Ended):
            roller.roll(position, count)
    roller.close()

    assert columns == {0: {"level": 3, "tags": ["x"]}, 1: {}}
    given, whole = [call["columns"] for call in seen], [{**columns[0], "prompt": "a"}, {"prompt": "b"}]
    assert sorted(map(str, given[0])) == sorted(map(str, whole))
    assert sorted(map(str, given[1:])) == sorted(str([one]) for one in whole)


def test_labels_are_short_and_differ() -> None:
    names = ["exact", "a.b:score", "c:score", "c:other", "exact"]

    assert labels_of(names) == ["exact", "a.b:score", "c:score", "other", "exact-2"]


def test_values_in_force_follow_from_other_keys() -> None:
    config = Config.model_validate(
        {"rewards": ["length", "m:f"], "rollout": {"max_prompt_length": 10, "max_new_tokens": 100}}
    )

    length, own = rewards_in_force(config)

    assert length == LengthReward(name="length", limit_tokens=100, buffer_tokens=20)
    assert own == config.rewards[1]
    assert part_labels(config) == ["length", "f"] and part_labels(Config()) == []


def test_a_single_function_beside_the_rewards_of_turns_has_a_column() -> None:
    config: dict[str, Any] = {"rewards": ["exact"], "rollout": {"environment": "m:Factory"}}
    reward = FunctionReward([length], None, labels=["exact"])
    reward.parts, reward.numbers = torch.tensor([[1.0], [0.5]]), [{}, {}]

    assert part_labels(Config.model_validate(config)) == ["exact"]
    assert reward.info(None, has_turns=True)["reward.exact"].tolist() == [1.0, 0.5]
    config["rewards"] = []
    assert part_labels(Config.model_validate({**config, "model": {"reward": "model"}})) == ["model"]


def test_causes_without_end_are_counted_together_and_hold_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    problems = RewardProblems(Telemetry(log_texts=True))

    for row in range(3000):
        score = RowScore(problem="invalid", text=f"no reward in the result of key_{row}", cause=f"keys: key_{row}")
        problems.report([(0, score)])

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1000 + 1 + 3
    assert said[-1] == "reward errored again: cause=a cause beyond the first 1,000 times=1000"
