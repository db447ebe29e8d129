"""The inputs of a loss from a batch of experience: checked, on one device, without groups of equal scores, trimmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.types import TOKEN_FIELDS, Experience, ExperienceVL
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.pass_size import PassSize, tokens_once
from pipeline.models.shared_prefix import groups_to_share, may_share_prompts


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Rows of one batch.

    Attributes:
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)`` int64.
        action_mask: ``(B, A)`` bool; action column j is sequence column S - A + j, as everywhere.
        log_probs: ``(B, A)`` float32, of the policy that sampled.
        advantages: ``(B, A)`` float32.
        base_log_probs: ``(B, A)`` float32, of the reference.
        values: ``(B, A)`` float32, of the critic at the rollout.
        returns: ``(B, A)`` float32, the targets of the critic.
        behaviour_log_probs: ``(B, A)`` float32, of the engine that sampled; None if it is the trainer's own function.
        importance_weights: ``(B, A)`` float32, factors of the policy loss; None for 1.
        vision: Images and videos of the rows; copied to the device only when a micro-batch needs them.
        tokens_once: Tokens of a pass over these rows that computes each prompt once; None for one over whole rows.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    base_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    behaviour_log_probs: Tensor | None = None
    importance_weights: Tensor | None = None
    vision: VisionRows | None = None
    tokens_once: int | None = None

    @classmethod
    def of(
        cls,
        experience: Experience,
        algorithm: Literal["ppo", "grpo"],
        device: torch.device,
        *,
        needs_reference: bool,
        skip_cut: bool = False,
        equal_groups: bool = False,
    ) -> Self:
        """Return the inputs of a loss from an experience; with GRPO, only of groups whose scores differ.

        With `skip_cut` rows whose response was cut at its maximum length are left out too; with `equal_groups` rows of
        groups with equal scores stay: they count in the divisors, and their KL and entropy in the loss.

        Raises:
            FieldError: If a field is missing, is a list (a packed batch), marks actions in the padding, or if pixels
                and grids do not account for each other.
            ShapeError: If fields disagree in shape.
        """
        sequences = _tensor(experience, "sequences", device)
        attention_mask = _tensor(experience, "attention_mask", device, like=sequences)
        action_mask = _tensor(experience, "action_mask", device).bool()
        _check_mask(attention_mask, action_mask)
        advantages = _tensor(experience, "advantages", device)
        if advantages.dim() == 1 or advantages.shape[1] == 1:
            advantages = advantages.reshape(-1, 1).expand(-1, action_mask.shape[1])
        if advantages.shape != action_mask.shape:
            raise ShapeError(f"advantages {tuple(advantages.shape)} for actions {tuple(action_mask.shape)}")
        base_log_probs = values = returns = None
        if needs_reference:
            base_log_probs = _tensor(experience, "base_action_log_probs", device, like=action_mask)
        if algorithm == "ppo":
            values = _tensor(experience, "values", device, like=action_mask)
            returns = advantages + values
            if experience.returns is not None:
                returns = _tensor(experience, "returns", device, like=action_mask)
        batch = cls(
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=action_mask,
            log_probs=_tensor(experience, "action_log_probs", device, like=action_mask),
            advantages=advantages,
            base_log_probs=base_log_probs,
            values=values,
            returns=returns,
            behaviour_log_probs=None
            if experience.behaviour_log_probs is None
            else _tensor(experience, "behaviour_log_probs", device, like=action_mask),
            vision=VisionRows.of(experience) if isinstance(experience, ExperienceVL) else None,
        )
        info = experience.info or {}
        mixed = info.get("group_mixed") if algorithm == "grpo" and not equal_groups else None
        kept = None if mixed is None else mixed.to(device).bool()
        if skip_cut:
            whole = ~_cut(info, device)
            kept = whole if kept is None else kept & whole
        return batch if kept is None else batch.rows(kept.nonzero().squeeze(1))

    def rows(self, index: Tensor) -> Self:
        """Return the rows of an index, ``(rows,)`` int64."""
        rows = self._mapped(lambda column: column[index], lambda column: column[index])
        return rows if self.vision is None else replace(rows, vision=self.vision.rows(index))

    @classmethod
    def to_score(cls, experience: Experience, device: torch.device) -> Self:
        """Return all rows of an experience for passes without a loss; `log_probs` are the indices of the actions.

        The indices are ``(B, A)`` int64, row by row: an element of a micro-batch knows its own.

        Raises:
            FieldError: As `of`.
            ShapeError: As `of`.
        """
        sequences = _tensor(experience, "sequences", device)
        attention_mask = _tensor(experience, "attention_mask", device, like=sequences)
        action_mask = _tensor(experience, "action_mask", device).bool()
        _check_mask(attention_mask, action_mask)
        indices = torch.arange(action_mask.numel(), device=device).reshape(action_mask.shape)
        vision = VisionRows.of(experience) if isinstance(experience, ExperienceVL) else None
        return cls(sequences, attention_mask, action_mask, indices, indices, None, None, None, vision=vision)

    def micro_batches(self, size: PassSize, width_multiple: int = 1, model: nn.Module | None = None) -> Iterator[Self]:
        """Yield the rows in parts of a size, rows of similar length together, without common padding.

        If the passes of a model share prompts, and these rows have some to share, the rows of one prompt are together
        instead, and the part says so.

        A part has neither the columns that are padding in all its rows nor the columns after its last action. A part
        without any action is left out. Its width is rounded up to a multiple, by padding on the left. With a bound of
        padding, and if they are packed, the rows of a part end together, at their last actions: their widths are then
        their lengths.
        """
        shared = self._sharing_prompts(size, model)
        if shared is not None:
            yield from shared
            return
        batch = self._ending_together() if size.packed or size.most_padding is not None else self
        if not len(batch.sequences):
            return
        order = batch.attention_mask.sum(dim=1).argsort(stable=True)
        lefts, rights = batch._spans(order)
        for columns in size.parts(lefts, rights):
            part = batch.rows(order[columns])
            if part.action_mask.any():
                yield part._trimmed(width_multiple)

    def _sharing_prompts(self, size: PassSize, model: nn.Module | None) -> Iterator[Self] | None:
        """Return parts of rows whose prompts are computed once; None if a model's passes do not, or save too little."""
        if model is None or not may_share_prompts(model) or (self.vision is not None and self.vision.tensors_exist):
            return None
        batch = self.rows(self.action_mask.any(dim=1).nonzero().squeeze(1))
        groups = groups_to_share(model, batch.sequences, batch.attention_mask, batch.action_mask)
        if groups is None:
            return None
        tokens = groups.prompts, groups.responses, groups.groups
        return (
            replace(batch.rows(groups.order[part])._trimmed(1), tokens_once=tokens_once(part, *tokens))
            for part in size.parts(*tokens)
        )

    def _ending_together(self) -> Self:
        """Return the rows that have actions, moved to the right until the last action of each is in the last column.

        The tokens after a row's last action are left out: no action depends on them.
        """
        rows = self.rows(self.action_mask.any(dim=1).nonzero().squeeze(1))
        # The columns after the last action: their number is the index of the first action from the right.
        shift = rows.action_mask.flip(1).long().argmax(dim=1, keepdim=True)

        def moved(column: Tensor) -> Tensor:
            source = torch.arange(column.shape[1], device=column.device) - shift
            return column.gather(1, source.clamp(min=0)).masked_fill(source < 0, 0)

        return rows._mapped(moved, moved)

    def _spans(self, order: Tensor) -> tuple[list[int], list[int]]:
        """Return each row's columns before the first action column, padding left out, and those up to its last action.

        The first number is negative for a row whose first token is to the right of that column.
        """
        mask, actions = self.attention_mask[order] != 0, self.action_mask[order]
        before = self.sequences.shape[1] - actions.shape[1]
        columns = torch.arange(1, actions.shape[1] + 1, device=actions.device)
        firsts = mask.long().argmax(dim=1)
        return (before - firsts).tolist(), (actions * columns).amax(dim=1).tolist()

    def _trimmed(self, width_multiple: int) -> Self:
        actions = self.action_mask.any(dim=0).nonzero()
        first, end = int(actions[0]), int(actions[-1]) + 1
        prompt_columns = self.sequences.shape[1] - self.action_mask.shape[1]
        first_token = int(self.attention_mask.any(dim=0).nonzero()[0])
        # The column before the first action stays in any case: its logits are the first action's distribution.
        start = min(first_token, prompt_columns + first - 1)
        padding = -(prompt_columns + end - start) % width_multiple
        return self._mapped(
            lambda column: functional.pad(column[:, start : prompt_columns + end], (padding, 0)),
            lambda column: column[:, first:end],
        )

    def _mapped(self, by_token: Callable[[Tensor], Tensor], by_action: Callable[[Tensor], Tensor]) -> Self:
        def mapped(name: str) -> Any:
            column = getattr(self, name)
            if name in ("vision", "tokens_once"):
                return column
            return None if column is None else (by_token if name in TOKEN_FIELDS else by_action)(column)

        return type(self)(**{field.name: mapped(field.name) for field in fields(self)})


def _tensor(experience: Experience, name: str, device: torch.device, *, like: Tensor | None = None) -> Tensor:
    value = getattr(experience, name)
    if not isinstance(value, Tensor):
        kind = "missing" if value is None else f"a {type(value).__name__}, a packed batch is not trained on"
        raise FieldError(f"{name} is {kind}")
    if like is not None and value.shape != like.shape:
        raise ShapeError(f"{name} of shape {tuple(value.shape)} where {tuple(like.shape)} is needed")
    return value.to(device)


def _cut(info: dict[str, Any], device: torch.device) -> Tensor:
    cut = info.get("cut")
    if not isinstance(cut, Tensor):
        raise FieldError("info['cut'] is missing: rows do not say whether their responses were cut")
    return cut.to(device).bool()


def _check_mask(attention_mask: Tensor, action_mask: Tensor) -> None:
    rows, num_actions = action_mask.shape
    if len(attention_mask) != rows or not 0 < num_actions < attention_mask.shape[1]:
        raise ShapeError(
            f"action_mask {tuple(action_mask.shape)} for sequences {tuple(attention_mask.shape)}: "
            "the rows must be as many, and the actions fewer than the columns"
        )
    if (action_mask & (attention_mask[:, -num_actions:] == 0)).any():
        raise FieldError("action_mask marks columns that attention_mask says are padding")
