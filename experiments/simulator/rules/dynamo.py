"""NVIDIA Dynamo's LoRA router: rendezvous sets of GPUs, sized by load.

Source: the allocation controller of https://github.com/ai-dynamo/dynamo (pull requests 5992, 8177, 8178 and 8180) and
its ``controller.rs``, read in November 2026.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from experiments.simulator.rules.held import is_home, num_slots
from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet

WINDOW = 256
"""Latest requests that tell an adapter's share of the load. Dynamo's window is a time, which a rule does not know."""
COOLDOWN = 128
"""Requests for which a set stays larger than its share."""


@SCHEDULING_RULES.register("dynamo")
class Dynamo(LargestWorkingSet):
    """The GPUs of highest rendezvous hash with the adapter, as many as its share of the load has of all slots.

    A set grows at once and shrinks after `COOLDOWN` requests in which it was too large. Within a set GPUs with the
    adapter come first, then the smallest working set. The next GPU by hash takes the place of one without room. The
    plain backbone, which every GPU has, has no set.

    Left out: budgets of slots, and the placement by min-cost flow (an option there).
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._share: Counter[int] = Counter()
        self._sets: dict[int, tuple[int, int]] = {}  # adapter -> size, when it was last wanted as large
        self._now = self._most_gpus = 0

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return one of the adapter's set."""
        adapter = request.adapter_id
        self._most_gpus = max(self._most_gpus, len(gpus))
        if not adapter:
            return min(gpus, key=lambda gpu: (len(gpu.members), gpu.uuid))
        self._count(adapter)
        size = self._size(adapter, num_slots(gpus[0]) * self._most_gpus)
        ranked = sorted(gpus, key=lambda gpu: rendezvous(adapter, gpu.uuid), reverse=True)[:size]
        return min([gpu for gpu in ranked if is_home(gpu, adapter)] or ranked, key=lambda gpu: len(gpu.members))

    def _count(self, adapter: int) -> None:
        self._now += 1
        self._latest.append(adapter)
        self._share[adapter] += 1
        if len(self._latest) > WINDOW:
            self._share[self._latest.popleft()] -= 1

    def _size(self, adapter: int, slots: int) -> int:
        wanted = min(self._most_gpus, math.ceil(self._share[adapter] / WINDOW * slots))
        size, since = self._sets.get(adapter, (0, 0))
        if wanted >= size or self._now - since > COOLDOWN:
            size, since = wanted, self._now
        self._sets[adapter] = size, since
        return size


@lru_cache(maxsize=2**17)
def rendezvous(adapter: int, uuid: str) -> int:
    """Hash an adapter with a GPU: each adapter has an order of GPUs that others' coming and going leaves alone."""
    return int.from_bytes(blake2b(f"{adapter} {uuid}".encode(), digest_size=8).digest(), "big")
