"""Capture of decoding steps as CUDA graphs: tried first, once an engine, in one pool of memory.

A step that reads a value back from the GPU cannot be captured, and a capture that fails leaves torch's allocator
and CUDA's stream in a state in which later work fails. So a step is first run with such reads refused; if it passes,
steps are captured. Either answer holds for the life of the engine, whose model does not change.

All graphs of an engine share one pool of memory, and torch refuses a capture into a pool whose graphs have all been
released, which happens at each change of the buffers. So a pool's first graph is a trivial one, which is never replayed
and is kept for as long as the pool is.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool, and the graph that keeps it."""

    name: Any
    keeper: torch.cuda.CUDAGraph


class GraphCapture:
    """Captures the steps of one kind of one engine.

    Args:
        device: Captures; None for a device without graphs, such as a CPU.
        kind: The steps' name in the log.
    """

    def __init__(self, device: CudaDevice | None, kind: str = "model") -> None:
        self._device = device
        self._kind = kind
        self._is_tried = False
        self._pool: _Pool | None = None

    @property
    def is_possible(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self._device is not None

    def run_or_capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Run one step, and capture it if its model allows.

        The first call for an engine runs the step as the trial, and captures nothing.

        Args:
            step: Runs over tensors of fixed address, its result among them; if it raises it may be called again, with
                the same result.

        Returns:
            The graph; None if the step was not captured.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for the step.
        """
        if self._device is None:
            step()
            return None
        try:
            if not self._is_tried:
                with self._device.refuse_synchronization():
                    step()
                self._is_tried = True
                return None
            graph = self._captured(self._device, step)
        except torch.OutOfMemoryError:
            self._pool = None
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            log.warning("no CUDA graph of this %s, its tokens take longer: %s", self._kind, reason)
            self._device = self._pool = None
            step()
            return None
        # A capture computes nothing.
        graph.replay()
        return graph

    def release(self) -> None:
        """Give the pool back, of which no other graph exists any more; the next capture makes another one."""
        self._pool = None

    def _captured(self, device: CudaDevice, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            name, number = device.new_pool(), torch.zeros(1, device=device.name)
            self._pool = _Pool(name, device.capture(number.zero_, name))
        return device.capture(step, self._pool.name)


class CudaDevice:
    """The current GPU; captures are on a stream of their own.

    Attributes:
        name: "cuda".
    """

    name = "cuda"

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def refuse_synchronization(self) -> Iterator[None]:
        """Return a context in which a call that waits for the GPU raises RuntimeError."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def new_pool(self) -> Any:
        """Return the name of a new pool of memory; it has memory for as long as one of its graphs exists."""
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
        """Capture a step without running it.

        ``torch.cuda.graph`` would empty the allocator's cache at each capture, and leave its stream current after a
        failed one.

        Args:
            step: The step.
            pool: The memory of its intermediate results.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for the step or its graph.
            RuntimeError: If the step cannot be captured, or the pool had graphs and all of them were released; the
                device is as before, but the pool takes no further capture.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._stream = None
            _end_allocation_in(pool)
            _renew_random_state()
            if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                # Of the graph itself, which CUDA allocates: it is no error of torch's allocator.
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return graph


def _set_sync_debug_mode(mode: int | str) -> None:
    """Set the mode without torch's warning that it is a prototype, which tells the reader of a log nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def _end_allocation_in(pool: Any) -> None:
    """End the allocator's use of a pool, which a capture whose end failed leaves on."""
    with contextlib.suppress(RuntimeError):
        # Private, and without a public counterpart; it raises if the end of the capture did it already.
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def _renew_random_state() -> None:
    """Give the GPU's generator a state of the same seed and offset that no capture has marked.

    A capture marks the state, and its end clears the mark, but not if the end fails: every later draw would raise.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with contextlib.suppress(RuntimeError):
        # If this is refused, the error of the next draw says so.
        generator.graphsafe_set_state(generator.clone_state())
