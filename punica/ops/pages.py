"""Page-locked host memory of any size, locked after it was written.

torch allocates page-locked memory in powers of two, zeroed by one thread while it is locked: 92 ms for 80 MB on the
host of an H200. Here the threads that write the memory are the first to touch its pages, and locking them is what
remains.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


class Pages(mmap.mmap):
    """Anonymous memory of ``size`` bytes, unlocked and given back when the last tensor on it is gone."""

    def __new__(cls, size: int) -> "Pages":
        return super().__new__(cls, -1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        self._size, self._locked_at = size, 0
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child would share pages that the device reads
            with suppress(AttributeError, OSError):  # of kernels without huge pages
                self.madvise(getattr(mmap, advice))

    def tensor(self) -> Tensor:
        """Return the memory as uint8 ``[size]``."""
        if not self._size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self, dtype=torch.uint8, count=self._size)

    def lock(self, tensor: Tensor) -> None:
        """Lock the pages of ``tensor``, which :meth:`tensor` returned. torch.cuda.CudaError: CUDA refuses it."""
        if self._size:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), self._size, 0))
            self._locked_at = tensor.data_ptr()

    def __del__(self) -> None:
        if self._locked_at:
            with suppress(Exception):  # CUDA may have ended before this object
                torch.cuda.cudart().cudaHostUnregister(self._locked_at)
