"""The targets of published tensors in a model's parameters, learned from one load by the model's own loader.

A loader knows the part of a fused parameter that each tensor fills, and much else: it takes several times as long as a
copy. `watched` looks on while it loads a version, and returns the targets as views of the parameters. Further versions
are copied there without the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_COPY = _ATEN.copy_.default
_CONSTANTS = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)


def watched(
    load: Callable[[Iterator[tuple[str, Tensor]]], object], sources: Mapping[str, Tensor], parameters: Iterable[Tensor]
) -> dict[str, Tensor] | None:
    """Call a function that loads tensors into parameters, and return the target of each tensor.

    Args:
        load: The loader: fills all parameters from the named tensors that it is given.
        sources: The tensors by name; each has memory of its own.
        parameters: The parameters, each once.

    Returns:
        Views of the parameters by name of the tensor that was copied there as it is; tensors that the loader ignores
        are left out. None if a copy of each tensor to its target does not do all that the loader does: if it computes,
        cuts a tensor, or writes a value twice.
    """
    filled = list(parameters)
    watch = _Watch(sources, filled)
    with watch:
        load(iter(sources.items()))
    whole = watch.values == sum(parameter.numel() for parameter in filled)
    return watch.targets if whole and watch.copies_alone else None


class _Watch(TorchDispatchMode):
    """Sees each operation that writes to a parameter.

    Attributes:
        targets: Targets of copies, by name of the tensor.
        values: Values written so far, by copies and by constants.
        copies_alone: Whether nothing else has written.
    """

    def __init__(self, sources: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: dict[str, Tensor] = {}
        self.values = 0
        self.copies_alone = True
        self._names = {_identity(tensor): name for name, tensor in sources.items()}
        self._storages = {_storage(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else given.get(argument.name)
                for tensor in written if isinstance(written, list | tuple) else [written]:
                    if isinstance(tensor, Tensor) and _storage(tensor) in self._storages:
                        self._wrote(func, tensor, args)
        return result

    def _wrote(self, func: Any, target: Tensor, args: Any) -> None:
        self.values += target.numel()
        if func in _CONSTANTS:
            return
        name = self._names.get(_identity(args[1])) if func is _COPY and args[1].shape == target.shape else None
        if name is None or name in self.targets:
            self.copies_alone = False
        else:
            self.targets[name] = target.detach().as_subclass(Tensor)


def fills(matrix: Tensor, target: Tensor, rank_axis: int) -> bool:
    """Return whether a target holds a matrix of an adapter, with room for more in its rank alone."""
    held = target.narrow(rank_axis, 0, min(matrix.shape[rank_axis], target.shape[rank_axis]))
    return held.shape == matrix.shape and torch.equal(held.cpu(), matrix)


def _identity(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype, bool]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.is_contiguous()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
