"""Periodic consolidation, of which the paper's introduction speaks and which its released code lacks (D12 h)."""

from collections.abc import Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet

PERIOD = 256
"""Fewest steps of a GPU between two attempts; the paper gives no number."""


@SCHEDULING_RULES.register("punica_consolidating")
class Consolidating(LargestWorkingSet):
    """Punica's rule; and when its working set has changed, at most every `PERIOD` steps, a GPU gives up all requests if
    a GPU with a larger working set has room for them. They migrate as evicted ones do: by a prefill of all their
    tokens.

    GPUs are known from earlier placements.
    """

    def __init__(self) -> None:
        self._known: dict[str, Gpu] = {}
        self._sizes: dict[str, int] = {}  # working sets when last asked
        self._tried: dict[str, int] = {}  # steps of the last attempts

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Consolidate."""
        self._known.update((gpu.uuid, gpu) for gpu in gpus)
        return super().choose(request, gpus)

    def must_evict(self, gpu: Gpu) -> bool:
        """Evict for want of pages, or one after the other where another GPU has room for all."""
        return super().must_evict(gpu) or (self._is_due(gpu) and any(_takes(one, gpu) for one in self._known.values()))

    def _is_due(self, gpu: Gpu) -> bool:
        size, uuid = len(gpu.members), gpu.uuid
        if gpu.reserved or self._sizes.get(uuid) == size:
            return False
        self._sizes[uuid] = size
        if 0 < gpu.step - self._tried.get(uuid, -1) < PERIOD:
            return False
        self._tried[uuid] = gpu.step
        return True


def _takes(gpu: Gpu, other: Gpu) -> bool:
    """Check that ``gpu`` has more requests than ``other`` and room for all of them, with a spare page for each."""
    requests, members = other.members.values(), len(gpu.members) + len(other.members)
    if len(gpu.members) <= len(requests) or members > gpu.max_batch_size or not all(map(gpu.has_room, requests)):
        return False
    return sum(gpu.pages_for(request.total_tokens) for request in requests) + members <= gpu.free_pages
