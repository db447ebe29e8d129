"""Prompts, answers and messages of foreign code about them stay out of a daemon's output, unless requested."""

import json

import pytest

from pipeline.errors import ConfigError, PromptError, RewardError
from pipeline.prompts.rendering import render
from pipeline.prompts.types import Prompt
from tests.support.daemon import SMALL, Daemon, total

_MARKER = "31415926"
_REWARD = """
def score(input_ids, attention_mask, *, gt_answer, response_start, response_end, tokenizer):
    prompt = tokenizer.decode(input_ids[:response_start], skip_special_tokens=True)
    if gt_answer == "31415926":
        raise KeyError(f"{prompt} {gt_answer}")
    if gt_answer == "text 31415926":
        return gt_answer
    return float(input_ids[response_start] % 5)
"""


@pytest.fixture
def moody(tmp_path, task):
    """Settings of a run in which every second prompt's reward raises, or returns, its answer."""
    (tmp_path / "moody.py").write_text(_REWARD)
    answers = ["1", _MARKER, "2", f"text {_MARKER}"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{_MARKER}>", "answer": answer}) + "\n" for answer in answers))
    return (*SMALL, f"model.actor={task / 'model'}", f"prompts.path={path}", 'rewards=["moody:score"]')


def everything_told(daemon):
    asked = (("status",), ("status", "--json"), ("why",), ("why", "--json"), ("logs", "--lines", "100000"))
    commands = [daemon.ask(*words) for words in asked]
    pages = [daemon.get(path)[1] for path in ("/metrics", "/healthz", "/readyz")]
    return "".join([daemon.output, daemon.errors, *pages, *(answer.stdout + answer.stderr for answer in commands)])


def run(folder, *settings):
    with Daemon(folder, *settings) as daemon:
        daemon.wait_ready()

        def errors(reason):
            return total(daemon.metrics(), "rlhfd_stage_errors_total", stage="reward", reason=reason)

        for reason in ("exception", "invalid"):
            daemon.wait_until(lambda reason=reason: errors(reason) > 0, f"a reward errored by {reason}")
            daemon.wait_logged(f"reason={reason}: moody:score")
            assert f"reason={reason}: moody:score" in daemon.ask("logs", "rollout-0", "--lines", "100000").stdout
        return everything_told(daemon)


@pytest.mark.integration
def test_by_default_no_text_of_prompts_answers_or_exceptions_is_told(tmp_path, moody):
    told = run(tmp_path, *moody)

    assert _MARKER not in told
    assert "reason=exception: moody:score raised KeyError (" in told
    assert "reason=invalid: moody:score returned a str; a reward is a finite number" in told


@pytest.mark.variant
@pytest.mark.integration
def test_with_log_texts_the_log_has_the_words_themselves(tmp_path, moody):
    told = run(tmp_path, *moody, "daemon.log_texts=true")

    assert f"moody:score raised KeyError('{_MARKER}> {_MARKER}') (" in told
    assert f"moody:score returned 'text {_MARKER}'; a reward" in told


@pytest.mark.variant
@pytest.mark.integration
def test_functions_called_in_the_worker_itself_say_no_more(tmp_path, moody):
    told = run(tmp_path, *moody, "rollout.reward_timeout_s=0")

    assert "moody:score raised KeyError (" in told and "moody:score returned a str; a reward" in told
    assert _MARKER not in told


def test_an_error_tells_both_ways():
    error = RewardError(f"f raised KeyError('{_MARKER}')", bare="f raised KeyError")

    assert error.told(texts=False) == "f raised KeyError"
    assert error.told(texts=True) == str(error) == f"f raised KeyError('{_MARKER}')"
    assert ConfigError("a is 1").told(texts=False) == "a is 1"


def test_a_chat_template_that_raises_is_named_without_what_it_said():
    class Tokenizer:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages, **_):
            raise ValueError(f"no role for {messages[0]['content']}")

    with pytest.raises(PromptError, match=f"ValueError: no role for {_MARKER}") as raised:
        render(Prompt(0, 0, 2, [{"role": "x", "content": _MARKER}], None), Tokenizer())

    assert raised.value.bare == "prompt 2 does not suit the tokenizer's chat template, which raised ValueError"
