"""Prompts: the check of a file, the endless sequence, and rendering to token ids."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError, PromptError
from pipeline.prompts.check import check
from pipeline.prompts.files import open_rows
from pipeline.prompts.lines import LineRows
from pipeline.prompts.order import permuted
from pipeline.prompts.rendering import render
from pipeline.prompts.source import PromptSource
from pipeline.prompts.types import Message, Prompt


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def numbered(path: Path, count: int) -> Path:
    return write_lines(path, *(json.dumps({"prompt": f"prompt {i}", "answer": i}) for i in range(count)))


@pytest.fixture
def ten(tmp_path: Path) -> Iterator[PromptSource]:
    source = PromptSource(numbered(tmp_path / "prompts.jsonl", 10), seed=5)
    yield source
    source.close()


class CharacterTokenizer:
    """The two calls of a Hugging Face tokenizer; a text gets a beginning-of-sequence token 1."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str) -> Mapping[str, Sequence[int]]:
        return {"input_ids": [1, *map(ord, text)] if text != "lost" else []}

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Mapping[str, Sequence[int]]:
        assert add_generation_prompt and tokenize and return_dict
        text = "".join(f"<{message['role']}>{message['content']}" for message in conversation) + "<assistant>"
        return {"input_ids": [ord(character) for character in text]}


def prompt_of(text_or_messages: str | list[Message]) -> Prompt:
    return Prompt(position=12, epoch=1, index=2, prompt=text_or_messages, answer=None)


def test_check_counts_texts_and_chat_messages(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl",
        '{"prompt": "7302>", "answer": "0237"}',
        '{"prompt": [{"role": "user", "content": "Sort 7302."}], "answer": ["0237"], "source": "ignored"}',
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "Sort."}]}]}',
    )

    assert check(path) == 3


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_line_numbers_stay(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", b'\xef\xbb\xbf{"prompt": "a"}', "", '{"prompt": "b"}\r', "  ", "")
    bad = write_lines(tmp_path / "bad.jsonl", "", '{"prompt": "a"}', "", "{")

    assert check(good) == 2
    with closing(PromptSource(good, seed=0)) as source:
        assert len(source) == 2
    with pytest.raises(ConfigError, match=r"bad\.jsonl:4:2: not JSON"):
        check(bad)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r":7:15: not JSON: Expecting ',' delimiter"),
        ("prompt", r":7:1: not JSON"),
        ('{"prompt": "a", "answer": NaN}', r":7:1: not JSON: NaN is no JSON number"),
        (b'{"prompt": "\xff"}', r":7:13: not UTF-8"),
        ("[" * 100_000, r":7:1: not JSON"),
        ('["a"]', r":7:1: a list, but a line is an object"),
        ('"a"', r":7:1: a text, but a line is an object"),
        ('{"text": "a", "answer": "b"}', r':7:1: no key "prompt" among answer, text'),
        ("{}", r':7:1: no key "prompt" among no keys'),
        ('{"prompt": 5}', r":7:1: prompt is a number, not a text or a list"),
        ('{"prompt": null}', r":7:1: prompt is null"),
        ('{"prompt": ""}', r":7:1: prompt is empty"),
        ('{"prompt": " "}', r":7:1: prompt is empty"),
        ('{"prompt": []}', r":7:1: prompt is an empty list"),
        ('{"prompt": ["a"]}', r":7:1: message 1 is a text, not an object"),
        ('{"prompt": [{"content": "a"}]}', r':7:1: message 1 has no "role"'),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]}',
            r':7:1: message 2 has no "content"',
        ),
        ('{"prompt": "\\ud800"}', r":7:1: prompt, answer or image holds half of a surrogate pair"),
    ],
)
def test_a_broken_line_is_named_by_file_line_and_column(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", *['{"prompt": "a"}'] * 6, line)

    with pytest.raises(ConfigError, match=r"prompts\.jsonl" + message):
        check(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "images": "a.png"}, "images is a text, not a list of paths"),
        ({"prompt": "a", "images": ["a.png", 7]}, "image 2 is a number, not a path"),
        ({"prompt": "a", "images": ["a.png", ""]}, "image 2 is empty, not a path"),
        ({"prompt": "a", "images": ["\ud800"]}, "prompt, answer or image holds half of a surrogate pair"),
        ({"prompt": "a", "videos": ["a.mp4"]}, '"videos" are not read from a prompt file, only "images" are'),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]},
            '0 images for 1 part of "type": "image" in the messages',
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "images": ["a.png"]},
            '1 image for 0 parts of "type": "image" in the messages',
        ),
    ],
)
def test_images_that_do_not_fit_their_line_are_refused(tmp_path: Path, line: dict[str, object], message: str) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", json.dumps({"prompt": "a", "images": []}), json.dumps(line))

    with pytest.raises(ConfigError) as error:
        check(path)

    assert str(error.value).startswith(f"{path}:2:1: {message}")


def test_images_are_paths_from_the_files_own_folder(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "images": ["below/a.png", "/above/b.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], "images": ["1", "2"]},
    ]
    path = write_lines(tmp_path / "prompts.jsonl", *map(json.dumps, lines))

    assert check(path) == 2
    with closing(PromptSource(path, seed=0)) as source:
        images = {source.at(position).index: source.at(position).images for position in range(2)}
    assert images[0] == (str(tmp_path / "below/a.png"), "/above/b.png")
    assert images[1] == (str(tmp_path / "1"), str(tmp_path / "2"))


def test_check_names_each_of_the_first_twenty_broken_lines_and_counts_the_rest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", *["5"] * 25)

    with pytest.raises(ConfigError) as raised:
        check(path)

    lines = str(raised.value).splitlines()
    assert len(lines) == 21
    assert lines[19].startswith(f"{path}:20:1: ")
    assert lines[20] == f"{path}: 5 more broken lines"


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="no prompt in the file"):
        check(path)
    with pytest.raises(ConfigError, match="no prompt in the file"):
        PromptSource(path, seed=0)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.path: cannot read .*gone\.jsonl: No such file"):
        check(tmp_path / "gone.jsonl")


@given(size=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 2**40))
def test_each_epoch_covers_each_index_once(size: int, seed: int, epoch: int) -> None:
    indices = [permuted(slot, size, seed=seed, epoch=epoch) for slot in range(size)]

    assert sorted(indices) == list(range(size))


def test_the_order_is_fixed_for_ever() -> None:
    order = [permuted(slot, 10, seed=0, epoch=0) for slot in range(10)]
    later = [permuted(slot, 1_000_003, seed=-7, epoch=123) for slot in range(4)]

    assert order == [9, 7, 0, 1, 5, 6, 2, 3, 8, 4]
    assert later == [935142, 298916, 826018, 125767]


@pytest.mark.parametrize("size", [2, 5, 17])
def test_over_many_epochs_each_index_stands_equally_often_at_each_slot(size: int) -> None:
    epochs = 2000

    counts = Counter((slot, permuted(slot, size, seed=1, epoch=epoch)) for epoch in range(epochs) for slot in (0, 1))

    expected = epochs / size
    chi_square = sum((counts[slot, index] - expected) ** 2 / expected for slot in (0, 1) for index in range(size))
    degrees = 2 * (size - 1)
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_position_gives_its_epoch_index_prompt_and_answer(ten: PromptSource) -> None:
    prompts = [ten.at(position) for position in range(20)]

    assert [prompt.position for prompt in prompts] == list(range(20))
    assert [prompt.epoch for prompt in prompts] == [0] * 10 + [1] * 10
    assert all(prompt.prompt == f"prompt {prompt.index}" and prompt.answer == prompt.index for prompt in prompts)
    assert sorted(prompt.index for prompt in prompts[:10]) == list(range(10))
    assert sorted(prompt.index for prompt in prompts[10:]) == list(range(10))
    assert [prompt.index for prompt in prompts[:10]] != [prompt.index for prompt in prompts[10:]]


def test_a_restart_goes_on_at_any_position_and_seed_alone_decides_the_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "prompts.jsonl", 50)
    with closing(PromptSource(path, seed=5)) as first:
        before = [first.at(position) for position in range(120)]

    with closing(PromptSource(path, seed=5)) as again, closing(PromptSource(path, seed=6)) as other:
        after = [again.at(position) for position in reversed(range(77, 120))]
        of_other_seed = [other.at(position) for position in range(120)]

    assert after == before[:76:-1]
    assert [prompt.index for prompt in of_other_seed] != [prompt.index for prompt in before]


def test_a_negative_position_is_refused(ten: PromptSource) -> None:
    with pytest.raises(ValueError, match="position -1 is negative"):
        ten.at(-1)


def test_a_line_that_turns_out_broken_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", "", "", '{"prompt": ""}')

    with (
        closing(PromptSource(path, seed=0)) as source,
        pytest.raises(ConfigError, match=r"prompts\.jsonl:3:1: prompt is empty"),
    ):
        source.at(0)


def test_a_file_put_in_place_by_rename_does_not_mix_with_the_one_in_use(tmp_path: Path) -> None:
    write_lines(tmp_path / "new.jsonl", '{"prompt": "other"}')
    with closing(PromptSource(numbered(tmp_path / "prompts.jsonl", 10), seed=5)) as source:
        os.replace(tmp_path / "new.jsonl", tmp_path / "prompts.jsonl")

        answers = {source.at(position).answer for position in range(10)}

    assert answers == set(range(10))


def test_a_file_put_in_place_while_the_former_one_is_indexed_does_not_mix_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = numbered(tmp_path / "prompts.jsonl", 10), write_lines(tmp_path / "new.jsonl", '{"prompt": "other"}')
    opened = Path.open

    def opened_and_replaced(self: Path, mode: str) -> Any:
        file = opened(self, mode)
        if other.exists():
            os.replace(other, path)
        return file

    monkeypatch.setattr(Path, "open", opened_and_replaced)

    with closing(LineRows(path)) as rows:
        assert [rows.record(index)["answer"] for index in range(len(rows))] == list(range(10))


def test_texts_are_encoded_as_the_tokenizer_does_by_itself() -> None:
    tokenizer = CharacterTokenizer(chat_template="{{ messages }}")

    assert render(prompt_of("ab"), tokenizer) == [1, 97, 98]
    assert render(prompt_of("ab"), tokenizer, "none") == [1, 97, 98]


def test_chat_messages_and_with_template_chat_texts_go_through_the_chat_template() -> None:
    tokenizer = CharacterTokenizer(chat_template="{{ messages }}")
    expected = [ord(character) for character in "<user>ab<assistant>"]

    assert render(prompt_of([{"role": "user", "content": "ab"}]), tokenizer) == expected
    assert render(prompt_of([{"role": "user", "content": "ab"}]), tokenizer, "chat") == expected
    assert render(prompt_of("ab"), tokenizer, "chat") == expected


def test_a_template_that_does_not_serve_the_prompt_is_refused() -> None:
    messages: list[Message] = [{"role": "user", "content": "ab"}]

    with pytest.raises(ConfigError, match=r'prompt 2 is a list of chat messages, but prompts\.template is "none"'):
        render(prompt_of(messages), CharacterTokenizer(chat_template="{{ messages }}"), "none")
    with pytest.raises(ConfigError, match="prompt 2 needs a chat template and the tokenizer has none"):
        render(prompt_of(messages), CharacterTokenizer())
    with pytest.raises(ConfigError, match="prompt 2 needs a chat template"):
        render(prompt_of("ab"), CharacterTokenizer(), "chat")


def test_a_refused_prompt_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n\n{"prompt": "b"}\n\n{"prompt": [{"role": "user", "content": "c"}]}\n')
    with closing(PromptSource(path, 0)) as source:
        prompts = sorted((source.at(position) for position in range(3)), key=lambda prompt: prompt.index)

    assert [prompt.location for prompt in prompts] == [f"{path}:1", f"{path}:4", f"{path}:6"]
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:6: the prompt needs a chat template and "):
        render(prompts[2], CharacterTokenizer())


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(PromptError, match=r"^prompt 2 has no tokens after tokenizing$"):
        render(prompt_of("lost"), CharacterTokenizer())


def test_prompts_are_imported_without_torch() -> None:
    modules = "pipeline.prompts.check, pipeline.prompts.rendering"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_file_that_was_written_in_place_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "number {number}"}}\n' for number in range(9)))
    with closing(LineRows(path)) as rows:
        path.write_text('{"prompt": "a"}\n\n{"prompt": "another one that is longer"}\n')

        with pytest.raises(ConfigError) as refused:
            rows.record(4)

    assert str(refused.value) == (
        f"{path} was written in place while it is in use, line 5 is not where it was: put the former file back, or "
        "start again; mv puts another file into its place without harm"
    )


def test_a_file_to_which_lines_were_added_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with closing(LineRows(path)) as rows:
        with path.open("a") as file:
            file.write('{"prompt": "c"}\n')

        assert [rows.record(index)["prompt"] for index in range(len(rows))] == ["a", "b"]


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")

    with pytest.raises(ConfigError) as refused:
        open_rows(tmp_path / "prompts.jsonl")

    assert str(refused.value) == (
        f"{tmp_path / 'prompts.jsonl'}:1:1: a pipe or a device, which can be read once: write its lines into a file"
    )
