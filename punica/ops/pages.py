"""Page-locked host memory that is locked after it was written, and used again.

torch allocates page-locked memory in powers of two, zeroed by one thread while it is locked: 92 ms for 80 MB on the
host of an H200. Here the threads that write the memory are the first to touch its pages, and locking them is what
remains. Pages that are free again stay locked for later adapters of about their size: unlocking waits for the device.
"""

import ctypes
import mmap
import weakref
from collections import defaultdict
from contextlib import suppress

import torch
from torch import Tensor

MOST_FREE = 4 << 30
"""Bytes of locked pages that are kept for later adapters."""
_free: defaultdict[int, list["Pages"]] = defaultdict(list)
"""Locked pages without a tensor, by their bytes."""


class Pages:
    """Anonymous memory of ``size`` bytes for tensors, which a device can read once it is locked."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size, self._is_locked = size, False
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child would share pages that the device reads
            with suppress(AttributeError, OSError):  # of kernels without huge pages
                self._memory.madvise(getattr(mmap, advice))

    @classmethod
    def of(cls, size: int) -> "Pages":
        """Return free pages, or new ones: at least ``size`` bytes, at most an eighth and a page more."""
        step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
        size = max(1, -(-size // step)) * step
        try:
            return _free[size].pop()
        except IndexError:
            return cls(size)

    def tensor(self, size: int) -> Tensor:
        """Return the first ``size`` bytes, uint8. Locked pages are free again when the last tensor on them is gone."""
        if not size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        array = (ctypes.c_uint8 * size).from_buffer(self._memory)
        weakref.finalize(array, self._give_back)
        return torch.frombuffer(array, dtype=torch.uint8)

    def lock(self) -> None:
        """Lock the pages, once. torch.cuda.CudaError: CUDA refuses it."""
        if not self._is_locked:
            address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, self.size, 0))
            except torch.cuda.CudaError:
                with suppress(RuntimeError):  # CUDA tells the error once more, to the next launch: to this one
                    torch.zeros(1, device="cuda")
                raise
            self._is_locked = True

    def _give_back(self) -> None:
        if not self._is_locked:
            return
        if sum(size * len(pages) for size, pages in list(_free.items())) + self.size <= MOST_FREE:
            _free[self.size].append(self)
        else:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory)))
