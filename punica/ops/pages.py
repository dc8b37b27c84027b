"""Host memory for tensors that is used again: for reading adapters, and page-locked for devices that read it.

The first touch of a page costs several times the copy into it: 80 MB are read in 49 ms into new pages, in 12 ms into
used ones. torch allocates and zeroes page-locked memory of 80 MB in 92 ms on the host of an H200; locking written pages
takes 4 ms. Free pages stay, locked or not, for adapters of about their size: unlocking waits for the device.
"""

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor

_free: dict["Pages", bool] = {}
"""Pages without a tensor, of every kind, the oldest first. One call each adds or takes: readers share them."""


class Pages:
    """Anonymous memory of ``size`` bytes for tensors, free for others when the last tensor on it is gone."""

    most_free = 256 << 20  # bytes of free pages of this kind that are kept: three adapters of 80 MB

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self._advise("MADV_HUGEPAGE")

    def _advise(self, advice: str) -> None:
        with suppress(AttributeError, OSError):  # of kernels without it
            self._memory.madvise(getattr(mmap, advice))

    @classmethod
    def of(cls, size: int) -> Self:
        """Return free pages, or new ones: at least ``size`` bytes, at most an eighth and a page more."""
        step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
        size = max(1, -(-size // step)) * step
        for pages in reversed(list(_free)):
            if type(pages) is cls and pages.size == size and _free.pop(pages, False):
                return pages
        return cls(size)

    def tensor(self, size: int) -> Tensor:
        """Return the first ``size`` bytes, uint8."""
        array = (ctypes.c_uint8 * max(1, size)).from_buffer(self._memory)  # torch takes no empty buffer
        weakref.finalize(array, self._give_back)
        return torch.frombuffer(array, dtype=torch.uint8)[:size]

    def _give_back(self) -> None:
        """Keep the pages, and release the oldest of this kind that are then beyond ``most_free``."""
        if self.size > self.most_free:
            self._release()
            return
        _free[self] = True
        kept = [pages for pages in list(_free) if type(pages) is type(self)]
        excess = sum(pages.size for pages in kept) - self.most_free
        for pages in kept:
            if excess > 0 and _free.pop(pages, False):
                pages._release()
                excess -= pages.size

    def _release(self) -> None:
        """Undo what must be undone before the memory is unmapped, which happens when this object is deleted."""


class LockedPages(Pages):
    """Pages that a device can read once they are locked. Those that never were are given back to the system."""

    most_free = 4 << 30

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._is_locked = False
        self._advise("MADV_DONTFORK")  # a child would share pages that the device reads

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
        if self._is_locked:
            super()._give_back()

    def _release(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory)))
