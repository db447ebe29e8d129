"""Rows of one prompt in a pass that computes the prompt once: its keys and values serve all its responses.

Of G responses of R tokens to a prompt of P, a pass computes P + G (R - 1) tokens in place of G (P + R): no action
follows a response's last token. The gradient of a prompt's token is the sum over its rows. Log-probs, losses and
gradients are those of the padded batch except for rounding.

The rows of a prompt are found by its tokens, wherever they are in the batch. A model needs causal attention over whole
rows, by sdpa. The first pass of a model tests it: its states must be those of each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, FieldError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.flat_rows import FlatRows, Index, on_device, ranges, starts_of
from pipeline.models.inputs import accepted_keywords, eval_mode
from pipeline.models.position_limits import check_rows
from pipeline.models.prefix_attention import PrefixLayout
from pipeline.models.varlen_attention import problem_of_attention, uses_varlen_attention
from pipeline.models.vision_inputs import vision_backbone

log = logging.getLogger(__name__)

MOST_TOKENS: Final = 0.85
"""Largest share of the rows' tokens with which prompts are shared: the largest that was measured to be faster."""

_PROMPTS: Final = ((0, 1, 1, 0, 1), (1, 0, 0), (1, 0, 0, 1, 0))
_RESPONSES: Final = (((0, 0, 1, 1), (1, 0, 1), (1,)), ((0, 1, 1),), ((1, 1, 0), (0, 1)))
"""Rows of tokens that every model has: equal and different lengths of prompts, responses of one action and of more."""

_TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_16_BITS: Final = 0.05

_wanted: WeakKeyDictionary[nn.Module, bool | None] = WeakKeyDictionary()
_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PromptGroups:
    """The rows of a batch, those of one prompt side by side, and the tokens that their passes compute.

    Attributes:
        order: ``(B,)`` int64 on the host, the rows.
        groups: For each row, in that order, the number of its prompt.
        prompts: Tokens of each row's prompt: all before its first action.
        responses: Tokens of each row from there on that precede an action.
    """

    order: Index
    groups: list[int]
    prompts: list[int]
    responses: list[int]

    @classmethod
    def of(cls, rows: FlatRows) -> Self:
        """Return the groups of rows in the order of their prompts' lengths, then of their first rows."""
        of_row, _ = _prompts_of(rows)
        order = np.argsort(of_row, kind="stable")
        # No action follows a row's last token.
        responses = rows.lengths - rows.prompts - 1
        return cls(order, of_row[order].tolist(), rows.prompts[order].tolist(), responses[order].tolist())

    @property
    def saves(self) -> bool:
        """Whether passes that compute each prompt once have `MOST_TOKENS` of the rows' tokens at most."""
        once = sum(dict(zip(self.groups, self.prompts, strict=True)).values()) + sum(self.responses)
        return once <= MOST_TOKENS * (sum(self.prompts) + sum(self.responses))


@dataclass(frozen=True, slots=True)
class SharedRows:
    """B rows of U prompts, laid end to end: T tokens; N actions.

    Attributes:
        input_ids: ``(1, T)`` int64, in the order of `PrefixLayout`.
        position_ids: ``(1, T)`` int64, those of the tokens in their whole rows.
        before: ``(N,)`` int64, the index of the token before each action, actions in the order of the batch.
        layout: The places of prompts and responses.
        row_lengths: ``(B,)`` int64 on the host, tokens of each row.
    """

    input_ids: Tensor
    position_ids: Tensor
    before: Tensor
    layout: PrefixLayout
    row_lengths: Tensor

    @classmethod
    def of_flat(cls, rows: FlatRows) -> Self:
        """Return rows that end with their last action, each without it: no action follows it."""
        device = rows.tokens.device
        of_row, firsts = _prompts_of(rows)
        order = np.argsort(of_row, kind="stable")
        starts, prompts, responses = starts_of(rows.lengths), rows.prompts, rows.lengths - rows.prompts - 1
        of_prompts = np.split(responses[order], np.cumsum(np.bincount(of_row))[:-1])
        layout = PrefixLayout.of(prompts[firsts].tolist(), [each.tolist() for each in of_prompts], device)
        index = [ranges(starts[firsts], prompts[firsts]), ranges((starts + prompts)[order], responses[order])]
        zeros = np.zeros(len(firsts), np.int64)
        positions = [ranges(zeros, prompts[firsts]), ranges(prompts[order], responses[order])]
        # The index of the token before an action: the last of its prompt, or one of its response.
        prompt_ends = np.cumsum(prompts[firsts])
        response_starts = np.empty_like(responses)
        response_starts[order] = prompt_ends[-1] + starts_of(responses[order])
        place = rows.action - 1 - on_device(starts + prompts, device)[rows.row]
        in_prompt = on_device(prompt_ends[of_row], device)[rows.row] + place
        in_response = on_device(response_starts, device)[rows.row] + place
        return cls(
            input_ids=rows.tokens[on_device(np.concatenate(index), device)].unsqueeze(0),
            position_ids=on_device(np.concatenate(positions), device).unsqueeze(0),
            before=torch.where(place < 0, in_prompt, in_response),
            layout=layout,
            row_lengths=torch.from_numpy(prompts + responses),
        )

    def keywords(self, model: object) -> dict[str, Any]:
        """Return a model's keywords besides the ids; transformers passes the last one to its attention."""
        return {
            # Four dimensions: passed on as it is, so that no mask of T x T is made.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            "position_ids": self.position_ids,
            "use_cache": False,
            "prefix_layout": self.layout,
        }

    def check(self, model: nn.Module, field: str) -> None:
        """Refuse a model that does not compute a row as it does alone.

        Args:
            model: The module that is called with the keywords.
            field: The field of its output that is read.

        Raises:
            FieldError: If it does not.
        """
        check_rows(model, self.row_lengths)
        if model not in _shares:
            device = self.input_ids.device
            _shares[model] = uses_varlen_attention(model) and _computes_rows_alone(model, field, device)
        if not _shares[model]:
            raise FieldError(
                f"{type(model).__name__} does not compute a response after a shared prompt as in a row alone"
            )


def prepare_shared_prefix(models: Sequence[nn.Module], device: torch.device, wanted: bool | None, *, key: str) -> None:
    """Let passes of models compute a prompt once, all of these models or none, and log which.

    Args:
        models: Causal language models, changed in place, and critics.
        device: Their device.
        wanted: Whether they do; None for: on a CPU, for batches with `PromptGroups.saves`, if all of them can.
        key: The configuration key, for the error.

    Raises:
        ConfigError: If it is wanted and a model cannot.
    """
    if wanted is False or (wanted is None and device.type != "cpu"):
        return

    def check(backbone: nn.Module) -> None:
        _example(device)[1].check(backbone, "last_hidden_state")

    for model in models:
        if vision_backbone(model) is None:
            problem = problem_of_attention(model, check)
        else:
            problem = "only a model of text alone can"
        if problem is not None:
            name = type(model).__name__
            if wanted:
                raise ConfigError(f"{key}: a {name} cannot share prompts: {problem}")
            log.info("prompts are computed once a row: model=%s reason=%s", name, problem)
            return
    for model in models:
        _wanted[model] = wanted
        log.info("prompts are computed once for all their responses: model=%s", type(model).__name__)


def may_share_prompts(model: object) -> bool:
    """Return whether a model's passes compute a prompt once for the batches of `groups_to_share`."""
    return isinstance(model, nn.Module) and model in _wanted


def groups_to_share(model: nn.Module, rows: FlatRows) -> PromptGroups | None:
    """Return the groups of rows if a model's passes are to compute each prompt once; None if they are not.

    Args:
        model: One with `may_share_prompts`.
        rows: Rows that end with their last action; with a row without an action prompts are not shared.
    """
    if not len(rows) or not rows.counts.all():
        return None
    groups = PromptGroups.of(rows)
    repeats = len(set(groups.groups)) < len(groups.groups)
    return groups if repeats and (_wanted[model] or groups.saves) else None


def _prompts_of(rows: FlatRows) -> tuple[Index, Index]:
    """Return the number of each row's prompt, ``(B,)``, and the first row of each prompt; shorter prompts first."""
    tokens, starts = rows.tokens.cpu().numpy(), starts_of(rows.lengths)
    found: dict[bytes, int] = {}
    first_of = [
        found.setdefault(tokens[start : start + length].tobytes(), row)
        for row, (start, length) in enumerate(zip(starts, rows.prompts, strict=True))
    ]
    firsts = np.array(sorted(found.values(), key=lambda row: (rows.prompts[row], row)))
    numbers = {int(row): number for number, row in enumerate(firsts)}
    return np.array([numbers[row] for row in first_of]), firsts


def _example(device: torch.device) -> tuple[list[tuple[Tensor, int]], SharedRows]:
    """Return rows of tokens with their numbers of actions, and the same rows with shared prompts."""
    rows = [(p + r, len(r)) for p, responses in zip(_PROMPTS, _RESPONSES, strict=True) for r in responses]
    alone = [(torch.tensor(row, device=device), count) for row, count in rows]
    lengths, counts = (np.array(sizes) for sizes in zip(*((len(row), count) for row, count in rows), strict=True))
    actions, of_row = ranges(np.cumsum(lengths) - counts, counts), np.repeat(np.arange(len(rows)), counts)
    return alone, SharedRows.of_flat(FlatRows.of(torch.cat([row for row, _ in alone]), lengths, actions, of_row))


@without_cudnn_attention()
@torch.no_grad()
def _computes_rows_alone(model: nn.Module, field: str, device: torch.device) -> bool:
    """Return whether the outputs before the actions of rows with shared prompts are those of each row alone."""
    alone, shared = _example(device)
    # No dropout, which would differ between two calls.
    with eval_mode(model):
        keywords = accepted_keywords(model, shared.keywords(model))
        found = getattr(model(input_ids=shared.input_ids, **keywords), field)[0, shared.before]
        expected = []
        for row, count in alone:
            more = accepted_keywords(model, {"use_cache": False})
            output = model(input_ids=row.unsqueeze(0), attention_mask=torch.ones_like(row).unsqueeze(0), **more)
            expected.append(getattr(output, field)[0, -count - 1 : -1])
    wanted = torch.cat(expected)
    tolerance = _TOLERANCE.get(wanted.dtype, _TOLERANCE_16_BITS) * max(1.0, float(wanted.abs().max()))
    return bool(((found - wanted).abs() <= tolerance).all())
