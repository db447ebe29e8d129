"""A reward model: one score for a whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.errors import FieldError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.flat_rows import on_device
from pipeline.models.inputs import accepted_keywords, position_ids_from_mask
from pipeline.models.packing import last_states, packs_scored_rows
from pipeline.models.pass_size import PassSize, width_multiple
from pipeline.models.position_limits import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHORT, _LONG = (7, 9, 6), (8, 6, 7, 9, 8, 7, 6, 9)
"""Rows of tokens that every model has."""

_MOST_GAP = 1e-3
_MOST_ROUNDED_SHARE = 0.25
"""In 16 bits, as a share of the gap between two rows: kernels round passes of other shapes apart."""


class SequenceReward:
    """A sequence-classification model as a reward function: one score a row, of the row alone.

    Args:
        model: A model with one label. If it has a ``score`` head, the head is applied at the last attended token. The
            model's own ``logits`` come from the token before the last one equal to the pad token, which may be the
            stop. Another model gets rows padded on the right, or on the left if its scores are of each row alone there,
            and counts their positions by itself: those of some encoders do not begin at 0.

    Attributes:
        model: As above.
        reads_last_token: Whether the model has a ``score`` head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.reads_last_token = hasattr(model, "score")
        self._scores: Callable[[Tensor, Tensor], Tensor] | None = None
        if self.reads_last_token:
            self._scores = self._at_last_token
        self.bound(PassSize("rollout.logits_forward_batch_size"), None)

    def bound(self, size: PassSize, multiple: int | None) -> None:
        """Set the bound of a pass, and the multiple to which the width of a padded one is rounded up.

        Args:
            size: The bound; without a call there is none.
            multiple: As for `width_multiple`.
        """
        self._size, self._multiple = size, width_multiple(self.model.device, multiple)

    @without_cudnn_attention()
    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_ignored: Any) -> Tensor:
        """Return the scores of rows, in passes of rows of similar length.

        Args:
            input_ids: ``(B, S)`` int64.
            attention_mask: ``(B, S)``, 1 where the token is real.

        Returns:
            ``(B,)`` float32.

        Raises:
            DeviceMemoryError: If a single row does not fit into the device's memory.
            FieldError: If the positions of a row would depend on the rows beside it; from the first call of a model
                without a ``score`` head as `check`.
        """
        ids, mask = input_ids.cpu(), attention_mask.cpu() != 0
        lengths = mask.sum(dim=1)
        check_rows(self.model, lengths)
        if self._scores is None:
            self.check()
        # On the model's device: a copy to the host waits for the pass, and a card has no next one meanwhile.
        order, scores = lengths.argsort(stable=True), torch.zeros(len(ids), device=self.model.device)

        def step(part: slice) -> None:
            some = order[part]
            scores[on_device(some.numpy(), scores.device)] = self._of_pass(ids[some], mask[some]).float()

        sizes = lengths[order].tolist(), [0] * len(ids)
        if packs_scored_rows(self.model):
            # Each row is a group of its own.
            self._size.run(*sizes, step, range(len(ids)))
        else:
            self._size.run(*sizes, step)
        return scores

    def _of_pass(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of rows of one pass, ``(b,)``."""
        assert self._scores is not None
        model: Any = self.model
        if packs_scored_rows(model):
            states = last_states(model, on_device(ids[mask].numpy(), model.device), mask.sum(dim=1).numpy())
            scores: Tensor = model.score(states)
            return scores[:, 0]
        # Without the columns that are padding in all of the rows.
        seen = mask.any(dim=0).long()
        first, end = int(seen.argmax()), len(seen) - int(seen.flip(0).argmax())
        ids, mask = (
            functional.pad(columns[:, first:end], (0, (first - end) % self._multiple)) for columns in (ids, mask.long())
        )
        return self._scores(*(on_device(columns.numpy(), model.device) for columns in (ids, mask)))

    @without_cudnn_attention()
    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model that gives a short row another score beside a longer one, by passes of a few tokens.

        Raises:
            FieldError: If it does, or takes no row without a stop token.
        """
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise FieldError(f"a {type(self.model).__name__} scores rows that end with its stop token alone")
        ways = [self._at_last_token] if self.reads_last_token else [self._padded_right, self._padded_left]
        gap, most, way = min(((*self._gap(way), way) for way in ways), key=lambda found: found[0])
        # Also where a gap is NaN.
        if not gap <= most:
            raise FieldError(f"a {type(self.model).__name__} gives a row another score beside a longer row")
        self._scores = way

    def _gap(self, scores: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
        """Return the gap between a short row alone and beside a longer one, and the gap that rounding may make."""
        device, padding = self.model.device, len(_LONG) - len(_SHORT)
        pad, ones = (0,) * padding, (1,) * len(_SHORT)
        beside = torch.tensor([_SHORT + pad, pad + _SHORT, _LONG], device=device)
        mask = torch.tensor([ones + pad, pad + ones, (1,) * len(_LONG)], device=device)
        alone = scores(beside[:1, : len(_SHORT)], mask[:1, : len(_SHORT)])
        first, second, long = scores(beside, mask).tolist()
        score = float(alone)
        most = _MOST_GAP * max(1.0, abs(score))
        if alone.dtype != torch.float32:
            most = max(8 * torch.finfo(alone.dtype).eps * max(1.0, abs(score)), _MOST_ROUNDED_SHARE * abs(long - score))
        return max(abs(first - score), abs(second - score)), most

    def _at_last_token(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        model: Any = self.model
        backbone = model.base_model
        positions = {"position_ids": position_ids_from_mask(attention_mask)}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        hidden = backbone(**inputs, **accepted_keywords(backbone, positions)).last_hidden_state
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = torch.where(attention_mask != 0, columns, 0).amax(dim=1)
        scores: Tensor = model.score(hidden[torch.arange(len(hidden), device=hidden.device), last])
        return scores[:, 0]

    def _padded_right(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._logits(input_ids, attention_mask, is_padding_first=False)

    def _padded_left(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._logits(input_ids, attention_mask, is_padding_first=True)

    def _logits(self, input_ids: Tensor, attention_mask: Tensor, *, is_padding_first: bool) -> Tensor:
        mask = attention_mask != 0
        # Stable: the tokens of a row stay in order.
        order = mask.long().argsort(dim=1, descending=not is_padding_first, stable=True)
        mask = mask.gather(1, order)
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        ids = input_ids.gather(1, order).masked_fill(~mask, padding)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits[:, 0]
