"""A user's engine, written against the interface alone: slow, plain, with its own weights.

Every token costs a forward pass over the whole row, nothing is cached or batched. It draws as the cached loop does, so
that both make the same responses. It computes with a copy of the model, which is stale without `update_weights`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.rollout.generation.interface import Responses
from pipeline.rollout.generation.stops import response_lengths
from pipeline.rollout.generation.token_sampler import sample_tokens


def new_engine(actor: Any, *, directory: Path, device: Any, on_progress: Any) -> WholeRows:
    """The factory that `rollout.engine` names."""
    return WholeRows(actor, on_progress)


class WholeRows:
    """One row at a time, one token at a time, all of the row each time."""

    def __init__(self, actor: Any, on_progress: Any = lambda: None) -> None:
        self._model = copy.deepcopy(actor)
        self._on_progress = on_progress
        self.paused = False
        self.updates = 0

    @torch.no_grad()
    def generate(
        self, input_ids: Any, attention_mask: Any, sampling: Any, *, group_size: int = 1, batch_rows: int | None = None
    ) -> Responses:
        """Sample; nothing here looks at `batch_rows`, for one row is the least there is."""
        assert not self.paused
        num_actions = sampling.max_length - input_ids.shape[1]
        draws = np.random.Generator(np.random.Philox(key=sampling.seed))
        noise = torch.from_numpy(draws.random((len(input_ids) * group_size, num_actions)))
        rows = input_ids.repeat_interleave(group_size, dim=0)
        tokens = torch.full(noise.shape, sampling.pad_token_id)
        for index, (row, mask) in enumerate(
            zip(rows, attention_mask.repeat_interleave(group_size, dim=0), strict=True)
        ):
            ids = row[mask != 0]
            for step in range(num_actions):
                self._on_progress()
                scaled = self._model(input_ids=ids[None]).logits[0, -1:].float() / sampling.temperature
                token = (
                    sample_tokens(
                        scaled,
                        noise[index, step, None],
                        top_k=sampling.top_k,
                        top_p=sampling.top_p,
                        min_p=sampling.min_p,
                    )
                    if sampling.do_sample
                    else scaled.argmax(dim=-1)
                )
                tokens[index, step] = token
                ids = torch.cat([ids, token])
                if int(token) in sampling.eos_token_ids:
                    break
        lengths = response_lengths(tokens, sampling.stop_sequences, sampling.eos_token_ids, sampling.pad_token_id)
        # Tokens after a stop sequence.
        tokens[torch.arange(num_actions) >= lengths.unsqueeze(1)] = sampling.pad_token_id
        return Responses(torch.cat([rows, tokens], dim=1), lengths)

    def update_weights(self, actor: Any) -> None:
        """Copy them."""
        assert self.paused
        self._model.load_state_dict(actor)
        self.updates += 1
        Path("whole_rows.updates").write_text(str(self.updates))

    def pause(self) -> None:
        """Only one thread is here: nothing is under way."""
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self.paused = False
