"""The inputs of a loss from rows of experience: checked, on one device, one number an action, end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.flat_rows import FlatRows, Index, on_device, ranges
from pipeline.models.pass_size import PassSize, tokens_once
from pipeline.models.shared_prefix import groups_to_share, may_share_prompts


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B rows with N actions that count; the columns have one number of each, row after row.

    Attributes:
        flat: Tokens of the rows up to their last actions, and the places of the actions.
        log_probs: ``(N,)`` float32, of the policy that sampled; None until they are computed.
        advantages: ``(N,)`` float32.
        base_log_probs: ``(N,)`` float32, of the reference.
        values: ``(N,)`` float32, of the critic at the rollout.
        returns: ``(N,)`` float32, the targets of the critic.
        behaviour_log_probs: ``(N,)`` float32, of the engine that sampled; None if it is the trainer's own function.
        entropies: ``(N,)`` float32, of the policy that sampled, if the rows have them.
        importance_weights: ``(N,)`` float32, factors of the policy loss; None for 1.
        vision: Images and videos of the rows.
        tokens_once: Tokens of a pass over these rows that computes each prompt once; None for one over whole rows.
    """

    flat: FlatRows
    log_probs: Tensor | None
    advantages: Tensor
    base_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    behaviour_log_probs: Tensor | None = None
    entropies: Tensor | None = None
    importance_weights: Tensor | None = None
    vision: VisionRows | None = None
    tokens_once: int | None = None

    @classmethod
    def of(
        cls,
        rows: RaggedRows,
        algorithm: Literal["ppo", "grpo"],
        device: torch.device,
        *,
        needs_log_probs: bool = True,
        needs_reference: bool = False,
    ) -> Self:
        """Return the inputs of a loss from all rows of a batch.

        Raises:
            FieldError: If a field is missing, marks actions in the padding, or if pixels and grids do not account for
                each other.
            ShapeError: If a field has not one number an action, or the first token of a row is an action.
        """
        rows = rows.on(device)
        tensors = rows.moved
        assert tensors is not None
        for name in ("attention_mask", "action_mask"):
            _check_present(rows, name)
        flat, chosen = _flat_of(rows, tensors["sequences"])

        def column(name: str, *, is_needed: bool = True) -> Tensor | None:
            if name not in rows.named and not is_needed:
                return None
            _check_present(rows, name)
            values = tensors[name]
            if rows.named[name].columns == "A":
                return values if chosen is None else values[on_device(chosen, device)]
            if name == "advantages" and values.numel() == len(rows):
                return values.reshape(-1)[flat.row]
            raise ShapeError(f"{name} of shape {tuple(values.shape)}: one number an action is needed")

        def needed(name: str) -> Tensor:
            found = column(name)
            assert found is not None
            return found

        advantages = needed("advantages")
        values = returns = None
        if algorithm == "ppo":
            values = needed("values")
            returns = column("returns", is_needed=False)
            returns = advantages + values if returns is None else returns
        return cls(
            flat=flat,
            log_probs=column("action_log_probs", is_needed=needs_log_probs),
            advantages=advantages,
            base_log_probs=column("base_action_log_probs", is_needed=needs_reference),
            values=values,
            returns=returns,
            behaviour_log_probs=column("behaviour_log_probs", is_needed=False),
            entropies=column("action_entropy", is_needed=False),
            vision=rows.vision if rows.moved_vision is None else rows.moved_vision,
        )

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.flat)

    @property
    def counts(self) -> Tensor:
        """``(B,)`` int64, the actions of each row."""
        return on_device(self.flat.counts, self.flat.tokens.device)

    def rows(self, index: Index) -> Self:
        """Return the rows of an index, ``(rows,)`` int64 on the host."""
        if len(index) == len(self) and bool((index == np.arange(len(self))).all()):
            return self
        flat, actions = self.flat.rows(index)
        chosen = on_device(actions, self.flat.tokens.device)
        vision = None if self.vision is None else self.vision.rows(index.tolist())
        return replace(self.mapped(lambda column: column[chosen]), flat=flat, vision=vision)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with each of its columns changed."""
        columns: dict[str, Any] = {
            field.name: change(column)
            for field in fields(self)
            if isinstance(column := getattr(self, field.name), Tensor)
        }
        return replace(self, **columns)

    def to_score(self) -> Self:
        """Return the rows for passes without a loss; `log_probs` are the numbers of the actions, ``(N,)`` int64.

        So an action of a micro-batch knows its number in the batch.
        """
        numbers = torch.arange(len(self.flat.action), device=self.flat.tokens.device)
        return type(self)(self.flat, numbers, numbers, vision=self.vision)

    def micro_batches(self, size: PassSize, model: nn.Module | None = None) -> Iterator[Self]:
        """Yield the rows that have actions in parts of a size, rows of similar length together.

        If the passes of a model share prompts, and these rows have some to share, the rows of one prompt are together
        instead, and the part says so.
        """
        batch = self.rows(np.flatnonzero(self.flat.counts))
        has_images = self.vision is not None and self.vision.tensors_exist
        if model is not None and may_share_prompts(model) and not has_images:
            groups = groups_to_share(model, batch.flat)
            if groups is not None:
                sizes = groups.prompts, groups.responses, groups.groups
                for part in size.parts(*sizes):
                    yield replace(batch.rows(groups.order[part]), tokens_once=tokens_once(part, *sizes))
                return
        order = np.argsort(batch.flat.lengths, kind="stable")
        for part in size.parts(batch.flat.lengths[order].tolist(), [0] * len(order)):
            yield batch.rows(order[part])


def trained_rows(
    rows: RaggedRows, algorithm: Literal["ppo", "grpo"], *, skip_cut: bool = False, equal_groups: bool = False
) -> Index:
    """Return the rows that are trained: with GRPO, only those of groups whose scores differ.

    Args:
        rows: The rows.
        algorithm: The algorithm.
        skip_cut: Whether rows whose response was cut at its maximum length are left out too.
        equal_groups: Whether rows of groups with equal scores stay: they count in the divisors, their KL and entropy in
            the loss.

    Raises:
        FieldError: If rows do not say whether their responses were cut.
    """
    kept = np.ones(len(rows), np.bool_)
    if algorithm == "grpo" and not equal_groups and (mixed := rows.columns.get("info.group_mixed")) is not None:
        kept &= mixed.astype(np.bool_)
    if skip_cut:
        cut = rows.columns.get("info.cut")
        if cut is None:
            raise FieldError("info['cut'] is missing: rows do not say whether their responses were cut")
        kept &= ~cut.astype(np.bool_)
    return np.flatnonzero(kept)


def _flat_of(rows: RaggedRows, tokens: Tensor) -> tuple[FlatRows, Index | None]:
    """Return the tokens of rows up to their last actions, and the indices of the actions that count; None for all.

    Of rows with images, whose pixels belong to tokens, all tokens stay.
    """
    lengths, counts = np.array(rows.lengths), np.array(rows.counts)
    row, action = np.repeat(np.arange(len(rows)), counts), ranges(np.cumsum(lengths) - counts, counts)
    taken, real = rows.columns.get("action_mask"), rows.columns.get("attention_mask")
    chosen = None if taken is None else np.flatnonzero(taken)
    if chosen is not None:
        row, action = row[chosen], action[chosen]
    kept = np.ones(int(lengths.sum()), np.bool_) if real is None else real != 0
    if not kept[action].all():
        raise FieldError("action_mask marks columns that attention_mask says are padding")
    of_token = np.repeat(np.arange(len(rows)), lengths)
    if rows.vision is None:
        last = np.full(len(rows), -1)
        np.maximum.at(last, row, action)
        kept &= np.arange(len(kept)) <= last[of_token]
    if not kept.all():
        lengths = np.bincount(of_token[kept], minlength=len(rows))
        action = np.cumsum(kept)[action] - 1
        # Their numbers: a mask on a card would make the host wait for the number of ones in it.
        tokens = tokens[on_device(np.flatnonzero(kept), tokens.device)]
    return FlatRows.of(tokens, lengths, action, row), chosen


def _check_present(rows: RaggedRows, name: str) -> None:
    if name not in rows.named:
        raise FieldError(f"{name} is missing")
