"""Quarantine of requests that are suspected of crashing runners: served alone, one at a time, on a reserved GPU.

    batched --2 shared crashes--> quarantined --8 tokens--> batched --1 shared crash--> quarantined to its end
                                       |
                                       `--3 solo crashes--> FAILED

A runner crash loses its whole batch, so one shared crash does not identify the culprit and fails no request. A culprit
usually crashes again when its tokens are recomputed: quarantine shows which it is. The second quarantine is final, so
each request takes part in at most three shared crashes. All others use the remaining GPUs meanwhile. The least loaded
GPU is reserved: its present members may finish, and it admits no others.
"""

from collections.abc import Collection
from dataclasses import dataclass

from punica.cluster.gpu import ClusterRequest, Gpu, PlacedRequest

MAX_SHARED_CRASHES = 2
"""Crashes of runners with this request and others before it is quarantined."""
MAX_SOLO_CRASHES = 3
"""Crashes of runners with only this request before it fails."""
PROBATION_TOKENS = 8
"""Tokens that a request generates in its first quarantine before it is batched again."""


@dataclass(eq=False)
class CrashRecord:
    """Runner crashes that one request took part in; ``solo_crashes``: of runners with only this request."""

    quarantined: bool = False
    solo_crashes: int = 0
    _shared_crashes: int = 0
    _tokens: int = 0  # generated in quarantine since the last crash
    _was_released: bool = False

    def add_crash(self, shared: bool) -> None:
        """Count a crash of the request's runner; ``shared``: other requests were in it."""
        if shared:
            self._shared_crashes += 1
        else:
            self.solo_crashes += 1
        self._tokens = 0
        self.quarantined |= self.solo_crashes > 0 or self._shared_crashes >= MAX_SHARED_CRASHES

    def add_token(self) -> bool:
        """Count a token generated in quarantine; True when the quarantine ends with it."""
        self._tokens += 1
        if self._was_released or self._tokens < PROBATION_TOKENS:
            return False
        self.quarantined, self._was_released = False, True
        return True


class Quarantine:
    """Quarantined requests of a cluster: ``queue`` of those without a GPU, by arrival, and the reserved ``gpu``."""

    def __init__(self) -> None:
        self.queue: list[ClusterRequest] = []
        self.gpu: Gpu | None = None

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
