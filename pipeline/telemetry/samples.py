"""Rollouts kept for people to read: a few a minute, on disk, bounded, whole or not shown.

    state_dir/samples/rollout-0.samples      one record after another, the newest last
    state_dir/samples/rollout-0.samples.1    what that file was before it grew to half of its worker's bytes

    record   magic (4 bytes), length (4), xxh3-64 of the payload (8), payload: a `Sample` in msgpack

Each worker writes files of its own, a record in one write; nobody waits for anybody. A worker that is killed in a write
leaves a torn record at the end: readers stop there, and its successor cuts it off before it writes. Nothing is brought
to disk on purpose, for a crash of the machine may cost what people look at.
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

_SUFFIX: Final = ".samples"
_OLDER: Final = ".1"
_HEAD: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"smp1"
_MOST_RECORDS: Final = 512
"""In a file; its bytes bound it as well."""
_MOST_RECORD_BYTES: Final = 16 << 20


class SampledResponse(msgspec.Struct, frozen=True):
    """One response, token by token.

    Attributes:
        pieces: Text of each token; a character of several tokens stands at its last one, the others are empty.
        log_probs: Of each token, at the sampling temperature.
        log_ratios: Of each token, log-prob less the reference model's; empty without a reference.
        advantages: Of each token, or one number for the whole response.
        tokens: Of the whole response; `pieces` may hold fewer of them.
        stopped: Whether it ended by itself.
        reward: What the reward functions and the reward model gave, added up.
        parts: The same by what gave it, where that is known.
    """

    pieces: list[str]
    log_probs: list[float]
    log_ratios: list[float]
    advantages: list[float]
    tokens: int
    stopped: bool
    reward: float
    parts: dict[str, float] = {}


class Sample(msgspec.Struct, frozen=True):
    """The responses to one prompt, which GRPO compares with each other; with PPO there is one.

    Attributes:
        unix_s: When it was rolled out.
        position: Of the prompt in the endless sequence.
        prompt: Its end, if it is long, with what the template put around it.
        answer: The right one, as JSON, if the prompt has one.
        group_size: Responses that there were; `responses` may hold fewer.
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


def folder_of(state_dir: Path) -> Path:
    """Where the samples of a state directory lie."""
    return state_dir / "samples"


class SampleWriter:
    """One worker's files, opened where its predecessor left them.

    Args:
        folder: Made if it is missing, for its user alone.
        worker: Number of the worker.
        most_bytes: Most bytes of both files together.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(self, folder: Path, worker: int, most_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"rollout-{worker}{_SUFFIX}"
        self._most_bytes = most_bytes // 2
        self._file = self._open()
        places = list(_whole_records(self._file, 0))
        self._records = len(places)
        self._nbytes = sum(places[-1]) if places else 0
        os.ftruncate(self._file, self._nbytes)

    def write(self, sample: Sample) -> bool:
        """Keep a sample; return whether it was small enough for that.

        Raises:
            OSError: If it cannot be written; nothing is left of it then.
        """
        payload = msgspec.msgpack.encode(sample)
        record = _HEAD.pack(_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        if len(record) > min(self._most_bytes, _MOST_RECORD_BYTES):
            return False
        if self._nbytes + len(record) > self._most_bytes or self._records == _MOST_RECORDS:
            self._turn()
        try:
            written = os.pwrite(self._file, record, self._nbytes)
            if written < len(record):
                raise OSError(f"{written:,} of {len(record):,} B written")
        except OSError:
            os.ftruncate(self._file, self._nbytes)
            raise
        self._nbytes += len(record)
        self._records += 1
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _turn(self) -> None:
        """Let the older file go, and begin a new one."""
        os.rename(self._path, f"{self._path}{_OLDER}")
        os.close(self._file)
        self._file = self._open()
        self._nbytes = self._records = 0


class SampleReader:
    """All workers' samples, those that are there and those that come.

    Args:
        folder: Where they lie; it may not be there yet.
        newest: How many of each worker's are read at first; those before are left out.
    """

    def __init__(self, folder: Path, *, newest: int = 2 * _MOST_RECORDS) -> None:
        self._folder = folder
        self._newest = newest
        # By a file's first head: it goes along when the file is renamed, and an inode may come again.
        self._read_to: dict[bytes, int] = {}
        self._is_first = True

    def read(self) -> list[Sample]:
        """Return what was kept since the last call, the oldest first."""
        found: list[Sample] = []
        seen: dict[bytes, int] = {}
        for name in sorted({path.name.removesuffix(_OLDER) for path in self._folder.glob(f"*{_SUFFIX}*")}):
            # The newer one first: if it is turned between the two, it is read on, and nothing is left out or doubled.
            newer, older = (self._new_of(self._folder / f"{name}{end}", seen) for end in ("", _OLDER))
            samples = sorted([*older, *newer], key=lambda sample: sample.unix_s)
            found += samples[-self._newest :] if self._is_first else samples
        self._read_to = seen
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
            places = list(_whole_records(file, start))
            seen[name] = sum(places[-1]) if places else start
            wanted = places[-self._newest :] if self._is_first else places
            found: list[Sample] = []
            for at, nbytes in wanted:
                # Another version may have kept something else.
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(_decoder.decode(os.pread(file, nbytes, at)[_HEAD.size :]))
            return found
        finally:
            os.close(file)


def _whole_records(file: int, start: int) -> Iterator[tuple[int, int]]:
    """Yield place and size of each record from a place on, up to one that is torn, damaged or of another kind."""
    while len(head := os.pread(file, _HEAD.size, start)) == _HEAD.size:
        magic, length, digest = _HEAD.unpack(head)
        if magic != _MAGIC or length > _MOST_RECORD_BYTES:
            return
        payload = os.pread(file, length, start + _HEAD.size)
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != digest:
            return
        yield start, _HEAD.size + length
        start += _HEAD.size + length
