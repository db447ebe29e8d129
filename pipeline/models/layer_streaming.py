"""Layer streaming: decoder layers in host memory, each copied to the device for the time that it runs.

For a frozen model that is only run forward. The device holds two layers, embeddings, head and buffers:

    slot 0   | layer 0 runs | copy of layer 2 | layer 2 runs | ...
    slot 1   | copy of layer 1 | layer 1 runs | copy of layer 3 | ...

The parameters of layer i are views of slot i mod 2 for good. A hook before a layer waits for its copy, or makes one if
the slot holds another layer, so that no pass depends on how the last one ended. A hook after it begins the copy of the
slot's next layer, which waits for the layer's computation: on a GPU on a stream of its own, beside the layer between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.weights.pinned import page_locked

_SLOTS = 2
_ALIGNMENT = 256
"""Bytes; that of torch's allocator on a GPU."""
_LEAST_PART_BYTES = 1 << 20


class InOrder:
    """Copies that are complete as soon as they are begun."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return pageable memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """Copy."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return lambda: None


class SideStream:
    """Copies from page-locked memory on a stream beside the computation of a GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        """Return page-locked memory; if CUDA refuses, log a warning and return pageable memory."""
        return page_locked(nbytes)

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """Copy once the current stream has come to this point."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


def stream_layers(model: nn.Module, device: torch.device, copier: InOrder | SideStream | None = None) -> None:
    """Move a model to a device, all but its decoder layers, which are copied there for the time that they run.

    Outputs are those of the model as it was, bit for bit on a CPU. The parameters of the layers have no values of their
    own afterwards: do not save, move or train the model.

    Args:
        model: A model in host memory, changed in place.
        device: The device of its passes.
        copier: The copies; None for those of the device.

    Raises:
        ConfigError: If the model has no decoder layers that can be told from the rest.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(
            f"model.reference_device: a {type(model).__name__} has no decoder layers that can be streamed; take "
            '"worker" or "trainer"'
        )
    model.requires_grad_(False)
    if copier is None:
        copier = SideStream(device) if device.type == "cuda" else InOrder()
    held = [_Layer(layer) for layer in layers]
    slots = [
        torch.empty(max((layer.nbytes for layer in held[number::_SLOTS]), default=0), dtype=torch.uint8, device=device)
        for number in range(_SLOTS)
    ]
    for number, layer in enumerate(held):
        # A layer after the other: its own memory is released, and host memory never holds the model twice.
        layer.lay_out(slots[number % _SLOTS], copier)
    _move_others(model, device, {id(view) for layer in held for view in layer.views})
    stream = _Stream(held, copier)
    for number, module in enumerate(layers):
        module.register_forward_pre_hook(functools.partial(stream.enter, number))
        module.register_forward_hook(functools.partial(stream.leave, number))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers marks for checkpointing, of the decoder's largest stack; [] without one."""
    owner: Any = getattr(model, "backbone", model)
    decoder = owner.get_decoder() if hasattr(owner, "get_decoder") else None
    # A vision-language model has another stack for its images, which may be larger.
    stacks = _stacks(decoder) if isinstance(decoder, nn.Module) else []
    return max(stacks or _stacks(model), key=_parameters, default=[])


def _stacks(module: nn.Module) -> list[list[nn.Module]]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        list(layers)
        for layers in module.modules()
        if isinstance(layers, nn.ModuleList)
        and len(layers)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    ]


class _Layer:
    """A layer: its bytes in host memory, and their offsets in a slot.

    Attributes:
        nbytes: Bytes of its parameters, each at a multiple of the alignment.
        views: The layer's parameters on the device, once it is laid out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._starts: dict[nn.Parameter, int] = {}
        self.nbytes = 0
        self.views: list[nn.Parameter] = []
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        for parameter in module.parameters():
            self._starts[parameter] = self.nbytes
            self.nbytes += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT

    def lay_out(self, slot: Tensor, copier: InOrder | SideStream) -> None:
        """Copy the layer's bytes to host memory of its own, and make its parameters views of a slot."""
        starts = [0]
        for nbytes in _part_bytes(self.nbytes):
            self._sources.append(copier.allocate(nbytes))
            self._targets.append(slot[starts[-1] : starts[-1] + nbytes])
            starts.append(starts[-1] + nbytes)
        views: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, start in self._starts.items():
            content = parameter.detach().reshape(-1).view(torch.uint8)
            end = start + len(content)
            for first, part in zip(starts, self._sources, strict=False):
                low, high = max(start, first), min(end, first + len(part))
                if low < high:
                    part[low - first : high - first] = content[low - start : high - start]
            view = slot[start:end].view(parameter.dtype).view(parameter.shape)
            views[parameter] = nn.Parameter(view, requires_grad=False)
        self._starts = {}
        self.views = list(views.values())
        _replace(self._module, views)

    def begin(self, copier: InOrder | SideStream) -> Callable[[], None]:
        """Begin the copy to the slot."""
        return copier.begin(self._targets, self._sources)


class _Stream:
    """The layers in turn; one thread runs the model."""

    def __init__(self, layers: list[_Layer], copier: InOrder | SideStream) -> None:
        self._layers = layers
        self._copier = copier
        self._held: list[int | None] = [None] * _SLOTS
        self._waits: list[Callable[[], None]] = [lambda: None] * _SLOTS
        for number in range(min(_SLOTS, len(layers))):
            self._begin(number)

    def enter(self, number: int, *_: Any) -> None:
        """Before a layer: its copy is in the slot."""
        if self._held[number % _SLOTS] != number:
            self._begin(number)
        self._waits[number % _SLOTS]()

    def leave(self, number: int, *_: Any) -> None:
        """After a layer: begin the copy of the next one of its slot, after the last one the first one."""
        following = number + _SLOTS
        self._begin(following if following < len(self._layers) else number % _SLOTS)

    def _begin(self, number: int) -> None:
        slot = number % _SLOTS
        if self._held[slot] != number:
            # Nothing, should the copy fail.
            self._held[slot] = None
            self._waits[slot] = self._layers[number].begin(self._copier)
            self._held[slot] = number


def _part_bytes(nbytes: int) -> Iterator[int]:
    """Yield sizes with a sum: powers of two but the last, to which torch rounds up page-locked memory."""
    while nbytes > _LEAST_PART_BYTES:
        yield (part := 1 << (nbytes.bit_length() - 1))
        nbytes -= part
    if nbytes:
        yield nbytes


def _move_others(model: nn.Module, device: torch.device, views: set[int]) -> None:
    """Move buffers, and the parameters that are no views of a slot, to a device; tied ones stay one tensor."""
    others = {parameter for parameter in model.parameters() if id(parameter) not in views}
    _replace(model, {one: nn.Parameter(one.detach().to(device), requires_grad=False) for one in others})
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _replace(model: nn.Module, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in replacements:
                setattr(module, name, replacements[parameter])


def _parameters(layers: list[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())
