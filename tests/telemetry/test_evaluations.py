"""Summaries of evaluations against slow references, and the file that holds them."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.evaluation import names_of, prompts_per_ticket
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.telemetry.evaluations import (
    EvaluationFile,
    PromptResult,
    find,
    pass_at_k,
    read_evaluations,
    summary,
)

PLAN = EvaluationPlan(10, 4, 2, ("math",), (3,), 2, "plan")
RESULTS = [PromptResult(2, 4, 1, 0.25, 8.0, 0), PromptResult(0, 4, 4, 1.0, 2.0, 1), PromptResult(1, 4, 0, 0.0, 5.0, 4)]


@pytest.mark.parametrize("responses", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_with_a_right_one(responses: int) -> None:
    for right, k in itertools.product(range(responses + 1), range(1, responses + 1)):
        choices = list(itertools.combinations([True] * right + [False] * (responses - right), k))

        assert pass_at_k(responses, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_a_summary_has_the_means_over_prompts() -> None:
    found = summary("math", RESULTS, 5, 2)

    assert (found.name, found.prompts, found.failed) == ("math", 3, 2)
    assert found.pass_at_1 == pytest.approx((0.25 + 1 + 0) / 3)
    # Of the 6 pairs of 4 responses, 3 hold the one right response.
    assert found.pass_at_k == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.reward_mean == pytest.approx(1.25 / 3)
    assert found.response_length_mean_tokens == pytest.approx(5.0)
    assert found.cut_ratio == pytest.approx((0 + 0.25 + 1) / 3)


def test_without_any_result_there_are_no_means() -> None:
    found = summary("math", [], 5, 2)

    assert (found.prompts, found.failed, found.pass_at_1, found.reward_mean) == (0, 5, None, None)


def test_an_evaluation_does_not_depend_on_the_order_of_its_results() -> None:
    orders = [PLAN.evaluation(0, "0a", [list(order)]) for order in itertools.permutations(RESULTS)]

    assert all(found == orders[0] for found in orders)


def test_the_file_holds_each_evaluation_as_a_line_and_finds_it_by_weights_and_plan(tmp_path: Path) -> None:
    path = tmp_path / "run" / "evaluations.jsonl"
    file = EvaluationFile(path, clock_s=lambda: 12.3456)
    file.add(PLAN.evaluation(10, f"{7:016x}", [RESULTS]))
    again = EvaluationFile(path)
    again.add(PLAN.evaluation(20, f"{8:016x}", [RESULTS[:1]]))

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["version"], line["total"]["prompts"]) for line in lines] == [(10, 3), (20, 1)]
    assert lines[0]["time_unix_s"] == 12.346 and lines[0]["files"][0]["name"] == "math"
    found = again.find(10, 7, "plan")
    assert found is not None and found.total.prompts == 3
    assert again.find(10, 8, "plan") is None and again.find(10, 7, "other") is None
    assert find(read_evaluations(path), 20, f"{8:016x}") == again.newest(20)


@pytest.mark.parametrize("torn", [1, 40])
def test_a_line_that_a_killed_writer_left_in_part_is_not_read_and_is_overwritten(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "evaluations.jsonl"
    for version in (0, 10):
        EvaluationFile(path).add(PLAN.evaluation(version, "0a", [RESULTS]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])

    file = EvaluationFile(path)
    assert [found.version for found in read_evaluations(path)] == [0, 10][: 1 if torn > 1 else 2]
    file.add(PLAN.evaluation(20, "0a", [RESULTS]))

    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == [0, 20]


def test_a_line_that_cannot_be_written_waits_for_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.mkdir()
    file = EvaluationFile(path)
    file.add(PLAN.evaluation(0, "0a", [RESULTS]))
    file.write_waiting()
    assert file.newest(20) is not None and [record.levelname for record in caplog.records] == ["ERROR"], "logged once"

    path.rmdir()
    file.write_waiting()
    file.write_waiting()

    assert [found.version for found in read_evaluations(path)] == [0]


@pytest.mark.parametrize("failing", ["fsync", "pwrite"])
def test_lines_that_a_disk_refused_are_there_once_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path, left, write = tmp_path / "evaluations.jsonl", [1, 2, 3], os.pwrite
    file = EvaluationFile(path)
    file.add(PLAN.evaluation(0, "0a", [RESULTS]))

    def fail(descriptor: int, *data: Any) -> Any:
        if not left:
            return write(descriptor, *data) if data else None
        if data and len(data[0]) > 10:
            # All but the end of the last line.
            return write(descriptor, data[0][:-10], data[1])
        left.pop()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, failing, fail)
    for version in (10, 20):
        file.add(PLAN.evaluation(version, "0a", [RESULTS]))
        assert [found.version for found in read_evaluations(path)] == [0]
        assert path.read_bytes().endswith(b"}\n")
    file.write_waiting()
    assert not left
    file.write_waiting()

    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == [0, 10, 20]


def plan_of(
    folder: Path, text: str = '{"prompt": "1>"}\n{"prompt": "2>"}\n\n{"prompt": "3>"}\n', **keys: object
) -> object:
    (folder / "held.jsonl").write_text(text)
    rollout, prompts = keys.pop("rollout", {}), keys.pop("prompts", {})
    return EvaluationPlan.of(
        Config.model_validate(
            {
                "evaluation": {"files": [str(folder / "held.jsonl")], **keys},
                "rollout": rollout,
                "prompts": prompts,
            }
        )
    )


def test_the_digest_of_a_plan_follows_files_and_settings_but_not_when_or_what_is_kept(tmp_path: Path) -> None:
    first = plan_of(tmp_path)
    assert isinstance(first, EvaluationPlan) and first.prompts == (3,) and first.names == ("held",)

    for same in ({}, {"every": 3}, {"keep_best": False}, {"rollout": {"min_p": 0.0}}, {"prompts": {"shuffle": False}}):
        assert plan_of(tmp_path, **same).digest == first.digest  # type: ignore[attr-defined]
    lengths = {"max_prompt_length": 12, "max_new_tokens": 12}
    others: list[dict[str, object]] = [
        {"num_generations": 2}, {"temperature": 0.5}, {"pass_reward": 0.5}, {"batch_size": 1},
        {"rollout": {"temperature": 0.9}}, {"rollout": {"min_p": 0.1}}, {"min_p": 0.1},
        {"rollout": lengths}, {"rollout": {"long_prompts": "cut_left", **lengths}}, {"text": '{"prompt": "1>"}\n'},
    ]  # fmt: skip
    digests = {plan_of(tmp_path, **other).digest for other in others}  # type: ignore[arg-type, attr-defined]
    assert len(digests | {first.digest}) == len(others) + 1


def test_the_digest_of_a_plan_follows_what_changes_a_score_and_not_the_form_or_the_name_of_a_reward(
    tmp_path: Path,
) -> None:
    def digest(*tables: object, model: dict[str, object] | None = None, **keys: object) -> str:
        (tmp_path / "held.jsonl").write_text('{"prompt": "1>"}\n')
        evaluation = {"files": [str(tmp_path / "held.jsonl")], **keys}
        config = Config.model_validate({"evaluation": evaluation, "rewards": [*tables], "model": model or {}})
        plan = EvaluationPlan.of(config)
        assert plan is not None
        return plan.digest

    table, judge = {"name": "model", "path": "/m"}, {"name": "judge", "url": "http://a", "model": "b"}
    tables = ("exact", judge, table)
    named = {**table, "label": "helpful"}

    assert digest("exact", {**judge, "concurrency": 2, "api_key_variable": "KEY"}, named) == digest(*tables)
    assert digest("exact", judge, model={"reward": "/m"}) == digest(*tables)
    assert digest("length") == digest({"name": "length", "limit_tokens": Config().lengths.row})
    assert digest(*tables, pass_function="model") == digest("exact", judge, named, pass_function="helpful")
    others = [
        digest(*tables, pass_function="model"),
        digest(*tables, pass_function="exact"),
        digest("exact", judge, {**table, "weight": 2.0}),
        digest("exact", judge, {**table, "path": "/n"}),
        digest("exact", judge, {**table, "tokenizer": "own"}),
        digest("exact", judge, model={"reward": "/m", "reward_tokenizer": "own"}),
        digest("exact", {**judge, "model": "c"}, table),
        digest("exact", judge),
    ]
    assert others[4] == others[5]
    assert len({*others, digest(*tables)}) == len(others)


def test_the_tickets_of_a_plan_hold_each_prompt_once() -> None:
    plan = EvaluationPlan(1, 1, 1, ("a", "b"), (5, 2), 2, "")

    assert plan.tickets() == [(0, 0, 2), (0, 2, 2), (0, 4, 1), (1, 0, 2)]


def test_a_ticket_of_held_out_prompts_has_about_the_rows_of_one_of_rollouts() -> None:
    rollout = {"num_generations": 8, "batch_size": 4}

    def size(**keys: object) -> int:
        return prompts_per_ticket(Config.model_validate({"rollout": rollout, "evaluation": keys}))

    assert (size(), size(num_generations=4), size(num_generations=64), size(batch_size=3)) == (32, 8, 1, 3)


def test_files_have_names_of_their_own() -> None:
    files = [Path("a/test.jsonl"), Path("b/test.json"), Path("all.jsonl"), Path("aime.jsonl"), Path("c/test.jsonl")]

    assert names_of(files) == ["test", "test-2", "all-2", "aime", "test-3"]


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held.jsonl:1:1: no prompt in the file"):
        plan_of(tmp_path, "\n")
    os.unlink(tmp_path / "held.jsonl")
    with pytest.raises(ConfigError, match=r"evaluation.files: cannot read .*held.jsonl"):
        EvaluationPlan.of(Config.model_validate({"evaluation": {"files": [str(tmp_path / "held.jsonl")]}}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pass_k": 5, "num_generations": 4}, "evaluation.pass_k: must be at most the 4 of evaluation.num_generations"),
        (
            {"temperature": 0.0, "num_generations": 2},
            "evaluation.num_generations: must be 1 with evaluation.temperature = 0",
        ),
        ({"max_new_tokens": 24}, "evaluation.max_new_tokens: must be at most the 23 tokens"),
        ({"files": [f"{number}.jsonl" for number in range(9)]}, "evaluation.files: must name at most 8 files, got 9"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"evaluation": keys})
