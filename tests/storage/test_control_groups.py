"""The memory limit of a container or job: found in either version, and held against the files in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import main
from pipeline.errors import ConfigError
from pipeline.storage import control_groups
from pipeline.storage.arena import Arena
from pipeline.storage.control_groups import memory_limit_bytes, memory_room_bytes
from pipeline.supervisor.capacity.machine import described

MIB = 1 << 20
OF_A_JOB = """9:memory:/slurm/job_7/step_0
8:cpu:/
0::/
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 4 GiB without swap, with no control group yet; the folder of its files."""
    (tmp_path / "meminfo").write_text("MemTotal:  4194304 kB\nSwapFree:  0 kB\n")
    (tmp_path / "own").write_text("0::/\n")
    for name, file in (("_ROOT", "groups"), ("_OWN", "own"), ("_MEMORY", "meminfo")):
        monkeypatch.setattr(control_groups, name, tmp_path / file)
    return tmp_path


def limited(group: Path, limit: str, *, anonymous: int = 0, shared: int = 0) -> None:
    """Make a group of version 2."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.stat").write_text(f"anon {anonymous}\nfile {900 * MIB}\nshmem {shared}\n")


def test_without_a_limit_there_is_none(machine: Path) -> None:
    limited(machine / "groups", "max")

    assert (memory_limit_bytes(), memory_room_bytes()) == (None, None)


def test_the_least_limit_of_the_groups_above_holds_and_pages_of_files_on_disk_take_no_room(machine: Path) -> None:
    (machine / "own").write_text("0::/pods/pod-1/main\n")
    limited(machine / "groups" / "pods" / "pod-1" / "main", "max")
    limited(machine / "groups" / "pods" / "pod-1", str(1024 * MIB), anonymous=100 * MIB, shared=24 * MIB)
    limited(machine / "groups" / "pods", str(2048 * MIB), anonymous=1500 * MIB)

    assert (memory_limit_bytes(), memory_room_bytes()) == (1024 * MIB, 548 * MIB)


def test_in_a_container_the_group_is_the_root_whatever_its_path_is_outside(machine: Path) -> None:
    (machine / "own").write_text("0::/kubepods/burstable/pod5\n")
    limited(machine / "groups", str(512 * MIB), anonymous=12 * MIB)

    assert (memory_limit_bytes(), memory_room_bytes()) == (512 * MIB, 500 * MIB)


def test_the_limit_of_a_job_of_version_1_is_found_above_its_step(machine: Path) -> None:
    (machine / "own").write_text(OF_A_JOB)
    job = machine / "groups" / "memory" / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (job / "memory.limit_in_bytes").write_text(f"{256 * MIB}\n")
    (job / "memory.stat").write_text(f"rss 0\ntotal_rss {6 * MIB}\ntotal_shmem {50 * MIB}\n")

    assert (memory_limit_bytes(), memory_room_bytes()) == (256 * MIB, 200 * MIB)


def test_swap_is_room(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal:  4194304 kB\nSwapFree:  1024 kB\n")
    limited(machine / "groups", str(512 * MIB))

    assert memory_room_bytes() == 513 * MIB


@pytest.mark.parametrize(("most", "used", "room"), [("max", 0, 612), ("0", 0, 512), (str(80 * MIB), 30 * MIB, 562)])
def test_swap_that_the_group_may_not_use_is_no_room(machine: Path, most: str, used: int, room: int) -> None:
    (machine / "meminfo").write_text(f"MemTotal:  4194304 kB\nSwapFree:  {100 << 10} kB\n")
    limited(machine / "groups", str(512 * MIB))
    (machine / "groups" / "memory.swap.max").write_text(f"{most}\n")
    (machine / "groups" / "memory.swap.current").write_text(f"{used}\n")

    assert memory_room_bytes() == room * MIB


def test_an_arena_beyond_the_limit_is_refused_before_the_kernel_kills_for_it(machine: Path) -> None:
    limited(machine / "groups", str(64 * MIB), anonymous=60 * MIB)

    with pytest.raises(ConfigError) as refused:
        Arena.create(machine / "arena", payload_bytes=8 * MIB, ledger_bytes=4096, layout=1)

    assert str(refused.value) == (
        "buffer.arena_bytes: an arena of 8,396,800 B does not fit: 4,194,304 B free of the 67,108,864 B of memory that "
        "the control group of this process (a container, a job, a service) may have, /dev/shm included"
    )
    assert not (machine / "arena").exists()


def test_the_plan_counts_with_the_limit(machine: Path) -> None:
    limited(machine / "groups", "1500000000")

    planned, given = described({}, gpus=0, gpu_bytes=0), described({}, gpus=0, gpu_bytes=0, ram_bytes=8_000_000_000)
    shown = CliRunner().invoke(main, ["plan"]).output

    assert (planned.ram_bytes, given.ram_bytes) == (1_500_000_000, 8_000_000_000)
    assert planned.shm_bytes <= 1_500_000_000
    assert "machine      no GPU, 1.5 GB of memory (the limit of its control group), " in shown
