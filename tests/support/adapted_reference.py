"""Log-probs of a model with adapters from plain transformers in float64, with W + s B A written into each layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def reference_log_probs(
    base: Any, adapters: Mapping[str, Tensor], scale: float, rows: list[list[int]], *, temperature: float = 1.0
) -> list[list[float]]:
    """Return the log-prob of each token of each row but the first, a row and a token at a time.

    Args:
        base: A causal language model without adapters, which is not changed.
        adapters: A and B by name, as ``lm_head.lora_A.weight``; of no layer: the base alone.
        scale: Their factor.
        rows: Token ids, without padding.
        temperature: The sampling temperature.
    """
    model = copy.deepcopy(base).double()
    layers = dict(model.named_modules())
    with torch.no_grad():
        for name in {name.rpartition(".lora_")[0] for name in adapters}:
            down, up = (adapters[f"{name}.lora_{matrix}.weight"].detach().double() for matrix in "AB")
            # A tensor of its own: a tied head shares that of the embedding, which has no adapter.
            layers[name].weight = torch.nn.Parameter(layers[name].weight + scale * up @ down)
        found = []
        for row in rows:
            logits = model(input_ids=torch.tensor([row])).logits[0] / temperature
            before = zip(logits, row[1:], strict=False)
            found.append([float(each[token] - each.exp().sum().log()) for each, token in before])
    return found
