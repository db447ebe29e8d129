"""Which GPU and which CPU cores each process gets; found without importing torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.config.schema import Config
from pipeline.errors import ConfigError


class Place(NamedTuple):
    """Where one process runs: GPU (an entry of CUDA_VISIBLE_DEVICES, "" for none) and CPU cores (empty: any)."""

    gpu: str
    cpus: tuple[int, ...]


def visible_gpus(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> list[str]:
    """Return the GPUs this process may use: what CUDA_VISIBLE_DEVICES lists, else all that the driver shows."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.replace(" ", "").split(",") if gpu and gpu != "-1"]
    numbers = sorted(
        int(m[1]) for path in device_folder.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))
    )
    return [str(position) for position in range(len(numbers))]


def place(config: Config, gpus: Sequence[str], cpus: Sequence[int]) -> dict[tuple[str, int], Place]:
    """Assign GPUs and cores to trainer ranks and rollout workers.

    With ``auto``, ranks take the first GPUs and workers the others, one each; where none is left they share the ranks'.
    With at least one core a process, each gets its own cores; with fewer, none is pinned. Workers whose models compute
    elsewhere in a cluster get neither.

    Raises:
        ConfigError: If a device is named that is not there, or there are fewer GPUs than ranks.
    """
    ranks = config.trainer.world_size if config.trainer.kind == "builtin" else 0
    trainer_gpus = _chosen(config.trainer.devices, gpus, "trainer.devices") or list(gpus[:ranks])
    if gpus and ranks and len(trainer_gpus) < ranks:
        raise ConfigError(f"trainer.world_size: {ranks} ranks need a GPU each, {len(trainer_gpus)} are there")
    rest = [gpu for gpu in gpus if gpu not in trainer_gpus]
    worker_gpus = _chosen(config.rollout.devices, gpus, "rollout.devices") or rest or list(gpus)
    trainers = [("trainer", rank) for rank in range(ranks)]
    workers = [("rollout", index) for index in range(worker_count(config, gpus))]
    is_remote = config.cluster.engine == "ray"
    processes = trainers if is_remote else trainers + workers
    cores = _shares(cpus, len(processes))
    gateways = dict.fromkeys(workers, Place("", ())) if is_remote else {}
    return gateways | {
        (role, index): Place(_nth(trainer_gpus if role == "trainer" else worker_gpus, index), cores[position])
        for position, (role, index) in enumerate(processes)
    }


def worker_count(config: Config, gpus: Sequence[str]) -> int:
    """Return the number of rollout workers: one a GPU of theirs, or `rollout.workers` where that is more.

    In a cluster it is `rollout.workers`: which GPUs there are is not known here.
    """
    if config.cluster.engine == "ray":
        return config.rollout.workers
    if config.rollout.devices != "auto":
        return max(len(config.rollout.devices), config.rollout.workers)
    ranks = config.trainer.world_size if config.trainer.kind == "builtin" else 0
    return max(config.rollout.workers, len(gpus) - ranks)


def _chosen(devices: str | list[int], gpus: Sequence[str], key: str) -> list[str]:
    if isinstance(devices, str):
        return []
    beyond = [device for device in devices if device >= len(gpus)]
    if beyond:
        raise ConfigError(f"{key}: device {beyond[0]} is not there, {len(gpus)} GPUs are visible")
    return [gpus[device] for device in devices]


def _nth(gpus: Sequence[str], index: int) -> str:
    return gpus[index % len(gpus)] if gpus else ""


def _shares(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    if len(cpus) < processes or not processes:
        return [()] * processes
    bounds = [len(cpus) * position // processes for position in range(processes + 1)]
    return [tuple(cpus[start:stop]) for start, stop in itertools.pairwise(bounds)]


def usable_cpus() -> list[int]:
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))
