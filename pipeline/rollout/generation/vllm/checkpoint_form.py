"""Published tensors of a mixture of experts, in the form of its checkpoint, which vLLM's loaders read.

transformers holds the experts of a layer in one tensor, and names some layers otherwise than the checkpoint does
(Mixtral's `block_sparse_moe` is `mlp`). Its own way back, that of `save_pretrained`, makes the names and tensors of the
checkpoint, a layer at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from pipeline.models.loading import shell

# The number of a layer is the first one in a name.
_LAYER = re.compile(r".*?\.\d+\.")


class CheckpointForm:
    """The form of a model's checkpoint.

    Args:
        directory: The model's.
    """

    def __init__(self, directory: str) -> None:
        self._outline = shell(directory, dtype="float32")
        conversions = get_model_conversion_mapping(self._outline, add_legacy=False)
        self._differs = any(isinstance(conversion, WeightConverter) for conversion in conversions)

    def __call__(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by the names of the checkpoint; those of a model whose tensors it has as they are, unchanged.

        Args:
            tensors: The published ones, by name, those of a layer one after the other.
        """
        if not self._differs:
            yield from tensors.items()
            return
        for _, layer in itertools.groupby(tensors.items(), key=lambda item: _layer_of(item[0])):
            yield from revert_weight_conversion(self._outline, dict(layer)).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""
