"""Capture of decoding steps as CUDA graphs: tried first, once an engine, in one pool of memory.

A step that reads a value back from the GPU cannot be captured, and a capture that fails leaves torch's allocator
and CUDA's stream in a state in which later work fails. So a step is first run with such reads refused; if it passes,
steps are captured. Either answer holds for the life of the engine, whose model does not change.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run the step again, over the same tensors."""


class GraphDevice(Protocol):
    """The calls of a device that a capture needs: `CudaDevice`, or a fake in tests."""

    def refuse_synchronization(self) -> AbstractContextManager[None]:
        """Return a context in which a call that waits for the device raises RuntimeError."""

    def capture(self, step: Callable[[], None]) -> Graph:
        """Capture a step without running it.

        Raises:
            RuntimeError: If the step cannot be captured; the device is as before.
        """


class GraphCapture:
    """Captures the steps of one engine.

    Args:
        device: Captures; None for a device without graphs, such as a CPU.
    """

    def __init__(self, device: GraphDevice | None) -> None:
        self._device = device
        self._is_tried = False

    @property
    def is_possible(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self._device is not None

    def run_or_capture(self, step: Callable[[], None]) -> Graph | None:
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
            graph = self._device.capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("no CUDA graph of this model, its tokens take longer: %s", str(error).partition("\n")[0])
            self._device = None
            step()
            return None
        # A capture computes nothing.
        graph.replay()
        return graph


class CudaDevice:
    """The current GPU: one side stream and one pool of memory for all graphs of an engine."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    @contextlib.contextmanager
    def refuse_synchronization(self) -> Iterator[None]:
        """Return a context in which a call that waits for the GPU raises RuntimeError."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, step: Callable[[], None]) -> Graph:
        """Capture a step; see `GraphDevice.capture`.

        ``torch.cuda.graph`` would empty the allocator's cache at each capture, and leave its stream current after a
        failed one.
        """
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError:
            self._leave_pool()
            _renew_random_state()
            raise
        return graph

    def _leave_pool(self) -> None:
        """End the allocator's use of the pool, which a capture whose end failed leaves on; the next pool is another."""
        with contextlib.suppress(RuntimeError):
            # Private, and without a public counterpart; it raises if the end of the capture did it already.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._stream = self._pool = None


def _renew_random_state() -> None:
    """Give the GPU's generator a state of the same seed and offset that no capture has marked.

    A capture marks the state, and its end clears the mark, but not if the end fails: every later draw would raise.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with contextlib.suppress(RuntimeError):
        # If this is refused, the error of the next draw says so.
        generator.graphsafe_set_state(generator.clone_state())
