"""A reward model: one score for a whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.inputs import accepted_keywords, position_ids_from_mask
from pipeline.models.position_limits import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SequenceReward:
    """A sequence-classification model as a reward function: one score a row, read at the last real token.

    Args:
        model: A model with one label. If it has a ``score`` head, the head is applied at the last attended token. The
            model's own ``logits`` come from the token before the last one equal to the pad token, which may be the
            stop.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @without_cudnn_attention()
    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_ignored: Any) -> Tensor:
        """Return the scores of rows.

        Args:
            input_ids: ``(B, S)`` int64.
            attention_mask: ``(B, S)``, 1 where the token is real.

        Returns:
            ``(B,)`` float32.

        Raises:
            FieldError: If the positions of a row would depend on the rows beside it.
        """
        device = self.model.device
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        check_rows(self.model, (attention_mask != 0).sum(dim=1))
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        positions = {"position_ids": position_ids_from_mask(attention_mask)}
        score = getattr(self.model, "score", None)
        if score is None:
            logits: Tensor = self.model(**inputs, **accepted_keywords(self.model, positions)).logits
            return logits[:, 0].float()
        backbone = self.model.base_model
        hidden = backbone(**inputs, **accepted_keywords(backbone, positions)).last_hidden_state
        columns = torch.arange(input_ids.shape[1], device=device)
        last = torch.where(attention_mask != 0, columns, 0).amax(dim=1)
        scores: Tensor = score(hidden[torch.arange(len(hidden), device=device), last])
        return scores[:, 0].float()
