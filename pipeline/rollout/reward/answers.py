"""The part of a response that is its answer, and the fenced blocks of its Markdown.

The answer of a response with tags is the text of the last one of them; without it, the text
after the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from markdown_it import MarkdownIt

# A tag alone on its line would begin a block of HTML, which hides the fences in it; inline text has no fences.
_MARKDOWN: Final = MarkdownIt("commonmark").disable(["html_block", "inline"])
_NAMED_FENCE: Final = re.compile(r"^[ \t>]*(?:`{3,}[ \t]*[^`\s][^`\n]*|~{3,}[ \t]*\S.*)$", re.MULTILINE)
_LANGUAGE: Final = re.compile(r"[{.\s]*([\w+#.-]*)")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        start: Offset of its first line in the text.
        end: Offset of the line behind it.
        language: First word of its info string in lower case, without the braces and the dot of attributes.
        content: Text of the block.
    """

    start: int
    end: int
    language: str
    content: str


def answer_bounds(text: str, tags: Sequence[str]) -> tuple[int, int]:
    """Return where the answer of a response begins and ends.

    Args:
        text: The response.
        tags: Names of the tags of a response, that of the answer last.

    Returns:
        The bounds of the text in the last pair of the last tag, else those of the text after the other tags, if there
        is any, else those of the whole text. A last tag that is not closed goes on to the end, and one that is not
        opened begins behind the others.
    """
    opening, closing = f"<{tags[-1]}>", f"</{tags[-1]}>"
    others = _behind(text, tags[:-1])
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else text.rfind(opening)
    if start >= 0:
        start += len(opening)
        return start, text.find(closing, start) if end >= 0 else len(text)
    if end >= 0:
        return _behind(text[:end], tags[:-1]), end
    return (others, len(text)) if text[others:].strip() else (0, len(text))


def _behind(text: str, tags: Sequence[str]) -> int:
    """Return the place after the last end of one of the tags; 0 without one."""
    return max((text.rfind(mark) + len(mark) for tag in tags if (mark := f"</{tag}>") in text), default=0)


def opened_by(prompt_end: str, tags: Sequence[str]) -> tuple[str, list[str]]:
    """Return the tags that the end of a prompt has opened, as text, and the names of those that it has closed again.

    Chat templates end with ``<think>``, or with ``<think></think>`` for no thoughts.

    Args:
        prompt_end: The end of the prompt's text.
        tags: Names of the tags of a response.
    """
    names = "|".join(map(re.escape, tags))
    found = re.search(rf"(?:</?(?:{names})>\s*)+\Z", prompt_end)
    opened, closed = "", []
    for mark in re.finditer(r"<(/?)([^>]*)>", found[0] if found else ""):
        if not mark[1]:
            opened += mark[0]
        elif opened.endswith(f"<{mark[2]}>"):
            opened = opened.removesuffix(f"<{mark[2]}>")
            closed.append(mark[2])
        else:
            # The end of a tag that the prompt is not seen to open.
            opened, closed = "", []
    return opened, closed


def answer_of(text: str, tags: Sequence[str]) -> str:
    """Return the answer of a response; see `answer_bounds`."""
    start, end = answer_bounds(text, tags)
    return text[start:end]


def block_of(response: str, tags: Sequence[str], is_language: Callable[[str], bool]) -> str:
    """Return the text of a response's last fenced block in a language, or the answer itself if there is none.

    Blocks are those of CommonMark 0.31, in lists and quotations too, that begin in the answer. A block with the
    language goes before one without any, which goes before the text. One that is left open in the thoughts ends with
    them.

    Args:
        response: The response.
        tags: Names of the tags of a response, that of the answer last; a tag in a block is text.
        is_language: Whether a word, in lower case, names the language.
    """
    names = "|".join(map(re.escape, tags))
    # `<answer>```python` and "```</answer>" are lines of their own for those who write them.
    text = re.sub(rf"(</?(?:{names})>)[ \t]*(?=`{{3}}|~{{3}})", r"\1\n", response)
    text = re.sub(rf"(?m)^([ \t]*(?:`{{3,}}|~{{3,}}))[ \t]*(?=</?(?:{names})>)", r"\1\n", text)
    # As the parser counts lines.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    blocks = _blocks(text)
    if at := _end_of_thoughts(text, blocks, tags[:-1]):
        blocks = [*_blocks(text[:at]), *_blocks(text[at:], at)]
    outside, behind = [], 0
    for block in blocks:
        outside += [text[behind : block.start], " " * (block.end - block.start)]
        behind = block.end
    start, end = answer_bounds("".join([*outside, text[behind:]]), tags)
    if not text[start:end].strip():
        start, end = 0, len(text)
    blocks = [block for block in blocks if start <= block.start < end]
    for wanted in (is_language, lambda language: not language):
        found = [block.content for block in blocks if wanted(block.language)]
        if found:
            return found[-1]
    return text[start:end]


def _blocks(text: str, at: int = 0) -> list[Block]:
    """Return the blocks of a text that is at an offset of another one."""
    starts = [at]
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        starts.append(starts[-1] + len(line))
    blocks = []
    for token in _MARKDOWN.parse(text):
        if token.type == "fence" and token.map is not None:
            first, end = token.map[0], min(token.map[1], len(starts) - 1)
            language = _LANGUAGE.match(token.info)
            blocks.append(Block(starts[first], starts[end], language[1].lower() if language else "", token.content))
    return blocks


def _end_of_thoughts(text: str, blocks: Sequence[Block], tags: Sequence[str]) -> int:
    """Return where a tag ends the thoughts within a block that goes on to another one; 0 where none does."""
    mark = re.compile(f"</(?:{'|'.join(map(re.escape, tags))})>")
    for block in blocks if tags else ():
        content = text.find("\n", block.start) + 1 or block.end
        tag = mark.search(text, content, block.end)
        if tag and _NAMED_FENCE.search(text, tag.end(), block.end):
            return tag.start()
    return 0
