"""GPU readings from NVIDIA's driver through NVML: memory and utilization.

A call into the driver of a failed GPU may take seconds or never return, so a thread of its own makes the calls; the
supervisor takes the last reading, and none once that is old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

_INTERVAL_S: Final = 1.0
_MOST_AGE_S: Final = 10.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU at one moment.

    Attributes:
        index: Number of the GPU in NVML's order, as in nvidia-smi; CUDA's order may differ.
        uuid: Permanent name of the GPU.
        utilization: Share of the driver's last sample period in which a kernel ran; None if the driver has no value.
    """

    index: int
    uuid: str
    used_bytes: int
    capacity_bytes: int
    utilization: float | None


def readings() -> Generator[list[Gpu]]:
    """Yield the present reading of every GPU, again and again; a GPU that does not answer is left out.

    None without a driver. The session with the driver ends with the iterator, which the caller closes.
    """
    # Only here: most commands read no GPU.
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        devices = [*_devices(nvml)]
    except nvml.NVMLError as error:
        log.debug("no GPU is read: error=%s", error)
        return
    try:
        while True:
            found = (_reading(nvml, index, device, uuid) for index, device, uuid in devices)
            yield [gpu for gpu in found if gpu is not None]
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: Any) -> Iterator[tuple[int, object, str]]:
    """Yield number, handle and UUID of each GPU; one that has none, as after it has fallen off the bus, is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            yield index, device, nvml.nvmlDeviceGetUUID(device)
        except nvml.NVMLError as error:
            log.warning("GPU is not read: index=%d error=%s", index, error)


def _reading(nvml: Any, index: int, device: object, uuid: str) -> Gpu | None:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
    except nvml.NVMLError as error:
        log.debug("GPU does not answer: index=%d error=%s", index, error)
        return None
    try:
        utilization = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
    except nvml.NVMLError:
        # A MIG slice of a GPU has no utilization of its own.
        utilization = None
    return Gpu(index, uuid, memory.used, memory.total, utilization)


def read_once() -> list[Gpu]:
    """Return the reading of every GPU; none without a driver."""
    with contextlib.closing(readings()) as found:
        return next(found, [])


class GpuWatch:
    """Reads the GPUs once a second for as long as the process lives; without a driver it reads none.

    Args:
        clock_s: Monotonic seconds.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._latest: tuple[float, Sequence[Gpu]] = (0.0, ())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpus", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the readings; a call that hangs in the driver stays, its daemon thread keeps no process alive."""
        self._stopped.set()

    def gpus(self) -> Sequence[Gpu]:
        """Return the last reading, none if it is older than 10 s."""
        at_s, gpus = self._latest
        return gpus if self._clock_s() - at_s <= _MOST_AGE_S else ()

    def _watch(self) -> None:
        with contextlib.closing(readings()) as found:
            while not self._stopped.is_set():
                # The time before the call: a reading that took long is as old as its start.
                at_s, gpus = self._clock_s(), next(found, None)
                if gpus is None:
                    return
                self._latest = at_s, gpus
                self._stopped.wait(_INTERVAL_S)


def gpu_series(gpus: Sequence[Gpu]) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the metric families rlhfd_gpu_*, a series for each GPU by its labels gpu and uuid."""
    named = [((str(gpu.index), gpu.uuid), gpu) for gpu in gpus]
    return {
        "rlhfd_gpu_memory_used_bytes": {labels: float(gpu.used_bytes) for labels, gpu in named},
        "rlhfd_gpu_memory_capacity_bytes": {labels: float(gpu.capacity_bytes) for labels, gpu in named},
        "rlhfd_gpu_utilization_ratio": {
            labels: gpu.utilization for labels, gpu in named if gpu.utilization is not None
        },
    }
