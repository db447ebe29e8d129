"""The files of a source of prompts: a file, those of a folder, or those of a data set in the local cache.

A folder is one that `datasets` saved (``save_to_disk``), or holds data files whose names have the split, such as
``train.jsonl`` or ``main/train-00000-of-00002.parquet``. A name is looked for in the cache of `datasets`, then in that
of the Hugging Face hub; nothing is ever downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from pipeline.config.prompts import CACHED_PREFIX, PromptSourceConfig
from pipeline.errors import ConfigError
from pipeline.prompts.lines import LineRows, lines_at_most, problem_of_format
from pipeline.prompts.tables import ArrowRows, ParquetRows, table_kind

Rows: TypeAlias = LineRows | ArrowRows | ParquetRows
"""Rows of one file by number."""

_SUFFIXES: Final = (".parquet", ".arrow", ".jsonl")
_SPLITS: Final = ("train", "training", "test", "testing", "eval", "evaluation", "dev", "validation", "valid", "val")


def files_of(source: PromptSourceConfig, *, field: str = "prompts.path") -> list[Path]:
    """Return the files of a source in the order of their rows.

    Args:
        source: The source, with its split.
        field: The configuration field that names it, for the error.

    Raises:
        ConfigError: If a folder or the cache has no such data set or split.
    """
    if source.path.startswith(CACHED_PREFIX):
        return _cached(source.path.removeprefix(CACHED_PREFIX), source.split or "train", field)
    path = Path(source.path)
    return _in_folder(path, source.split or "train", field) if path.is_dir() else [path]


def folder_of(source: PromptSourceConfig) -> Path | None:
    """Return the file or folder that a source reads; None for a data set that is in no cache."""
    if not source.path.startswith(CACHED_PREFIX):
        return Path(source.path)
    name = source.path.removeprefix(CACHED_PREFIX).partition(":")[0]
    return _cached_folder(name) or _hub_folder(name)


def open_rows(path: Path, *, field: str = "prompts.path") -> Rows:
    """Open a file of prompts by its format.

    Args:
        path: The file.
        field: The configuration field that names it, for the error.

    Raises:
        ConfigError: If the file cannot be read, is damaged, or needs a package that is not installed.
    """
    kind = table_kind(path)
    if kind:
        return ParquetRows(path) if kind == "Parquet" else ArrowRows(path)
    if problem := problem_of_format(path):
        raise ConfigError(f"{path}:1:1: {problem}")
    return LineRows(path, field=field)


def rows_at_most(path: Path) -> int:
    """Return an upper bound of the rows of a file; 0 if it does not exist."""
    if not path.exists():
        return 0
    if not table_kind(path):
        return lines_at_most(path)
    with contextlib.closing(open_rows(path)) as rows:
        return len(rows)


def _in_folder(folder: Path, split: str, field: str) -> list[Path]:
    saved = _saved_splits(folder)
    if saved is not None:
        if split not in saved and saved != [""]:
            raise ConfigError(_no_split(folder, split, saved))
        inner = folder if saved == [""] else folder / split
        state = _saved_state(inner, field)
        # The default reads any: a held-out part is often saved alone.
        if saved == [""] and split not in ("train", own := _own_split(state)):
            raise ConfigError(_no_split(folder, split, [own]))
        return [inner / file["filename"] for file in state["_data_files"]]
    found = _data_files(folder)
    if not found:
        raise ConfigError(f"{field}: no file of {', '.join(_SUFFIXES)} in the folder {folder}")
    suffix = next(suffix for suffix in _SUFFIXES if any(path.suffix == suffix for path in found))
    found = [path for path in found if path.suffix == suffix]
    splits = {path: _splits_in(path.relative_to(folder)) for path in found}
    chosen = [path for path in found if split in splits[path] or path.stem == split]
    if split == "train" and not any(splits.values()):
        return found
    if not chosen:
        raise ConfigError(_no_split(folder, split, sorted({name for names in splits.values() for name in names})))
    return chosen


def _data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder; hidden ones, such as those of ``.ipynb_checkpoints``, are copies of tools."""
    found = (path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))


def _saved_splits(folder: Path) -> list[str] | None:
    """Return the splits of a folder that `datasets` saved, "" for one without splits; None for another folder."""
    try:
        if (folder / "state.json").is_file():
            return [""]
        splits: list[str] = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return splits
    except (OSError, ValueError, KeyError):
        return None


def _saved_state(folder: Path, field: str) -> dict[str, Any]:
    """Return what `datasets` has written about the files of a folder: at least one."""
    path = folder / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        if all(isinstance(file["filename"], str) for file in state["_data_files"]) and state["_data_files"]:
            return state
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        # As a list of files that is empty.
        pass
    raise ConfigError(f"{field}: {path} does not name the files of a data set: it was not saved to its end")


def _own_split(state: dict[str, Any]) -> str:
    """Return the split that a saved data set is, or is a slice of, such as ``test[:10%]``; empty if it names none."""
    return re.sub(r"\[[^]]*\]$", "", state.get("_split") or "")


def _splits_in(path: Path) -> list[str]:
    """Return the names of splits in the name of a file, or else in those of its folders.

    A name with the number of its part is a split itself: ``train_sft-00000-of-00002`` is none of the split train.
    """
    numbered = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", path.stem)
    own = [numbered[1]] if numbered else []
    for part in (*(own or [path.stem]), *reversed(path.parent.parts)):
        if words := [word for word in re.split(r"[^A-Za-z0-9]+", part) if word in _SPLITS]:
            return own if part in own else [*own, part, *words]
    return own


def _no_split(folder: Path, split: str, splits: list[str]) -> str:
    known = [name for name in splits if name]
    close = difflib.get_close_matches(split, known, n=1)
    meant = f", did you mean {close[0]}?" if close else ""
    return f"prompts.split: no split {split} in {folder}, which has {', '.join(known) or 'none'}{meant}"


def _cached(name: str, split: str, field: str) -> list[Path]:
    """Return the files of a data set by its name, or ``name:subset``."""
    name, _, subset = name.partition(":")
    if (folder := _cached_folder(name)) is not None:
        return _of_cache(folder, name, subset, split, field)
    if (folder := _hub_folder(name)) is not None:
        return _of_hub(folder, name, subset, split, field)
    known = sorted(_names_in_cache())
    close = difflib.get_close_matches(name, known, n=1)
    meant = f", did you mean {CACHED_PREFIX}{close[0]}?" if close else ""
    raise ConfigError(f"{field}: no data set {name} in {_cache()} or {_hub()}; nothing is downloaded{meant}")


def _of_cache(folder: Path, name: str, subset: str, split: str, field: str) -> list[Path]:
    """Return the files of a folder of the cache: ``subset/version/hash/name-split.arrow``, or several of one split."""
    subsets = sorted(path.name for path in folder.iterdir() if path.is_dir())
    chosen = [found for found in subsets if found == subset or found.startswith(f"{subset}-")]
    if not subset:
        chosen = subsets if len(subsets) == 1 else [found for found in subsets if found == "default"]
    if len(chosen) != 1:
        raise ConfigError(_wrong_subset(folder, name, subset, subsets, field))
    made = [path for path in (folder / chosen[0]).glob("*/*") if any(path.glob("*.arrow"))]
    if not made:
        raise ConfigError(f"{field}: no Arrow file of {name} in {folder / chosen[0]}")
    newest = max(made, key=lambda path: path.stat().st_mtime)
    splits: dict[str, list[Path]] = {}
    for path in sorted(newest.glob("*.arrow")):
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        splits.setdefault(stem.rpartition("-")[2], []).append(path)
    if split not in splits:
        raise ConfigError(_no_split(newest, split, sorted(splits)))
    return splits[split]


def _of_hub(folder: Path, name: str, subset: str, split: str, field: str) -> list[Path]:
    """Return the files of a snapshot of the hub, in which a subset is a folder, such as ``main`` or ``data/en``."""
    if subset and not (folder / subset).is_dir():
        found = {_subset_of(path, folder, split) for path in _data_files(folder)}
        raise ConfigError(_wrong_subset(folder, name, subset, found, field))
    files = _in_folder(folder / subset, split, field)
    if not subset and len(found := {_subset_of(path, folder, split) for path in files}) > 1:
        raise ConfigError(_wrong_subset(folder, name, subset, found, field))
    return files


def _subset_of(path: Path, folder: Path, split: str) -> str:
    """Return the folders of a file above that of its split; empty if there are none."""
    parts = path.parent.relative_to(folder).parts
    ends = (at for at, part in enumerate(parts) if part == split or part in _SPLITS)
    return "/".join(parts[: next(ends, len(parts))])


def _wrong_subset(folder: Path, name: str, subset: str, subsets: Iterable[str], field: str) -> str:
    named = sorted(filter(None, subsets))
    wanted = f"no subset {subset}" if subset else "several subsets"
    shown = f"{CACHED_PREFIX}{name}" + (f":{named[0]}" if named else "")
    return f"{field}: {wanted} of {name} in {folder}, which has {', '.join(named) or 'none'}: write {shown}"


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def _cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets").expanduser()


def _hub() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub").expanduser()


def _same(name: str) -> str:
    """Return a name as the cache compares it: `datasets` writes ``MATH-500`` as ``math-500``, ``myData`` as a word."""
    return name.lower().replace("/", "___").replace("_", "")


def _cached_folder(name: str) -> Path | None:
    folders = _cache().iterdir() if _cache().is_dir() else ()
    return next((path for path in folders if path.is_dir() and _same(path.name) == _same(name)), None)


def _hub_folder(name: str) -> Path | None:
    """Return the folder of the newest snapshot of a data set in the hub's cache."""
    folder = _hub() / f"datasets--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def _names_in_cache() -> set[str]:
    cached = {path.name.replace("___", "/") for path in _cache().glob("*/") if path.is_dir()}
    hub = {path.name.removeprefix("datasets--").replace("--", "/") for path in _hub().glob("datasets--*")}
    return {name for name in cached | hub if not name.startswith("_")}
