"""Activation checkpointing: a decoder layer keeps its inputs alone and is computed again in the backward pass.

A token then keeps one hidden state a layer, and the activations of one layer at a time, for a third more operations.
transformers checkpoints its layers only in training mode, in which dropout would change log-probs. Here each layer's
`forward` is checkpointed in any mode, and within the hooks of the layer, so that those of a sharded layer run once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.models.attention_kernels import without_cudnn_attention
from pipeline.models.layer_code import forward_of

log = logging.getLogger(__name__)


def checkpoint_activations(models: Sequence[nn.Module], device: torch.device, wanted: bool | None) -> bool:
    """Checkpoint the layers of models, in place.

    Gradients are the same bit for bit on a CPU: a layer's operations are the same, in the same order.

    Args:
        models: The models of a trainer. Copy none of them later to be trained without checkpointing.
        device: The device of the models.
        wanted: `trainer.activation_checkpointing`; None for: on a card, where a model has layers to checkpoint.

    Returns:
        Whether the layers of all models are checkpointed.

    Raises:
        ConfigError: If checkpointing is wanted and a model has no layers that transformers marks for it.
    """
    if not (device.type != "cpu" if wanted is None else wanted):
        return False
    for model in models:
        if next(checkpointed_layers(model), None) is None:
            name = type(model).__name__
            if wanted:
                raise ConfigError(
                    f"trainer.activation_checkpointing: {name} has no layers that transformers can checkpoint; "
                    "leave the key out or set it to false"
                )
            log.warning(
                "activations are kept, the model has no layers that transformers can checkpoint: model=%s", name
            )
            return False
    for model in models:
        for layer in checkpointed_layers(model):
            # No closure over the layer: a copy of the model must compute with the copy's weights.
            layer.forward = functools.partial(_forward, layer)
    return True


def checkpointed_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the layers that are checkpointed: those that transformers marks, the outermost of nested ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for child in model.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from checkpointed_layers(child)


def _forward(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    # The same kernels both times, though a caller may begin the backward pass with others.
    forward = without_cudnn_attention()(functools.partial(forward_of, layer))
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    # Models are trained in eval mode: no layer draws random numbers whose state must be kept.
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)
