"""Token ids of a prompt, by the tokenizer and its chat template."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pipeline.config.prompts import PromptsConfig
from pipeline.errors import ConfigError, PromptError
from pipeline.prompts.chat import ChatForms, text_of
from pipeline.prompts.lines import json_of_file
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import JsonValue, Message, Prompt

Template: TypeAlias = Literal["auto", "none", "chat"]

_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Rendering:
    """The chat template's use.

    Attributes:
        template: "auto" encodes a text as it is, with the special tokens that the tokenizer adds by itself, and puts
            chat messages through the tokenizer's chat template; "chat" puts a text through it too, as one message of
            the user; "none" refuses chat messages.
        system_prompt: First message of a chat without a system message.
        arguments: Further keywords of the template.
        tools: Functions that the template offers, for prompts without tools of their own.
    """

    template: Template = "auto"
    system_prompt: str | None = None
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    tools: Sequence[JsonValue] = ()
    _forms: dict[int, ChatForms] = field(default_factory=dict, init=False, repr=False, compare=False)

    def forms_of(self, tokenizer: Any) -> ChatForms:
        """Return the forms of messages that a tokenizer's template takes; it is asked once."""
        if id(tokenizer) not in self._forms:
            apply = functools.partial(
                tokenizer.apply_chat_template, add_generation_prompt=False, tokenize=False, **self.arguments
            )
            self._forms[id(tokenizer)] = ChatForms(apply)
        return self._forms[id(tokenizer)]


def rendering_of(prompts: PromptsConfig) -> Rendering:
    """Return the use of the chat template by a configuration.

    Raises:
        ConfigError: If the file of tools cannot be read, or is no list of objects.
    """
    template: Template = "chat" if prompts.needs_template else prompts.template
    tools: list[JsonValue] = []
    if prompts.tools_file is not None:
        tools = json_of_file(prompts.tools_file, "prompts.tools_file")
        if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
            raise ConfigError(f"prompts.tools_file: {prompts.tools_file} is not a list of functions, each an object")
    return Rendering(template, prompts.system_prompt, dict(prompts.template_arguments), tuple(tools))


def render(prompt: Prompt, tokenizer: Any, template: Template | Rendering = "auto") -> list[int]:
    """Return the token ids of a prompt, ready for generation.

    Args:
        prompt: The prompt.
        tokenizer: A Hugging Face tokenizer.
        template: The use of the chat template.

    Returns:
        The token ids, at least one.

    Raises:
        ConfigError: If the prompt is chat messages and the template is "none", or the tokenizer has no chat template.
        PromptError: If the chat template refuses this prompt, or the prompt has no tokens.
    """
    rendering = template if isinstance(template, Rendering) else Rendering(template)
    if isinstance(prompt.prompt, str) and rendering.template != "chat":
        token_ids, _ = _encoded(prompt.prompt, tokenizer)
    elif rendering.template == "none":
        raise ConfigError(f'{prompt.named} is a list of chat messages, but prompts.template is "none"')
    else:
        token_ids = _render_chat(prompt, tokenizer, rendering)
    if not token_ids:
        raise PromptError(f"{prompt.named} has no tokens after tokenizing")
    return token_ids


def conversation(prompt: Prompt, response: str, tokenizer: Any, rendering: Rendering) -> list[int] | None:
    """Return the token ids of a chat with its response as the last message; None for a text, or without a template.

    Args:
        prompt: The prompt.
        response: The text of the response.
        tokenizer: Tokenizer of the reader, such as a reward model.
        rendering: The use of the chat template.

    Raises:
        PromptError: If the chat template refuses this chat.
    """
    is_text = isinstance(prompt.prompt, str) and rendering.template != "chat"
    if is_text or getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = _messages(prompt, rendering)
    if _begins_an_answer(messages[-1]):
        response = (text_of(messages[-1].get("content")) or "") + response
        messages = messages[:-1]
    elif _is_empty_answer(messages[-1]):
        messages = messages[:-1]
    messages = rendering.forms_of(tokenizer).adapted([*messages, {"role": "assistant", "content": response}])
    tools = prompt.tools or list(rendering.tools)
    return _templated(prompt, messages, tokenizer, {"tools": tools} if tools else {})


def remarks(prompt: Prompt, tokenizer: Any, rendering: Rendering, ends: Collection[int] = ()) -> list[str]:
    """Return the oddities of a rendered prompt, of its ends or of its messages, a phrase each; errors as for `render`.

    Args:
        prompt: The prompt.
        tokenizer: As for `render`.
        rendering: The use of the chat template.
        ends: Tokens that end a response, beside the tokenizer's EOS.
    """
    ids, found = render(prompt, tokenizer, rendering), []
    is_text = isinstance(prompt.prompt, str) and rendering.template != "chat"
    if is_text:
        found += _encoded(str(prompt.prompt), tokenizer)[1]
    elif roles := _roles_left_out(prompt, tokenizer, rendering):
        found.append(f"the chat template leaves out messages of the role {', '.join(map(repr, roles))}")
    if not is_text and _leaves_out_tools(prompt, tokenizer, rendering):
        found.append("the chat template leaves out the tools")
    bos, eos = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        found.append("it begins with two BOS tokens")
    if ids[-1] in {eos, *ends} and len(ids) > 1:
        found.append("it ends with a token that ends responses, and each response begins behind it")
    return found


def special_texts(prompt: Prompt, tokenizer: Any, special: Mapping[int, str], rendering: Rendering) -> list[str]:
    """Return the special tokens of which a chat message holds the text; the tokenizer takes it as the token.

    A message of the assistant is left out, and a prompt that is a text without the chat template: their authors write
    such tokens on purpose.

    Args:
        prompt: The prompt.
        tokenizer: As for `render`.
        special: The texts of the tokenizer's special tokens by id.
        rendering: The use of the chat template.

    Returns:
        The tokens' texts, sorted.
    """
    if not special or (isinstance(prompt.prompt, str) and rendering.template != "chat"):
        return []
    given = [message for message in _messages(prompt, Rendering()) if message["role"] != "assistant"]
    texts = [text for message in given for text in _texts_of(message.get("content"))]
    found = set()
    for text in texts:
        taken = {special[token] for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token in special}
        # An unknown character is a special token too.
        found |= {token for token in taken if token in text}
    return sorted(found)


def _texts_of(content: JsonValue) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    return [text for part in parts if (text := text_of([part])) is not None]


def _encoded(text: str, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Return the token ids of a text, and phrases about those that the tokenizer adds and that are left out."""
    ids, found = list(tokenizer(text)["input_ids"]), []
    bos, eos = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos] and text.startswith(tokenizer.bos_token):
        # A text that a chat template has rendered before.
        del ids[0]
        found.append("the text begins with the BOS token, and a second one that the tokenizer adds is left out")
    if eos is not None and len(ids) > 1 and ids[-1] == eos:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if list(own[-1:]) != [eos]:
            del ids[-1]
            found.append("an EOS token that the tokenizer adds at the end is left out")
    return ids, found


def _begins_an_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and not _is_empty_answer(message)


def _is_empty_answer(message: Message) -> bool:
    if message["role"] != "assistant" or message.get("tool_calls"):
        return False
    content = message.get("content")
    text = text_of(content)
    return not content or (text is not None and not text.strip())


def first_tokens(prompts: PromptsConfig, seed: int, tokenizer: Any) -> list[int]:
    """Return the tokens of the first prompt of a sequence, cut at 64; trainer and workers probe their models with them.

    Args:
        prompts: The prompts.
        seed: Seed of the sequence.
        tokenizer: As for `render`.

    Returns:
        At least two token ids; an empty list if the prompt has fewer or cannot be rendered, and then there is no probe.
    """
    with contextlib.closing(PromptSource(prompts, seed)) as source:
        prompt = source.at(0)
    try:
        tokens = render(prompt, tokenizer, rendering_of(prompts))[:_PROBE_TOKENS]
    except PromptError:
        return []
    return tokens if len(tokens) > 1 else []


def _render_chat(prompt: Prompt, tokenizer: Any, rendering: Rendering) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{prompt.named} needs a chat template and the tokenizer has none: "
            'give texts and prompts.template = "none", or a tokenizer with a chat template'
        )
    messages, keywords = _chat(prompt, tokenizer, rendering)
    return _templated(prompt, messages, tokenizer, keywords)


def _chat(prompt: Prompt, tokenizer: Any, rendering: Rendering) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages of a prompt in the form that the template takes, and the template's keywords."""
    keywords: dict[str, Any] = {**rendering.arguments}
    if tools := prompt.tools or list(rendering.tools):
        keywords["tools"] = tools
    messages = rendering.forms_of(tokenizer).adapted(_messages(prompt, rendering))
    keywords["add_generation_prompt"] = True
    if _begins_an_answer(messages[-1]):
        # The model goes on where the message ends.
        keywords |= {"add_generation_prompt": False, "continue_final_message": True}
    elif _is_empty_answer(messages[-1]) and len(messages) > 1:
        messages = messages[:-1]
    return messages, keywords


def _roles_left_out(prompt: Prompt, tokenizer: Any, rendering: Rendering) -> list[str]:
    """Return the roles of messages whose text the template shows nowhere; of the assistant it may hide thoughts."""
    messages, keywords = _chat(prompt, tokenizer, rendering)
    shown = _without_spaces(tokenizer.apply_chat_template(messages, tokenize=False, **keywords))

    def is_shown(text: str) -> bool:
        # As it is, or within JSON.
        return any(_without_spaces(form) in shown for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))

    given = [message for message in messages if message["role"] != "assistant"]
    left_out = [message for message in given if not all(map(is_shown, _texts_of(message.get("content"))))]
    return list(dict.fromkeys(str(message["role"]) for message in left_out))


def _leaves_out_tools(prompt: Prompt, tokenizer: Any, rendering: Rendering) -> bool:
    """Return whether a prompt has tools, and the template renders the same without them."""
    messages, keywords = _chat(prompt, tokenizer, rendering)
    tools = keywords.pop("tools", None)
    if not tools:
        return False
    given = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **keywords)
    try:
        return bool(given == tokenizer.apply_chat_template(messages, tokenize=False, **keywords))
    # A template is foreign code: one that fails without tools shows them.
    except Exception:  # noqa: BLE001
        return False


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _templated(prompt: Prompt, messages: list[Message], tokenizer: Any, keywords: dict[str, Any]) -> list[int]:
    from jinja2 import TemplateSyntaxError

    try:
        encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **keywords)
    except TemplateSyntaxError as error:
        # Of the template alone, before any prompt.
        raise ConfigError(
            f"{prompt.named} needs a chat template, and the tokenizer's does not compile: {error.message} in its line "
            f"{error.lineno}"
        ) from error
    # A template is foreign code, and its error may quote the prompt. Many refuse a role, or an order of roles, that one
    # line in a million has: that costs the line and not the run.
    except Exception as error:
        bare = f"{prompt.named} does not suit the tokenizer's chat template, which raised {type(error).__name__}"
        whole = f"{bare}: {error}"
        raise PromptError(whole, bare=whole if _is_literal(str(error), tokenizer.chat_template) else bare) from error
    return list(encoded["input_ids"])


def _is_literal(text: str, template: object) -> bool:
    """Return whether a text is a whole literal of a chat template, as of ``raise_exception('System role ...')``."""
    sources = template.values() if isinstance(template, Mapping) else [template]
    return bool(text) and any(f"{quote}{text}{quote}" in str(source) for source in sources for quote in "'\"")


def _messages(prompt: Prompt, rendering: Rendering) -> list[Message]:
    text_or_messages = prompt.prompt
    messages: list[Message]
    if not isinstance(text_or_messages, str):
        messages = text_or_messages
    elif not prompt.images:
        messages = [{"role": "user", "content": text_or_messages}]
    else:
        images: list[JsonValue] = [{"type": "image"} for _ in prompt.images]
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": text_or_messages}]}]
    if rendering.system_prompt and messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": rendering.system_prompt}, *messages]
    return messages
