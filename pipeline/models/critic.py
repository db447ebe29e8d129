"""The critic: a language model with a value head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipeline.errors import FieldError
from pipeline.models.attention_kernels import chooses_kernels
from pipeline.models.inputs import backbone_of, position_ids_from_mask
from pipeline.models.position_limits import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


VALUE_HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """A backbone and a value head that starts at zero, so that an untrained critic's values are 0 everywhere.

    Args:
        backbone: A model without a head that returns ``last_hidden_state``.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        text = backbone.config.get_text_config()
        # Some models of the kind OPT project their last states.
        hidden_size = getattr(text, "word_embed_proj_dim", text.hidden_size)
        # float32 for a backbone of any dtype: bfloat16 values near 1 have steps of 0.008.
        self.value_head = nn.Linear(hidden_size, 1, device=backbone.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def from_actor(cls, actor: PreTrainedModel) -> Self:
        """Return a critic with a copy of an actor's backbone; the actor is not changed.

        Args:
            actor: A transformers model with a language model head.

        Returns:
            The critic, its backbone trainable, on the actor's device.

        Raises:
            FieldError: If the actor has no such head.
        """
        if (part := backbone_of(actor)) is None:
            raise FieldError(f"a {type(actor).__name__} has no language model head, below which a critic's backbone is")
        backbone: Any = copy.deepcopy(part)
        backbone.requires_grad_(True)
        return cls(backbone)

    @chooses_kernels
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None, **pixels: Tensor
    ) -> Tensor:
        """Return the value of the state after each token.

        Args:
            input_ids: ``(B, S)`` int64.
            attention_mask: ``(B, S)``, 1 where the token is real.
            position_ids: ``(B, S)`` int64; None derives them from the mask. ``(3, B, S)`` for a vision-language
                backbone.
            **pixels: Pixels and grids, for a vision-language backbone.

        Returns:
            ``(B, S)`` float32.
        """
        check_rows(self, (attention_mask != 0).sum(dim=1))
        if position_ids is None:
            position_ids = position_ids_from_mask(attention_mask)
        output = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **pixels
        )
        states = output.last_hidden_state.float()
        # Flat, and a copy: FSDP hooks both results, and a view would lose its hook if it were changed in place.
        values: Tensor = self.value_head(states.flatten(0, 1))
        return values.view(states.shape[:2]).clone()

    def save_pretrained(self, path: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone in the format of transformers, with the value head beside it, for `load_critic`.

        Args:
            path: The folder; made if it does not exist.
            state_dict: The critic's tensors to write; None for its own.

        Raises:
            OSError: If the folder cannot be written.
        """
        from safetensors.torch import save_file

        state = self.state_dict() if state_dict is None else state_dict
        # The prefixes of the parts of one module.
        parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "value_head": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.backbone.save_pretrained(path, state_dict=parts["backbone"])
        save_file(parts["value_head"], Path(path) / VALUE_HEAD_FILE)
