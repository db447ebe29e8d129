"""Parquet, Arrow, folders, the cache of `datasets`: the prompts and the order of JSON lines of the same rows."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipeline.config.prompts import PromptsConfig
from pipeline.errors import ConfigError
from pipeline.prompts.check import check, left_out
from pipeline.prompts.files import folder_of
from pipeline.prompts.pass_rates import write_pass_rates
from pipeline.prompts.source import PromptSource, prompts_at_most
from pipeline.prompts.tables import ParquetRows
from pipeline.prompts.types import Prompt

ROWS = [{"prompt": f"prompt {n}", "answer": str(n), "level": n % 3, "tags": ["a", f"t{n}"]} for n in range(50)]


def write_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), str(path), row_group_size=7)
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sequence(prompts: PromptsConfig, positions: int = 120) -> list[tuple[object, ...]]:
    with closing(PromptSource(prompts, 3)) as source:
        found = [source.at(position) for position in range(positions)]
    return [(one.position, one.epoch, one.index, one.prompt, one.answer, dict(one.columns)) for one in found]


def expected(folder: Path, rows: list[dict[str, Any]] = ROWS) -> list[tuple[object, ...]]:
    return sequence(PromptsConfig(path=str(write_lines(folder / "expected" / "rows.jsonl", rows))))


def one(path: Path, **keys: Any) -> Prompt:
    with closing(PromptSource(PromptsConfig(path=str(path), **keys), 0)) as source:
        return source.at(0)


@pytest.mark.parametrize("write", [write_parquet, write_file, write_stream])
def test_a_table_gives_the_prompts_and_the_order_of_json_lines(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "rows.table", ROWS)
    prompts = PromptsConfig(path=str(path))

    assert sequence(prompts) == expected(tmp_path)
    assert check(prompts) == prompts_at_most(prompts) == 50


def test_few_row_groups_are_kept_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "p.parquet", ROWS)
    monkeypatch.setattr("pipeline.prompts.tables._KEPT_BYTES", 1)

    with closing(PromptSource(path, 3)) as source:
        assert [source.at(position).prompt for position in range(50)] == [row[3] for row in expected(tmp_path)[:50]]
        (rows,) = source._parts[0].files
        assert len(rows._kept) == 1  # type: ignore[union-attr]


def test_the_size_of_a_row_group_is_asked_for_when_it_is_read_not_at_each_row(tmp_path: Path) -> None:
    """It costs more than a row: a file of 400 groups took 13 ms a row."""
    asked = 0

    class Counted:
        def __init__(self, table: Any) -> None:
            self.slice = table.slice
            self._nbytes = table.nbytes

        @property
        def nbytes(self) -> int:
            nonlocal asked
            asked += 1
            return int(self._nbytes)

    with closing(ParquetRows(write_parquet(tmp_path / "p.parquet", ROWS))) as rows:
        read = rows._file.read_row_group
        groups = rows._file.metadata.num_row_groups
        rows._file = SimpleNamespace(
            read_row_group=lambda group, columns: Counted(read(group, columns=columns)), close=rows._file.close
        )
        for _ in range(2):
            assert [rows.record(index)["prompt"] for index in range(50)] == [row["prompt"] for row in ROWS]

    assert groups > 1 and asked == groups


def test_values_become_those_of_json(tmp_path: Path) -> None:
    row = {
        "prompt": "p", "answer": math.nan, "when": datetime.datetime(2026, 1, 2, 3, 4),
        "price": decimal.Decimal("1.50"),
        "nested": {"a": [math.inf, 1.0]}, "image": b"\x89PNG",
    }  # fmt: skip
    path = write_parquet(tmp_path / "p.parquet", [row])

    prompt = one(path)

    assert prompt.answer is None
    assert prompt.columns == {"when": "2026-01-02T03:04:00", "price": "1.50", "nested": {"a": [None, 1.0]}}
    assert left_out(path) == [f"image of {path}"]


@pytest.mark.parametrize("name", ["images", "videos"])
def test_a_column_of_images_as_bytes_is_refused_as_in_a_line_of_json(tmp_path: Path, name: str) -> None:
    """It was left out with a note, and a vision-language model trained on the texts alone."""
    path = write_parquet(tmp_path / "p.parquet", [{"prompt": "a", name: [{"bytes": b"x", "path": "a.png"}]}])

    with pytest.raises(ConfigError, match=rf"p\.parquet:1:1: the column {name} holds bytes, and would be left out"):
        check(path)


@pytest.mark.parametrize("column", ["prompt", "task.chat"])
def test_prompts_of_a_table_are_the_same_ones_with_their_pass_rates(tmp_path: Path, column: str) -> None:
    plain: dict[str, Any] = {"role": "user", "content": "1+1="}
    rows = [[plain], [{**plain, "name": "me"}]]
    columns = {"prompt": rows} if column == "prompt" else {"task": [{"chat": row, "level": None} for row in rows]}
    parquet.write_table(pa.table({**columns, "note": [None, "n"]}), str(tmp_path / "p.parquet"))
    prompts = PromptsConfig(path=str(tmp_path / "p.parquet"), prompt_column=column, shuffle=False)

    write_pass_rates(prompts, {0: 0.5, 1: 0.25}, tmp_path / "rated.jsonl", column="rate")

    rated = prompts.model_copy(update={"path": str(tmp_path / "rated.jsonl")})
    with closing(PromptSource(prompts, 0)) as table, closing(PromptSource(rated, 0)) as lines:
        for position, rate in enumerate((0.5, 0.25)):
            assert lines.at(position).prompt == table.at(position).prompt
            assert lines.at(position).columns["note"] == table.at(position).columns["note"]
            assert lines.at(position).columns["rate"] == rate
    assert '"note": null' in (tmp_path / "rated.jsonl").read_text()


@pytest.mark.parametrize("object_", ["", "data."], ids=["columns", "inside an object"])
def test_messages_lack_the_keys_that_are_null_because_other_rows_have_them(tmp_path: Path, object_: str) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": content, "name": name}],
         "tools": [{"function": {"name": "f", "x": x}, "strict": strict}]}
        for content, name, x, strict in (("a", None, None, None), ("b", "n", 1, True))
    ]  # fmt: skip
    written = [{"data": row} for row in rows] if object_ else rows
    names = {"prompt_column": f"{object_}messages", "tools_column": f"{object_}tools"}

    def found(path: Path) -> list[Prompt]:
        with closing(PromptSource(PromptsConfig(path=str(path), **names), 0)) as source:
            return sorted((source.at(position) for position in range(2)), key=lambda prompt: prompt.index)

    first, second = found(write_parquet(tmp_path / "p.parquet", written))

    assert first.prompt == [{"role": "user", "content": "a"}] and first.tools == [{"function": {"name": "f"}}]
    assert second.prompt == rows[1]["messages"] and second.tools == rows[1]["tools"]
    # A line says what it has.
    assert found(write_lines(tmp_path / "p.jsonl", written))[0].prompt == rows[0]["messages"]


def broken_table(column: str) -> Any:
    """Return a table whose row 3 has a value that Python cannot hold."""
    offsets = pa.py_buffer(b"".join(at.to_bytes(4, "little") for at in range(5)))
    values = {
        "text": pa.StringArray.from_buffers(4, offsets, pa.py_buffer(b"ab\xffd")),
        "date": pa.array([0, 0, 2**31 - 1, 0], pa.int32()).cast(pa.date32()),
        "zone": pa.array([None, None, 0, None], pa.timestamp("s", "No/Where")),
    }
    return pa.table({"prompt": list("abcd"), column: values[column]})


@pytest.mark.parametrize("column", ["text", "date", "zone"])
@pytest.mark.parametrize("kind", ["Arrow", "Parquet"])
def test_a_value_that_python_cannot_hold_is_named_with_its_row(tmp_path: Path, column: str, kind: str) -> None:
    path, table = tmp_path / "p", broken_table(column)
    if kind == "Arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, str(path), row_group_size=2)

    with pytest.raises(ConfigError, match=rf"^{path}:3:1: a value cannot be read: .+$"):
        check(path)


def test_a_null_in_row_12_is_named_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "answer": "a"} for n in range(20)]
    rows[11]["answer"] = None  # type: ignore[assignment]
    rows[13]["prompt"] = None  # type: ignore[assignment]
    path = write_parquet(tmp_path / "p.parquet", rows)

    with pytest.raises(ConfigError) as raised:
        check(PromptsConfig(path=str(path), answer_column="answer"))

    assert str(raised.value).splitlines() == [
        f'{path}:12:1: "answer" is null',
        f"{path}:14:1: prompt is null, not a text or a list of chat messages",
    ]


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"ARROW1 and no more", b"\xff\xff\xff\xff and no more"])
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"^{path}:1:1: not an? (Parquet|Arrow) file: "):
        check(path)


def test_damage_within_a_table_is_told_by_its_place_each_in_one_line(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", ROWS)
    whole = path.read_bytes()
    page = parquet.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset

    def lines(content: bytes) -> list[str]:
        path.write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            check(path)
        return str(raised.value).split("\n")

    rows = lines(whole[:page] + b"\xff" * 8 + whole[page + 8 :])
    assert [line.startswith(f"{path}:{row}:1: not Parquet: ") for row, line in enumerate(rows, 8)] == [True] * 7
    # Offsets of texts, of which one is before the begin of all; and a name of a column.
    whole = write_file(path, ROWS).read_bytes()
    (line,) = lines(whole.replace(struct.pack("<3i", 0, 8, 16), struct.pack("<3i", 0, 8, -1), 1))
    assert line.startswith(f"{path}:2:1: a value cannot be read: ")
    (line,) = lines(whole.replace(b"answer", b"\xffnswer"))
    assert line.startswith(f"{path}:1:1: not an Arrow file: ")


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "p.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError) as raised:
        check(path)

    advice = f"read with pyarrow: {sys.executable} -m pip install pyarrow"
    assert str(raised.value) == f"{path}:1:1: the file is Parquet, {advice}"


def test_json_lines_are_read_without_pyarrow(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", ROWS)
    code = (
        "import sys; from pipeline.prompts.source import PromptSource; PromptSource(sys.argv[1], 0).at(0); "
        "sys.exit('pyarrow' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode == 0


# Folders.


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"),
        ("train/part.parquet", "test/part.parquet"),
        ("train/part-00000-of-00002.parquet", "test/part-00000-of-00001.parquet"),
        ("my_train_rows.arrow", "my_test_rows.arrow"),
    ],
)
def test_a_folder_gives_the_files_of_its_split(tmp_path: Path, names: tuple[str, str]) -> None:
    write = {".jsonl": write_lines, ".parquet": write_parquet, ".arrow": write_stream}[Path(names[0]).suffix]
    folder = tmp_path / "rows"
    more = [Path(names[0].replace("00000-of", "00001-of"))] if "-of-" in names[0] else []
    write(folder / names[0], ROWS[:20] if more else ROWS)
    for path in more:
        write(folder / path, ROWS[20:])
    write(folder / names[1], [{"prompt": "of the test split"}])
    (folder / "README.md").write_text("...")

    assert sequence(PromptsConfig(path=str(folder))) == expected(tmp_path)
    assert one(folder, split="test").prompt == "of the test split"
    with pytest.raises(ConfigError, match=r"^prompts\.split: no split tset in .*, did you mean test\?"):
        check(PromptsConfig(path=str(folder), split="tset"))


def test_a_folder_without_names_of_splits_is_one_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows" / "0001.jsonl", ROWS[:20])
    write_lines(tmp_path / "rows" / "0002.jsonl", ROWS[20:])

    assert sequence(PromptsConfig(path=str(tmp_path / "rows"))) == expected(tmp_path)
    with closing(PromptSource(tmp_path / "rows", 3)) as source:
        locations = {source.at(position).index: source.at(position).location for position in range(50)}
    assert locations[25] == f"{tmp_path}/rows/0002.jsonl:6"


def test_hidden_copies_of_a_folders_files_are_no_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows" / "train.jsonl", ROWS)
    write_lines(tmp_path / "rows" / ".ipynb_checkpoints" / "train-checkpoint.jsonl", ROWS[:9])
    write_lines(tmp_path / "rows" / "._train.jsonl", ROWS[:9])

    assert sequence(PromptsConfig(path=str(tmp_path / "rows"))) == expected(tmp_path)


def test_a_numbered_file_of_another_name_is_not_in_the_split_that_it_begins_with(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows" / "data" / "train-00000-of-00001.jsonl", ROWS)
    write_lines(tmp_path / "rows" / "data" / "train_sft-00000-of-00001.jsonl", ROWS[:9])

    assert sequence(PromptsConfig(path=str(tmp_path / "rows"))) == expected(tmp_path)
    assert check(PromptsConfig(path=str(tmp_path / "rows"), split="train_sft")) == 9


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^prompts\.path: no file of \.parquet, \.arrow, \.jsonl in the folder"):
        PromptSource(tmp_path, 0)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_of_two_columns_of_one_name_is_refused(tmp_path: Path, kind: str) -> None:
    column = pa.array(["a", "b"])
    table = pa.Table.from_arrays([column, column.cast("large_string")], names=["prompt", "prompt"])
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)

    with pytest.raises(ConfigError, match=r'p\.(parquet|arrow):1:1: several columns have the name "prompt"$'):
        check(path)


def saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the files that `datasets` 4 writes for one split by ``save_to_disk``."""
    write_stream(folder / "data-00000-of-00002.arrow", rows[:20])
    write_stream(folder / "data-00001-of-00002.arrow", rows[20:])
    names = [{"filename": f"data-0000{part}-of-00002.arrow"} for part in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))


def test_a_folder_that_datasets_saved_is_read_with_and_without_splits(tmp_path: Path) -> None:
    saved(tmp_path / "one", ROWS)
    saved(tmp_path / "two" / "train", ROWS)
    saved(tmp_path / "two" / "test", ROWS[::-1])
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    assert sequence(PromptsConfig(path=str(tmp_path / "one"))) == expected(tmp_path)
    assert sequence(PromptsConfig(path=str(tmp_path / "two"))) == expected(tmp_path)
    assert sequence(PromptsConfig(path=str(tmp_path / "two"), split="test")) == expected(tmp_path, ROWS[::-1])
    with pytest.raises(ConfigError, match=r"^prompts\.split: no split tests in .*, did you mean test\?"):
        check(PromptsConfig(path=str(tmp_path / "two"), split="tests"))


@pytest.mark.parametrize("named", ["test", "test[:10%]"])
def test_a_data_set_saved_without_splits_is_not_read_as_another_split(tmp_path: Path, named: str) -> None:
    saved(tmp_path / "one", ROWS)
    state = tmp_path / "one" / "state.json"
    state.write_text(state.read_text().replace('"train"', json.dumps(named)))

    assert check(PromptsConfig(path=str(tmp_path / "one"), split="test")) == 50
    assert check(PromptsConfig(path=str(tmp_path / "one"))) == 50, "the default reads any"
    with pytest.raises(ConfigError, match=r"^prompts\.split: no split tests in .*, which has test, did you mean test"):
        check(PromptsConfig(path=str(tmp_path / "one"), split="tests"))
    state.write_text(state.read_text().replace(json.dumps(named), "null"))
    assert check(PromptsConfig(path=str(tmp_path / "one"))) == 50
    with pytest.raises(ConfigError, match=r"^prompts\.split: no split test in .*, which has none$"):
        check(PromptsConfig(path=str(tmp_path / "one"), split="test"))


@pytest.mark.parametrize("written", [None, "", "[]", "{}", '{"_data_files": []}', '{"_data_files": [{}]}'])
def test_a_data_set_that_was_not_saved_to_its_end_is_refused_by_name(tmp_path: Path, written: str | None) -> None:
    saved(tmp_path / "train", ROWS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    state = tmp_path / "train" / "state.json"
    state.unlink() if written is None else state.write_text(written)

    said = "cannot read .*: No such file" if written is None else ".* does not name the files of a data set"
    with pytest.raises(ConfigError, match=rf"^prompts\.path: {said}"):
        check(PromptsConfig(path=str(tmp_path)))


def test_what_datasets_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "two"))
    made.to_parquet(str(tmp_path / "three" / "train.parquet"))
    lines = str(write_lines(tmp_path / "lines.jsonl", ROWS))
    datasets.load_dataset("json", data_files={"train": lines}, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    for name in (str(tmp_path / "one"), str(tmp_path / "two"), str(tmp_path / "three"), "datasets:json"):
        assert sequence(PromptsConfig(path=name)) == expected(tmp_path), name


# Names in the cache.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hf"


def test_a_name_is_found_in_the_cache_of_datasets(tmp_path: Path, cache: Path) -> None:
    made = cache / "datasets" / "openai___gsm8k" / "main" / "0.0.0" / "abc123"
    write_stream(made / "gsm8k-train-00000-of-00002.arrow", ROWS[:20])
    write_stream(made / "gsm8k-train-00001-of-00002.arrow", ROWS[20:])
    write_stream(made / "gsm8k-test.arrow", ROWS[:1])
    earlier = made.parent / "zzz"
    write_stream(earlier / "gsm8k-train.arrow", ROWS[:1])
    os.utime(earlier, (0, 0))

    for name in ("datasets:openai/gsm8k", "datasets:openai/gsm8k:main", "datasets:OpenAI/GSM8K"):
        assert sequence(PromptsConfig(path=name)) == expected(tmp_path), name
    assert check(PromptsConfig(path="datasets:openai/gsm8k", split="test")) == 1
    (source,) = PromptsConfig(path="datasets:openai/gsm8k").files
    assert folder_of(source) == cache / "datasets" / "openai___gsm8k", "a service may read it"


def in_hub(cache: Path, name: str, files: dict[str, list[dict[str, Any]]]) -> Path:
    """Write Parquet files as the snapshot of a data set; return its folder."""
    folder = cache / "hub" / f"datasets--{name.replace('/', '--')}"
    for path, rows in files.items():
        write_parquet(folder / "snapshots" / "rev1" / path, rows)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("rev1\n")
    return folder / "snapshots" / "rev1"


GSM8K = {
    "main/train-00000-of-00001.parquet": ROWS, "main/test-00000-of-00001.parquet": ROWS[:2],
    "socratic/train-00000-of-00001.parquet": ROWS[:1],
}  # fmt: skip


def test_a_name_is_found_in_the_cache_of_the_hub(tmp_path: Path, cache: Path) -> None:
    in_hub(cache, "openai/gsm8k", GSM8K)

    assert sequence(PromptsConfig(path="datasets:openai/gsm8k:main")) == expected(tmp_path)
    assert check(PromptsConfig(path="datasets:openai/gsm8k:socratic")) == 1
    assert check(PromptsConfig(path="datasets:openai/gsm8k", split="test")) == 2, "one subset alone has it"


def test_subsets_in_the_cache_of_the_hub_are_not_mixed_and_a_wrong_one_is_refused(cache: Path) -> None:
    folder = in_hub(cache, "openai/gsm8k", GSM8K)

    for name, message in (
        ("datasets:openai/gsm8k", "several subsets of"),
        ("datasets:openai/gsm8k:mian", "no subset mian of"),
    ):
        with pytest.raises(ConfigError) as raised:
            check(PromptsConfig(path=name))
        assert str(raised.value) == (
            f"prompts.path: {message} openai/gsm8k in {folder}, which has main, socratic: "
            "write datasets:openai/gsm8k:main"
        )


@pytest.mark.parametrize(
    "names",
    [
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        ("train/0000.parquet", "train/more/0001.parquet"),
        ("train-1.parquet", "train-2.parquet"),
        ("default/train/a.parquet", "default/train/b.parquet"),
    ],
)
def test_all_files_of_a_data_set_without_subsets_are_read(cache: Path, names: tuple[str, str]) -> None:
    in_hub(cache, "a/b", {names[0]: ROWS[:20], names[1]: ROWS[20:], "validation/part.parquet": ROWS[:1]})

    assert check(PromptsConfig(path="datasets:a/b")) == 50


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("data/en/train-1.parquet", "data/fr/train-1.parquet"), "data/en, data/fr"),
        (("en/train/a.parquet", "fr/train/a.parquet"), "en, fr"),
        (("en_train/a.parquet", "fr_train/a.parquet"), "en_train, fr_train"),
        (("train.parquet", "more/train.parquet"), "more"),
    ],
)
def test_subsets_are_told_in_any_layout(cache: Path, names: tuple[str, str], found: str) -> None:
    folder = in_hub(cache, "a/b", dict.fromkeys(names, ROWS))
    first = found.partition(",")[0]

    with pytest.raises(ConfigError) as raised:
        check(PromptsConfig(path="datasets:a/b"))

    assert str(raised.value) == (
        f"prompts.path: several subsets of a/b in {folder}, which has {found}: write datasets:a/b:{first}"
    )
    assert check(PromptsConfig(path=f"datasets:a/b:{first}")) == 50


def test_a_name_or_subset_that_is_not_there_is_refused_with_those_that_are(cache: Path) -> None:
    for subset in ("main", "socratic"):
        write_stream(cache / "datasets" / "openai___gsm8k" / subset / "0.0.0" / "a" / "gsm8k-train.arrow", ROWS)

    for name, message in (
        ("datasets:openai/gsm8", "nothing is downloaded, did you mean datasets:openai/gsm8k?"),
        ("datasets:openai/gsm8k", "several subsets of openai/gsm8k in .*, which has main, socratic: write datasets:"),
        ("datasets:openai/gsm8k:mian", "no subset mian of openai/gsm8k in .*, which has main, socratic"),
    ):
        with pytest.raises(ConfigError, match=rf"^prompts\.path: .*{message.replace('?', '[?]')}"):
            check(PromptsConfig(path=name))
