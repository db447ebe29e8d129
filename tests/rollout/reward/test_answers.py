"""The answer of a response, and the fenced blocks of its Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pipeline.rollout.reward.answers import answer_of, block_of

TAGS = ["think", "answer"]


def python_of(response: str) -> str:
    return block_of(response, TAGS, lambda language: language in ("python", "python3"))


@pytest.mark.parametrize(("response", "answer"), [
    ("<think>a</think><answer>b</answer>", "b"),
    ("b", "b"),
    ("<think>a</think> b", " b"),
    ("<think>a</think> ", "<think>a</think> "),
    ("<answer>a</answer> no: <answer>b</answer>", "b"),
    ("<answer>b</answer> I have used the tag <answer>.", "b"),
    ("<think>a</think><answer>b", "b"),
    # The chat template, or nobody, has opened the tag.
    ("a</think><answer>b</answer>", "b"),
    ("b</answer>", "b"),
    ("a</think>b</answer> c", "b"),
    ("<think>a <answer>c</answer></think><answer>b</answer>", "b"),
    ("<answer></answer>", ""),
])  # fmt: skip
def test_the_answer_is_the_text_of_the_last_tag(response: str, answer: str) -> None:
    assert answer_of(response, TAGS) == answer


def test_one_tag_alone_is_that_of_the_answer() -> None:
    assert answer_of("<think>a</think><x>b</x>", ["x"]) == "b"


@pytest.mark.parametrize("response", [
    # An example of CommonMark 0.31, section 4.5, or a habit of models, with the code `x`.
    "```\nx\n```",
    "~~~\nx\n~~~",
    "````\nx\n````",
    "```python3\nx\n```",
    "``` python3 {.numberLines startFrom=1} title=\"a b\"\nx\n```",
    "```{.python .numberLines}\nx\n```",
    "``` {python}\nx\n```",
    "```PYTHON\nx\n```",
    "   ```python\n   x\n   ```",
    "1. Do this:\n\n   ```python\n   x\n   ```\n",
    "- ```python\n  x\n  ```\n",
    "> ```python\n> x\n> ```",
    "```python\nx",
    "```python\r\nx\r\n```\r\n",
    "~~~~    python startline=3 $%@#$\nx\n~~~~~~~",
    "```python\nx\n```   \nmore",
    "text\n```python\nx\n```",
    # Another block before, an output block after.
    "```\ny\n```\n```python\nx\n```",
    "```java\ny\n```\n```python\nx\n```\n",
    "```python\nx\n```\nOutput:\n```\ny\n```",
    "```python\nx\n```\n```text\ny\n```",
    "```\nx\n```\nOutput:\n```output\ny\n```",
    "```python\ny\n```\nBetter:\n```python\nx\n```",
    # Tags, alone on their lines or beside the fences.
    "<think>\n```python\ny\n```\n</think>\n<answer>\n```python\nx\n```\n</answer>",
    "<answer>```python\nx\n```</answer>",
    "</think>```python\nx\n``` </answer>",
    "<think>```python\ny\n```</think><answer>x</answer>",
    # A fence that is left open in the thoughts.
    "<think>\n```python\ny\nso.</think>\n<answer>\n```python\nx\n```\n</answer>",
    "- ```python\n  y\n  so.</think>```python\nx\n```",
    "~~~\ny\n</think>\n```python\nx\n```\nOutput:\n```text\ny\n```",
    "\u2028\f\n```python\nx\n```",
])  # fmt: skip
def test_the_code_is_the_block_that_a_reader_of_markdown_sees(response: str) -> None:
    assert python_of(response).strip() == "x"


@pytest.mark.parametrize(("response", "code"), [
    ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
    ("```python\n~~~\nx\n```", "~~~\nx\n"),
    ("```python\nx\n  ```", "x\n"),
    ("```python\nx\n    ```\n```", "x\n    ```\n"),
    ("  ```python\n  if x:\n      y\n  ```", "if x:\n    y\n"),
    ("```python\nfind('<answer>(.*)</answer>')\n```", "find('<answer>(.*)</answer>')\n"),
    ("```python\nend = '</think>'\nx\n```", "end = '</think>'\nx\n"),
    ("```python\nend = '</think>'\n```\n```python\nx\n```", "x\n"),
    ("<think>y</think>\n```python\nend = '</think>'\nx\n```\n```text\ny\n```", "end = '</think>'\nx\n"),
    # No fences: four spaces, backquotes in the info string, another character at the end.
    ("    ```\n    x\n    ```", "    ```\n    x\n    ```"),
    ("``` `a`\nx", "``` `a`\nx"),
    ("```python\nx\n~~~", "x\n~~~"),
    ("``x``", "``x``"),
])  # fmt: skip
def test_a_block_ends_as_commonmark_says(response: str, code: str) -> None:
    assert python_of(response) == code


LINES = st.sampled_from([
    "", "x", "  y", "    z", "\tw", "```", "```python", "``` python3 a=b", "~~~", "~~~~ text", "````", "   ```",
    "    ```", "- a", "  ```", "1. b", "   ~~~", "> q", "> ```", ">", "***", "# h", "`c`", "``` ``", "[a]: b", "===",
    "  - ```python", "```json", "+", "\u00a0```", "\f",
])  # fmt: skip


@given(st.lists(LINES, max_size=14), st.sampled_from(["\n", "\r\n", "\r"]))
def test_the_blocks_are_those_of_a_whole_parser_of_commonmark(lines: list[str], end: str) -> None:
    response = end.join(lines)
    fences = [token for token in MarkdownIt("commonmark").parse(response) if token.type == "fence"]
    words = [(token.info.split() or [""])[0] for token in fences]
    tagged = [token.content for token, word in zip(fences, words, strict=True) if word in ("python", "python3")]
    untagged = [token.content for token, word in zip(fences, words, strict=True) if not word]

    found = python_of(response)

    assert found == (tagged or untagged or [response.replace("\r\n", "\n").replace("\r", "\n")])[-1]


@given(st.text(alphabet="`~<>/\n answerthik{}.py", max_size=60))
def test_any_text_has_an_answer_and_a_block(text: str) -> None:
    assert answer_of(text, TAGS) in text
    assert isinstance(python_of(text), str)


def test_a_long_response_is_read_in_time() -> None:
    for text in (
        "```\n" * 20_000,
        "> " * 20_000,
        "- " * 20_000,
        "<answer>```" * 5_000,
        "</answer>" * 10_000,
        "```python\n</think>\n" * 5_000,
        "```python\n</think>\n```python\n```\n" * 5_000,
        "```\n" + "</think>" * 10_000,
    ):
        assert isinstance(python_of(text), str)
