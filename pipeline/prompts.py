"""Prompts from a JSON lines file, as an endless sequence in which a position alone is the state.

Each line of the file is an object ``{"prompt": ..., "answer": ...}``: the prompt a string or a list of chat messages,
the answer any JSON value, or left out. ``"images": ["a.png", ...]`` are paths from the file's own folder: one for each
``{"type": "image"}`` in the messages, or all in front of the text. Further keys are ignored, blank lines are skipped.

Position p of the sequence lies in epoch p // n at slot p % n, and each epoch is a permutation of all n prompts that
follows from (seed, epoch) by integer arithmetic alone. So any process can look up any position, a restart needs the
position and no other state, and platform, Python and numpy versions do not change the order.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast

from pipeline.errors import ConfigError, PromptError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Message: TypeAlias = dict[str, JsonValue]
Template: TypeAlias = Literal["auto", "none", "chat"]

_ERRORS_SHOWN = 20
_FEISTEL_ROUNDS = 8
_PROBE_TOKENS = 64
_MASK_64 = (1 << 64) - 1
_FORMAT_BYTES = 4096
_FORMATS = {b"PAR1": "Parquet", b"\x1f\x8b": "compressed by gzip", b"ARROW1": "Arrow", b"PK\x03\x04": "a zip archive"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One element of the endless sequence.

    Attributes:
        position: Place in the sequence, from 0.
        epoch: Number of passes over all prompts before this one.
        index: Place of the prompt in the file, from 0, blank lines not counted.
        prompt: The text, or the chat messages.
        answer: Argument ``gt_answer`` of the reward functions; None if the file has none.
        images: Paths of the prompt's images, in the prompt's order.
        file: Path of the file; empty if the prompt is from no file.
        line: Number of its line, from 1.
    """

    position: int
    epoch: int
    index: int
    prompt: str | list[Message]
    answer: JsonValue
    images: tuple[str, ...] = ()
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """File and line, as ``prompts.jsonl:37``; empty if the prompt is from no file."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def named(self) -> str:
        """The prompt at the start of a message: its place, or its number."""
        return f"{self.place}: the prompt" if self.file else f"prompt {self.index}"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `render` uses."""

    def __call__(self, text: str) -> Mapping[str, Sequence[int]]:
        """Encode a text, with special tokens."""

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Mapping[str, Sequence[int]]:
        """Encode chat messages by the tokenizer's chat template."""


def check(path: str | os.PathLike[str]) -> int:
    """Read the whole file once, in bounded memory, and refuse it if any line is broken.

    Args:
        path: The JSON lines file.

    Returns:
        The number of prompts in the file, at least 1.

    Raises:
        ConfigError: If the file cannot be read or holds no prompt. If lines are broken, the message names the first 20
            of them, as ``prompts.jsonl:7:1: problem``.
    """
    if problem := _problem_of_format(Path(path)):
        raise ConfigError(f"{path}:1:1: {problem}")
    count = broken = 0
    shown: list[str] = []
    for line_number, _, line in prompt_lines(Path(path)):
        count += 1
        try:
            parse_line(line, f"{path}:{line_number}")
        except ConfigError as error:
            broken += 1
            if broken <= _ERRORS_SHOWN:
                shown.append(str(error))
    if broken > _ERRORS_SHOWN:
        shown.append(f"{path}: {broken - _ERRORS_SHOWN} more broken lines")
    if broken:
        raise ConfigError("\n".join(shown))
    if count == 0:
        raise ConfigError(f"{path}:1:1: no prompt in the file, at least one is needed")
    return count


def records(path: str | os.PathLike[str]) -> Iterator[tuple[str, str | list[Message], JsonValue]]:
    """Yield (place, prompt, answer) of each line in the file's order.

    Raises:
        ConfigError: If the file cannot be read, or at a broken line.
    """
    for line_number, _, line in prompt_lines(Path(path)):
        place = f"{path}:{line_number}:1"
        prompt, answer, _ = parse_line(line, f"{path}:{line_number}")
        yield place, prompt, answer


class PromptSource:
    """Random access to the endless sequence of prompts; keeps line offsets in memory (8 bytes a prompt), never texts.

    The file is held open, so that a file renamed into its place does not mix with it during a run.
    """

    def __init__(self, path: str | os.PathLike[str], seed: int) -> None:
        """Index the file's lines; `check` validates them.

        Args:
            path: The JSON lines file.
            seed: Seed of the order, any int; the same seed gives the same order everywhere.

        Raises:
            ConfigError: If the file cannot be read or holds no prompt.
        """
        self._path = Path(path)
        self._seed = seed
        self._offsets = array.array("q")
        # For each blank line, the index of the first prompt behind it: a few in most files.
        self._blanks = array.array("q")
        for line_number, offset, _ in prompt_lines(self._path):
            blanks = line_number - 1 - len(self._offsets) - len(self._blanks)
            self._blanks.extend([len(self._offsets)] * blanks)
            self._offsets.append(offset)
        if not self._offsets:
            raise ConfigError(f"{path}:1:1: no prompt in the file, at least one is needed")
        self._file = self._path.open("rb")

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self._offsets)

    def at(self, position: int) -> Prompt:
        """Return the prompt at a place of the endless sequence.

        Args:
            position: Place in the sequence, 0 or more.

        Returns:
            The prompt, read from the file at this call.

        Raises:
            ConfigError: If the line is broken, or missing because the file was changed in place.
            ValueError: If `position` is negative.
        """
        if position < 0:
            raise ValueError(f"position {position} is negative")
        epoch, slot = divmod(position, len(self._offsets))
        index = permuted(slot, len(self._offsets), seed=self._seed, epoch=epoch)
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        line_number = index + 1 + bisect.bisect_right(self._blanks, index)
        prompt, answer, images = parse_line(line, f"{self._path}:{line_number}")
        paths = tuple(str(self._path.parent / image) for image in images)
        return Prompt(position, epoch, index, prompt, answer, paths, str(self._path), line_number)

    def close(self) -> None:
        """Close the file; later calls of `at` fail."""
        self._file.close()


def permuted(slot: int, size: int, *, seed: int, epoch: int) -> int:
    """Return `slot` under a pseudo-random permutation of ``range(size)``, in constant memory and some 10 us.

    A Feistel network of 8 rounds over the next even power of two, walked until the value falls below `size` again
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002: cycle walking); rounds mix by splitmix64.

    Args:
        slot: From 0 up to, not including, `size`.
        size: Length of the permutation, at least 1.
        seed: Any int.
        epoch: Any int; another epoch is another permutation.

    Returns:
        The index, from 0 up to, not including, `size`.
    """
    # Halves of fewer than 3 bits leave the network too few different permutations.
    half_bits = max(3, (max(size - 1, 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    key = _splitmix64(_splitmix64(seed & _MASK_64) ^ (epoch & _MASK_64))
    value = slot
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_splitmix64(key ^ (round_number << 56) ^ right) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value


def render(prompt: Prompt, tokenizer: Tokenizer, template: Template = "auto") -> list[int]:
    """Return the token ids of a prompt, ready for generation.

    Args:
        prompt: The prompt.
        tokenizer: A Hugging Face tokenizer.
        template: "auto" encodes a text as it is, with the special tokens that the tokenizer adds by itself, and puts
            chat messages through the tokenizer's chat template; "chat" puts a text through it too, as one message of
            the user; "none" refuses chat messages.

    Returns:
        The token ids, at least one.

    Raises:
        ConfigError: If the prompt is chat messages and `template` is "none", or the tokenizer has no chat template.
        PromptError: If the chat template refuses this prompt, or the prompt has no tokens.
    """
    if isinstance(prompt.prompt, str) and template != "chat":
        token_ids = list(tokenizer(prompt.prompt)["input_ids"])
    elif template == "none":
        raise ConfigError(f'{prompt.named} is a list of chat messages, but prompts.template is "none"')
    else:
        token_ids = _render_chat(prompt, tokenizer)
    if not token_ids:
        raise PromptError(f"{prompt.named} has no tokens after tokenizing")
    return token_ids


def _render_chat(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{prompt.named} needs a chat template and the tokenizer has none: "
            'give texts and prompts.template = "none", or a tokenizer with a chat template'
        )
    text_or_messages = prompt.prompt
    messages: list[Message]
    if not isinstance(text_or_messages, str):
        messages = text_or_messages
    elif not prompt.images:
        messages = [{"role": "user", "content": text_or_messages}]
    else:
        images: list[JsonValue] = [{"type": "image"} for _ in prompt.images]
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": text_or_messages}]}]
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    # A template is foreign code, and its error may quote the prompt. Many refuse a role, or an order of roles, that one
    # line in a million has: that costs the line and not the run.
    except Exception as error:
        bare = f"{prompt.named} does not suit the tokenizer's chat template, which raised {type(error).__name__}"
        raise PromptError(f"{bare}: {error}", bare=bare) from error
    return list(encoded["input_ids"])


def prompt_lines(path: Path, *, field: str = "prompts.path") -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from 1, byte offset, line) of each line that is not blank.

    Args:
        path: A JSON lines file.
        field: The configuration field that names the file, for the error; empty if none does.

    Raises:
        ConfigError: If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            offset = 0
            for line_number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n" if line_number > 1 else b" \t\r\n" + _BYTE_ORDER_MARK):
                    yield line_number, offset, line
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{field + ': ' if field else ''}cannot read {path}: {error.strerror}") from error


def _problem_of_format(path: Path) -> str:
    """Return the problem of a file of another format as a whole, in place of one for each of its lines."""
    try:
        with path.open("rb") as file:
            begin = file.read(_FORMAT_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    except OSError:
        return ""
    for magic, name in _FORMATS.items():
        if begin.startswith(magic):
            return f'the file is {name}, not JSON lines: one object like {{"prompt": "..."}} a line'
    first = begin.partition(b"\n")[0].strip()
    if first.startswith(b"[") and (first == b"[" or first.startswith(b"[{")):
        return f"the file is one JSON array, not JSON lines: jq -c '.[]' {path.name} prints it as one object a line"
    if first == b"{":
        return f"an object over several lines, not JSON lines: jq -c . {path.name} prints it as one object a line"
    return ""


def parse_line(line: bytes, where: str) -> tuple[str | list[Message], JsonValue, list[str]]:
    """Return prompt, answer and images of one line; `where` is the file and line for errors.

    Raises:
        ConfigError: If the line holds no prompt.
    """
    try:
        record = json.loads(
            line.removeprefix(_BYTE_ORDER_MARK).rstrip().decode("utf-8"), parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.colno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}:{error.start + 1}: not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}:1: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f'{where}:1: {_kind(record)}, but a line is an object like {{"prompt": "..."}}')
    if "prompt" not in record:
        raise ConfigError(f'{where}:1: no key "prompt" among {", ".join(sorted(record)) or "no keys"}')
    problem = _problem_of_prompt(record["prompt"]) or _problem_of_images(record) or _problem_of_text(record)
    if problem:
        raise ConfigError(f"{where}:1: {problem}")
    prompt = cast("str | list[Message]", record["prompt"])
    return prompt, cast(JsonValue, record.get("answer")), cast("list[str]", record.get("images") or [])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _problem_of_prompt(prompt: object) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt is empty"
    if not isinstance(prompt, list):
        return f"prompt is {_kind(prompt)}, not a text or a list of chat messages"
    if not prompt:
        return "prompt is an empty list"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {_kind(message)}, not an object"
        if not isinstance(message.get("role"), str) or not message["role"]:
            return f'message {number} has no "role"'
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            return f'message {number} has no "content"'
    return None


def _problem_of_images(record: Mapping[str, object]) -> str | None:
    images, prompt = record.get("images") or [], record["prompt"]
    if record.get("videos"):
        return '"videos" are not read from a prompt file, only "images" are'
    if not isinstance(images, list):
        return f"images is {_kind(images)}, not a list of paths"
    for number, image in enumerate(images, start=1):
        if not isinstance(image, str) or not image or "\0" in image:
            return f"image {number} is {_kind(image) if image else 'empty'}, not a path"
    if isinstance(prompt, list):
        parts = sum(_image_parts(message) for message in prompt)
        if parts != len(images):
            return f'{len(images)} images for {parts} parts of "type": "image" in the messages'
    return None


def _image_parts(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _kind(value: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _problem_of_text(record: Mapping[str, object]) -> str | None:
    # A lone surrogate is valid in JSON, but no tokenizer takes it.
    try:
        texts = [record["prompt"], record.get("answer"), record.get("images")]
        json.dumps(texts, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"prompt, answer or image holds half of a surrogate pair: {error.object[error.start]!r}"
    return None


def _splitmix64(state: int) -> int:
    """Return one output of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from a state."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def first_tokens(path: str, seed: int, template: Template, tokenizer: Any) -> list[int]:
    """Return the tokens of the first prompt of a sequence, cut at 64; trainer and workers probe their models with them.

    Args:
        path: The prompts' file.
        seed: Seed of the sequence.
        template: As for `render`.
        tokenizer: As for `render`.

    Returns:
        At least two token ids; an empty list if the prompt has fewer or cannot be rendered, and then there is no probe.
    """
    with contextlib.closing(PromptSource(path, seed)) as source:
        prompt = source.at(0)
    try:
        tokens = render(prompt, tokenizer, template)[:_PROBE_TOKENS]
    except PromptError:
        return []
    return tokens if len(tokens) > 1 else []
