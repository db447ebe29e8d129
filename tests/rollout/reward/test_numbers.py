"""A reward function may return further numbers beside the reward: they are named, bounded, counted, and travel."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.rewards import OwnReward
from pipeline.errors import ConfigError, RewardError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.models.loading import load_tokenizer
from pipeline.progress import Telemetry
from pipeline.rollout.insert_gate import find_fault
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.numbers import PREFIX, columns_of, pack, scored, split
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.roller import Rolled
from pipeline.telemetry.metrics import MOST_NUMBERS, NUMBER_LABELS, SlotName
from pipeline.telemetry.number_names import COLUMN, NumberNames, numbers_of, sums_of
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from pipeline.trainer.row_means import RowMeans
from tests.rollout.reward.test_foreign import Digits
from tests.support.folders import importable
from tests.support.told import Told

FUNCTIONS = """
import math
from pipeline import batched

def own(input_ids, attention_mask, *, response_end, **_):
    return {"reward": 1.0, "end": int(response_end), "format": True}

@batched
def rows(input_ids, attention_mask, *, response_end, **_):
    return [{"reward": 1.0, "end": int(end)} for end in response_end]

@batched
def columns(input_ids, attention_mask, *, response_end, **_):
    return {"reward": [1.0 for _ in response_end], "end": response_end, "beta": 0.5, "short": [], "text": "ab"}

@batched
async def short(input_ids, attention_mask, **_):
    return {"reward": [1.0] * (len(input_ids) + 1), "end": [1.0]}

def trl(completions, **kwargs):
    return {"reward": [1.0 for _ in completions], "characters": [len(one) for one in completions]}

def verl(solution_str, ground_truth):
    return {"score": 1.0, "acc": solution_str == ground_truth, "pred": solution_str, "reward": 7}

def odd(input_ids, attention_mask, **_):
    return {"reward": 1.0, "nan": math.nan, "text": "7", "none": None, "list": [1, 2], "good one!": 2}

def many(input_ids, attention_mask, **_):
    return {"reward": 1.0, **{f"n{at}": at for at in range(20)}}

def without(input_ids, attention_mask, **_):
    return {"end": 1.0}

def plain(**columns):
    return [float(len(one)) for one in columns["completions"]] if "completions" in columns else -1.0

def sometimes(input_ids, attention_mask, *, gt_answer, **_):
    return {"reward": 1.0, "hit": 4.0} if gt_answer == "12" else 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("numbers"), number_rewards=FUNCTIONS) as folder:
        yield folder


def given(answers: tuple[str, ...] = ("12", "21")) -> dict[str, Any]:
    """Return rows ``21>12<eos>``."""
    rows = len(answers)
    return {
        "input_ids": torch.tensor([[5, 4, 2, 4, 5, 1, 0]] * rows),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]] * rows),
        "response_start": torch.tensor([3] * rows),
        "response_end": torch.tensor([6] * rows),
        "gt_answer": list(answers),
        "columns": [{"prompt": "21>"}] * rows,
    }


def reward_of(*names: str, telemetry: Telemetry = Telemetry.none()) -> FunctionReward:
    functions = [load_reward_function(f"number_rewards:{name}") for name in names]
    return FunctionReward(functions, Digits(), telemetry, labels=names)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("own", {"own.end": 6.0, "own.format": 1.0}),
        ("rows", {"rows.end": 6.0}),
        ("columns", {"columns.end": 6.0, "columns.beta": 0.5}),
        ("trl", {"trl.characters": 2.0}),
        ("verl", {"verl.acc": 1.0, "verl.reward": 7.0}),
    ],
)
def test_each_style_may_return_numbers_beside_the_reward(folder: Path, name: str, numbers: dict[str, float]) -> None:
    reward = reward_of(name)

    scores = reward(**given(("12", "12")))

    assert scores.tolist() == [1.0, 1.0] and reward.numbers == [numbers, numbers]


def test_what_is_no_number_is_named_and_counted_and_the_reward_stands(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Told()
    reward = reward_of("odd", telemetry=telemetry)

    scores = [reward(**given()).tolist() for _ in range(5)]

    assert scores == [[1.0, 1.0]] * 5
    assert reward.numbers == [{"odd.good_one_": 2.0}] * 2
    # Ten rows, each with NaN, a text and a list; None is no number, and no error.
    assert telemetry.counted["number_left_out"] == ["invalid"] * 30
    first = [line for line in caplog.messages if "is no finite number, the reward stands" in line]
    assert [line.rpartition("=")[2] for line in first] == ["odd.nan", "odd.text", "odd.list"]
    assert sum("left out again" in line and "times=10" in line for line in caplog.messages) == 3


def test_names_are_bounded_and_one_that_does_not_fit_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Told()
    reward = reward_of("many", telemetry=telemetry)

    for _ in range(2):
        reward(**given(("12",)))

    assert reward.numbers == [{f"many.n{at}": float(at) for at in range(MOST_NUMBERS)}]
    assert telemetry.counted["number_left_out"] == ["name"] * 8
    said = [line for line in caplog.messages if "a further number" in line]
    assert len(said) == 4 and "name=many.n16: at most 16 names" in said[0]


def test_the_style_of_a_table_is_that_of_the_call(folder: Path) -> None:
    as_trl, own = (OwnReward(name="number_rewards:plain", style=style) for style in ("trl", "rlhfd"))  # type: ignore[arg-type]

    assert FunctionReward([load_reward_function(as_trl)], Digits())(**given()).tolist() == [2.0, 2.0]
    assert FunctionReward([load_reward_function("number_rewards:own")], Digits())(**given()).tolist() == [1.0, 1.0]
    # A function of one's own gets its rows by place.
    with pytest.raises(ConfigError, match="number_rewards:plain cannot be called"):
        load_reward_function(own)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("without", 'without returned a dict: the dict has no "reward", its keys are end'),
        ("short", "returned 3 scores for 2 rows"),
    ],
)
def test_a_dict_without_a_reward_a_row_is_no_reward(folder: Path, name: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        reward_of(name)(**given())


def test_a_pool_returns_the_numbers_of_each_function(folder: Path, task: Path) -> None:
    names = ["own", "rows", "sometimes", "odd"]
    telemetry = Told()
    tokenizer = load_tokenizer(str(task / "model"))
    row = tokenizer("21>12")["input_ids"] + [tokenizer.eos_token_id]
    with RewardPool(
        [f"number_rewards:{name}" for name in names], str(task / "model"), timeout_s=30.0, labels=names,
        telemetry=telemetry,
    ) as pool:  # fmt: skip
        scores = pool(
            input_ids=torch.tensor([row, row]),
            attention_mask=torch.ones(2, 6, dtype=torch.int64),
            response_start=torch.tensor([3, 3]),
            response_end=torch.tensor([6, 6]),
            gt_answer=["12", "21"],
        )

    shared = {"own.end": 6.0, "own.format": 1.0, "rows.end": 6.0, "odd.good_one_": 2.0}
    assert scores.tolist() == [4.0, 3.5]
    assert pool.numbers == [{**shared, "sometimes.hit": 4.0}, shared]
    assert telemetry.counted["number_left_out"] == ["invalid"] * 6


def experience(numbers: list[dict[str, float]]) -> Experience:
    rows = len(numbers)
    sequences, actions = torch.ones(rows, 3, dtype=torch.int64), torch.ones(rows, 2, dtype=torch.bool)
    info = {"score": torch.zeros(rows), "policy_version": torch.zeros(rows, dtype=torch.int64), **columns_of(numbers)}
    return Experience(sequences, attention_mask=torch.ones_like(sequences), action_mask=actions, info=info)


def test_numbers_become_columns_of_the_rows_that_are_kept() -> None:
    reward = FunctionReward([lambda *_, **__: 1.0], None)
    reward.parts, reward.numbers = torch.zeros(3, 1), [{"a": 1.0}, {}, {"a": 3.0, "b": 2.0}]

    info = reward.info(np.array([1, 2]))

    assert set(info) == {f"{PREFIX}a", f"{PREFIX}b"}
    torch.testing.assert_close(info[f"{PREFIX}a"], torch.tensor([math.nan, 3.0]), equal_nan=True)


def test_a_row_without_a_number_passes_the_gate() -> None:
    made = experience([{"a": 1.0}, {}])

    assert find_fault(RaggedRows.of(made), vocabulary=2) is None


def test_the_mean_of_a_number_is_over_the_rows_of_all_ranks_that_have_it(tmp_path: Path) -> None:
    names = NumberNames(tmp_path)
    first, second = experience([{"f.a": 1.0}, {}]), experience([{"f.a": 4.0, "f.b": -2.0}, {"f.b": 0.0}])
    # Another worker meets the names in another order.
    first, second = pack(RaggedRows.of(first), names), pack(RaggedRows.of(second), NumberNames(tmp_path))
    means = RowMeans({}, NumberNames(tmp_path))

    found = means.means([means.sums([made], 0) for made in (first, second)])

    assert {name: mean for name, mean in found.items() if name.startswith("reward/")} == {
        "reward/f.a": 2.5, "reward/f.b": -1.0,
    }  # fmt: skip
    info = {name for name in first.columns if name.startswith("info.")}
    assert info == {"info.score", "info.policy_version", f"info.{COLUMN}"}
    assert numbers_of(second.columns[f"info.{COLUMN}"][0], names) == {"f.a": 4.0, "f.b": -2.0}


def test_the_names_of_a_run_outlive_its_processes_and_a_torn_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = NumberNames(tmp_path)
    assert [first.place(name) for name in ("a", "b", "a")] == [0, 1, 0]
    (file,) = tmp_path.iterdir()
    with file.open("a") as torn:
        torn.write('"c')

    later = NumberNames(tmp_path)

    assert later.names == ["a", "b"] and later.place("d") == 2 and first.names == ["a", "b", "d"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == ["a", "b", "d"]
    assert [first.place(f"n{at}") for at in range(14)] == [*range(3, 16), None]
    assert later.place("n13") is None and later.place("n13") is None
    assert sum("name=n13: the run has 16 names" in line for line in caplog.messages) == 2


def test_a_disk_that_takes_no_further_name_costs_the_numbers_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = NumberNames(tmp_path)
    assert names.place("odd.first") == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        places = [names.place(name) for name in ("odd.second", "odd.third", "odd.first")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert places == [None, None, 0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("further numbers of rewards are left out: first=odd.second error=[Errno 27] File too large")
    assert names.place("odd.second") == 1, "the disk has room again"


def test_names_stay_known_while_their_file_cannot_be_read_and_no_new_one_is_refused_for_good(tmp_path: Path) -> None:
    names = NumberNames(tmp_path)
    assert names.place("a") == 0
    (file,) = tmp_path.iterdir()
    file.rename(kept := tmp_path / "kept")
    # As of a file system that answers each call with EACCES, EIO or ESTALE.
    file.symlink_to(file)

    assert names.names == ["a"] and names.place("a") == 0 and names.place("b") is None
    kept.replace(file)
    assert names.place("b") == 1 and NumberNames(tmp_path).names == ["a", "b"]


def test_a_workers_metric_has_the_name_of_the_number(tmp_path: Path) -> None:
    names = NumberNames(tmp_path)
    made = pack(RaggedRows.of(experience([{"f.a": 1.0}, {"f.a": 2.0}])), names)
    slab = MetricsSlab.create(tmp_path / "metrics", [SlotName("supervisor"), SlotName("rollout", 1)])
    slab.begin("rollout", 1)
    reader = MetricsReader(slab)
    metrics = RolloutMetrics(slab.writer("rollout", 1), reward_source="function")

    made = made.with_info("cut", np.zeros(2, bool))
    metrics.rolled(Rolled(made, 0), prompts=1, group_size=2)
    metrics.count("number_left_out", "invalid")
    reader.name(dict(zip(NUMBER_LABELS, names.names, strict=False)))
    reading = reader.read()
    slab.close()

    assert reading.value("rlhfd_reward_function_mean", role="rollout", worker="1", function="f.a") == 1.5
    assert reading.value("rlhfd_reward_numbers_left_out_total", reason="invalid") == 1
    assert sums_of(made.columns[f"info.{COLUMN}"])[1][:2] == [2.0, 0.0]


@pytest.mark.parametrize("line", [b"\0\0\0\0", b"xyz", b'"\xff"', b""])
def test_a_damaged_line_keeps_the_places_of_the_names_behind_it(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "reward-numbers.jsonl").write_bytes(b'"a"\n' + line + b'\n"c"\n"torn')

    names = NumberNames(tmp_path)

    assert names.names == ["a", "number-2", "c"]
    assert [names.place(name) for name in ("c", "d")] == [2, 3]


def test_a_key_that_utf_8_cannot_encode_is_sent_by_a_scorer() -> None:
    """It would end at the first such row."""
    (number,) = scored(1.0, {"a\ud800": 2.0}).numbers.items()
    with pytest.raises(RewardError) as refused:
        split({"a\ud800": 2.0})

    assert number == ("a?", 2.0)
    assert str(refused.value).encode().endswith(b"its keys are a?")
