"""GPU readings from NVIDIA's driver through NVML: memory and utilization.

ctypes suffices: seven functions are needed, and their interface has been fixed for a decade. A call into the driver of
a failed GPU may take seconds or never return, so a thread of its own makes the calls; the supervisor takes the last
reading, and none once that is old.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

LIBRARY: Final = "libnvidia-ml.so.1"
_INTERVAL_S: Final = 1.0
_MOST_AGE_S: Final = 10.0
_UUID_BYTES: Final = 96
_OK: Final = 0

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


class NvmlError(Exception):
    """A call of NVML returned an error code."""


class Library(Protocol):
    """A loaded library, as `ctypes.CDLL` returns it: functions by name."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """An open session with the driver.

    Raises:
        NvmlError: If the library finds no driver or no GPU.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = [self._open(index) for index in range(count.value)]

    def read(self) -> list[Gpu]:
        """Return the present reading of every GPU; a GPU that does not answer is left out."""
        found = []
        for index, (device, uuid) in enumerate(self._devices):
            memory, load = _Memory(), _Utilization()
            try:
                self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            except NvmlError as error:
                log.debug("GPU does not answer: index=%d error=%s", index, error)
                continue
            try:
                self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(load))
                utilization = load.gpu / 100
            except NvmlError:
                # A MIG slice of a GPU has no utilization of its own.
                utilization = None
            found.append(Gpu(index, uuid, memory.used, memory.total, utilization))
        return found

    def close(self) -> None:
        """End the session."""
        self._call("nvmlShutdown")

    def _open(self, index: int) -> tuple[ctypes.c_void_p, str]:
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self._call("nvmlDeviceGetUUID", device, uuid, ctypes.c_uint(_UUID_BYTES))
        return device, uuid.value.decode("ascii", "replace")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _OK:
            raise NvmlError(f"{name} gave {code}")


class GpuWatch:
    """Reads the GPUs once a second for as long as the process lives; without a driver it reads none.

    Args:
        load: Returns the loaded NVML library.
        clock_s: Monotonic seconds.
    """

    def __init__(
        self,
        load: Callable[[], Library] = lambda: ctypes.CDLL(LIBRARY),
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
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
        try:
            nvml = Nvml(self._load())
        except (OSError, AttributeError, NvmlError) as error:
            log.debug("no GPU metrics: error=%s", error)
            return
        while not self._stopped.is_set():
            # The time before the call: a reading that took long is as old as its start.
            at_s = self._clock_s()
            self._latest = at_s, nvml.read()
            self._stopped.wait(_INTERVAL_S)
        nvml.close()


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
