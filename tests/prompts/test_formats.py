"""Prompt files of other formats, and model folders without their content: the cause and the remedy in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.model_files import problem_of_model
from pipeline.errors import ConfigError
from pipeline.prompts.check import check

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 7031645\n"
ROW = '{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER.encode(), "is a pointer of Git LFS without the content: run git lfs pull in its folder"),
        (ROW.encode("utf-16"), "the file is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 prompts.jsonl"),
        (ROW.encode("utf-16-le"), "the file is UTF-16LE, not UTF-8"),
        (ROW.encode("utf-16-be"), "the file is UTF-16BE, not UTF-8"),
        (ROW.encode("utf-32"), "the file is UTF-32, not UTF-8"),
        (b"prompt,answer\nwhat is 1,1\n", "the file is CSV, not JSON lines: pandas.read_csv(..., sep=',')"),
        (b'"prompt","answer"\n"what, is",1\n', "the file is CSV"),
        (b"prompt\tanswer\nwhat is 1\t1\n", "the file is TSV, not JSON lines: pandas.read_csv(..., sep='\\t')"),
        (b"prompt;answer\nwhat is 1;1\n", "the file is CSV with semicolons"),
    ],
)
def test_a_file_of_another_format_is_named_with_the_way_out(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as refused:
        check(path)

    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_name_of_the_hub_is_told_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"cannot read .*; for a data set of the hub .* write datasets:openai/gsm8k$"):
        check(Path("openai/gsm8k").absolute())
    with pytest.raises(ConfigError, match=r"cannot read .*No such file or directory$"):
        check(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt", "model-00001-of-00002.safetensors"])
def test_any_file_of_a_model_that_git_lfs_has_not_fetched_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text(POINTER)

    assert problem_of_model(tmp_path, is_actor=True, is_trained=True) == (
        f"{tmp_path / name} is a pointer of Git LFS without the content: run git lfs pull in its folder"
    )
