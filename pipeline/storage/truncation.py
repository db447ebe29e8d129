"""Files in shared memory that another program has cut off, and a mapping that outlives it.

An access beyond the end of a mapped file is SIGBUS, which ends a process: children are restarted or ended by the
supervisor, which must not die itself. `survive` puts a page of zeros where a page is gone: the reader sees zeros, and
the supervisor's next look at the sizes (`Sizes`) ends the run and names the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

_PAGE_BYTES: Final = mmap.PAGESIZE
# siginfo_t of x86-64 Linux: si_addr is the first field of the part for faults.
_SI_ADDR_OFFSET: Final = 16
_MAP_FIXED: Final = 0x10
_SA_SIGINFO: Final = 4
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of glibc on x86-64."""

    _fields_ = (
        ("handler", _Handler), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p),
    )  # fmt: skip


_kept: list[Any] = []
"""The handler, which must not be collected, and what it calls."""


def survive(mapping: mmap.mmap) -> Callable[[int], None]:
    """Let accesses of this process to a mapping whose file was truncated read and write pages of zeros.

    One mapping a process. The handler runs Python in the thread of the fault: it holds the interpreter's lock, for the
    slab is read and written by Python alone. A fault elsewhere ends the process as before.

    Returns:
        A function that maps the file anew at the same place, once it is whole again; it takes a descriptor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    view = ctypes.c_char.from_buffer(mapping)
    start, end = ctypes.addressof(view), ctypes.addressof(view) + len(mapping)
    # Else the mapping could not be closed.
    del view

    def lost(number: int, info: int, _context: int) -> None:
        address = ctypes.c_uint64.from_address(info + _SI_ADDR_OFFSET).value
        page = address - address % _PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        is_mine = start <= address < end
        if not is_mine or libc.mmap(page, _PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _MAP_FAILED:
            # The access is made again, and ends the process.
            signal.signal(number, signal.SIG_DFL)

    action = _Action(handler=_Handler(lost), flags=_SA_SIGINFO)
    _kept[:] = [action, libc, lost]
    if libc.sigaction(signal.SIGBUS, ctypes.byref(action), None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def map_again(descriptor: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(start, end - start, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return map_again


class Sizes:
    """The sizes of files that never shrink while they are at their paths.

    Args:
        paths: The files; one that is not there yet is looked for again.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen: dict[Path, tuple[int, int]] = dict.fromkeys(paths, (0, 0))

    def cut(self) -> tuple[Path, str] | None:
        """Return a file that is smaller than before, and a sentence that names it; None if there is none."""
        for path, (inode, nbytes) in self._seen.items():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if found.st_ino == inode and found.st_size < nbytes:
                return path, truncated(path, found.st_size, nbytes)
            self._seen[path] = found.st_ino, found.st_size
        return None


def truncated(path: Path, size_bytes: int, whole_bytes: int) -> str:
    """Return the sentence about a file that was cut off."""
    return f"shared memory was truncated by another program: {path} holds {size_bytes:,} B of {whole_bytes:,} B"
