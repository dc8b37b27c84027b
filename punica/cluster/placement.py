"""Placement and eviction rules of a cluster: their registry, and the paper's two.

`punica` is section 5.1 of the paper. `released` is its released code where the two differ (disagreement D12 of
``paper_results/README.md``). A new rule is a subclass of `LargestWorkingSet`, registered by
:data:`SCHEDULING_RULES` ``.register("name")``.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.registry import Registry


class OpenGpus:
    """GPUs whose batch has room, in ascending ``order``, a key of the members that ends with the UUID; else in any."""

    def __init__(self, order: Callable[[Gpu], tuple] | None = None) -> None:
        self._order = order
        self._gpus: dict[str, Gpu] = {}
        self._key_of: dict[str, tuple] = {}
        self._keys: list[tuple] = []  # ascending

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self._gpus.values())

    def __reversed__(self) -> Iterator[Gpu]:
        return (self._gpus[key[-1]] for key in reversed(self._keys))

    def put(self, gpu: Gpu) -> None:
        """Add a GPU, or give one whose members changed its place."""
        self._gpus[gpu.uuid] = gpu
        if self._order is not None:
            self._forget(gpu.uuid)
            key = self._key_of[gpu.uuid] = self._order(gpu)
            insort(self._keys, key)

    def discard(self, gpu: Gpu) -> None:
        self._gpus.pop(gpu.uuid, None)
        self._forget(gpu.uuid)

    def _forget(self, uuid: str) -> None:
        key = self._key_of.pop(uuid, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, key)]


SCHEDULING_RULES: Registry[type["LargestWorkingSet"]] = Registry("scheduling rule")


@SCHEDULING_RULES.register("punica")
class LargestWorkingSet:
    """Punica's rule: the GPU with the largest working set, ties to the highest UUID. Busy GPUs fill up and idle ones
    can be released. The request that arrived last is evicted, which keeps first come first served.

    Attributes:
        prefills_per_step: most prompts in one step of a GPU, ``None`` for all that are pending.
        spare_pages: the rule may evict as soon as some member has no free page.
    """

    prefills_per_step: int | None = 1
    spare_pages: bool = False

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return one of ``gpus``: at least one, all with room for the request."""
        return max(gpus, key=LargestWorkingSet.order)

    @staticmethod
    def order(gpu: Gpu) -> tuple:
        """Return the key by which the policy keeps the GPUs of `candidates`."""
        return len(gpu.members), gpu.uuid

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        """Yield GPUs in order of preference, for the first with room. A subclass without it is asked to `choose`."""
        return reversed(gpus)

    def must_evict(self, gpu: Gpu) -> bool:
        """Return True when a member has to leave before the next step. While pages suffice (with ``spare_pages``, one
        for each member), the answer changes with the members alone.
        """
        return gpu.pages_to_grow() > gpu.free_pages

    def victim(self, gpu: Gpu) -> ClusterRequest:
        """Return the member to evict."""
        return max(gpu.members.values(), key=lambda request: request.arrival)


@SCHEDULING_RULES.register("released")
class Released(LargestWorkingSet):
    """Rule of the released scheduler (D12 a to c).

    Ties go to more requests of the same adapter, then to fewer free pages, then to the highest UUID. The oldest request
    is evicted, as soon as there are fewer free pages than requests. All pending prefills run in one step.

    One departure: the last request of a GPU stays unless it cannot grow; otherwise it would be evicted for ever.
    """

    prefills_per_step: int | None = None
    spare_pages: bool = True

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        adapter = request.adapter_id
        return max(gpus, key=lambda gpu: (len(gpu.members), gpu.requests_of[adapter], -gpu.free_pages, gpu.uuid))

    def must_evict(self, gpu: Gpu) -> bool:
        return super().must_evict(gpu) or gpu.free_pages < len(gpu.members) > 1

    def victim(self, gpu: Gpu) -> ClusterRequest:
        return min(gpu.members.values(), key=lambda request: request.arrival)
