"""Requests that are served alone, one at a time, on a GPU that is set apart for them while there are any.

Who may harm others (`suspicion.py` says who) must not run beside them, and must not keep them waiting either: everybody
else goes on with the other GPUs. The GPU set apart is the emptiest; who runs there may finish, and nobody new comes.
"""

import bisect
from collections.abc import Collection
from typing import NamedTuple

from punica.cluster.gpu import ClusterRequest, Gpu


class PlacedRequest(NamedTuple):
    """A request left the queue for a GPU."""

    request_id: str
    gpu: str


class Isolation:
    """The isolated requests of a cluster.

    Attributes:
        queue: those without a GPU, by arrival.
        gpu: that is set apart; ``None`` while nobody is isolated.
    """

    def __init__(self) -> None:
        self.queue: list[ClusterRequest] = []
        self.gpu: Gpu | None = None

    def add(self, request: ClusterRequest) -> None:
        """It waits to be served alone."""
        bisect.insort(self.queue, request, key=lambda one: one.arrival)

    def place(self, gpus: Collection[Gpu]) -> tuple[list[PlacedRequest], Gpu | None]:
        """Give the first of the queue its GPU if nobody is there any more; and the GPU that is open to all again, if
        there is one.
        """
        before = self.gpu
        if before is None or not any(request.isolated for request in before.members.values()):
            self._set_apart(gpus)
        opened = None if before is self.gpu else before
        if not self.queue or self.gpu is None or self.gpu.members:
            return [], opened
        head = self.queue.pop(0)
        self.gpu.place(head)
        return [PlacedRequest(head.request_id, self.gpu.uuid)], opened

    def forget(self, gpu: Gpu) -> None:
        """It leaves the cluster."""
        if gpu is self.gpu:
            self.gpu = None

    def _set_apart(self, gpus: Collection[Gpu]) -> None:
        """The emptiest GPU, for the first in the queue; the one that is being emptied, unless another one is empty."""
        wanted = [gpu for gpu in gpus if _could_hold(gpu, self.queue[0])] if self.queue else []
        if self.gpu in wanted and all(gpu.members for gpu in wanted):
            return
        if self.gpu is not None:
            self.gpu.closed = False
        self.gpu = min(wanted, key=lambda gpu: (gpu.working_set, gpu.uuid), default=None)
        if self.gpu is not None:
            self.gpu.closed = True


def _could_hold(gpu: Gpu, request: ClusterRequest) -> bool:
    return request.final_tokens <= gpu.num_pages * gpu.page_size
