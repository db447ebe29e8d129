"""A small streaming engine over a transformers model: each row is a loop of its own, and rows end out of order.

Every token costs a forward pass over the whole row, so that no row depends on another one. A step advances the first
`room_rows` rows in hand by one token. A prompt that begins with one of the `slow_tokens` advances every `slowness`-th
step only: a straggler.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, WeightsMismatchError
from pipeline.rollout.generation.interface import Completed, EngineLoad, FinishReason, Request, Response, Span
from pipeline.rollout.generation.token_sampler import sample_tokens


def new_engine(actor: Any, *, directory: Path, device: Any, on_progress: Any) -> RowStream:
    """The factory that `rollout.engine` names."""
    return RowStream(actor, on_progress, room_rows=64)


@dataclasses.dataclass
class _Row:
    request: Request
    draws: torch.Generator
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    def response(self) -> Response:
        assert self.finish_reason is not None
        spans, start = [], 0
        for version, same in itertools.groupby(self.versions):
            end = start + len(list(same))
            spans.append(Span(version, start, end))
            start = end
        return Response(
            torch.tensor(self.tokens), self.finish_reason, tuple(spans), torch.tensor(self.log_probs, dtype=torch.float)
        )


class RowStream:
    """An `Engine` whose requests advance independently of each other."""

    deterministic = True

    def __init__(
        self,
        actor: Any,
        on_progress: Callable[[], None] = lambda: None,
        *,
        room_rows: int | None = None,
        slow_tokens: Sequence[int] = (),
        slowness: int = 10,
    ) -> None:
        self._model = copy.deepcopy(actor)
        self._on_progress = on_progress
        self._room_rows = room_rows
        self._slow_tokens = slow_tokens
        self._slowness = slowness
        self._rows: dict[int, list[_Row]] = {}
        self._steps = 0
        self._version = -1
        self.paused = self.closed = False

    @property
    def load(self) -> EngineLoad:
        rows = sum(row.finish_reason is None for rows in self._rows.values() for row in rows)
        running = rows if self._room_rows is None else min(rows, self._room_rows)
        return EngineLoad(running, rows - running, room_rows=self._room_rows)

    def submit(self, request: Request) -> None:
        if request.key in self._rows:
            raise FieldError(f"request {request.key} is in hand already")
        self._rows[request.key] = [
            _Row(request, _draws(request.sampling.seed, request.first_row + member))
            for member in range(request.group_size)
        ]

    @torch.no_grad()
    def step(self) -> list[Completed]:
        assert not self.paused and not self.closed
        self._steps += 1
        unfinished = [row for rows in self._rows.values() for row in rows if row.finish_reason is None]
        for row in unfinished[: self._room_rows]:
            if int(row.request.prompt_ids[0]) not in self._slow_tokens or self._steps % self._slowness == 0:
                self._advance(row)
        ended = [key for key, rows in self._rows.items() if all(row.finish_reason for row in rows)]
        return [Completed(key, tuple(row.response() for row in self._rows.pop(key))) for key in ended]

    def cancel(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._rows.pop(key, None)

    def update_weights(self, actor: Mapping[str, Tensor], version: int) -> None:
        assert self.paused
        missing, unknown = self._model.load_state_dict(dict(actor), strict=False)
        if missing or unknown:
            raise WeightsMismatchError(f"missing {missing}, unknown {unknown}")
        self._version = version

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self._rows.clear()
        self.closed = True

    def _advance(self, row: _Row) -> None:
        self._on_progress()
        sampling = row.request.sampling
        ids = torch.cat([row.request.prompt_ids, torch.tensor(row.tokens, dtype=torch.int64)])
        scaled = self._model(input_ids=ids[None]).logits[0, -1:].float() / sampling.temperature
        noise = torch.rand(1, generator=row.draws, dtype=torch.float64)
        token = int(
            sample_tokens(scaled, noise, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
            if sampling.do_sample
            else scaled.argmax(dim=-1)
        )
        row.tokens.append(token)
        row.log_probs.append(float(scaled[0].log_softmax(dim=-1)[token]))
        row.versions.append(self._version)
        strings = sampling.stop_strings
        if (
            token in sampling.eos_token_ids
            or any(tuple(row.tokens[-len(stop) :]) == stop for stop in sampling.stop_sequences)
            or (strings is not None and strings.completed_by(row.tokens) is not None)
        ):
            row.finish_reason = "stop"
        elif len(row.tokens) == row.request.max_new_tokens:
            row.finish_reason = "length"


def _draws(seed: int, row: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
