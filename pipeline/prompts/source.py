"""Random access to the endless sequence of prompts, of one source or of several by weight."""

from __future__ import annotations

import array
import bisect
import contextlib
import itertools
import os
from typing import Any, Final, NamedTuple

from pipeline.config.prompts import PromptsConfig, PromptSourceConfig
from pipeline.errors import ConfigError
from pipeline.prompts.files import Rows, files_of, open_rows, rows_at_most
from pipeline.prompts.lines import LineRows
from pipeline.prompts.order import Mixture, permuted, source_seed
from pipeline.prompts.rows import ColumnNames, Row, row_of
from pipeline.prompts.types import Prompt

_PARTS = 10

_BOUNDS: Final = ("min_characters", "max_characters", "min_pass_rate", "max_pass_rate")

AnyPrompts = str | os.PathLike[str] | PromptsConfig
"""The section of the configuration, or the path of one file with the defaults."""


class PromptSource:
    """Random access to the endless sequence of prompts; keeps places of rows in memory, of JSON lines never texts."""

    def __init__(self, prompts: AnyPrompts, seed: int) -> None:
        """Open and index the files; `pipeline.prompts.check` validates them.

        Args:
            prompts: The prompts.
            seed: Seed of the order, any int; the same seed gives the same order everywhere.

        Raises:
            ConfigError: If a file cannot be read or a source has no prompt.
        """
        parts = parts_of(prompts)
        weights, is_mixed = [part.source.weight for part in parts], parts[0].section.shuffle
        self._mixture = Mixture(weights, seed, is_mixed=is_mixed)
        self._seeds = [source_seed(seed, number, len(parts)) for number in range(len(parts))]
        self._parts: list[OpenedPart] = []
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            for part in parts:
                self._parts.append(OpenedPart(part))
            undone.pop_all()

    def __len__(self) -> int:
        """Return the number of prompts of all sources."""
        return sum(map(len, self._parts))

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the endless sequence.

        Args:
            position: Place in the sequence, 0 or more.

        Returns:
            The prompt, read from the file at this call.

        Raises:
            ConfigError: If the row is broken, or missing because the file was changed in place.
            ValueError: If `position` is negative.
        """
        if position < 0:
            raise ValueError(f"position {position} is negative")
        which, number = self._mixture.locate(position)
        part = self._parts[which]
        epoch, slot = divmod(number, len(part))
        index = part.index_at(slot, seed=self._seeds[which], epoch=epoch)
        rows, at = part.rows_at(index)
        row = part.read(rows, at)
        paths = tuple(str(rows.path.parent / image) for image in row.images)
        return Prompt(
            position, epoch, index, row.prompt, row.answer, paths, str(rows.path), rows.line(at), row.columns, row.tools
        )

    def close(self) -> None:
        """Close the files; later calls of `at` fail."""
        for part in self._parts:
            part.close()


class Part(NamedTuple):
    """One source of prompts.

    Attributes:
        source: Path, weight and split of the source.
        section: The section of the source: bounds of its prompts, and their order.
        field: The configuration field that names it.
        names: Columns of the source.
    """

    source: PromptSourceConfig
    section: PromptsConfig
    field: str
    names: ColumnNames

    @property
    def bounds(self) -> dict[str, Any]:
        """The settings that may leave rows out, by key."""
        fields = PromptsConfig.model_fields
        return {key: value for key in _BOUNDS if (value := getattr(self.section, key)) != fields[key].default}

    def takes(self, row: Row) -> bool:
        """Return whether a row's prompt has a length and a pass rate that are wanted."""
        section = self.section
        if row.pass_rate is not None and not section.min_pass_rate <= row.pass_rate <= section.max_pass_rate:
            return False
        most = section.max_characters
        return section.min_characters <= row.characters and (most is None or row.characters <= most)


class OpenedPart:
    """The rows of one source, all its files in a row.

    Attributes:
        part: The source.
        files: The rows of each file.
    """

    def __init__(self, part: Part, *, filtered: bool = True) -> None:
        """Open the files.

        Args:
            part: The source.
            filtered: Whether rows that are not wanted are left out, and the others ordered; every row is read then.

        Raises:
            ConfigError: If a file cannot be read, or the source has no prompt.
        """
        self.part = part
        self.files: list[Rows] = []
        self._kept: array.array[int] | None = None
        self._easiest_first: array.array[int] | None = None
        with contextlib.ExitStack() as undone:
            undone.callback(self.close)
            paths = files_of(part.source, field=part.field)
            for path in paths:
                self.files.append(open_rows(path, field=part.field))
            self._starts = list(itertools.accumulate(map(len, self.files), initial=0))
            if not self._starts[-1]:
                raise ConfigError(f"{paths[0]}:1:1: no prompt in the file, at least one is needed")
            if filtered and part.bounds:
                rows = range(self._starts[-1])
                self._kept = array.array("q", (at for at in rows if part.takes(self.read(*self.rows_at(at)))))
                if not self._kept:
                    raise ConfigError(f"{paths[0]}:1:1: {nothing_wanted(part)}")
            if filtered and part.section.curriculum == "easy_first":
                rates = [
                    self.read(*self.rows_at(self.index_of(number))).pass_rate or 0.0 for number in range(len(self))
                ]
                self._easiest_first = array.array("q", sorted(range(len(self)), key=lambda number: -rates[number]))
            undone.pop_all()

    def __len__(self) -> int:
        """Return the number of prompts."""
        return self._starts[-1] if self._kept is None else len(self._kept)

    def index_at(self, slot: int, *, seed: int, epoch: int) -> int:
        """Return the index, among all rows, of the prompt at a slot of an epoch."""
        if not self.part.section.shuffle:
            return self.index_of(slot)
        if epoch or self._easiest_first is None:
            return self.index_of(permuted(slot, len(self), seed=seed, epoch=epoch))
        # A negative epoch is that of no other permutation of the seed.
        tenth = slot * _PARTS // len(self)
        start, end = -(-tenth * len(self) // _PARTS), -(-(tenth + 1) * len(self) // _PARTS)
        return self.index_of(
            self._easiest_first[start + permuted(slot - start, end - start, seed=seed, epoch=-1 - tenth)]
        )

    def index_of(self, number: int) -> int:
        """Return the index of a prompt among all rows, those left out included."""
        return number if self._kept is None else self._kept[number]

    def rows_at(self, index: int) -> tuple[Rows, int]:
        """Return the file of a row, and its number there."""
        which = bisect.bisect_right(self._starts, index) - 1
        return self.files[which], index - self._starts[which]

    def read(self, rows: Rows, at: int) -> Row:
        """Return a row of a file.

        Raises:
            ConfigError: If the row is broken.
        """
        where, is_table = f"{rows.path}:{rows.line(at)}", not isinstance(rows, LineRows)
        return row_of(rows.record(at), where, self.part.names, is_table=is_table)

    def close(self) -> None:
        """Close the files."""
        for rows in self.files:
            rows.close()


def parts_of(prompts: AnyPrompts) -> list[Part]:
    """Return the sources of prompts."""
    section = prompts if isinstance(prompts, PromptsConfig) else PromptsConfig(path=os.fspath(prompts))
    field = "prompts.sources" if section.sources else "prompts.path"
    return [
        Part(
            source,
            section,
            field,
            ColumnNames(
                source.prompt_column or "prompt", source.answer_column, section.tools_column, section.pass_rate_column
            ),
        )
        for source in section.files
    ]


def nothing_wanted(part: Part) -> str:
    """Return the message about a source of which no prompt is wanted."""
    wanted = "length or pass rate" if any("pass_rate" in key for key in part.bounds) else "length"
    bounds = ", ".join(f"prompts.{key} = {value}" for key, value in part.bounds.items())
    return f"no prompt has the {wanted} that is wanted: {bounds}"


def prompts_at_most(prompts: PromptsConfig) -> int:
    """Return an upper bound of the prompts of all sources; 0 while the embedded file is still to be made."""
    counts = [rows_at_most(path) for part in parts_of(prompts) for path in files_of(part.source, field=part.field)]
    return sum(counts) if all(counts) else 0
