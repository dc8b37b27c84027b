"""Tensor-parallel ranks that are threads of this process: what does not need processes is tested in milliseconds."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from punica.parallel import tensor_parallel
from punica.parallel.group import check_not_broken

PATIENCE = 120.0
"""Seconds until one that waits for another gives up: only where a test fails, however busy the machine."""


class Threads:
    """The group of one of them. `before_close` keeps what it is given in `released_by`."""

    can_be_captured = True
    broken = ""

    def __init__(self, rank: int, meeting: threading.Barrier, shared: list[Any]) -> None:
        self.rank, self.world_size = rank, len(shared)
        self._meeting, self._shared = meeting, shared
        self.released_by: list[Callable[[], None]] = []

    def before_close(self, release: Callable[[], None]) -> None:
        self.released_by.append(release)

    def break_off(self, reason: str) -> None:
        self.broken = self.broken or reason
        self._meeting.abort()  # else the others would wait for their time-out

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        check_not_broken(self)
        self._meeting.wait(PATIENCE)
        self._shared[self.rank] = tensor.clone()
        self._meeting.wait(PATIENCE)
        return list(self._shared)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._of_all(tensor), dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._of_all(tensor)).sum(0)

    def gather(self, tensor: Tensor, dst: int, dim: int) -> Tensor | None:
        found = self.all_gather(tensor, dim)
        return found if dst == self.rank else None


def on_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns on every rank, or the exception that ended it."""
    meeting, shared, outcomes = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            with tensor_parallel(Threads(rank, meeting, shared)):
                outcomes[rank] = body(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return outcomes
