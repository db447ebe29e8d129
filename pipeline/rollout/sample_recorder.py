"""Samples of a rollout worker, for people to read: at intervals one group of a ticket, token by token.

Selection, decoding and writing take at most 1/200 of the worker's time: after a sample that took long the next one is
delayed. The policy's sampling does not depend on the recorder.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pipeline.config.identity import run_dir
from pipeline.config.rewards import part_labels, part_names, reward_functions, reward_models
from pipeline.config.schema import Config
from pipeline.experience.extent_format import Array
from pipeline.experience.ragged import RaggedRows
from pipeline.rollout.reward.row_rewards import PREFIX
from pipeline.rollout.roller import Rolled
from pipeline.rollout.worker import WorkerHook
from pipeline.runtime.messages import Ticket
from pipeline.telemetry.number_names import COLUMN, NumberNames, numbers_of
from pipeline.telemetry.samples import MOST_BYTES, Sample, SampledResponse, SampleWriter, folder_of

_MOST_SHARE: Final = 1 / 200
_MOST_RESPONSES: Final = 16
_MOST_TOKENS: Final = 1024
_MOST_PROMPT_TOKENS: Final = 2048
_MOST_ANSWER_CHARACTERS: Final = 4096
_REPEATS: Final = 8
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class RolloutSamples(WorkerHook):
    """Selects tickets, and records one group of each.

    Attributes:
        writer: Writes the samples.
        tokenizer: Decodes tokens.
        worker: The worker's number.
        group_size: Responses of a prompt (G).
        per_minute: Samples a minute, at most.
        parts: Label and weight of each part of a reward by its name, where it has several.
        clock: Monotonic seconds.
        only: Name of the function that alone is the reward; empty if there is none.
        has_turns: Whether the turns of an environment have rewards.
        stop_strings: Texts that end a response.
        numbers: Names of the further numbers of reward functions.
    """

    writer: SampleWriter
    tokenizer: Any
    _: dataclasses.KW_ONLY
    worker: int
    group_size: int
    per_minute: float
    clock: Callable[[], float]
    parts: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    only: str = ""
    has_turns: bool = False
    stop_strings: Sequence[str] = ()
    numbers: NumberNames | None = None

    def __post_init__(self) -> None:
        self._due_s = self.clock()
        self._rng = random.Random()
        self._is_failing = False

    @classmethod
    def of(
        cls, config: Config, tokenizer: Any, worker: int, clock: Callable[[], float] = time.monotonic
    ) -> RolloutSamples | None:
        """Return the recorder of a configuration; None if samples are off, or the folder cannot be written."""
        if not config.samples.per_minute:
            return None
        workers = max(1, config.rollout.workers or 1)
        functions, names, labels = reward_functions(config), part_names(config), part_labels(config)
        weights = [*(one.weight for one in functions), *(one.weight for one in reward_models(config))]
        try:
            writer = SampleWriter(folder_of(run_dir(config)), worker, MOST_BYTES // workers)
        except OSError as error:
            log.warning("no samples are kept: error=%s", error)
            return None
        return cls(
            writer,
            tokenizer,
            worker=worker,
            group_size=config.group_size,
            per_minute=config.samples.per_minute / workers,
            parts={name: (label, weight) for name, label, weight in zip(names, labels, weights, strict=False)},
            only=names[0] if functions and not labels else "",
            has_turns=config.rollout.environment is not None,
            numbers=NumberNames(run_dir(config)),
            clock=clock,
            stop_strings=config.rollout.stop,
        )

    def sealed(self, ticket: Ticket, rolled: Rolled, version: int) -> None:
        """Write one group of a ticket's experience, if a sample is due.

        Args:
            ticket: The ticket.
            rolled: The rollout, with its rows, the G responses of a prompt contiguous.
            version: Policy version of the weights.
        """
        began_s = self.clock()
        if began_s < self._due_s:
            return
        made, stopped = rolled.rows, rolled.stopped
        assert made is not None
        group = self._rng.randrange(len(made) // self.group_size)
        first, prompt = group * self.group_size, rolled.prompts[group]
        shown = range(min(self.group_size, _MOST_RESPONSES))
        sample = Sample(
            unix_s=round(time.time(), 3),
            worker=self.worker,
            ticket=ticket.ticket,
            position=prompt.position,
            policy_version=version,
            group_size=self.group_size,
            answer=""
            if prompt.answer is None
            else json.dumps(prompt.answer, ensure_ascii=False)[:_MOST_ANSWER_CHARACTERS],
            responses=[self._response(made, first + member, bool(stopped[first + member])) for member in shown],
            **self._prompt(made, first),
        )
        try:
            while not (is_kept := self.writer.write(sample)) and len(sample.responses) > 1:
                # Many workers have small files each.
                half = len(sample.responses) // 2
                sample = msgspec.structs.replace(sample, responses=sample.responses[:half])
            if not is_kept:
                log.warning("sample too large: ticket=%d", ticket.ticket)
            self._is_failing = False
        except OSError as error:
            # Once: a disk may be full for days.
            if not self._is_failing:
                log.warning("samples are not kept: ticket=%d error=%s", ticket.ticket, error)
            self._is_failing = True
        now_s = self.clock()
        self._due_s = now_s + max(60.0 / self.per_minute, (now_s - began_s) / _MOST_SHARE)

    def closing(self) -> None:
        """Close the file."""
        self.writer.close()

    def _prompt(self, rows: RaggedRows, row: int) -> dict[str, Any]:
        ids = rows.columns_of("sequences", row)[: -rows.counts[row]].tolist()
        text = "".join(
            token if count < _REPEATS else f"{token} \N{MULTIPLICATION SIGN}{count} "
            for token, count in self._runs(ids[-_MOST_PROMPT_TOKENS:])
        )
        return {"prompt": text, "prompt_tokens": len(ids)}

    def _runs(self, ids: list[int]) -> list[tuple[str, int]]:
        """Decode ids; return texts with repeats. A long repetition of one token, an image, is an entry of its own."""
        runs: list[tuple[str, int]] = []
        between: list[int] = []
        for token, same in itertools.groupby(ids):
            count = len(list(same))
            if count < _REPEATS:
                between += [token] * count
                continue
            runs += [(self._text(between), 1), (self._text([token]), count)]
            between = []
        return [*runs, (self._text(between), 1)]

    def _response(self, rows: RaggedRows, row: int, stopped: bool) -> SampledResponse:
        whole = rows.columns_of("sequences", row)[-rows.counts[row] :].tolist()
        ids = whole[:_MOST_TOKENS]

        def of(name: str) -> Array | None:
            return rows.columns_of(name, row)[:_MOST_TOKENS] if name in rows.columns else None

        def rounded(values: Array | None) -> list[float]:
            return [] if values is None else [round(value, 4) for value in values.tolist()]

        # Where the trainer computes them, the rows have the engine's alone.
        log_probs = of("action_log_probs" if "action_log_probs" in rows.columns else "behaviour_log_probs")
        base, mask = of("base_action_log_probs"), of("action_mask")
        observed = [] if mask is None else (mask == 0).tolist()
        advantages = rows.columns["advantages"]
        reward = float(rows.columns["info.score"][row])
        return SampledResponse(
            pieces=pieces(self._text, ids),
            log_probs=rounded(log_probs),
            log_ratios=[] if base is None or log_probs is None else rounded(log_probs - base),
            advantages=rounded(of("advantages") if rows.named["advantages"].columns else advantages[row : row + 1]),
            tokens=len(whole),
            stopped=stopped,
            reward=round(reward, 6),
            parts=self._parts(rows, row, reward),
            numbers=self._further(rows, row),
            observed=observed if any(observed) else [],
            stop=self._stop_string(whole) if stopped else "",
        )

    def _further(self, rows: RaggedRows, row: int) -> dict[str, float]:
        column = rows.columns.get(f"info.{COLUMN}")
        if column is None or self.numbers is None:
            return {}
        # A number may have any scale: as many digits as a float32 has.
        return {name: float(f"{value:.7g}") for name, value in numbers_of(column[row], self.numbers).items()}

    def _stop_string(self, ids: list[int]) -> str:
        # It is of the last tokens: no token has less than a byte of it, except for those without a text.
        most = max((len(string.encode()) for string in self.stop_strings), default=0)
        text = self._text(ids[-2 * most :]) if most else ""
        return next((string for string in self.stop_strings if string in text), "")

    def _parts(self, rows: RaggedRows, row: int, reward: float) -> dict[str, float]:
        if self.only:
            return {self.only: round(reward, 6)}
        found = {
            name: weight * float(rows.columns[f"info.{PREFIX}{label}"][row])
            for name, (label, weight) in self.parts.items()
        }
        if found and self.has_turns:
            found["environment"] = reward - sum(found.values())
        return {name: round(value, 6) for name, value in found.items()}

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def pieces(text_of: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """Return the text that each token adds; joined they are the text of all tokens.

    A character may take several tokens: the last one has the character, the others have empty pieces.
    """
    found: list[str] = []
    # Decoded with tokens before it, because a tokenizer may insert a space; with few, because decoding is slow.
    start = shown = 0
    for end in range(1, len(ids) + 1):
        before, now = text_of(ids[start:shown]), text_of(ids[start:end])
        if now.endswith(_UNFINISHED) and end < len(ids):
            found.append("")
            continue
        found.append(now[len(before) :])
        start, shown = shown, end
    return found
