"""Rows of one prompt in a pass that computes the prompt once: its keys and values serve all its responses.

Of G responses of R tokens to a prompt of P, a pass computes P + G (R - 1) tokens in place of G (P + R): no action
follows a response's last token. The gradient of a prompt's token is the sum over its rows. Log-probs, losses and
gradients are those of the padded batch except for rounding.

The rows of a prompt are found by its tokens, wherever they are in the batch. A model needs causal attention over whole
rows, by sdpa. The first pass of a model tests it: its states must be those of each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, FieldError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.inputs import accepted_keywords, action_columns
from pipeline.models.position_limits import check_rows
from pipeline.models.prefix_attention import PrefixLayout
from pipeline.models.varlen_attention import problem_of_attention, uses_varlen_attention

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
        order: ``(B,)`` int64, the rows.
        groups: For each row, in that order, the number of its prompt.
        prompts: Tokens of each row's prompt: all before its first action.
        responses: Tokens of each row from there on that precede an action.
    """

    order: Tensor
    groups: list[int]
    prompts: list[int]
    responses: list[int]

    @classmethod
    def of(cls, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Self:
        """Return the groups of a padded batch in the order of their prompts' lengths, then of their first rows.

        Arguments and errors are those of `pipeline.models.inputs.action_columns`.
        """
        columns = _Columns.of(sequences, attention_mask, action_mask)
        order = columns.of_row.argsort(stable=True)
        return cls(
            order=order,
            groups=columns.of_row[order].tolist(),
            prompts=columns.is_prompt.sum(dim=1)[order].tolist(),
            responses=columns.is_response.sum(dim=1)[order].tolist(),
        )

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
        row_lengths: ``(B,)`` int64, tokens of each row.
    """

    input_ids: Tensor
    position_ids: Tensor
    before: Tensor
    layout: PrefixLayout
    row_lengths: Tensor

    @classmethod
    def of_padded(cls, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Self:
        """Return the rows of a padded batch; arguments and errors are those of `PromptGroups.of`."""
        columns = _Columns.of(sequences, attention_mask, action_mask)
        is_prompt, is_response, of_row, firsts = (
            columns.is_prompt, columns.is_response, columns.of_row, columns.firsts
        )  # fmt: skip
        rows = of_row.argsort(stable=True)
        prompt_lengths, response_lengths = is_prompt.sum(dim=1), is_response.sum(dim=1)
        counts: list[int] = torch.bincount(of_row).tolist()
        lengths = [part.tolist() for part in response_lengths[rows].split(counts)]
        layout = PrefixLayout.of(prompt_lengths[firsts].tolist(), lengths, sequences.device)
        positions = (is_prompt | is_response).long().cumsum(dim=1) - 1
        chosen = [(firsts, is_prompt[firsts]), (rows, is_response[rows])]
        # The index of a token: the start of its prompt or response in the pass, and its position there.
        prompt_starts = layout.prompt_starts.long()
        ends = prompt_starts[-1] + response_lengths[rows].cumsum(dim=0)
        response_starts = torch.empty_like(ends).index_copy(0, rows, ends - response_lengths[rows])
        indices = positions + torch.where(
            is_prompt, prompt_starts[of_row].unsqueeze(1), (response_starts - prompt_lengths).unsqueeze(1)
        )
        return cls(
            input_ids=torch.cat([sequences[index][real] for index, real in chosen]).unsqueeze(0),
            position_ids=torch.cat([positions[index][real] for index, real in chosen]).unsqueeze(0),
            before=indices[columns.predicts],
            layout=layout,
            row_lengths=prompt_lengths + response_lengths,
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


def prepare_shared_prefix(
    models: Sequence[nn.Module],
    device: torch.device,
    wanted: bool | None,
    *,
    key: str,
    inside: Callable[[nn.Module, Callable[[], None]], None] = lambda model, call: call(),
) -> None:
    """Let passes of models compute a prompt once, all of these models or none, and log which.

    Args:
        models: Causal language models, changed in place, and critics.
        device: Their device.
        wanted: Whether they do; None for: on a CPU, for batches with `PromptGroups.saves`, if all of them can.
        key: The configuration key, for the error.
        inside: Calls a function in which a model's modules can be called.

    Raises:
        ConfigError: If it is wanted and a model cannot.
    """
    if wanted is False or (wanted is None and device.type != "cpu"):
        return

    def check(backbone: nn.Module) -> None:
        _example(device)[1].check(backbone, "last_hidden_state")

    for model in models:
        if (problem := problem_of_attention(model, check, inside=inside)) is not None:
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


def groups_to_share(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor
) -> PromptGroups | None:
    """Return the groups of a batch if a model's passes are to compute each prompt once; None if they are not.

    Args:
        model: One with `may_share_prompts`.
        sequences: As for `PromptGroups.of`.
        attention_mask: As for `PromptGroups.of`.
        action_mask: As for `PromptGroups.of`; with a row without an action prompts are not shared.
    """
    if not len(sequences) or not bool(action_mask.any(dim=1).all()):
        return None
    groups = PromptGroups.of(sequences, attention_mask, action_mask)
    repeats = len(set(groups.groups)) < len(groups.groups)
    return groups if repeats and (_wanted[model] or groups.saves) else None


@dataclass(frozen=True, slots=True)
class _Columns:
    """The prompts of a padded batch.

    Attributes:
        is_prompt: ``(B, S)`` bool, the real tokens before a row's first action.
        is_response: ``(B, S)`` bool, the later ones that precede an action.
        predicts: ``(B, S)`` bool, the tokens whose next token is an action.
        of_row: ``(B,)`` int64, the number of each row's prompt; shorter prompts first.
        firsts: ``(U,)`` int64, the first row of each prompt.
    """

    is_prompt: Tensor
    is_response: Tensor
    predicts: Tensor
    of_row: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Self:
        is_action, real, predicts = action_columns(sequences, attention_mask, action_mask)
        is_prompt = real & (is_action.cumsum(dim=1) == 0)
        # Prompts from column 0 on, their length first, so that shorter ones have the smaller numbers.
        lengths, columns = is_prompt.sum(dim=1, keepdim=True), torch.arange(sequences.shape[1], device=sequences.device)
        source = (is_prompt.long().argmax(dim=1, keepdim=True) + columns).clamp(max=sequences.shape[1] - 1)
        prompts = sequences.gather(1, source).masked_fill(columns >= lengths, -1)[:, : int(lengths.max())]
        _, of_row = torch.unique(torch.cat([lengths, prompts], dim=1), dim=0, return_inverse=True)
        rows = torch.arange(len(of_row), device=of_row.device)
        firsts = torch.full((int(of_row.max()) + 1,), len(rows), device=rows.device)
        firsts = firsts.scatter_reduce(0, of_row, rows, "amin")
        return cls(is_prompt, real & ~is_prompt, predicts, of_row, firsts)


def _example(device: torch.device) -> tuple[list[tuple[Tensor, int]], SharedRows]:
    """Return rows of tokens with their numbers of actions, and the same rows with shared prompts."""
    rows = [(p + r, len(r)) for p, responses in zip(_PROMPTS, _RESPONSES, strict=True) for r in responses]
    width, most = max(len(row) for row, _ in rows), max(actions for _, actions in rows)
    padding = [width - len(row) for row, _ in rows]
    ids = torch.tensor([[0] * pad + list(row) for pad, (row, _) in zip(padding, rows, strict=True)], device=device)
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=device)
    actions = torch.tensor([[column >= most - count for column in range(most)] for _, count in rows], device=device)
    alone = [(torch.tensor(row, device=device), count) for row, count in rows]
    return alone, SharedRows.of_padded(ids, mask, actions)


@without_cudnn_attention()
@torch.no_grad()
def _computes_rows_alone(model: nn.Module, field: str, device: torch.device) -> bool:
    """Return whether the outputs before the actions of rows with shared prompts are those of each row alone."""
    alone, shared = _example(device)
    # No dropout, which would differ between two calls.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        keywords = accepted_keywords(model, shared.keywords(model))
        found = getattr(model(input_ids=shared.input_ids, **keywords), field)[0, shared.before]
        expected = []
        for row, count in alone:
            more = accepted_keywords(model, {"use_cache": False})
            output = model(input_ids=row.unsqueeze(0), attention_mask=torch.ones_like(row).unsqueeze(0), **more)
            expected.append(getattr(output, field)[0, -count - 1 : -1])
    finally:
        for module in training:
            module.training = True
    wanted = torch.cat(expected)
    tolerance = _TOLERANCE.get(wanted.dtype, _TOLERANCE_16_BITS) * max(1.0, float(wanted.abs().max()))
    return bool(((found - wanted).abs() <= tolerance).all())
