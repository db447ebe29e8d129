"""Published weights, from shared memory into the parameters of vLLM's model, without a copy in between.

vLLM makes `FeedsWeights` a base of its workers: there is one on each card, in the engine's process or in a child of it
(`ranks`). Each maps the weights file itself and copies its own part; vLLM's loader, which knows the part, does so at
each update where it cuts tensors. Each verifies the fingerprint of the whole version.

At the first update with given names every element of every parameter is marked before the copy, and a mark that is left
over afterwards is a stale parameter: vLLM's loader alone reports the names that it met, and counts a fused parameter of
which one part is missing. This update also shows the target of each tensor (`targets`): further ones are copied there
block by block, with the fingerprint taken on the way. Where vLLM repacks what it loads, its own reload takes each
update (`repacked`). Adapters are small: they are copied and verified first, then replaced (`adapters`), so that a torn
version never reaches the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pipeline.errors import WeightsError, WeightsMismatchError
from pipeline.models.weights.store import WeightsReader, joined, part_of
from pipeline.models.weights.tensor_specs import TensorSpec
from pipeline.rollout.generation.vllm.checkpoint_form import CheckpointForm
from pipeline.rollout.generation.vllm.memory import mapped
from pipeline.rollout.generation.vllm.ranks import forget_names
from pipeline.rollout.generation.vllm.repacked import reload
from pipeline.rollout.generation.vllm.targets import watched
from pipeline.storage.weights_header import Age

if TYPE_CHECKING:
    from pipeline.rollout.generation.vllm.adapters import Adapters

_MARKS = {4: 0x7FC0DEAD, 2: 0x7FDE}
_INTEGERS = {4: torch.int32, 2: torch.int16}
_PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

Outcome = tuple[str, str, Age]
"""Kind of the error ("" for none), its message, and the age of the weights.

Kinds: "mismatch", weights of another model; "version", a version that is not held, with the parameters as before;
"torn", no whole version, with parameters of no version.
"""


_Identity = tuple[str, int]
"""Path and inode: a trainer that publishes other tensors makes a new weights file under the same name."""


class FeedsWeights:
    """Methods of a vLLM worker, called through `collective_rpc`; they return an `Outcome` in place of raising."""

    model_runner: Any
    vllm_config: Any
    _rlhfd_adapters: Adapters | None = None

    def rlhfd_adapt(self, lora: tuple[int, float, list[str]]) -> None:
        """Take adapters of a rank, alpha and layers in place of whole weights; the first ones change nothing."""
        # vLLM has been imported here; this module is also read where it is not installed.
        from pipeline.rollout.generation.vllm.adapters import Adapters

        self._rlhfd_adapters = Adapters(self.model_runner.lora_manager, *lora)

    def rlhfd_forget_names(self) -> None:
        """Unlink the shared memory that vLLM's processes have opened; see `ranks`."""
        forget_names()

    def rlhfd_newest(self, path: str) -> tuple[int, int] | None:
        """Return the age of the newest version in a weights file; None without one."""
        try:
            newest = self._rlhfd_reader(path).newest()
        except (WeightsError, OSError):
            return None
        return None if newest is None else newest.age

    def rlhfd_fetch(self, path: str, age: tuple[int, int] | None) -> Outcome:
        """Load the actor of a version; None for the newest."""
        begun = False

        def load(tensors: Mapping[str, torch.Tensor]) -> None:
            nonlocal begun
            begun = True
            self._rlhfd_load(part_of(tensors, "actor"), learn=known is None)

        try:
            reader = self._rlhfd_reader(path)
            known = self._rlhfd_known(path)
            if (adapters := self._rlhfd_adapters) is not None:
                copied: dict[str, torch.Tensor] = {}
                found = reader.feed(lambda tensors: copied.update(_copies(part_of(tensors, "actor"))), age=age)
                begun = True
                adapters.replace(copied)
            elif known and (age is None or reader.holds(age)):
                begun = True
                found = reader.fetch(known, age=age, partial=True)
            else:
                found = reader.feed(load, age=age)
                if known is None:
                    targets = joined({"actor": self._rlhfd_learned or {}})
                    self._rlhfd_targets = _identity(path), self._rlhfd_addresses(), targets
        except WeightsMismatchError as error:
            return "mismatch", str(error), (0, 0)
        except (WeightsError, OSError) as error:
            return ("torn" if begun else "version"), str(error), (0, 0)
        return "", "", found.age

    def rlhfd_take(self, path: str, specs: bytes) -> Outcome:
        """Load tensors that lie in a file."""
        tensors = mapped(path, msgspec.msgpack.decode(specs, type=list[TensorSpec]))
        try:
            if self._rlhfd_adapters is not None:
                self._rlhfd_adapters.replace(_copies(tensors))
            else:
                self._rlhfd_load(tensors)
        except WeightsMismatchError as error:
            return "mismatch", str(error), (0, 0)
        return "", "", (0, 0)

    def _rlhfd_reader(self, path: str) -> WeightsReader:
        reader: WeightsReader | None = getattr(self, "_rlhfd_open", None)
        if reader is None or reader.path != Path(path):
            if reader is not None:
                reader.close()
            reader = self._rlhfd_open = WeightsReader(Path(path))
        return reader

    def _rlhfd_known(self, path: str) -> Mapping[str, torch.Tensor] | None:
        """Return the targets of a file's tensors; {} if the loader has to place them, None if that is not known."""
        known: tuple[_Identity, list[int], Mapping[str, torch.Tensor]] | None = getattr(self, "_rlhfd_targets", None)
        if known is None or known[:2] != (_identity(path), self._rlhfd_addresses()):
            return None
        return known[2]

    def _rlhfd_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model_runner.get_model().parameters()]

    def _rlhfd_checkpoint_form(self) -> CheckpointForm:
        form: CheckpointForm | None = getattr(self, "_rlhfd_form", None)
        if form is None:
            form = self._rlhfd_form = CheckpointForm(self.vllm_config.model_config.model)
        return form

    def _rlhfd_load(self, tensors: Mapping[str, torch.Tensor], *, learn: bool = False) -> None:
        """Copy tensors into the model's parameters by vLLM's loader.

        Args:
            tensors: The actor's, by name.
            learn: Whether to look for their targets.

        Raises:
            WeightsMismatchError: If a tensor is of another model, or a parameter is not covered.
        """
        model = self.model_runner.get_model()
        names = frozenset(tensors)
        parameters = dict(model.named_parameters())
        checked = learn or names != getattr(self, "_rlhfd_names", None)
        self._rlhfd_learned = None
        try:
            if not _is_plain(model, parameters):
                reload(model, self._rlhfd_checkpoint_form()(tensors), self.vllm_config)
                _renew_heads(model)
                return
            with torch.no_grad():
                if checked:
                    _mark(parameters)
                if learn:
                    self._rlhfd_learned = watched(model.load_weights, tensors, parameters.values())
                else:
                    model.load_weights(iter(tensors.items()))
        except torch.OutOfMemoryError:
            raise
        except (ValueError, KeyError, AssertionError, RuntimeError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            raise WeightsMismatchError(f"the weights do not fit the engine's model: {problem}") from error
        if checked:
            for name, parameter in parameters.items():
                if left := _marked(parameter):
                    raise WeightsMismatchError(
                        f"the weights do not cover the engine's model: {left:,} of {parameter.numel():,} values of "
                        f"{name} were not loaded"
                    )
            self._rlhfd_names = names


def _identity(path: str) -> _Identity:
    return path, os.stat(path).st_ino


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _is_plain(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    """Return whether the parameters are laid out as loaded; otherwise vLLM has repacked them and must do so again."""
    methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
    if not methods <= _PLAIN_METHODS or any(not parameter.numel() for parameter in parameters.values()):
        return False
    # On CPUs some kernels compute with a packed copy of weights of lower precision.
    return all(tensor.device.type != "cpu" or tensor.dtype == torch.float32 for tensor in parameters.values())


def _renew_heads(model: torch.nn.Module) -> None:
    """Have heads compute with their present matrices.

    On a CPU a head of 16 bits has a packed copy. vLLM's reload makes another one where it has loaded the head itself,
    but a head that is the embedding is loaded as the embedding alone.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[2] == "lm_head" and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _bits(parameter: torch.Tensor) -> torch.Tensor | None:
    size = parameter.element_size()
    if not parameter.is_floating_point() or size not in _MARKS:
        return None
    return parameter.data.view(_INTEGERS[size])


def _mark(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    for parameter in parameters.values():
        if (bits := _bits(parameter)) is not None:
            bits.fill_(_MARKS[parameter.element_size()])


def _marked(parameter: torch.Tensor) -> int:
    """Return the number of elements that still hold the mark."""
    bits = _bits(parameter)
    return 0 if bits is None else int((bits == _MARKS[parameter.element_size()]).sum())
