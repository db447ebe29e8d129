"""Token ids of a prompt, by the tokenizer and its chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from pipeline.config.prompts import PromptsConfig
from pipeline.errors import ConfigError, PromptError
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import JsonValue, Message, Prompt

Template: TypeAlias = Literal["auto", "none", "chat"]

_PROBE_TOKENS = 64


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `render` uses."""

    def __call__(self, text: str) -> Mapping[str, Sequence[int]]:
        """Encode a text, with special tokens."""

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Mapping[str, Sequence[int]]:
        """Encode chat messages by the tokenizer's chat template; further keywords are the template's."""


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


def rendering_of(prompts: PromptsConfig) -> Rendering:
    """Return the use of the chat template by a configuration.

    Raises:
        ConfigError: If the file of tools cannot be read, or is no list of objects.
    """
    template: Template = "chat" if prompts.needs_template else prompts.template
    tools: list[JsonValue] = []
    if prompts.tools_file is not None:
        try:
            tools = json.loads(prompts.tools_file.read_bytes())
        except OSError as error:
            raise ConfigError(f"prompts.tools_file: cannot read {prompts.tools_file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"prompts.tools_file: {prompts.tools_file} is not JSON: {error}") from error
        if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
            raise ConfigError(f"prompts.tools_file: {prompts.tools_file} is not a list of functions, each an object")
    return Rendering(template, prompts.system_prompt, dict(prompts.template_arguments), tuple(tools))


def render(prompt: Prompt, tokenizer: Tokenizer, template: Template | Rendering = "auto") -> list[int]:
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
        token_ids = list(tokenizer(prompt.prompt)["input_ids"])
    elif rendering.template == "none":
        raise ConfigError(f'{prompt.named} is a list of chat messages, but prompts.template is "none"')
    else:
        token_ids = _render_chat(prompt, tokenizer, rendering)
    if not token_ids:
        raise PromptError(f"{prompt.named} has no tokens after tokenizing")
    return token_ids


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
    keywords: dict[str, Any] = {**rendering.arguments}
    if tools := prompt.tools or list(rendering.tools):
        keywords["tools"] = tools
    try:
        encoded = tokenizer.apply_chat_template(
            _messages(prompt, rendering), add_generation_prompt=True, tokenize=True, return_dict=True, **keywords
        )
    # A template is foreign code, and its error may quote the prompt. Many refuse a role, or an order of roles, that one
    # line in a million has: that costs the line and not the run.
    except Exception as error:
        bare = f"{prompt.named} does not suit the tokenizer's chat template, which raised {type(error).__name__}"
        raise PromptError(f"{bare}: {error}", bare=bare) from error
    return list(encoded["input_ids"])


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
