"""NVML without a driver: its absence and its interface; tests/daemon/test_gpu.py has the real one."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.supervisor.gpus import Gpu, GpuWatch, Nvml, NvmlError, gpu_series
from tests.support.daemon import wait_until

GIB = 1 << 30
NO_DRIVER, NOT_SUPPORTED, GPU_IS_LOST = 9, 3, 15


@dataclasses.dataclass
class FakeDriver:
    """The functions of NVML that are called, over plain values: they write where the pointers point, as it does.

    Attributes:
        fails: Error code by function name.
        lost: GPUs that have fallen off the bus.
    """

    uuids: tuple[str, ...] = ("GPU-aaaa", "GPU-bbbb")
    used_bytes: tuple[int, ...] = (3 * GIB, 0)
    percent: tuple[int, ...] = (87, 0)
    fails: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: set[int] = dataclasses.field(default_factory=set)
    is_open: bool = False
    answers: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = object.__getattribute__(self, "_" + name)
        return lambda *arguments: self.fails.get(name) or function(*arguments)

    def _nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def _nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.uuids)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = 0x7F0000000000 + index.value
        return 0

    def _nvmlDeviceGetUUID(self, device: ctypes.c_void_p, uuid: Any, length: ctypes.c_uint) -> int:
        assert length.value == len(uuid) > len(self.uuids[0])
        uuid.value = self.uuids[self._index(device)].encode()
        return 0

    def _nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        self.answers.wait(60.0)
        if self._index(device) in self.lost:
            return GPU_IS_LOST
        memory._obj.total, memory._obj.used = 80 * GIB, self.used_bytes[self._index(device)]
        return 0

    def _nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, load: Any) -> int:
        load._obj.gpu, load._obj.memory = self.percent[self._index(device)], 50
        return 0

    def _index(self, device: ctypes.c_void_p) -> int:
        # The whole of a 64-bit pointer: ctypes would pass a bare int as 32 bits.
        assert isinstance(device, ctypes.c_void_p) and device.value is not None
        return device.value - 0x7F0000000000


def test_each_gpu_tells_its_memory_in_bytes_and_its_load_as_a_share() -> None:
    driver = FakeDriver()

    nvml = Nvml(driver)
    gpus = nvml.read()
    nvml.close()

    assert gpus == [Gpu(0, "GPU-aaaa", 3 * GIB, 80 * GIB, 0.87), Gpu(1, "GPU-bbbb", 0, 80 * GIB, 0.0)]
    assert not driver.is_open


def test_each_gpu_is_a_series_of_each_family_that_it_can_tell() -> None:
    gpus = [Gpu(0, "GPU-aaaa", 3 * GIB, 80 * GIB, 0.87), Gpu(1, "GPU-bbbb", 0, 80 * GIB, None)]
    first, second = ("0", "GPU-aaaa"), ("1", "GPU-bbbb")

    assert gpu_series(gpus) == {
        "rlhfd_gpu_memory_used_bytes": {first: 3.0 * GIB, second: 0.0},
        "rlhfd_gpu_memory_capacity_bytes": {first: 80.0 * GIB, second: 80.0 * GIB},
        "rlhfd_gpu_utilization_ratio": {first: 0.87},
    }
    assert not any(gpu_series([]).values())


def test_memory_and_load_are_laid_out_as_in_nvml_h() -> None:
    from pipeline.supervisor.gpus import _Memory, _Utilization

    assert ctypes.sizeof(_Memory) == 24 and (_Memory.total.offset, _Memory.free.offset, _Memory.used.offset) == (
        0,
        8,
        16,
    )
    assert ctypes.sizeof(_Utilization) == 8 and _Utilization.gpu.offset == 0


def test_a_gpu_that_is_lost_or_tells_no_load_hides_no_other() -> None:
    driver = FakeDriver(lost={0})
    assert [gpu.uuid for gpu in Nvml(driver).read()] == ["GPU-bbbb"]

    driver = FakeDriver(fails={"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED})
    assert [gpu.utilization for gpu in Nvml(driver).read()] == [None, None]


def test_a_library_without_a_driver_is_an_error_that_names_the_call() -> None:
    with pytest.raises(NvmlError, match="nvmlInit_v2 gave 9"):
        Nvml(FakeDriver(fails={"nvmlInit_v2": NO_DRIVER}))


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_has_none_to_tell_of() -> None:
    watch = GpuWatch()

    watch.start()
    watch._thread.join(10.0)

    assert not watch._thread.is_alive()
    assert watch.gpus() == ()


def test_a_driver_that_hangs_holds_nobody_up_and_what_it_said_grows_old() -> None:
    driver, now_s = FakeDriver(), [100.0]
    watch = GpuWatch(lambda: driver, clock_s=lambda: now_s[0])
    watch.start()
    wait_until(watch.gpus, 10.0, "the first answer")

    driver.answers.clear()
    now_s[0] += 9.9
    still_fresh = watch.gpus()
    now_s[0] += 0.2
    too_old = watch.gpus()
    driver.answers.set()
    watch.stop()
    watch._thread.join(10.0)

    assert [gpu.index for gpu in still_fresh] == [0, 1]
    assert too_old == ()
    assert not driver.is_open
