"""A card without one: tensors of torch's FakeTensorMode with a device and no memory, and the operations on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.launches import NO_LAUNCH

CARD = torch.device("cuda", 0)

_NO_LAUNCH = frozenset({"prim.device", *(name.replace("::", ".") for name in NO_LAUNCH)})


class _Seen(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_on_card = any(isinstance(one, Tensor) and one.device.type == "cuda" for one in (result, *args))
        if str(func).rpartition(".")[0] not in _NO_LAUNCH and is_on_card:
            self._names.append(str(func).rpartition(".")[0].removeprefix("aten."))
        return result


@contextlib.contextmanager
def fake_card() -> Iterator[list[str]]:
    """Yield the names of the operations that a card computes in the block, each a launch, and of copies to it.

    An operation whose result the host reads, such as `nonzero` or `item`, raises: there is no value.
    """
    names: list[str] = []
    with FakeTensorMode(), _Seen(names):
        yield names


def to_fake_card(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give the parameters and buffers of a model of the CPU fakes on the card, in the block of `fake_card`."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    kind = dtype if held is module._parameters else tensor.dtype
                    fake = torch.empty(tensor.shape, dtype=kind, device=CARD)
                    held[name] = nn.Parameter(fake) if held is module._parameters else fake
