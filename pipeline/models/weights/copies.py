"""A copy of one version outside shared memory, to be sent to another machine."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import WeightsError
from pipeline.models.weights.slot_copy import Slot
from pipeline.models.weights.tensor_specs import TensorSpec, tensor_views
from pipeline.storage.weights_header import WeightsVersion


@dataclasses.dataclass(frozen=True)
class WeightsCopy:
    """A copy of one version outside shared memory, to be sent to another machine; `fetch` is as in `WeightsReader`.

    Attributes:
        version: The version.
        specs: The version's tensors in `data`.
        data: ``(bytes of a slot,)`` uint8; may be read-only.
    """

    version: WeightsVersion
    specs: list[TensorSpec]
    data: npt.NDArray[np.uint8]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the version's tensors by published name, without a copy; they are only read."""
        with warnings.catch_warnings():
            # Torch warns about memory that is not writable.
            warnings.simplefilter("ignore", UserWarning)
            return tensor_views(self.data.data, self.specs)

    def fetch(self, into: Mapping[str, torch.Tensor], *, partial: bool = False) -> WeightsVersion:
        """Copy the version into a model's tensors.

        Args:
            into: Targets by published name; every published tensor needs one of its shape.
            partial: Whether a published tensor without a target is not copied; the fingerprint covers all.

        Returns:
            The version, with its verified fingerprint.

        Raises:
            WeightsError: If a target is missing or has another shape, or the bytes are not the published ones.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            slot = Slot(self.data.data, self.tensors(), is_kept=False)
        if (found := slot.read(into, partial=partial)) != self.version.fingerprint:
            raise WeightsError(
                f"weights of version {self.version.version} came damaged: fingerprint {found:016x}, "
                f"published as {self.version.fingerprint:016x}"
            )
        return self.version
