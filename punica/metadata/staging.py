"""Asynchronous host-to-device copies: `StagedBuffer`, double-buffered in pinned memory, and `send`.

On a CPU the host array *is* the tensor. A GPU has two pinned ones: while the copy of one may still be running, the next
step fills the other, and an event tells when a third step may reuse the first.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch


class StagedBuffer:
    """A tensor ``tensor`` of fixed shape and address, as captured graphs hold it, on its device's current stream. Use:
    ``host = buffer.begin(); host[...] = values; buffer.commit(rows)``, one thread at a time.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, initial: tuple[int, ...] = (0,)
    ) -> None:
        """``initial`` is repeated along the first dimensions (one value per column, or one for all)."""
        with torch.inference_mode(False):  # steps may be filled in and outside of it
            start = torch.tensor(initial, dtype=dtype, device="cpu").expand(shape).contiguous()
            self.tensor = start.to(device)
            self._asynchronous = device.type == "cuda"
            if self._asynchronous:
                self._hosts = [start.pin_memory() for _ in range(2)]
            else:
                self._hosts = [self.tensor if device.type == "cpu" else start]
        self._arrays: list[np.ndarray] = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._turn = 0

    def begin(self) -> np.ndarray:
        """Return the host array that may be overwritten now; it holds the values of two steps ago."""
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._copied[self._turn]
        if event is not None and not event.query():
            event.synchronize()  # only when the device is two whole steps behind
        return self._arrays[self._turn]

    def commit(self, rows: int) -> None:
        """Send the first ``rows`` rows (a contiguous prefix) to the device tensor; the rest of it is left alone."""
        host = self._hosts[self._turn]
        if host is self.tensor or not rows:
            return
        whole = rows == self.tensor.shape[0]
        target, source = (self.tensor, host) if whole else (self.tensor[:rows], host[:rows])
        target.copy_(source, non_blocking=self._asynchronous)
        if self._asynchronous:
            event = self._copied[self._turn] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.tensor.device))
            self._copied[self._turn] = event


def send(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers into a new tensor on ``device``, asynchronously on CUDA, from page-locked memory."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()  # torch.tensor(pin_memory=True) takes no numpy array
    return host.to(device, non_blocking=True)


def aligned_offsets(lengths: list[int], multiple: int = 32) -> tuple[list[int], int]:
    """Start of each of several arrays packed into one allocation, and the total, in elements; multiples of ``multiple``
    (32 int32 = 128 bytes), as Triton compiles a faster kernel for 16-byte aligned pointers.
    """
    padded = [math.ceil(length / multiple) * multiple for length in lengths]
    return [sum(padded[:i]) for i in range(len(padded))], sum(padded)
