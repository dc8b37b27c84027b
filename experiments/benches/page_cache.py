"""The operating system's copies of files in memory: what reads from a drive must find gone."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(folders: Iterable[Path]) -> None:
    """Write the files of ``folders`` to their drive and ask the system to forget its copies of them."""
    for file in _files(folders):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folders: Iterable[Path]) -> float:
    """Share of the bytes of ``folders`` that memory has a copy of: 1 on a file system that lives there."""
    held = [(file.stat().st_size, _cached(file)) for file in _files(folders)]
    return sum(size * share for size, share in held) / sum(size for size, _ in held)


def _files(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in sorted(folder.iterdir()) if file.stat().st_size]


def _cached(file: Path) -> float:
    """Share of a file's pages in memory (``mincore``). OSError where the system does not tell."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = -(-len(mapped) // mmap.PAGESIZE)
        known = (ctypes.c_ubyte * pages)()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), known)
        del start  # a mapping in use cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file}: {os.strerror(ctypes.get_errno())}")
        return sum(one & 1 for one in known) / pages
