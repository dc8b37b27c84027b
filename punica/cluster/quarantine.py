"""Quarantine of suspected requests: served alone, one at a time, on a GPU reserved for them.

`crash_record.py` says which requests are suspected. All others use the remaining GPUs meanwhile. The least loaded GPU
is reserved: its present members may finish, and it admits no others.
"""

import bisect
from collections.abc import Collection

from punica.cluster.gpu import ClusterRequest, Gpu, PlacedRequest


class Quarantine:
    """Quarantined requests of a cluster.

    Attributes:
        queue: those without a GPU, by arrival.
        gpu: the reserved one; ``None`` while no request is quarantined.
    """

    def __init__(self) -> None:
        self.queue: list[ClusterRequest] = []
        self.gpu: Gpu | None = None

    def add(self, request: ClusterRequest) -> None:
        """Queue a request."""
        bisect.insort(self.queue, request, key=lambda one: one.arrival)

    def place(self, gpus: Collection[Gpu]) -> tuple[list[PlacedRequest], Gpu | None]:
        """Place the head of the queue once the reserved GPU is empty; also return the GPU that is open again."""
        before = self.gpu
        if before is None or not any(request.quarantined for request in before.members.values()):
            self._reserve(gpus)
        freed = None if before is self.gpu else before
        if not self.queue or self.gpu is None or self.gpu.members:
            return [], freed
        head = self.queue.pop(0)
        self.gpu.place(head)
        return [PlacedRequest(head.request_id, self.gpu.uuid)], freed

    def forget(self, gpu: Gpu) -> None:
        """Drop a GPU that leaves the cluster."""
        if gpu is self.gpu:
            self.gpu = None

    def _reserve(self, gpus: Collection[Gpu]) -> None:
        """Reserve the least loaded GPU for the head of the queue; a draining one stays, unless another is empty."""
        wanted = [gpu for gpu in gpus if self.queue[0].final_tokens <= gpu.capacity] if self.queue else []
        if self.gpu in wanted and all(gpu.members for gpu in wanted):
            return
        if self.gpu is not None:
            self.gpu.reserved = False
        self.gpu = min(wanted, key=lambda gpu: (gpu.working_set, gpu.uuid), default=None)
        if self.gpu is not None:
            self.gpu.reserved = True
