"""A card without one: tensors of torch's FakeTensorMode with a device and no memory, and the operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.launches import Launches

CARD = torch.device("cuda", 0)


class _OnCard(Launches):
    def counts(self, *tensors: Any) -> bool:
        return any(isinstance(one, Tensor) and one.device.type == "cuda" for one in tensors)


@contextlib.contextmanager
def fake_card() -> Iterator[list[str]]:
    """Yield the names of the operations that a card computes in the block, each a launch, and of copies to it.

    An operation whose result the host reads, such as `nonzero` or `item`, raises: there is no value.
    """
    with FakeTensorMode(), _OnCard() as seen:
        yield seen.names


def to_fake_card(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give the parameters and buffers of a model of the CPU fakes on the card, in the block of `fake_card`."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    kind = dtype if held is module._parameters else tensor.dtype
                    fake = torch.empty(tensor.shape, dtype=kind, device=CARD)
                    held[name] = nn.Parameter(fake) if held is module._parameters else fake
