"""Checkpoints: a folder that `from_pretrained` reads, with the training state; whole or absent.

step-000070/   the actor, its tokenizer and image processor in Hugging Face's format
    model.safetensors.index.json the actor's files: without it vLLM takes trainer_state.safetensors for one of them
    critic/                      with PPO
    trainer_state.safetensors    optimizer moments, float32 copies, progress, random state
    trainer_state.json           `CheckpointNote`: step and version, and size and checksum of every other file
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.config.model_files import INDEX, WHOLE
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.loading import load_actor, load_critic
from pipeline.models.lora import adapter_of, load_adapter, published
from pipeline.progress import Telemetry
from pipeline.runtime.checkpoint_note import NOTE, CheckpointNote, FileNote, checksum, folder_name, heads_in, of_run
from pipeline.runtime.latest_checkpoint import (
    REPLACED,
    Latest,
    best_checkpoint,
    put_back_replaced,
    read_latest,
    write_latest,
)
from pipeline.runtime.signals import has_ended
from pipeline.storage import sealed_json
from pipeline.storage.files import flush_folder
from pipeline.trainer.state import OPTIONAL

STATE_FILE = "trainer_state.safetensors"
_FLUSH_BYTES = 1 << 28
_LOOK_S = 1.0
# SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER.
_WRITE_AND_WAIT = 7
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

log = logging.getLogger(__name__)


def save_checkpoint(
    root: Path,
    note: CheckpointNote,
    *,
    actor: Any,
    tokenizer: Any,
    state: Mapping[str, torch.Tensor] | Callable[[Path], None],
    critic: Any = None,
    keep: int = 0,
    telemetry: Telemetry = Telemetry.none(),
) -> Path:
    """Write the checkpoint of one step, record it as the latest, and remove the run's oldest checkpoints.

    Args:
        root: Folder of all checkpoints; created if it is missing.
        note: Description of the checkpoint; `run`, `written_by` and `files` are filled in here.
        actor: A `PreTrainedModel`.
        tokenizer: The actor's tokenizer, saved in the same folder.
        state: The training state beside the weights, or a function that writes it into a safetensors file.
        critic: With PPO, saved in ``critic/`` inside.
        keep: Number of checkpoints of a run to keep, this one included; 0 for all. The best one is kept beside them.
        telemetry: Told of progress while bytes are written, read or flushed, from a thread too.

    Returns:
        ``root/step-000150``. An existing folder of that name is replaced once the new one is whole.

    Raises:
        CheckpointError: If the checkpoint cannot be written; nothing of it is left then, and the latest checkpoint is
            still the previous one.
    """
    target = root / folder_name(note.step)
    temporary = root / f".{target.name}.{os.getpid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(root)
        run = _run_of(root) or secrets.token_hex(4)
        with _reporting_growth(temporary, telemetry):
            actor.save_pretrained(temporary)
            _write_index(temporary)
            tokenizer.save_pretrained(temporary)
            if critic is not None:
                critic.save_pretrained(temporary / "critic")
            if callable(state):
                state(temporary / STATE_FILE)
            else:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary / STATE_FILE)
        note = msgspec.structs.replace(note, run=run, written_by=libraries(), files=_files(temporary, telemetry))
        (temporary / NOTE).write_bytes(sealed_json.encode(note))
        _flush(temporary, telemetry)
        _put_in_place(temporary, target, note.latest(target))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_write_failure(target, temporary, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if keep:
        _remove_old(root, note, keep)
    return target


def libraries() -> dict[str, str]:
    """Return the versions of the libraries whose functions a step calls."""
    return {"torch": str(torch.__version__), "transformers": importlib.metadata.version("transformers")}


def load_state(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's training state into tensors: all of them or, if any does not fit, none.

    Raises:
        CheckpointError: If a tensor is missing or unexpected, and not `OPTIONAL`, or has another shape or dtype.
    """
    try:
        saved = load_file(folder / STATE_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / STATE_FILE}: {error}") from error
    odd = OPTIONAL & (saved.keys() ^ into.keys())
    saved, into = ({name: one for name, one in each.items() if name not in odd} for each in (saved, into))
    copy_tensors(saved, into, str(folder / STATE_FILE))


def copy_tensors(saved: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy tensors by name: all of them or, if any does not fit, none.

    Raises:
        CheckpointError: If a tensor is missing or unexpected, or has another shape or dtype.
    """
    if odd := saved.keys() ^ into.keys():
        raise CheckpointError(f"{source}: {min(odd)} is {'missing' if min(odd) in into else 'not of this model'}")
    for name, tensor in into.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            found = f"{tuple(saved[name].shape)} {saved[name].dtype}"
            raise CheckpointError(f"{source}: {name} is {found}, expected {tuple(tensor.shape)} {tensor.dtype}")
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(saved[name])


def load_whole(
    folder: Path,
    config: Config,
    models: Mapping[str, torch.nn.Module],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Set whole models and a training state (`tensors_of`) to those of a checkpoint; its files are verified before.

    Args:
        folder: The checkpoint.
        config: The run's configuration.
        models: ``actor`` and, with PPO, ``critic``.
        state: The training state, live.

    Raises:
        CheckpointError: If a file cannot be read, or is of other models.
    """
    targets = {name: published(model) for name, model in models.items()}
    loaders: dict[str, tuple[Any, Path]] = {"actor": (load_actor, folder), "critic": (load_critic, folder / "critic")}
    saved = {}
    for name in models:
        load, path = loaders[name]
        try:
            adapted = name == "actor" and adapter_of(models[name])
            saved[name] = (
                load_adapter(folder) if adapted else load(path, dtype=config.model.dtype, device="cpu").state_dict()
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error
    for name, target in targets.items():
        copy_tensors(saved[name], target, f"{folder} ({name})")
    load_state(folder, state)


def _run_of(root: Path) -> str:
    """Return the id of the run whose checkpoints these are; "" if it has none yet."""
    try:
        latest = read_latest(root)
    except ConfigError as error:
        # The checkpoint being written replaces this record, whatever its fault; the others stay those of its run.
        log.warning("%s", error)
        return max(((note.step, note.run) for _, note in heads_in(root)), default=(0, ""))[1]
    return "" if latest is None else latest.run


def _is_latest(root: Path, latest: Latest) -> bool:
    try:
        return read_latest(root) == latest
    except ConfigError:
        return False


def _write_index(folder: Path) -> None:
    """Write the index of a model of one file; one of several has its own."""
    if (folder / WHOLE).is_file():
        with safe_open(folder / WHOLE, "pt") as weights:
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), WHOLE)}
        (folder / INDEX).write_bytes(msgspec.json.encode(index))


def _files(folder: Path, telemetry: Telemetry) -> dict[str, FileNote]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): FileNote(path.stat().st_size, checksum(path, telemetry)) for path in paths}


@contextlib.contextmanager
def _reporting_growth(folder: Path, telemetry: Telemetry) -> Iterator[None]:
    """Tell of progress whenever the files in a folder have grown: one file may take minutes in a single call."""
    done = threading.Event()

    def watch() -> None:
        written = 0
        while not done.wait(_LOOK_S):
            before, written = written, _written_bytes(folder)
            if written > before:
                telemetry.progress()

    watcher = threading.Thread(target=watch, name="checkpoint", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _written_bytes(folder: Path) -> int:
    """Return the bytes of the files on disk, by blocks: safetensors sets their whole length before the first byte."""
    blocks = 0
    # A folder that cannot be read has not grown.
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            # A file is written under another name first.
            with contextlib.suppress(FileNotFoundError):
                blocks += path.stat().st_blocks
    return 512 * blocks


def _flush(folder: Path, telemetry: Telemetry) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            _flush_pieces(path, telemetry)
        # A folder is opened and flushed like a file.
        flush_folder(path)
        telemetry.progress()


def _flush_pieces(path: Path, telemetry: Telemetry) -> None:
    """Write a large file's pages to disk in pieces: a single call may take minutes without reporting progress.

    By sync_file_range, since `mmap.flush` holds the interpreter's lock and would stop training. A file system without
    it writes all at the flush that follows.
    """
    nbytes = path.stat().st_size
    if nbytes <= _FLUSH_BYTES:
        return
    with path.open("rb") as file:
        for start in range(0, nbytes, _FLUSH_BYTES):
            _sync_file_range(file.fileno(), start, min(_FLUSH_BYTES, nbytes - start), _WRITE_AND_WAIT)
            telemetry.progress()


def _put_in_place(temporary: Path, target: Path, latest: Latest) -> None:
    """Rename the folder into place and record it as the latest; replacing a folder takes two renames.

    After a kill between the two renames the former folder is put back (`put_back_replaced`), and so it is, with the new
    one under its temporary name, if the record cannot be written.
    """
    root, replaced = target.parent, target.with_name(f".{target.name}{REPLACED}{os.getpid()}")
    try:
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        flush_folder(root)
        write_latest(root, latest)
    except OSError:
        # A record that is in place, but not flushed, names the new folder.
        if not temporary.exists() and not _is_latest(root, latest):
            target.rename(temporary)
        put_back_replaced(root)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_unfinished(root: Path) -> None:
    """Remove the half-written folders of killed processes."""
    put_back_replaced(root)
    for folder in root.glob(".step-*"):
        pid = folder.name.rpartition(".")[2]
        if pid.isdecimal() and (int(pid) == os.getpid() or has_ended(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_old(root: Path, note: CheckpointNote, keep: int) -> None:
    try:
        best = best_checkpoint(root)
        old = [folder for step, folder in of_run(root, note.run) if step <= note.step][:-keep]
    except OSError as error:
        log.warning("old checkpoints are not removed before the next one: %s", error)
        return
    for folder in old:
        if folder == best:
            continue
        try:
            # A link to a place of the user's: what is there stays.
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError as error:
            log.warning("an old checkpoint cannot be removed, remove it by hand: path=%s: %s", folder, error)
        else:
            log.info("old checkpoint removed: path=%s", folder)


def _write_failure(target: Path, temporary: Path, error: Exception) -> str:
    failure = f"checkpoint {target} could not be written: {error}"
    try:
        written = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        found = os.statvfs(next((folder for folder in target.parents if folder.is_dir()), Path("/")))
    except OSError:  # of a folder that cannot be read any more nothing else is known
        return failure
    # Without a free inode no file can be made, however many bytes are free.
    inodes = ", but no inode" if found.f_files and not found.f_favail else ""
    free_bytes = found.f_bavail * found.f_frsize
    return f"{failure}; {written:,} B were written, {free_bytes:,} B are free{inodes}"
