"""GPU and CPU cores of each process, found without torch."""

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
    """Devices of one process: GPU (an entry of CUDA_VISIBLE_DEVICES, "" for none) and CPU cores (empty: any)."""

    gpu: str
    cpus: tuple[int, ...]


def visible_gpus(environ: Mapping[str, str], device_folder: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this process may use: the list in CUDA_VISIBLE_DEVICES, else all that the driver shows."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.replace(" ", "").split(",") if gpu and gpu != "-1"]
    numbers = sorted(
        int(m[1]) for path in device_folder.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))
    )
    return [str(position) for position in range(len(numbers))]


def place(config: Config, gpus: Sequence[str], cpus: Sequence[int]) -> dict[tuple[str, int], Place]:
    """Assign GPUs and cores to trainer ranks and rollout workers.

    With ``auto``, ranks take the first GPUs and workers the others, one each; if none is left, workers share the ranks'
    GPUs. With at least one core a process, each process gets its own cores; with fewer, no process is pinned. Workers
    whose models run on other nodes of a cluster get neither.

    Returns:
        The place of each (role, index).

    Raises:
        ConfigError: If a configured device does not exist, or there are fewer GPUs than ranks.
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
    """Return the number of rollout workers: one for each of their GPUs, or `rollout.workers` if that is more.

    In a cluster it is `rollout.workers`: the GPUs of the other nodes are not known here.
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
    """Return the CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
