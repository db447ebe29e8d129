"""NVML without a driver: its absence and its interface; tests/daemon/test_gpu.py has the real one."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pipeline.supervisor.gpus import Gpu, GpuWatch, gpu_series, read_once
from tests.support.daemon import wait_until

GIB = 1 << 30


@dataclasses.dataclass
class FakeNvml:
    """The functions of pynvml that are called, over plain values.

    Attributes:
        fails: Error code by function name.
        lost: GPUs that have fallen off the bus.
        gone: GPUs that had done so before the session began.
    """

    NVMLError = pynvml.NVMLError

    uuids: tuple[str, ...] = ("GPU-aaaa", "GPU-bbbb")
    used_bytes: tuple[int, ...] = (3 * GIB, 0)
    capacity_bytes: tuple[int, ...] = (80 * GIB, 80 * GIB)
    percent: tuple[int, ...] = (87, 0)
    fails: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: set[int] = dataclasses.field(default_factory=set)
    gone: set[int] = dataclasses.field(default_factory=set)
    is_open: bool = False
    answers: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        function = object.__getattribute__(self, f"_{name}")

        def call(*arguments: int) -> Any:
            if name in self.fails:
                raise self.NVMLError(self.fails[name])
            return function(*arguments)

        return call

    def _nvmlInit(self) -> None:
        self.is_open = True

    def _nvmlShutdown(self) -> None:
        self.is_open = False

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.gone:
            raise self.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def _nvmlDeviceGetUUID(self, device: int) -> str:
        return self.uuids[device]

    def _nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        self.answers.wait(60.0)
        if device in self.lost:
            raise self.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=self.capacity_bytes[device], used=self.used_bytes[device])

    def _nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.percent[device], memory=50)


def faked(monkeypatch: pytest.MonkeyPatch, driver: FakeNvml) -> FakeNvml:
    """Put a driver in the place of pynvml."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_the_functions_are_those_of_pynvml() -> None:
    names = [name.removeprefix("_") for name in vars(FakeNvml) if name.startswith("_nvml")]

    assert len(names) == 7 and all(callable(getattr(pynvml, name)) for name in names)


def test_each_gpu_tells_its_memory_in_bytes_and_its_load_as_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = faked(monkeypatch, FakeNvml())

    assert read_once() == [Gpu(0, "GPU-aaaa", 3 * GIB, 80 * GIB, 0.87), Gpu(1, "GPU-bbbb", 0, 80 * GIB, 0.0)]
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


def test_a_gpu_that_is_lost_or_tells_no_load_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, FakeNvml(lost={0}))
    assert [gpu.uuid for gpu in read_once()] == ["GPU-bbbb"]

    faked(monkeypatch, FakeNvml(fails={"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED}))
    assert [gpu.utilization for gpu in read_once()] == [None, None]


def test_a_gpu_that_is_lost_before_the_start_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = faked(monkeypatch, FakeNvml(gone={0}))

    assert [(gpu.index, gpu.uuid) for gpu in read_once()] == [(1, "GPU-bbbb")]
    assert not driver.is_open


def test_a_library_without_a_driver_tells_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, FakeNvml(fails={"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}))

    assert read_once() == []


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_has_none_to_tell_of() -> None:
    watch = GpuWatch()

    watch.start()
    watch._thread.join(10.0)

    assert not watch._thread.is_alive()
    assert watch.gpus() == () and read_once() == []


def test_a_driver_that_hangs_holds_nobody_up_and_what_it_said_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, now_s = faked(monkeypatch, FakeNvml()), [100.0]
    watch = GpuWatch(clock_s=lambda: now_s[0])
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
