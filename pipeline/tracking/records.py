"""The records that a tracker gets: new lines of ``metrics.jsonl`` as named numbers, and new samples as rows of a table.

A tracker's place is kept in ``tracking/NAME.json`` in the folder of the run, with the tracker's own id of the run. A
line is sent at least once: a process that is killed between a line and its note sends it again under the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pipeline.config.schema import Config
from pipeline.storage.files import UNREADABLE, write_whole
from pipeline.telemetry.samples import SampleReader, folder_of

_METRICS: Final = "metrics.jsonl"
_SETTINGS: Final = "settings.json"
_MOST_SAMPLES: Final = 8
_MOST_CHARACTERS: Final = 2000
_PIECE_BYTES: Final = 1 << 20
COLUMNS: Final = ("version", "position", "prompt", "response", "answer", "reward", "stopped")
"""The columns of a table of samples."""


class Record(NamedTuple):
    """A line of ``metrics.jsonl``.

    Attributes:
        step: Optimizer steps so far.
        unix_s: Unix time.
        values: Numbers by name: ``train/reward_mean``, ``evaluation/pass_at_1``, ``evaluation/FILE/pass_at_1``.
    """

    step: int
    unix_s: float
    values: dict[str, float]

    @property
    def is_train(self) -> bool:
        """Whether it is the line of an optimizer step, not that of an evaluation."""
        return any(name.startswith("train/") for name in self.values)


class Progress(msgspec.Struct):
    """The progress of a tracker in a run.

    Attributes:
        run_id: The tracker's own id of the run; empty before the first start.
        unix_s: Unix time of the last line that was sent.
        samples_unix_s: Unix time of the last sample that was sent.
        step: Step of the last line that was sent; -1 if there was none.
    """

    run_id: str = ""
    unix_s: float = 0.0
    samples_unix_s: float = 0.0
    step: int = -1


def tracking_dir(run_dir: Path) -> Path:
    """Return the folder of the trackers in the folder of a run."""
    return run_dir / "tracking"


def write_settings(run_dir: Path, config: Config) -> None:
    """Write the configuration in force for the trackers of a run; no key of it holds a secret."""
    folder = tracking_dir(run_dir)
    values = config.model_dump(mode="json", exclude_none=True)
    write_whole(folder / _SETTINGS, msgspec.json.encode(values) + b"\n", folder / f".{_SETTINGS}.new", flush=False)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the configuration that `write_settings` wrote; empty if it cannot be read."""
    try:
        return msgspec.json.decode((tracking_dir(run_dir) / _SETTINGS).read_bytes(), type=dict[str, Any])
    except (OSError, *UNREADABLE):
        return {}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by ``section.key``, and options of reward functions by ``rewards.0.option``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = {str(number): one for number, one in enumerate(value)}
        inner = flat(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".removesuffix("."): one for key, one in inner.items()}
    return found


def read_progress(path: Path) -> Progress:
    """Return the progress that a file holds; that of a new run if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, *UNREADABLE):
        return Progress()


def write_progress(path: Path, progress: Progress) -> None:
    """Write a progress; the file is replaced as a whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(progress) + b"\n", path.with_name(f".{path.name}.new"), flush=False)


class LineFollower:
    """Reads the new lines of ``metrics.jsonl``.

    The trainer cuts the file where it takes steps again. A line is new if it lies behind the last one that was read; if
    that one is gone, if its time is later.

    Args:
        run_dir: Folder of the run.
        after_unix_s: Lines up to this time were read before.
        beat: Called amid lines that were read before, which take minutes in a run of weeks.
    """

    def __init__(self, run_dir: Path, *, after_unix_s: float = 0.0, beat: Callable[[], object] = lambda: None) -> None:
        self._path = run_dir / _METRICS
        self._beat = beat
        self._after_unix_s = after_unix_s
        self._end = 0
        self._last = b""

    def read(self) -> Iterator[Record]:
        """Yield the new lines, the oldest first; a line that is being written is left for later."""
        after_unix_s = -math.inf
        while lines := self._next_lines():
            if not self._end:
                after_unix_s = self._after_unix_s
            is_old = True
            for line in lines:
                self._end, self._last = self._end + len(line), line
                record = record_of(line)
                if record is not None and record.unix_s > after_unix_s:
                    self._after_unix_s, is_old = record.unix_s, False
                    yield record
            if is_old:
                self._beat()

    def _next_lines(self) -> list[bytes]:
        """Return some whole lines behind the last one that was read; those of a month are not held at once."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._end, self._last = 0, b""
                    file.seek(0)
                lines = file.readlines(_PIECE_BYTES)
        except OSError:
            return []
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def record_of(line: bytes) -> Record | None:
    """Return the numbers of a line; None if it does not decode."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        step, unix_s = int(fields.pop("step")), float(fields.pop("time_unix_s"))
    except (KeyError, TypeError, ValueError, *UNREADABLE):
        return None
    evaluation = fields.pop("evaluation", None)
    values = {f"train/{name}": float(value) for name, value in fields.items() if _is_number(value)}
    if isinstance(evaluation, dict):
        total, files = evaluation.get("total") or {}, evaluation.get("files") or []
        for prefix, summary in (("", total), *((f"{one['name']}/", one) for one in files if len(files) > 1)):
            found = {f"evaluation/{prefix}{name}": value for name, value in summary.items()}
            values |= {name: float(value) for name, value in found.items() if _is_number(value)}
    return Record(step, unix_s, values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class SampleFollower:
    """Reads new samples as rows of a table with `COLUMNS`.

    Args:
        run_dir: Folder of the run.
        after_unix_s: Samples up to this time were read before.

    Attributes:
        after_unix_s: Unix time of the last sample that was read.
    """

    def __init__(self, run_dir: Path, *, after_unix_s: float = 0.0) -> None:
        self._reader = SampleReader(folder_of(run_dir), newest=_MOST_SAMPLES)
        self._is_first = True
        self.after_unix_s = after_unix_s

    def read(self) -> list[tuple[Any, ...]]:
        """Return a row for each response of the newest samples, at most 8 of them."""
        # Later ones are new whatever their time: the wall clock may have stepped back.
        after_unix_s, self._is_first = self.after_unix_s if self._is_first else -math.inf, False
        samples = [sample for sample in self._reader.read() if sample.unix_s > after_unix_s][-_MOST_SAMPLES:]
        if samples:
            self.after_unix_s = samples[-1].unix_s
        return [
            (
                sample.policy_version,
                sample.position,
                sample.prompt[-_MOST_CHARACTERS:],
                "".join(response.pieces)[:_MOST_CHARACTERS],
                sample.answer[:_MOST_CHARACTERS],
                response.reward,
                response.stopped,
            )
            for sample in samples
            for response in sample.responses
        ]
