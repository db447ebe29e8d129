"""Rollouts kept for people to read: a few per minute, on disk, bounded; an incomplete one is not shown.

    runs/NAME/samples/rollout-0.samples      one record after another, the newest last
    runs/NAME/samples/rollout-0.samples.1    the previous file, renamed once it had half of its worker's bytes

    record   magic (4 bytes), length (4), xxh3-64 of the payload (8), payload: a `Sample` in msgpack

Each worker writes its own files, one write per record; no process waits for another. A worker that is killed during a
write leaves a torn record at the end: readers stop there, and its successor cuts it off before it writes. Files are not
flushed to disk: the loss of samples in a crash of the machine is acceptable.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from pipeline.storage.files import is_at, write_at_end

_SUFFIX: Final = ".samples"
_OLDER: Final = ".1"
_HEAD: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"smp1"
MOST_BYTES: Final = 16 << 20
"""Maximum bytes of the samples of a run, of all workers together."""
_MOST_RECORDS: Final = 512
"""Maximum number of records in a file, whose bytes are bounded as well."""
_MOST_RECORD_BYTES: Final = 16 << 20


class SampledResponse(msgspec.Struct, frozen=True):
    """One response, token by token.

    Attributes:
        pieces: Text of each token; a character of several tokens is at the last of them, the others are empty.
        log_probs: Log-prob of each token, at the sampling temperature.
        log_ratios: Log-prob of each token minus the reference model's; empty without a reference.
        advantages: Advantage of each token, or one number for the whole response.
        tokens: Number of tokens of the whole response; `pieces` may hold fewer of them.
        stopped: Whether the response ended at a stop sequence.
        reward: Sum of the scores of the reward functions and the reward model.
        parts: Scores by function or model, if they are known.
        observed: Whether each token of `pieces` is an environment's; empty if none is.
        stop: The stop string with which the response ended; empty if it ended otherwise.
        numbers: Further numbers of the reward functions by name.
    """

    pieces: list[str]
    log_probs: list[float]
    log_ratios: list[float]
    advantages: list[float]
    tokens: int
    stopped: bool
    reward: float
    parts: dict[str, float] = {}
    observed: list[bool] = []
    stop: str = ""
    numbers: dict[str, float] = {}


class Sample(msgspec.Struct, frozen=True):
    """The responses to one prompt: a group with GRPO, a single response with PPO.

    Attributes:
        unix_s: Unix time of the rollout.
        position: Position of the prompt in the endless sequence.
        prompt: The rendered prompt; of a long one, the end.
        answer: The right answer as JSON, if the prompt has one.
        group_size: Number of responses that were generated; `responses` may hold fewer.
    """

    unix_s: float
    worker: int
    ticket: int
    position: int
    policy_version: int
    prompt: str
    prompt_tokens: int
    answer: str
    group_size: int
    responses: list[SampledResponse]


_decoder = msgspec.msgpack.Decoder(Sample)


def folder_of(run_dir: Path) -> Path:
    """Return the folder of the samples in a run's folder."""
    return run_dir / "samples"


class SampleWriter:
    """One worker's files, opened at the end that its predecessor left.

    Args:
        folder: Folder of the files; made with mode 0700 if it is missing.
        worker: Number of the worker.
        most_bytes: Maximum bytes of both files together.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(self, folder: Path, worker: int, most_bytes: int) -> None:
        self._path = folder / f"rollout-{worker}{_SUFFIX}"
        self._most_bytes = most_bytes // 2
        self._file = self._open()

    def write(self, sample: Sample) -> bool:
        """Keep a sample; return False if it is too large.

        Raises:
            OSError: If it cannot be written; a partial record is removed.
        """
        payload = msgspec.msgpack.encode(sample)
        record = _HEAD.pack(_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        if len(record) > min(self._most_bytes, _MOST_RECORD_BYTES):
            return False
        if not is_at(self._file, self._path):
            self._open_again()
        if self._nbytes + len(record) > self._most_bytes or self._records == _MOST_RECORDS:
            self._rotate()
        write_at_end(self._file, record, self._nbytes)
        self._nbytes += len(record)
        self._records += 1
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self) -> int:
        """Open the file at the end of its whole records."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        spans = list(_whole_records(file, 0))
        self._records = len(spans)
        self._nbytes = sum(spans[-1]) if spans else 0
        os.ftruncate(file, self._nbytes)
        return file

    def _open_again(self) -> None:
        before, self._file = self._file, self._open()
        os.close(before)

    def _rotate(self) -> None:
        """Replace the older file by the present one, and start a new one."""
        with contextlib.suppress(FileNotFoundError):  # removed by another program, or no new one could be made
            os.rename(self._path, f"{self._path}{_OLDER}")
        self._open_again()


class SampleReader:
    """Reads all workers' samples, the existing ones and those that are added later.

    Args:
        folder: Folder of the samples; it may not exist yet.
        newest: Number of each worker's newest samples that the first read returns; older ones are left out.
    """

    def __init__(self, folder: Path, *, newest: int = 2 * _MOST_RECORDS) -> None:
        self._folder = folder
        self._newest = newest
        # By a file's first record header: it stays the same when the file is renamed, and an inode may be reused.
        self._read_to: dict[bytes, int] = {}
        self._is_first = True

    def read(self) -> list[Sample]:
        """Return the samples that were added since the last call, the oldest first."""
        found: list[Sample] = []
        seen: dict[bytes, int] = {}
        for name in sorted({path.name.removesuffix(_OLDER) for path in self._folder.glob(f"*{_SUFFIX}*")}):
            # The newer file first: if it is rotated between the two reads, it is read on, and no sample is left out or
            # doubled.
            newer, older = (self._new_of(self._folder / f"{name}{end}", seen) for end in ("", _OLDER))
            samples = sorted([*older, *newer], key=lambda sample: sample.unix_s)
            found += samples[-self._newest :] if self._is_first else samples
        # Also of files that are not found for a time.
        self._read_to |= seen
        self._is_first = False
        return sorted(found, key=lambda sample: sample.unix_s)

    def _new_of(self, path: Path, seen: dict[bytes, int]) -> list[Sample]:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        try:
            name = os.pread(file, _HEAD.size, 0)
            start = max(seen.get(name, 0), self._read_to.get(name, 0))
            spans = list(_whole_records(file, start))
            seen[name] = sum(spans[-1]) if spans else start
            wanted = spans[-self._newest :] if self._is_first else spans
            found: list[Sample] = []
            for at, nbytes in wanted:
                # Another version may have written another structure.
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(_decoder.decode(os.pread(file, nbytes, at)[_HEAD.size :]))
            return found
        finally:
            os.close(file)


def _whole_records(file: int, start: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each record from an offset on, up to one that is torn, damaged or of another kind."""
    while len(head := os.pread(file, _HEAD.size, start)) == _HEAD.size:
        magic, length, digest = _HEAD.unpack(head)
        if magic != _MAGIC or length > _MOST_RECORD_BYTES:
            return
        payload = os.pread(file, length, start + _HEAD.size)
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != digest:
            return
        yield start, _HEAD.size + length
        start += _HEAD.size + length
