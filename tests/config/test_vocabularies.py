"""A model that reads the actor's rows has the actor's vocabulary; padding of its table of embeddings is none of it."""

import json

import pytest

from pipeline.config.load import load
from pipeline.config.vocabularies import problem_of_vocabulary
from pipeline.supervisor.preflight import problems_of_files

TOKENS = ["<end>", "<user>", *"abcdefgh"]


def a_model(folder, tokens=TOKENS, rows=None, special=2, *, unigram=False, nested=False):
    """The two files of a model by which its vocabulary is known."""
    folder.mkdir(parents=True)
    sizes = {"vocab_size": len(tokens or TOKENS) if rows is None else rows}
    (folder / "config.json").write_text(json.dumps({"text_config": sizes} if nested else sizes))
    if tokens:
        plain = list(enumerate(tokens))
        vocabulary = [[token, -1.0] for _, token in plain] if unigram else {token: number for number, token in plain}
        added = [{"id": number, "content": token} for number, token in plain[:special]]
        described = {"model": {"vocab": vocabulary}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def actor(tmp_path):
    return a_model(tmp_path / "actor")


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"rows": 64},
        {"tokens": None},
        {"unigram": True},
        {"nested": True},
        {"tokens": [*TOKENS, "<more>"]},
        {"tokens": TOKENS[:9], "rows": 10},
    ],
    ids=["the same", "padded", "without a tokenizer", "a list", "in text_config", "one more", "one less, with its row"],
)
def test_the_same_vocabulary_is_taken_however_its_table_is_padded(tmp_path, actor, other):
    assert problem_of_vocabulary(a_model(tmp_path / "other", **other), actor) == ""


def test_renamed_tokens_that_only_hold_a_place_are_no_other_vocabulary(tmp_path):
    actor = a_model(tmp_path / "actor", [*TOKENS, "<|eom_id|>"])
    other = a_model(tmp_path / "other", [*TOKENS, "<|reserved_special_token_4|>"])

    assert problem_of_vocabulary(other, actor) == ""


@pytest.mark.parametrize(
    ("tokens", "count", "first"),
    [
        (["<s>", "</s>", *"abcdefgh"], 2, "0, '<end>' of the actor and '<s>' there"),
        (["<end>", "<user>", *"abcdefhg"], 2, "8, 'g' of the actor and 'h' there"),
        (["<end>", *"abcdefgh", "<user>"], 9, "1, '<user>' of the actor and 'a' there"),
    ],
)
def test_another_tokenizer_of_the_same_size_is_named_with_a_token(tmp_path, actor, tokens, count, first):
    problem = problem_of_vocabulary(a_model(tmp_path / "other", tokens), actor)

    assert f"another tokenizer than model.actor, and gets its token ids: {count} of 10 mean" in problem
    assert problem.endswith(first)


@pytest.mark.parametrize("other", [{"tokens": TOKENS[:6]}, {"tokens": None, "rows": 9}, {"rows": 9, "nested": True}])
def test_a_smaller_vocabulary_is_named_with_both_sizes(tmp_path, actor, other):
    problem = problem_of_vocabulary(a_model(tmp_path / "other", **other), actor)

    assert "smaller vocabulary than model.actor" in problem and "and 10 tokens" in problem


def test_rows_that_the_actor_can_sample_beyond_its_tokenizer_count(tmp_path):
    actor = a_model(tmp_path / "actor", rows=512)

    assert "(10 and 512 tokens" in problem_of_vocabulary(a_model(tmp_path / "other"), actor)


@pytest.mark.parametrize("broken", ["{", "[]", '{"model": 7}', '{"model": {"vocab": [1]}}', ""])
def test_a_tokenizer_that_cannot_be_read_is_not_compared(tmp_path, actor, broken):
    other = a_model(tmp_path / "other")
    (other / "tokenizer.json").write_text(broken)

    assert problem_of_vocabulary(other, actor) == ""


@pytest.mark.parametrize("name", ["reward", "reference", "critic"])
def test_the_key_of_each_model_that_reads_the_rows_is_named_before_a_start(tmp_path, actor, name):
    a_model(tmp_path / "other", ["<s>", "</s>", *"abcdefgh"])
    algorithm = "ppo" if name == "critic" else "grpo"
    sets = [f"model.actor={actor}", f"model.{name}={tmp_path / 'other'}", f"rollout.algorithm={algorithm}"]

    problems = [line for line in problems_of_files(load(None, sets, {})) if "another tokenizer" in line]

    assert len(problems) == 1 and problems[0].startswith(f"--set model.{name}: ")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("stops", "is_refused"), [("[[1, 9], [3]]", False), ("[[1, 10], [3]]", True), ("10", True)])
def test_a_stop_token_that_the_model_does_not_have_is_refused_before_a_start(tmp_path, stops, is_refused, nested):
    actor = a_model(tmp_path / "actor", nested=nested)
    sets = [f"model.actor={actor}", f"rollout.stop_token_ids={stops}"]

    problems = [line for line in problems_of_files(load(None, sets, {})) if "stop_token_ids" in line]

    expected = "model.actor has no token 10: its ids are below 10"
    assert [line.partition(": ")[2] for line in problems] == [expected] * is_refused
