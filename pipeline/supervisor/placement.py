"""GPU and CPU cores of each process, found without torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, counted


class Devices(NamedTuple):
    """Devices of one process: its CUDA_VISIBLE_DEVICES, and its CPU cores (empty: any).

    Attributes:
        gpu: Its GPU, with `rollout.tensor_parallel` its GPUs, separated by commas; "" for none.
        cpus: Its cores.
    """

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


def local_cpus(
    gpus: Sequence[str],
    driver_folder: Path = Path("/proc/driver/nvidia/gpus"),
    pci_folder: Path = Path("/sys/bus/pci/devices"),
) -> dict[str, tuple[int, ...]]:
    """Return the CPU cores of each GPU's NUMA node, without the GPUs of which none are known.

    Args:
        gpus: Entries of CUDA_VISIBLE_DEVICES: UUIDs, or numbers, counted in order of the PCI bus. CUDA counts GPUs of
            different models in another order unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
        driver_folder: The driver's folder with one entry a GPU, named by PCI address.
        pci_folder: The kernel's folder with one entry a PCI device.
    """
    addresses = sorted(path.name.lower() for path in driver_folder.glob("*:*"))
    by_uuid = {_uuid(driver_folder, path.name): path.name.lower() for path in driver_folder.glob("*:*")}
    found = {}
    for gpu in gpus:
        if gpu.isdecimal():
            address = addresses[int(gpu)] if int(gpu) < len(addresses) else None
        else:
            # CUDA takes the beginning of a UUID, if it is unique.
            matching = [by_uuid[uuid] for uuid in by_uuid if gpu and uuid.startswith(gpu)]
            address = matching[0] if len(matching) == 1 else None
        if address and (cores := _core_list(pci_folder / address / "local_cpulist")):
            found[gpu] = cores
    return found


def _uuid(driver_folder: Path, address: str) -> str:
    try:
        text = (driver_folder / address / "information").read_text()
    except OSError:
        return ""
    match = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else ""


def _core_list(path: Path) -> tuple[int, ...]:
    """Return the numbers of a list as ``0-3,8``; none if the file is missing or is not such a list."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return tuple(core for first, *last in ranges for core in range(int(first), int((last or [first])[0]) + 1))
    except (OSError, ValueError):
        return ()


def assign(
    config: Config,
    gpus: Sequence[str],
    cpus: Sequence[int],
    local: Mapping[str, Sequence[int]] = {},
) -> dict[tuple[str, int], Devices]:
    """Assign GPUs and cores to trainer ranks and rollout workers.

    With ``auto``, ranks take the first GPUs and workers the others, one each or `rollout.tensor_parallel` each; if none
    is left, workers share the ranks' GPUs. With at least one core a process, each process gets its own cores; with
    fewer, no process is pinned. If the GPUs are on several NUMA nodes, the processes of a node share its cores in this
    way. Ranks and workers whose models run on other machines of a cluster get neither.

    Args:
        config: The configuration.
        gpus: Entries of CUDA_VISIBLE_DEVICES.
        cpus: Cores that may be used.
        local: Cores of each GPU's NUMA node (`local_cpus`).

    Returns:
        The devices of each (role, index).

    Raises:
        ConfigError: If a configured device does not exist, or there are fewer GPUs than ranks, or than a worker needs.
    """
    ranks = config.ranks_here if config.trainer.kind == "builtin" else 0
    trainer_gpus = _chosen(config.trainer.devices, gpus, "trainer.devices") or list(gpus[:ranks])
    if gpus and ranks and len(trainer_gpus) < ranks:
        raise ConfigError(
            f"trainer.world_size: {ranks} ranks need a GPU each, {counted(len(trainer_gpus), 'is', 'are')} there"
        )
    rest = [gpu for gpu in gpus if gpu not in trainer_gpus]
    worker_gpus = _groups(_chosen(config.rollout.devices, gpus, "rollout.devices") or rest or list(gpus), config)
    trainers = [("trainer", rank) for rank in range(ranks)]
    workers = [("rollout", index) for index in range(worker_count(config, gpus))]
    is_remote = config.cluster.engine == "ray"
    processes = trainers if is_remote else trainers + workers
    chosen = [_nth(trainer_gpus if role == "trainer" else worker_gpus, index) for role, index in processes]
    first = [gpu.partition(",")[0] for gpu in chosen]
    cores = _shares_of_nodes(cpus, [frozenset(local.get(gpu, ())) for gpu in first]) or _shares(cpus, len(processes))
    remote_ranks = [("trainer", rank) for rank in range(ranks, config.trainer.world_size)] if ranks else []
    gateways = dict.fromkeys([*(workers if is_remote else []), *remote_ranks], Devices("", ()))
    return gateways | {
        process: Devices(gpu, share) for process, gpu, share in zip(processes, chosen, cores, strict=True)
    }


def worker_count(config: Config, gpus: Sequence[str]) -> int:
    """Return the number of rollout workers: one for each of their GPUs, or `rollout.workers` if that is more.

    With `rollout.tensor_parallel` it is one for as many GPUs.

    In a cluster it is `rollout.workers`: the GPUs of the other nodes are not known here.
    """
    if config.cluster.engine == "ray":
        return config.rollout.workers
    if config.rollout.devices != "auto":
        return max(len(config.rollout.devices) // config.rollout.tensor_parallel, config.rollout.workers)
    devices = config.trainer.devices
    ranks = config.ranks_here if config.trainer.kind == "builtin" else 0
    taken = ranks if isinstance(devices, str) else len({*devices})
    return max(config.rollout.workers, (len(gpus) - taken) // config.rollout.tensor_parallel)


def _chosen(devices: str | list[int], gpus: Sequence[str], key: str) -> list[str]:
    if isinstance(devices, str):
        return []
    beyond = [device for device in devices if device >= len(gpus)]
    if beyond:
        raise ConfigError(f"{key}: device {beyond[0]} is not there, {counted(len(gpus), 'GPU is', 'GPUs are')} visible")
    return [gpus[device] for device in devices]


def _groups(gpus: Sequence[str], config: Config) -> list[str]:
    """Return the GPUs of each worker that has its own, separated by commas; a rest is left out."""
    size = config.rollout.tensor_parallel
    if gpus and len(gpus) < size:
        raise ConfigError(
            f"rollout.tensor_parallel: a worker needs {size} GPUs, {counted(len(gpus), 'is', 'are')} there for workers"
        )
    return [",".join(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)]


def _nth(gpus: Sequence[str], index: int) -> str:
    return gpus[index % len(gpus)] if gpus else ""


def _shares(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    if len(cpus) < processes or not processes:
        return [()] * processes
    bounds = [len(cpus) * position // processes for position in range(processes + 1)]
    return [tuple(cpus[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _shares_of_nodes(cpus: Sequence[int], nodes: Sequence[frozenset[int]]) -> list[tuple[int, ...]] | None:
    """Return the cores of each process among those of its node; None if the nodes are one, unknown or overlap."""
    different = set(nodes)
    if len(different) < 2 or frozenset() in different or len(frozenset().union(*different)) < sum(map(len, different)):
        return None
    shares = {
        node: iter(_shares([cpu for cpu in cpus if cpu in node], sum(other == node for other in nodes)))
        for node in different
    }
    return [next(shares[node]) for node in nodes]


def usable_cpus() -> list[int]:
    """Return the CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
