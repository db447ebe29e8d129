"""The arena's file and its allocator."""

import itertools
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ArenaFullError, ConfigError, LedgerError
from pipeline.storage.allocator import Extent, ExtentAllocator
from pipeline.storage.arena import ALIGNMENT_BYTES, Arena


def make(path: Path, payload_bytes: int = 1 << 20) -> Arena:
    Arena.create(path, payload_bytes=payload_bytes, ledger_bytes=8192, layout=7)
    return Arena(path)


def test_arena_is_private_and_exactly_as_large_as_configured(tmp_path):
    arena = make(tmp_path / "arena")

    status = os.stat(tmp_path / "arena")

    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 1 << 20, "pages are allocated, not promised"
    assert (arena.payload_bytes, arena.ledger_bytes, arena.layout) == (1 << 20, 8192, 7)
    arena.close()


def test_two_mappings_see_the_same_bytes(tmp_path):
    one = make(tmp_path / "arena")
    two = Arena(tmp_path / "arena")

    one.extent(4096, 3)[:] = b"abc"

    assert bytes(two.extent(4096, 3)) == b"abc"
    one.close()
    two.close()


def test_arena_larger_than_shared_memory_is_refused_before_a_page_is_taken():
    folder = Path("/dev/shm")
    system = os.statvfs(folder)

    with pytest.raises(ConfigError, match=r"arena_bytes: an arena of .* B does not fit: .* B free of .* B"):
        Arena.create(
            folder / f"rlhfd-test-{os.getpid()}",
            payload_bytes=(system.f_blocks + 1) * system.f_frsize,
            ledger_bytes=4096,
            layout=1,
        )

    assert not (folder / f"rlhfd-test-{os.getpid()}").exists()


def test_an_arena_above_the_limit_of_a_files_size_is_refused_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ConfigError) as refused:
            make(tmp_path / "arena")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert str(refused.value) == (
        "buffer.arena_bytes: an arena of 1,060,864 B is above the limit of a file's size, 1,048,576 B: raise it "
        "(ulimit -f, LimitFSIZE=)"
    )
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_arena_is_refused(tmp_path):
    (tmp_path / "arena").write_bytes(bytes(8192))

    with pytest.raises(LedgerError, match="no arena"):
        Arena(tmp_path / "arena")


def test_a_truncated_arena_is_refused_rather_than_mapped(tmp_path):
    make(tmp_path / "arena").close()
    os.truncate(tmp_path / "arena", 65536)

    with pytest.raises(LedgerError, match=r"truncated by another program: .*arena holds 65,536 B of 1,060,864 B"):
        Arena(tmp_path / "arena")


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, (1 << 20) + 1), (1 << 20, 1)])
def test_extent_outside_the_arena_is_refused(tmp_path, offset, nbytes):
    arena = make(tmp_path / "arena")

    with pytest.raises(LedgerError, match="outside an arena"):
        arena.extent(offset, nbytes)

    arena.close()


def test_full_arena_refuses_reserve_and_says_how_much_is_free():
    allocator = ExtentAllocator(1024)
    allocator.reserve(1000)

    with pytest.raises(ArenaFullError, match="64 B does not fit: 0 B free of 1,024 B"):
        allocator.reserve(1)


def test_neighbours_merge_when_they_are_released():
    allocator = ExtentAllocator(1024)
    first, second, third = (allocator.reserve(256) for _ in range(3))

    allocator.release(first)
    allocator.release(third)
    allocator.release(second)

    assert allocator.reserve(1024) == Extent(0, 1024)


def test_shrink_gives_the_tail_back():
    allocator = ExtentAllocator(1024)
    extent = allocator.reserve(1024)

    allocator.shrink(extent, 100)

    assert allocator.free_bytes == 1024 - 128
    assert allocator.reserve(896).offset == 128


def test_taking_an_extent_twice_is_refused():
    allocator = ExtentAllocator(1024)
    allocator.take(Extent(128, 100))

    with pytest.raises(LedgerError, match="overlaps"):
        allocator.take(Extent(192, 10))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=60))
def test_extents_never_overlap_and_no_byte_is_lost(steps):
    allocator = ExtentAllocator(16384)
    held: list[Extent] = []
    for release, number in steps:
        if release and held:
            allocator.release(held.pop(number % len(held)))
            continue
        try:
            held.append(allocator.reserve(number))
        except ArenaFullError:
            continue

    ranges = sorted((extent.offset, extent.offset + extent.nbytes) for extent in held)

    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
    assert allocator.free_bytes + sum(extent.nbytes for extent in held) == 16384
    assert all(extent.offset % ALIGNMENT_BYTES == 0 for extent in held)
    for extent in held:
        allocator.release(extent)
    assert allocator.reserve(16384) == Extent(0, 16384)
