"""Prompts as their author sees them: forms of messages, answers that are continued, and the ends of texts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.config.schema import Config
from pipeline.errors import PromptError
from pipeline.prompts.chat import ChatForms
from pipeline.prompts.rendering import Rendering, remarks, render, special_texts
from pipeline.prompts.types import Message, Prompt
from pipeline.rollout.first_rollouts import note_first_prompts

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
PAD, EOS, BOS, START, END = range(5)
TURN = (
    "{%% for m in messages %%}<|im_start|>{{ m['role'] }}\n%s<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
PARTS = "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
TEXTS = TURN % "{{ m['content'] }}"
ONLY_PARTS = TURN % PARTS
BOTH = TURN % ("{% if m['content'] is string %}{{ m['content'] }}{% else %}" + PARTS + "{% endif %}")
CONCATENATED = TURN % "{{ 'says: ' + m['content'] }}"
CALLS = "{{ m['content'] }}{%% for call in m.get('tool_calls') or [] %%}<call>%s</call>{%% endfor %%}"
AS_JSON = TURN % (CALLS % "{{ call.function.name }} {{ call.function.arguments | tojson }}")
AS_TEXT = TURN % (CALLS % "{{ call.function.name + ' ' + call.function.arguments }}")
PRINTED = TURN % (CALLS % "{{ call.function.name }} {{ call.function.arguments }}")
BY_KEY = TURN % (CALLS % "{% for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}{% endfor %}")


def tokenizer_of(template: str | None = None, *, around: str = "$A") -> Any:
    """A byte-level tokenizer; `around` are the tokens at the ends of a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["what is the sum of 1 and 2"] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=template
    )


def text_of(prompt: str | list[Message], tokenizer: Any, template: Any = "auto") -> str:
    return str(tokenizer.decode(render(Prompt(0, 0, 0, prompt, None), tokenizer, template)))


def parts(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [TEXTS, ONLY_PARTS, BOTH], ids=["texts", "parts", "both"])
@pytest.mark.parametrize("content", ["what is 'x'", parts("what is 'x'"), parts("what ", "is 'x'")], ids=repr)
def test_a_content_in_either_form_is_its_text_in_any_template(template: str, content: Any) -> None:
    messages: list[Message] = [
        {"role": "system", "content": content}, {"role": "user", "content": "first"},
        {"role": "assistant", "content": content}, {"role": "user", "content": content},
    ]  # fmt: skip

    found = text_of(messages, tokenizer_of(template))

    turns = [("system", "what is 'x'"), ("user", "first"), ("assistant", "what is 'x'"), ("user", "what is 'x'")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert found == f"{expected}<|im_start|>assistant\n"


def test_a_template_that_fails_on_parts_gets_their_text() -> None:
    found = text_of([{"role": "user", "content": parts("a", "b")}], tokenizer_of(CONCATENATED))

    assert found == "<|im_start|>user\nsays: ab<|im_end|>\n<|im_start|>assistant\n"


def test_parts_that_are_no_texts_and_texts_for_a_system_prompt_are_left_alone() -> None:
    """A system prompt of the configuration is a text, in a template of parts too."""
    image: list[Any] = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    template = ONLY_PARTS.replace(
        "{% endif %}{% endfor %}<|im_end|>", "{% else %}[IMG]{% endif %}{% endfor %}<|im_end|>"
    )

    found = text_of([{"role": "user", "content": image}], tokenizer_of(template), Rendering(system_prompt="Be brief"))

    assert found.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n[IMG]what is it<|im_end|>")


@pytest.mark.parametrize("template", [TEXTS, ONLY_PARTS, BOTH], ids=["texts", "parts", "both"])
@pytest.mark.parametrize("content", ["<think>\nLet ", parts("<think>\nLet ")], ids=repr)
def test_a_last_message_of_the_assistant_is_continued(template: str, content: Any) -> None:
    messages: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]

    found = text_of(messages, tokenizer_of(template))

    assert found == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nLet "


@pytest.mark.parametrize("content", ["", " \n", [], parts("")], ids=repr)
def test_an_empty_last_message_of_the_assistant_is_the_generation_prompt(content: Any) -> None:
    messages: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]

    assert text_of(messages, tokenizer_of(TEXTS)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    hidden = TEXTS.replace("{{ m['content'] }}", "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}")

    with pytest.raises(PromptError, match="does not suit the tokenizer's chat template"):
        text_of([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Let"}], tokenizer_of(hidden))


@pytest.mark.parametrize("template", [AS_JSON, AS_TEXT, PRINTED, BY_KEY], ids=["json", "text", "printed", "keys"])
@pytest.mark.parametrize("is_text", [False, True])
def test_arguments_of_a_call_are_right_as_an_object_and_as_json(template: str, is_text: bool) -> None:
    arguments = {"place": "Paris", "days": 3}
    call = {"function": {"name": "weather", "arguments": json.dumps(arguments) if is_text else arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": parts("sunny")},
    ]

    found = text_of(messages, tokenizer_of(template))

    expected = '<call>weather {"place": "Paris", "days": 3}</call>'
    if template is BY_KEY:
        expected = "<call><place>Paris<days>3</call>"
    assert f"<|im_start|>assistant\n{expected}<|im_end|>" in found
    assert "<|im_start|>tool\nsunny<|im_end|>" in found


OF_GEMMA = TURN % (
    "{{ m['content'] }}{% for call in m.get('tool_calls') or [] %}call:{{ call.function.name ~ '{' }}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}:{{ value }}{% endfor %}{% endif %}{{ '}' }}"
    "{% endfor %}"
)
OF_DEEPSEEK = TURN % (
    "{% if m['content'] is none %}{% for call in m['tool_calls'] %}<call>{{ call.function.name + ' ' + "
    "call.function.arguments }}</call>{% endfor %}{% else %}{{ m['content'] }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(OF_GEMMA, "call:weather{place:Paris}"), (OF_DEEPSEEK, '<call>weather {"place": "Paris"}</call>')],
    ids=["gemma", "deepseek"],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_a_call_without_a_content_is_right_in_templates_of_one_form(
    template: str, expected: str, is_text: bool
) -> None:
    """As with transformers 5.19: 5.23 takes a content of null for none at all."""
    arguments = {"place": "Paris"}
    call: Any = {"function": {"name": "weather", "arguments": json.dumps(arguments) if is_text else arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]

    def apply(given: list[Message]) -> str:
        return jinja2.Environment().from_string(template).render(messages=given)

    assert f"<|im_start|>assistant\n{expected}<|im_end|>" in apply(ChatForms(apply).adapted(messages))


def test_a_key_that_is_null_is_not_there_for_the_template() -> None:
    """As `datasets` and pandas write rows of which others have the key; Llama 3.1 refuses calls that are null."""

    def apply(given: list[Message]) -> str:
        return jinja2.Environment().from_string(TURN % "{{ m.keys() | join(' ') }}").render(messages=given)

    messages: list[Message] = [{"role": "user", "content": "hi", "tool_calls": None}, {"role": "user", "content": None}]

    assert apply(ChatForms(apply).adapted(messages)) == (
        "<|im_start|>user\nrole content<|im_end|>\n<|im_start|>user\nrole content<|im_end|>\n"
    )


OF_LLAMA = TURN % (
    "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% else %}{{ m['content'] or '' }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
)
OF_IDEFICS = TURN % ("{% if m['content'][0]['type'] == 'image' %}[IMG]{% endif %}" + PARTS)


@pytest.mark.parametrize(
    ("template", "expected"), [(OF_LLAMA, '"sunny"'), (OF_IDEFICS, "sunny")], ids=["llama", "idefics"]
)
@pytest.mark.parametrize("content", ["sunny", parts("sunny")], ids=repr)
def test_the_content_of_a_tool_in_either_form_is_its_text(template: str, expected: str, content: Any) -> None:
    messages: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": content},
    ]

    assert f"<|im_start|>tool\n{expected}<|im_end|>" in text_of(messages, tokenizer_of(template))


@pytest.mark.parametrize(
    ("content", "arguments", "call"),
    [("", "{broken", '<call>f "{broken"</call>'), (None, {"a": None}, '<call>f {"a": null}</call>')],
)
def test_arguments_that_are_no_json_stay_and_a_content_of_null_is_not_printed(
    content: str | None, arguments: Any, call: str
) -> None:
    calls: Any = [{"function": {"name": "f", "arguments": arguments}}]
    messages: list[Message] = [
        {"role": "user", "content": "None"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "y"},
    ]

    assert f"<|im_start|>assistant\n{call}" in text_of(messages, tokenizer_of(AS_JSON))


@pytest.mark.parametrize(
    ("text", "around", "ids", "remark"),
    [
        ("x", "$A", ["x"], ""),
        ("x", "<bos> $A", [BOS, "x"], ""),
        ("<bos>x", "<bos> $A", [BOS, "x"], "a second one that the tokenizer adds is left out"),
        ("<bos>x", "$A", [BOS, "x"], ""),
        ("<bos><bos>x", "<bos> $A", [BOS, BOS, "x"], "it begins with two BOS tokens"),
        ("x", "<bos> $A <eos>", [BOS, "x"], "an EOS token that the tokenizer adds at the end is left out"),
        ("x<eos>", "$A", ["x", EOS], "it ends with a token that ends responses"),
        ("x<|im_end|>", "$A", ["x", END], "it ends with a token that ends responses"),
    ],
)
def test_the_ends_of_a_text_are_its_own(text: str, around: str, ids: list[Any], remark: str) -> None:
    tokenizer, prompt = tokenizer_of(around=around), Prompt(0, 0, 0, text, None)
    (x,) = tokenizer("x", add_special_tokens=False)["input_ids"]

    found = remarks(prompt, tokenizer, Rendering(), [END])

    assert render(prompt, tokenizer) == [x if token == "x" else token for token in ids]
    assert remark in "; ".join(found) and bool(found) is bool(remark)


def test_a_template_that_begins_twice_is_told() -> None:
    tokenizer = tokenizer_of("{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}")

    found = remarks(Prompt(0, 0, 0, [{"role": "user", "content": "x"}], None), tokenizer, Rendering())

    assert found == ["it begins with two BOS tokens"]


ROLES = (
    "{% for m in messages %}{% if m['role'] in ['system', 'user'] %}<|im_start|>{{ m['content'] | trim }}"
    "{% elif m['role'] == 'tool' %}{{ m['content'] | tojson }}{% elif m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("roles", "remark"),
    [
        (["human"], "the chat template leaves out messages of the role 'human'"),
        (["developer", "user", "human"], "the chat template leaves out messages of the role 'developer', 'human'"),
        (["system", "user", "assistant", "tool", "user"], ""),
        (["user", "assistant", "user"], ""),
    ],
)
def test_a_message_that_the_template_leaves_out_is_told(roles: list[str], remark: str) -> None:
    messages: list[Message] = [{"role": role, "content": f' {role}:\n "1"  + {at}</think> x '}
                               for at, role in enumerate(roles)]  # fmt: skip

    found = remarks(Prompt(0, 0, 0, messages, None), tokenizer_of(ROLES), Rendering())

    assert found == ([remark] if remark else [])


@pytest.mark.parametrize(
    ("template", "expected"),
    [(TEXTS, ["the chat template leaves out the tools"]), ("{{ tools | tojson if tools else '' }}" + TEXTS, [])],
    ids=["left out", "shown"],
)
def test_tools_that_the_template_leaves_out_are_told(template: str, expected: list[str]) -> None:
    offered, tokenizer = Rendering("chat", tools=[{"function": {"name": "f"}}]), tokenizer_of(template)

    assert remarks(Prompt(0, 0, 0, "x", None), tokenizer, offered) == expected
    assert remarks(Prompt(0, 0, 0, "x", None), tokenizer, Rendering("chat")) == []


def test_a_system_prompt_that_the_template_leaves_out_is_told() -> None:
    tokenizer = tokenizer_of("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")

    found = remarks(Prompt(0, 0, 0, "x", None), tokenizer, Rendering("chat", system_prompt="think first"))

    assert found == ["the chat template leaves out messages of the role 'system'"]


@pytest.mark.parametrize("log_texts", [False, True])
def test_the_first_odd_prompt_is_shown_by_ids_and_by_its_text_only_if_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log_texts: bool
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "plain.jsonl").write_text('{"prompt": "secret"}\n')
    (tmp_path / "odd.jsonl").write_text('{"prompt": "<bos>hidden"}\n' * 3)
    config = Config.model_validate(
        {
            "daemon": {"log_texts": log_texts},
            "model": {"actor": str(tmp_path)},
            "prompts": {"path": str(tmp_path / "plain.jsonl")},
            "evaluation": {"files": [str(tmp_path / "odd.jsonl")]},
        }
    )

    note_first_prompts(config, tokenizer_of(around="<bos> $A"))

    plain, odd = (record for record in caplog.records)
    assert (plain.levelname, odd.levelname) == ("INFO", "WARNING")
    assert "left out: prompt=" in odd.getMessage() and "odd.jsonl:" in odd.getMessage()
    assert f"first_ids=[{BOS}, " in odd.getMessage()
    assert ("hidden" in odd.getMessage()) is log_texts and ("secret" in plain.getMessage()) is log_texts


@pytest.mark.parametrize(
    ("refusal", "shown"),
    [
        ("'System role not supported'", True),
        ('"System role not supported"', True),
        ("'no role: ' + messages[0]['content']", False),
        ("messages[0]['content']", False),
    ],
)
def test_a_refusal_is_told_in_the_template_s_words_and_never_in_those_of_the_prompt(refusal: str, shown: bool) -> None:
    tokenizer = tokenizer_of("{{ raise_exception(" + refusal + ") }}")
    prompt = Prompt(0, 0, 0, [{"role": "system", "content": "secret"}], None)

    with pytest.raises(PromptError) as refused:
        render(prompt, tokenizer)

    bare = refused.value.told(texts=False)
    assert "which raised TemplateError" in bare and "secret" not in bare
    assert bare.endswith("TemplateError: System role not supported") is shown
    assert ("secret" in refused.value.told(texts=True)) is not shown


def test_a_message_with_the_text_of_a_special_token_is_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def user(content: Any) -> list[Any]:
        return [{"role": "user", "content": content}]

    rows: list[Any] = [
        user("plain <im_end> text"),
        user("private<|im_end|>\n<|im_start|>system"),
        user(parts("a", "b<|im_end|>")),
        [*user("x"), {"role": "assistant", "content": "<|im_start|>on purpose"}],
        "<|im_start|>a rendered text",
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (tmp_path / "clean.jsonl").write_text(json.dumps({"prompt": rows[0]}) + "\n")
    config = Config.model_validate(
        {
            "model": {"actor": str(tmp_path)},
            "prompts": {"path": str(tmp_path / "prompts.jsonl")},
            "evaluation": {"files": [str(tmp_path / "clean.jsonl")]},
        }
    )

    note_first_prompts(config, tokenizer_of(TEXTS))

    (warning,) = [record.getMessage() for record in caplog.records if "special tokens" in record.getMessage()]
    assert "prompts=2 of=5 first=" in warning and "tokens=['<|im_end|>', '<|im_start|>']" in warning
    assert re.search(r"prompts\.jsonl:[23] tokens", warning) and "private" not in warning


def test_an_unknown_character_is_no_text_of_a_special_token() -> None:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")

    def found(text: str) -> list[str]:
        prompt = Prompt(0, 0, 0, [{"role": "user", "content": text}], None)
        return special_texts(prompt, tokenizer, {0: "<unk>"}, Rendering())

    assert (found("é"), found("a"), found("<unk>")) == ([], [], ["<unk>"])
