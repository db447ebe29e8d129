"""Published weights into a model whose layers vLLM lays out anew as it loads them: quantized, or packed for a kernel.

A quantized layer has 8 bits a weight, and a scale a row, in place of the published matrix; experts lie as the kernel of
their card reads them, and matrices of 16 bits as that of a CPU does. vLLM's layerwise reload gives each layer room for
the published form, lays it out once all parts are there, and copies the result to its former addresses. A layer of
which nothing came keeps its former weights, one of which a part came is laid out with whatever its memory held: vLLM
reports neither. So the elements that came are counted, layer by layer, at each update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import WeightsMismatchError


def reload(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]], configuration: Any) -> None:
    """Replace all weights of a model; after an error they are of no version.

    Args:
        model: vLLM's, this rank's part.
        tensors: The published ones with their names, which vLLM's loader knows.
        configuration: vLLM's, of this rank.

    Raises:
        WeightsMismatchError: If a part of the model is not among the tensors.
    """
    # Modules that read this one may be without vLLM.
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    # It warns of each buffer that no checkpoint has, such as those of rotary embeddings; parameters are counted here.
    logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
    _forget_kernels(model)
    with set_current_vllm_config(configuration), torch.no_grad():
        layerwise.initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))  # type: ignore[operator]
        for name, loaded, needed in missing_parts(model, layerwise.get_layerwise_info):
            raise WeightsMismatchError(
                f"the weights do not cover the engine's model: {needed - loaded:,} of {needed:,} values of {name} were "
                "not loaded"
            )
        layerwise.finalize_layerwise_reload(model, configuration.model_config)


def _forget_kernels(model: torch.nn.Module) -> None:
    """Have experts on a CPU be packed again, which vLLM does only where it makes their kernel.

    On a card the kernel stays: graphs have its addresses, and vLLM lays experts out at each reload.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def missing_parts(model: torch.nn.Module, info_of: Callable[[torch.nn.Module], Any]) -> Iterator[tuple[str, int, int]]:
    """Yield each layer of which not all came: its name, its elements that came, and those that it needs.

    Args:
        model: vLLM's, between the load and the end of its reload.
        info_of: vLLM's account of a layer.
    """
    incomplete, kept = [], set[int]()
    for name, layer in model.named_modules():
        info = info_of(layer)
        parameters = [parameter for parameter in layer._parameters.values() if parameter is not None]
        # A layer whose parts have all come is laid out already, and its account is closed.
        if not info.can_load():
            kept |= {parameter.untyped_storage().data_ptr() for parameter in parameters}
        elif needed := sum(map(_elements, parameters)) - _padding(layer):
            if info.load_numel >= needed:
                kept |= _former(info)
            else:
                incomplete.append((name, info, needed))
    for name, info, needed in incomplete:
        # A head that is the embedding, which has come, gets nothing itself.
        if info.load_numel or not _former(info) <= kept:
            yield name, info.load_numel, needed


def _elements(parameter: Tensor) -> int:
    """Return the elements that a checkpoint has; experts may be padded beyond these."""
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def _former(info: Any) -> set[int]:
    """Return the addresses of a layer's parameters before the reload, to which it is copied at the end."""
    return {parameter.untyped_storage().data_ptr() for parameter in info.kernel_tensors[0].values()}


def _padding(layer: Any) -> int:
    """Return the elements of a part of the vocabulary that stand for no token."""
    places = getattr(layer, "shard_indices", None)
    if places is None:
        return 0
    return int((layer.num_embeddings_per_partition - places.num_org_elements) * layer.embedding_dim)
