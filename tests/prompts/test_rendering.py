"""System prompt, keywords and tools of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.prompts import PromptsConfig
from pipeline.errors import ConfigError
from pipeline.prompts.rendering import Rendering, render, rendering_of
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import Message, Prompt

TOOL = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": "mul"}}


class Recording:
    """A tokenizer that keeps the arguments of its chat template."""

    chat_template = "{{ messages }}"

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.keywords: dict[str, Any] = {}

    def __call__(self, text: str) -> Mapping[str, Sequence[int]]:
        return {"input_ids": [1]}

    def apply_chat_template(self, conversation: list[Message], **keywords: Any) -> Mapping[str, Sequence[int]]:
        self.messages, self.keywords = conversation, keywords
        return {"input_ids": [2]}


def rendered(prompt: str | list[Message], how: Rendering, tools: list[Any] | None = None) -> Recording:
    tokenizer = Recording()
    assert render(Prompt(0, 0, 0, prompt, None, tools=tools), tokenizer, how) == [2]
    assert tokenizer.keywords.pop("add_generation_prompt") and tokenizer.keywords.pop("tokenize")
    return tokenizer


def test_the_system_prompt_comes_first_unless_the_chat_has_one() -> None:
    how = rendering_of(PromptsConfig(system_prompt="Be brief."))

    system = {"role": "system", "content": "Be brief."}
    assert rendered("hi", how).messages == [system, {"role": "user", "content": "hi"}]
    assert rendered([{"role": "user", "content": "hi"}], how).messages[0] == system
    for role in ("system", "developer"):
        own: list[Message] = [{"role": role, "content": "Own."}, {"role": "user", "content": "hi"}]
        assert rendered(own, how).messages == own


def test_keywords_and_tools_reach_the_template_and_a_row_has_its_own_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    how = rendering_of(PromptsConfig(template_arguments={"enable_thinking": False}, tools_file=tmp_path / "tools.json"))

    assert rendered("hi", how).keywords == {"return_dict": True, "enable_thinking": False, "tools": [TOOL]}
    assert rendered("hi", how, [OTHER]).keywords["tools"] == [OTHER]


def test_without_these_keys_the_template_gets_no_further_keyword() -> None:
    how = rendering_of(PromptsConfig(template="chat"))

    assert how == Rendering("chat")
    assert rendered("hi", how).keywords == {"return_dict": True}


def test_tools_of_a_row_are_a_list_or_its_json(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "p", "tools": tools}) + "\n" for tools in ([TOOL], json.dumps([TOOL]), None))
    )
    source = PromptSource(PromptsConfig(path=str(path), tools_column="tools"), 0)

    prompts = sorted((source.at(position) for position in range(3)), key=lambda prompt: prompt.index)

    assert [prompt.tools for prompt in prompts] == [[TOOL], [TOOL], None]
    assert all("tools" not in prompt.columns for prompt in prompts)
    source.close()


@pytest.mark.parametrize(("tools", "message"), [(3, "tools is a number, not a list"), ("[", "tools is not JSON")])
def test_tools_of_another_kind_are_refused_with_their_line(tmp_path: Path, tools: object, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "p", "tools": tools}))
    source = PromptSource(PromptsConfig(path=str(path), tools_column="tools"), 0)

    with pytest.raises(ConfigError, match=rf"p\.jsonl:1:1: {message}"):
        source.at(0)
    source.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("[", "is not JSON"), ("[]", "is not a list of functions"), ('["a"]', "is not a list of")],
)
def test_a_file_of_tools_that_has_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)

    with pytest.raises(ConfigError, match=rf"^prompts\.tools_file: .*{message}"):
        rendering_of(PromptsConfig(tools_file=tmp_path / "t.json"))
