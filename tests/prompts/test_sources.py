"""Several sources by weight, filters and columns: the position is still the whole state."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.prompts import PromptsConfig, PromptSourceConfig
from pipeline.errors import ConfigError
from pipeline.prompts.check import check
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
