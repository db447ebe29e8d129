"""The GPUs and the memory of a machine, this one or one that is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.storage.control_groups import memory_limit_bytes
from pipeline.supervisor.gpus import read_once
from pipeline.supervisor.placement import visible_gpus

SHM = "/dev/shm"
_LISTED = "CUDA_VISIBLE_DEVICES"


class Machine(NamedTuple):
    """A machine for a run, in bytes.

    Attributes:
        gpus: Number of GPUs.
        gpu_bytes: Memory of the smallest of them, 0 without one.
        ram_bytes: Host memory, or what the control group of this process may have of it, as in a container.
        shm_bytes: Room in /dev/shm, which is never more than the host memory.
    """

    gpus: int
    gpu_bytes: int
    ram_bytes: int
    shm_bytes: int


def described(
    environ: Mapping[str, str],
    *,
    gpus: int | None = None,
    gpu_bytes: int | None = None,
    ram_bytes: int | None = None,
    shm_bytes: int | None = None,
) -> Machine:
    """Return this machine with the values that are given in place of its own.

    Args:
        environ: The environment, with the list of GPUs that a run may use (CUDA_VISIBLE_DEVICES).
        gpus: Number of GPUs; None for those that a run may use here.
        gpu_bytes: Memory of a GPU; None for the smallest of those that a run may use here.
        ram_bytes: Host memory; None for this machine's.
        shm_bytes: Room in /dev/shm; None for half of `ram_bytes`, which is Linux's default, or for the free room here.

    Raises:
        ConfigError: If there are GPUs of unknown memory, or no shared memory.
    """
    here = gpus_here(environ) if gpu_bytes is None else []
    count = len(visible_gpus(environ)) if gpus is None else gpus
    if gpus is None and gpu_bytes is None and len(here) < count:
        raise ConfigError("the driver does not tell the memory of this machine's GPUs")
    if count and gpu_bytes is None and not here:
        raise ConfigError("--gpu-memory: this machine shows no GPU, give the memory of one, such as 80GB")
    memory = gpu_bytes if gpu_bytes is not None else min(here, default=0)
    if ram_bytes is not None:
        return Machine(count, memory, ram_bytes, min(ram_bytes // 2 if shm_bytes is None else shm_bytes, ram_bytes))
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (limit_bytes := memory_limit_bytes()) is not None:
        ram_bytes = min(ram_bytes, limit_bytes)
    if shm_bytes is None:
        try:
            shm = os.statvfs(SHM)
        except OSError as error:
            raise ConfigError(f"{SHM}: {error.strerror}; mount a tmpfs there, which holds the run's rows") from error
        shm_bytes = shm.f_bavail * shm.f_frsize
    # A mount may be larger than the memory that its files would take.
    return Machine(count, memory, ram_bytes, min(shm_bytes, ram_bytes))


def gpus_here(environ: Mapping[str, str]) -> list[int]:
    """Return the memory of each GPU that a run may use here, in bytes; none without a driver.

    Entries of CUDA_VISIBLE_DEVICES are numbers, or the beginnings of UUIDs; one that the driver does not know is left
    out, as a part of a GPU (MIG) is.
    """
    found = read_once()
    if environ.get(_LISTED) is None:
        return [gpu.capacity_bytes for gpu in found]
    named = (
        [gpu for gpu in found if (gpu.index == int(entry) if entry.isdecimal() else gpu.uuid.startswith(entry))]
        for entry in visible_gpus(environ)
    )
    return [gpus[0].capacity_bytes for gpus in named if len(gpus) == 1]
