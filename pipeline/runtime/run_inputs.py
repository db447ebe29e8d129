"""Digests of the files that a run reads: whether they are still those that it began with, and the same on all machines.

    runs/NAME/inputs.json    digest of each input by the key that names it, sealed (`pipeline.storage.sealed_json`)

Models and tokenizer must be the same: what a checkpoint holds was learned with them, and adapters fit one base alone.
Prompts, templates, reward code and a tokenizer of the reward model's own may change, which is said. An input that is
missing on either side is not compared. Of a folder of prompts, or a data set by name, the files of the split count,
not the images that rows name.

A model's weights of at most 1 GiB are read whole. Of larger ones each file's size and header count, each tensor of at
most 64 KiB, and 4 KiB at the begin, in the middle and at the end of each other tensor: some seconds for hundreds of
gigabytes. Training changes every matrix nearly everywhere; a change of a few rows of one large matrix may be missed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from pipeline import sort_digits
from pipeline.config import user_modules
from pipeline.config.evaluation import held_out
from pipeline.config.identity import run_dir
from pipeline.config.rewards import REWARD_NAMES, RewardModel, reward_functions, reward_models
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.prompts.files import files_of
from pipeline.storage import sealed_json
from pipeline.storage.files import UNREADABLE, write_whole

FILE_NAME = "inputs.json"
_WHOLE_BYTES = 1 << 30
_SMALL_BYTES = 1 << 16
_PIECE_BYTES = 1 << 12
_BLOCK_BYTES = 1 << 24
_PIECES = 1024
_MOST_HEADER_BYTES = 100_000_000
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_MODELS: Final = ("actor", "reference", "critic", "lora_adapter")
_VOCABULARY = ("tokenizer.json", "vocab.*", "merges.txt", "added_tokens.json", "*.model", "tekken.json", "*.tiktoken")
_TEMPLATE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.*", "additional_chat_templates/*")
_FIXED = ("model.", "tokenizer")

# By path, size, time of change and inode.
_known: dict[tuple[str, int, int, int], bytes] = {}

log = logging.getLogger(__name__)


class RunInputs(msgspec.Struct, frozen=True):
    """The digests of a run's inputs, by their names."""

    digests: dict[str, str]


def inputs_of(config: Config, *, most_bytes: int | None = None) -> dict[str, str]:
    """Return the digest of each input that exists; those of the embedded task are made by the run itself.

    Args:
        config: The configuration, its paths absolute.
        most_bytes: Files of prompts that have more are left out.
    """
    own = sort_digits.directory_of(config.daemon.state_dir)
    found: dict[str, Path] = {}
    digests: dict[str, str] = {}
    for name in _MODELS:
        if (source := getattr(config.model, name)) is not None:
            found[f"model.{name}"] = Path(source)
    found |= {name: Path(model.path) for name, model in _reward_models(config).items()}
    actor = Path(config.model.actor)
    for key, folder in found.items():
        if folder.is_dir() and own not in folder.parents:
            digests[key] = digest_of_model(folder)
    if actor.is_dir() and own not in actor.parents:
        digests["tokenizer"] = _digest_of_files(_matching(actor, _VOCABULARY))
        digests["chat template"] = _digest_of_files(_matching(actor, _TEMPLATE))
    for name, model in _reward_models(config).items():
        if name in digests and model.tokenizer == "own":
            files = _matching(found[name], (*_VOCABULARY, *_TEMPLATE))
            digests[name.replace("model.reward", "reward tokenizer", 1)] = _digest_of_files(files)
    sources = [("prompts", source) for source in config.prompts.files]
    for file in config.evaluation.files:
        sources += [("evaluation.files", source) for source in held_out(config, file).files]
    rows: dict[str, list[Path]] = {}
    for key, prompts in sources:
        # A source that cannot be read is refused elsewhere.
        with contextlib.suppress(ConfigError):
            files = [] if own in Path(prompts.path).parents else files_of(prompts)
            rows.setdefault(f"{key} {prompts.path}", []).extend(file for file in files if file.is_file())
    for key, files in rows.items():
        files = list(dict.fromkeys(files))
        if files and (most_bytes is None or sum(file.stat().st_size for file in files) <= most_bytes):
            digests[key] = _digest_of_files(files)
    return digests | code_of(config)


def code_of(config: Config) -> dict[str, str]:
    """Return the digest of each module of the user's own that the configuration names, not of those that it imports.

    Raises:
        OSError: If a file cannot be read.
    """
    digests = {}
    functions = [reward.name for reward in reward_functions(config)]
    for function in (*functions, config.rollout.environment, config.rollout.advantages, config.trainer.policy_loss):
        file = user_modules.file_of(function) if function and ":" in function else None
        if file is not None and function not in REWARD_NAMES:
            digests[f"code of {function}"] = _digest_of_files([file])
    return digests


def _reward_models(config: Config) -> dict[str, RewardModel]:
    """Return the reward models by the name of their digest: the order and the labels of tables are no part of it."""
    # Of two of one folder that with its own tokenizer.
    models = sorted(reward_models(config), key=lambda model: model.tokenizer == "own")
    return {"model.reward" if len(models) == 1 else f"model.reward {model.path}": model for model in models}


def check(config: Config) -> None:
    """Compare the inputs of a run that is gone on with to those that `note` wrote at its last start.

    Args:
        config: The configuration, its paths absolute.

    Raises:
        ConfigError: If a model or the tokenizer is another one.
    """
    path = run_dir(config) / FILE_NAME
    if config.trainer.resume == "never":
        return
    try:
        before, now = _read(path), inputs_of(config)
    except OSError as error:
        log.warning("nothing tells whether the run's files are still those that it began with: %s", error)
        return
    changed = [name for name in now if name in before and before[name] != now[name]]
    if fixed := [name for name in changed if is_fixed(name)]:
        raise ConfigError(_refusal(config, fixed, path))
    for name in changed:
        log.warning("changed since the run's last start: %s (`rlhfd start --fresh` starts anew)", name)


def note(config: Config) -> None:
    """Note the inputs of a run that starts; its folder exists."""
    path = run_dir(config) / FILE_NAME
    try:
        digests = {**_read(path), **inputs_of(config)}
        write_whole(path, sealed_json.encode(RunInputs(digests)), path.with_name(".inputs.new"))
    except OSError as error:
        log.warning("the run's inputs are not noted, a later change of them is not noticed: %s", error)


def inputs_to_compare(config: Config) -> dict[str, str]:
    """Return those of `inputs_of` that a worker reads; empty, with a warning, where a file cannot be read.

    Each worker of a machine reads the files anew: prompts above 1 GiB are left out.
    """
    others = {f"code of {config.trainer.policy_loss}"}
    if config.reference_on != "worker":
        others.add("model.reference")
    try:
        found = inputs_of(config, most_bytes=_WHOLE_BYTES)
        return {name: digest for name, digest in found.items() if name not in others}
    except OSError as error:
        log.warning("nothing tells whether files are the same on all machines: %s", error)
        return {}


def unlike_here(config: Config, there: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs of another machine that are not as on this one, where the run was started."""
    noted = _read(run_dir(config) / FILE_NAME)
    unlike = [name for name in there if noted.get(name) != there[name]]
    # What was changed on all machines since the start is as it is here now.
    here = inputs_to_compare(config) if unlike else {}
    return [name for name in unlike if here.get(name, there[name]) != there[name]]


def is_fixed(name: str) -> bool:
    """Return whether the input of this name is the same from start to start of a run."""
    return name.startswith(_FIXED)


def changed_since_start(config: Config) -> list[str]:
    """Return the names of the inputs of trainer and worker that are not as at the run's last start; none if unknown."""
    try:
        before, now = _read(run_dir(config) / FILE_NAME), inputs_of(config)
    except OSError:
        return []
    names = ("model.actor", "tokenizer", "chat template", "prompts ")
    return [name for name in now if name.startswith(names) and before.get(name, now[name]) != now[name]]


def digest_of_model(folder: Path) -> str:
    """Return a digest of a model's weights: every file of its folder that may hold some, its configuration not.

    Raises:
        OSError: If a file cannot be read.
    """
    files = _matching(folder, _WEIGHTS)
    is_small = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
    return _digest_of_files(files, _blocks if is_small else _samples)


def _refusal(config: Config, names: list[str], path: Path) -> str:
    keys = {name: model.key for name, model in _reward_models(config).items()}
    first = keys.get(names[0], names[0]) if names[0].startswith("model.") else "model.actor"
    what = {"tokenizer": "the tokenizer"} | {name: f"the weights of {key}" for name, key in keys.items()}
    named = " and ".join(what.get(name, f"the weights of {name}") for name in names)
    adapters = ", whose adapters fit their own base alone" if config.model.lora_rank else ""
    return (
        f"{first}: {named} are not those that run {path.parent.name} was begun with, though the path is the same"
        f"{adapters}: put the former files back, or `rlhfd start --fresh` removes the run and begins anew; if only the "
        f"files were written anew, and the weights are the same, remove {path}"
    )


def _read(path: Path) -> dict[str, str]:
    try:
        return sealed_json.decode(path.read_bytes(), RunInputs).digests
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        log.error("nothing tells whether the run's files are still those that it began with: %s: %s", path, error)
        return {}


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _digest_of_files(files: list[Path], pieces_of: Callable[[Path], Iterator[bytes]] | None = None) -> str:
    """Return a digest of the names, sizes and bytes of files; each file is read once in this process."""
    digest = xxhash.xxh3_128()
    for file in files:
        found = file.stat()
        key = str(file), found.st_size, found.st_mtime_ns, found.st_ino
        if key not in _known:
            content = xxhash.xxh3_128()
            for piece in (pieces_of or _blocks)(file):
                content.update(piece)
            _known[key] = content.digest()
        digest.update(f"{file.name}\0{found.st_size}\0".encode() + _known[key])
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            yield block


def _samples(file: Path) -> Iterator[bytes]:
    """Yield the header of a weights file and pieces of each tensor; evenly spaced pieces of another file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        ranges, header = _tensors(descriptor, size)
        yield header
        for begin, end in ranges:
            if end - begin <= _SMALL_BYTES:
                yield os.pread(descriptor, end - begin, begin)
                continue
            for start in (begin, (begin + end - _PIECE_BYTES) // 2, end - _PIECE_BYTES):
                yield os.pread(descriptor, _PIECE_BYTES, start)
    finally:
        os.close(descriptor)


def _tensors(descriptor: int, size: int) -> tuple[list[tuple[int, int]], bytes]:
    """Return where the bytes of each tensor are, and the header; of no safetensors file even parts and nothing."""
    head = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    even = [(size * part // _PIECES, size * (part + 1) // _PIECES) for part in range(_PIECES)]
    if not 2 <= length <= min(size, _MOST_HEADER_BYTES):
        return even, b""
    header = os.pread(descriptor, length, 8)
    try:
        described: dict[str, Any] = json.loads(header)
        places = [one["data_offsets"] for name, one in described.items() if name != "__metadata__"]
        return sorted((8 + length + begin, 8 + length + end) for begin, end in places), header
    except (ValueError, TypeError, KeyError, AttributeError):
        return even, header
