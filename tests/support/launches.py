"""Launches and memory of a block of code, counted on a CPU; on a GPU each operation is a launch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = frozenset({"prim::device"}) | {
    f"aten::{name}"
    for name in (
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "contiguous", "detach", "empty", "empty_like",
        "empty_strided", "expand", "expand_as", "is_nonzero", "item", "lift_fresh", "narrow", "permute", "reshape",
        "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split", "squeeze", "t", "to",
        "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    )
}  # fmt: skip
"""Views, shapes and memory: no kernel of a GPU."""


class Launches(TorchDispatchMode):
    """Notes each operation that computes, as it is dispatched: the profiler takes ten times as long to tell of as many.

    Attributes:
        names: Their names.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        if name.replace(".", "::") not in NO_LAUNCH and self.counts(result, *args):
            self.names.append(name.removeprefix("aten."))
        return result

    def counts(self, *_tensors: Any) -> bool:
        """Whether an operation with this result and these arguments counts."""
        return True


def launches(profiler: profile) -> list[FunctionEvent]:
    """Return the innermost operations that compute."""
    events = [event for event in profiler.events() or () if event.name not in NO_LAUNCH]
    parents = {event.cpu_parent.id for event in events if event.cpu_parent is not None}
    return [event for event in events if event.id not in parents]


def most_bytes(profiler: profile) -> int:
    """Return the largest sum of bytes allocated since the profile began; it needs ``profile_memory``."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
