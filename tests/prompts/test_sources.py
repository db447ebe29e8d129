"""Several sources by weight, filters and columns: the position is still the whole state."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.prompts import PromptsConfig, PromptSourceConfig
from pipeline.errors import ConfigError
from pipeline.prompts.check import check
from pipeline.prompts.pass_rates import write_pass_rates
from pipeline.prompts.source import PromptSource, prompts_at_most


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def named(path: Path, name: str, count: int) -> str:
    return write(path, [{"prompt": f"{name}{number}", "answer": str(number)} for number in range(count)])


def mixed(folder: Path, **more: Any) -> PromptsConfig:
    return PromptsConfig(
        sources=[
            PromptSourceConfig(path=named(folder / "a.jsonl", "a", 5), weight=3.0),
            PromptSourceConfig(path=named(folder / "b.jsonl", "b", 40), weight=1.0),
        ],
        **more,
    )


def test_sources_are_mixed_by_weight_and_each_goes_through_its_own_epochs(tmp_path: Path) -> None:
    with closing(PromptSource(mixed(tmp_path), 0)) as source:
        prompts = [source.at(position) for position in range(80)]

    texts = [str(prompt.prompt) for prompt in prompts]
    assert len(source) == 45
    # 60 of a, that is 12 epochs of 5; 20 of b, none twice. Any 8 positions in line have about 6 and 2.
    assert Counter(text for text in texts if text[0] == "a") == {f"a{number}": 12 for number in range(5)}
    assert len({text for text in texts if text[0] == "b"}) == 20
    assert {sum(text[0] == "b" for text in texts[block : block + 4]) for block in range(0, 80, 4)} == {1}
    epochs = [prompt.epoch for prompt in prompts if str(prompt.prompt)[0] == "a"]
    assert Counter(epochs) == dict.fromkeys(range(12), 5) and max(epochs[:30]) < 7


def test_the_position_is_the_whole_state_of_a_mixture(tmp_path: Path) -> None:
    prompts = mixed(tmp_path)
    with closing(PromptSource(prompts, 4)) as first:
        forward = [first.at(position) for position in range(100)]

    with closing(PromptSource(prompts, 4)) as again, closing(PromptSource(prompts, 5)) as other:
        assert [again.at(position) for position in reversed(range(100))] == forward[::-1]
        assert [other.at(position) for position in range(100)] != forward


def test_one_source_has_the_order_of_the_same_file_as_path(tmp_path: Path) -> None:
    path = named(tmp_path / "a.jsonl", "a", 30)
    with (
        closing(PromptSource(PromptsConfig(sources=[PromptSourceConfig(path=path, weight=7.0)]), 3)) as one,
        closing(PromptSource(path, 3)) as plain,
    ):
        assert [one.at(position) for position in range(60)] == [plain.at(position) for position in range(60)]


def test_prompts_outside_the_lengths_are_left_out_and_the_others_keep_their_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "x" * number} for number in range(1, 11)]
    parts = [{"type": "text", "text": "xx"}]
    rows.append({"prompt": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]})
    prompts = PromptsConfig(path=write(tmp_path / "p.jsonl", rows), min_characters=3, max_characters=5)

    with closing(PromptSource(prompts, 0)) as source:
        found = [source.at(position) for position in range(len(source))]

    assert check(prompts) == len(source) == 4
    assert sorted(prompt.line for prompt in found) == [3, 4, 5, 11]
    assert all(prompt.index == prompt.line - 1 for prompt in found)


def test_lengths_that_no_prompt_has_are_refused(tmp_path: Path) -> None:
    path = named(tmp_path / "p.jsonl", "p", 3)

    for use in (check, lambda prompts: PromptSource(prompts, 0)):
        with pytest.raises(ConfigError, match=r"p\.jsonl:1:1: no prompt has the length .*prompts\.min_characters = 9"):
            use(PromptsConfig(path=path, min_characters=9))


def test_prompts_outside_the_pass_rates_are_left_out(tmp_path: Path) -> None:
    rates = (0, 0.2, 0.5, 0.9, 1)
    path = write(tmp_path / "p.jsonl", [{"prompt": f"{rate}", "stats": {"rate": rate}} for rate in rates])
    prompts = PromptsConfig(path=path, pass_rate_column="stats.rate", min_pass_rate=0.2, max_pass_rate=0.9)

    with closing(PromptSource(prompts, 0)) as source:
        found = sorted(source.at(position).prompt for position in range(len(source)))

    assert check(prompts) == 3 and found == ["0.2", "0.5", "0.9"]
    for use in (check, lambda prompts: PromptSource(prompts, 0)):
        with pytest.raises(ConfigError, match=r"1:1: no prompt has the length or pass rate .* = 0\.6, .* = 0\.8"):
            use(prompts.model_copy(update={"min_pass_rate": 0.6, "max_pass_rate": 0.8}))


def test_easy_prompts_come_first_in_the_first_epoch_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "rate": (number * 37 % 101) / 100} for number in range(101)]
    prompts = PromptsConfig(
        path=write(tmp_path / "p.jsonl", rows), pass_rate_column="rate", max_pass_rate=0.98, curriculum="easy_first"
    )
    seeds = []

    for seed in (0, 1):
        with closing(PromptSource(prompts, seed)) as source:
            size = len(source)
            found = [source.at(position) for position in range(2 * size)]
        rates = [float(str(prompt.columns["rate"])) for prompt in found]
        tenths = [rates[-(-tenth * size // 10) : -(-(tenth + 1) * size // 10)] for tenth in range(10)]
        assert size == 99 and sorted(prompt.index for prompt in found[:size]) == sorted({p.index for p in found})
        assert all(min(one) > max(other) for one, other in itertools.pairwise(tenths))
        assert all(one != sorted(one, reverse=True) for one in tenths), "the rows of a tenth are mixed"
        assert max(rates[size : size + 50]) > 0.9 and min(rates[size : size + 50]) < 0.1, "later epochs are mixed"
        seeds.append([prompt.index for prompt in found])
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("rows", [1, 3, 9, 10, 11])
def test_few_prompts_come_each_once_an_epoch(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"p{number}", "rate": 0.5} for number in range(rows)])
    prompts = PromptsConfig(path=path, pass_rate_column="rate", curriculum="easy_first")

    with closing(PromptSource(prompts, 5)) as source:
        assert sorted(source.at(position).index for position in range(rows)) == list(range(rows))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1.5, "rate is 1.5, not a number from 0 to 1"),
        (True, "rate is a boolean, not a number from 0 to 1"),
        ("0.5", "rate is a text, not a number from 0 to 1"),
        (None, '"rate" is null'),
    ],
)
def test_a_pass_rate_that_is_none_is_named_with_its_line(tmp_path: Path, value: Any, problem: str) -> None:
    rows = [{"prompt": "a", "rate": 0.5}, {"prompt": "b", "rate": value}]
    prompts = PromptsConfig(path=write(tmp_path / "p.jsonl", rows), pass_rate_column="rate")

    with pytest.raises(ConfigError, match=re.escape(f"p.jsonl:2:1: {problem}")):
        check(prompts)


def test_a_pass_rate_that_no_row_has_is_one_line(tmp_path: Path) -> None:
    prompts = PromptsConfig(path=named(tmp_path / "p.jsonl", "p", 3), pass_rate_column="promt")

    with pytest.raises(
        ConfigError, match=r'^prompts\.pass_rate_column: no column "promt" in .*, did you mean "prompt"'
    ):
        check(prompts)


def test_pass_rates_are_written_beside_each_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": f"p{number}", "answer": number, "rate": 7} for number in range(4)]
    prompts = PromptsConfig(path=write(tmp_path / "p.jsonl", rows), prompt_column="question")

    (tmp_path / "rated.new").write_text("mine")

    assert write_pass_rates(prompts, {0: 0.25, 3: 1.0}, tmp_path / "rated.jsonl", column="rate") == 2

    written = [json.loads(line) for line in (tmp_path / "rated.jsonl").read_text().splitlines()]
    assert written == [{**rows[0], "rate": 0.25}, {**rows[3], "rate": 1.0}]
    assert (tmp_path / "rated.new").read_text() == "mine", "a file of the user's"


def test_pass_rates_are_written_beside_a_column_that_utf_8_cannot_encode(tmp_path: Path) -> None:
    rows = [{"prompt": "é", "note": "half \ud83d of a pair"}]
    prompts = PromptsConfig(path=write(tmp_path / "p.jsonl", rows))

    write_pass_rates(prompts, {0: 0.5}, tmp_path / "rated.jsonl", column="rate")

    assert (tmp_path / "rated.jsonl").read_text() == '{"prompt": "é", "note": "half \\ud83d of a pair", "rate": 0.5}\n'
    with closing(PromptSource(tmp_path / "rated.jsonl", 0)) as source:
        assert source.at(0).columns["note"] == rows[0]["note"]


def test_columns_by_name_and_every_further_one_reaches_the_reward(tmp_path: Path) -> None:
    row = {"question": "q", "reward_model": {"ground_truth": "7", "style": "rule"}, "level": 3, "prompt": "other"}
    prompts = PromptsConfig(
        path=write(tmp_path / "p.jsonl", [row]), prompt_column="question", answer_column="reward_model.ground_truth"
    )

    with closing(PromptSource(prompts, 0)) as source:
        prompt = source.at(0)

    assert (prompt.prompt, prompt.answer) == ("q", "7")
    assert prompt.columns == {"reward_model": row["reward_model"], "level": 3, "prompt": "other"}


def test_a_column_whose_own_name_has_a_dot_is_found_first(tmp_path: Path) -> None:
    prompts = PromptsConfig(path=write(tmp_path / "p.jsonl", [{"a.b": "q", "a": {"b": "no"}}]), prompt_column="a.b")

    with closing(PromptSource(prompts, 0)) as source:
        assert source.at(0).prompt == "q"


def test_each_source_has_its_own_columns(tmp_path: Path) -> None:
    prompts = PromptsConfig(
        answer_column="solution",
        sources=[
            PromptSourceConfig(path=write(tmp_path / "a.jsonl", [{"q": "a", "solution": 1}]), prompt_column="q"),
            PromptSourceConfig(path=write(tmp_path / "b.jsonl", [{"prompt": "b", "a": 2}]), answer_column="a"),
        ],
    )

    with closing(PromptSource(prompts, 0)) as source:
        assert {source.at(position).prompt: source.at(position).answer for position in range(2)} == {"a": 1, "b": 2}
    assert check(prompts) == prompts_at_most(prompts) - 2 == 2, "an upper bound: a line more for each file"


def test_a_column_that_is_missing_in_row_12_is_named_with_its_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "p", "solution": "s"} for _ in range(20)]
    rows[11] = {"prompt": "p", "solutoin": "s"}
    rows[14]["solution"] = None
    path = write(tmp_path / "p.jsonl", rows)

    with pytest.raises(ConfigError) as raised:
        check(PromptsConfig(path=path, answer_column="solution"))

    assert str(raised.value).splitlines() == [
        f'{path}:12:1: no key "solution" among prompt, solutoin, did you mean "solutoin"?',
        f'{path}:15:1: "solution" is null',
    ]
    assert check(path) == 20, "an answer is optional as long as no column is named"


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ("questoin", {"question": "q", "answer": 1}, 'answer, question, did you mean "question"?'),
        ("prompt", {"question": "q", "answer": 1}, 'answer, question, did you mean "question"?'),
        ("zzz", {"question": "q"}, "question"),
        ("prompt", {}, "none"),
    ],
)
def test_a_column_that_no_row_has_is_one_line_with_a_suggestion(
    tmp_path: Path, column: str, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "p.jsonl", [row] * 30)

    with pytest.raises(ConfigError) as raised:
        check(PromptsConfig(path=path, prompt_column=column))

    assert str(raised.value) == f'prompts.prompt_column: no column "{column}" in {path}, which has {message}'


def test_the_problems_of_all_sources_are_named(tmp_path: Path) -> None:
    prompts = PromptsConfig(
        sources=[
            PromptSourceConfig(path=str(tmp_path / "gone.jsonl")),
            PromptSourceConfig(path=write(tmp_path / "b.jsonl", [{"prompt": ""}, {"prompt": "b"}])),
            PromptSourceConfig(path=write(tmp_path / "c.jsonl", [{"prompt": "c"}]), answer_column="a"),
        ]
    )

    with pytest.raises(ConfigError) as raised:
        check(prompts)

    assert str(raised.value).splitlines() == [
        f"prompts.sources: cannot read {tmp_path}/gone.jsonl: No such file or directory",
        f"{tmp_path}/b.jsonl:1:1: prompt is empty",
        f'prompts.sources: no column "a" in {tmp_path}/c.jsonl, which has prompt',
    ]


def test_unmixed_rows_come_in_the_order_of_the_file_in_each_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (1 + number)} for number in range(5)]
    path = write(tmp_path / "p.jsonl", rows)
    orders = {}
    for shuffle in (True, 1, False, 0):
        prompts = PromptsConfig.model_validate({"path": path, "shuffle": shuffle, "min_characters": 2})
        with closing(PromptSource(prompts, 3)) as source:
            orders[repr(shuffle)] = [source.at(position).index for position in range(12)]

    assert orders["False"] == orders["0"] == [1, 2, 3, 4] * 3
    assert orders["True"] == orders["1"] != orders["0"]
    assert sorted(orders["True"]) == sorted(orders["0"]), "each epoch takes each row once"


def test_sources_by_weight_keep_their_shares_without_mixed_rows(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [{"prompt": name * (1 + row)} for row in range(3)]) for name in "ab"]
    sources = [{"path": paths[0], "weight": 3.0}, {"path": paths[1], "weight": 1.0}]
    prompts = PromptsConfig.model_validate({"sources": sources, "shuffle": False})

    with closing(PromptSource(prompts, 3)) as source:
        found = [str(source.at(position).prompt) for position in range(16)]

    assert found == [text for last in ("b", "bb", "bbb", "b") for text in ("a", "aa", "aaa", last)]
