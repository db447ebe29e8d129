"""Compiled code of decoder layers: the forward pass of a layer is one graph, and one graph serves all layers.

The function that is compiled takes the layer as an argument. So parameters are inputs of the graph: weights that are
copied in place count, and layers of the same shapes share it. Sizes are symbols: another length compiles nothing.

    packed rows, by a kernel that takes their starts    compiled for a model whose passes are packed
    padded rows with a mask                             compiled for a model whose passes are padded
    any other pass                                      as the model computes it: decoding, shared prompts, one row,
                                                        rows of equal lengths, for which transformers makes no mask

Graphs are made while `LayerCode.compiles` is set, and never later: a pass that needs another graph is computed as the
model does, with one line of the log. So no step waits for a compiler, and none fails by one.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipeline.models.card_attention import Kernel
from pipeline.models.inputs import CACHE_KEYWORDS
from pipeline.models.layer_streaming import decoder_layers

_MOST_GRAPHS: Final = 64
"""Graphs of one function; torch's own limit of 8 is too low for actor, critic and reference, each in several ways."""

_ATTRIBUTE: Final = "rlhfd_code"

log = logging.getLogger(__name__)


class LayerCode:
    """The compiled code of a model's decoder layers.

    Args:
        packed: Whether it computes packed passes; else padded ones.
        attend: The kernel of packed rows; None for the model's own attention.
        backend: The backend of torch.compile.

    Attributes:
        compiles: Whether a pass may make a graph.
        problem: The reason for which layers cannot be compiled, in one line; empty as long as they can.
        is_used: Whether passes go through it.
        passes: Layers' passes that it was called for.
        missed: Passes among them without a graph, which the layer computed itself.
    """

    def __init__(self, *, packed: bool, attend: Kernel | None = None, backend: Any = "inductor") -> None:
        self.compiles = self.is_used = True
        self.problem = ""
        self.passes = self.missed = 0
        self._packed, self._attend = packed, attend
        self._compiled = _compiled(backend)

    def __deepcopy__(self, _memo: dict[int, Any]) -> LayerCode:
        """Return itself: it holds no weights."""
        return self

    def attach(self, model: nn.Module) -> int:
        """Have a model's decoder layers computed by this code; return their number."""
        layers = decoder_layers(model)
        for layer in layers:
            setattr(layer, _ATTRIBUTE, self)
            if "forward" not in vars(layer):
                # No closure over the layer: a copy of the model must compute with the copy's weights.
                layer.forward = functools.partial(forward_of, layer)
        return len(layers)

    def takes(self, arguments: Sequence[Any], keywords: dict[str, Any]) -> bool:
        """Return whether a pass of a layer is compiled, by the table above."""
        states = arguments[0] if arguments else keywords.get("hidden_states")
        # Sizes of 1 are constants to torch.
        if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[1] < 2:
            return False
        if any(keywords.get(name) is not None for name in (*CACHE_KEYWORDS, "prefix_layout")):
            return False
        is_packed = keywords.get("cu_seq_lens_q") is not None
        if self._packed:
            return is_packed and bool(keywords.get("max_length_q", 0) > 1)
        return not is_packed and len(states) > 1 and keywords.get("attention_mask") is not None

    def __call__(self, layer: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return a layer's outputs."""
        self.passes += 1
        # Its numbers would be constants of the graph; a kernel takes the starts of the rows, a tensor.
        given = {name: value for name, value in keywords.items() if name != "row_lengths"}
        if self._attend is not None:
            # Chosen here: what is installed cannot be traced.
            given["attend"] = self._attend
        if not self.compiles:
            with torch.compiler.set_stance("eager_on_recompile"):
                return self._compiled(layer, *arguments, **given)
        if not self.problem:
            try:
                with _while_compiling():
                    return self._compiled(layer, *arguments, **given)
            except (RuntimeError, OSError, ImportError) as error:
                # Here: an error that leaves a checkpointed layer breaks later passes of torch 2.11. No other one:
                # checkpointing ends its second pass by an exception.
                self.problem = first_line(error)
        return type(layer).forward(layer, *arguments, **keywords)

    def miss(self, layer: Any) -> None:
        """Note that a pass of a layer has no graph."""
        if not self.compiles and not self.missed:
            log.warning("some passes are not compiled: layer=%s reason=no start computes such a pass",
                        type(layer).__name__)  # fmt: skip
        self.missed += 1


def first_line(error: BaseException) -> str:
    """Return the name of an error, or of that of a backend which torch wraps, and the first line of its message."""
    cause = getattr(error, "inner_exception", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}".removesuffix(": ")


def detach(model: nn.Module) -> None:
    """Have a model's decoder layers computed as they were before `LayerCode.attach`."""
    for layer in decoder_layers(model):
        vars(layer).pop(_ATTRIBUTE, None)
        forward = vars(layer).get("forward")
        if isinstance(forward, functools.partial) and forward.func is forward_of:
            del vars(layer)["forward"]


def forward_of(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Return a layer's outputs, by its compiled code if it has one that takes the pass.

    The choice follows from the inputs: a checkpointed layer is computed in the same way again.
    """
    code: LayerCode | None = vars(layer).get(_ATTRIBUTE)
    if code is None or not code.is_used or not code.takes(arguments, keywords):
        return type(layer).forward(layer, *arguments, **keywords)
    return code(layer, *arguments, **keywords)


@functools.cache
def _compiled(backend: Any) -> Callable[..., Any]:
    """Return the compiled forward pass of a layer, which is the first argument; one a process and backend."""
    import torch._dynamo
    import torch._inductor.config

    # The tracer looks at each input's gradient.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    # No process beside this one compiles: none is left when this one is killed.
    torch._inductor.config.compile_threads = 1
    # No kernel is chosen by its measured time: the order of sums would differ from start to start.
    options: Any = {"options": {"deterministic": True}} if backend == "inductor" else {}
    return torch.compile(_forward, fullgraph=True, dynamic=True, backend=backend, **options)


def _while_compiling() -> Any:
    """Return the context in which torch compiles."""
    import torch._dynamo

    # A number such as the factor of the scores is a constant: torch would compile twice to find that out.
    limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    return torch._dynamo.config.patch(specialize_float=True, recompile_limit=limit)


def _forward(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    if not torch.compiler.is_compiling():
        vars(layer)[_ATTRIBUTE].miss(layer)
    return type(layer).forward(layer, *arguments, **keywords)
