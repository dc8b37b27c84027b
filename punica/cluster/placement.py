"""Placement and eviction rules of a cluster.

`punica` is section 5.1 of the paper. `released` is its released code where the two differ (disagreement D12 of
``paper_results/README.md``). The others are proposals of newer systems with Punica's eviction, so that a comparison
changes one thing. A new rule is one class with :data:`SCHEDULING_RULES` ``.register("name")``.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.open_gpus import OpenGpus
from punica.registry import Registry


class SchedulingRule(Protocol):
    """Placement and eviction; ``prefills_per_step``: most prompts in one step of a GPU, ``None`` for all that are
    pending.
    """

    prefills_per_step: int | None

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return one of ``gpus``: at least one, all with room for the request."""

    def must_evict(self, gpu: Gpu) -> bool:
        """Return True when a member has to leave before the next step: at least when the pages do not suffice, never
        when there is a free page for each member.
        """

    def victim(self, gpu: Gpu) -> ClusterRequest:
        """Return the member to evict."""


class OrderedRule(SchedulingRule, Protocol):
    """Rule whose choice is the first GPU with room in an order, which the policy keeps: no scan of all GPUs. A subclass
    with another `choose` is not taken for one.
    """

    def order(self, gpu: Gpu) -> tuple:
        """Return the key of the order, see `open_gpus.Order`."""

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        """Yield ``gpus``, sorted by `order`, in the order of preference."""


SCHEDULING_RULES: Registry[type[SchedulingRule]] = Registry("scheduling rule")


@SCHEDULING_RULES.register("punica")
class LargestWorkingSet:
    """Punica's rule: the GPU with the largest working set, ties to the highest UUID. Busy GPUs fill up and idle ones
    can be released. The request that arrived last is evicted, which keeps first come first served.
    """

    prefills_per_step: int | None = 1

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Consolidate."""
        return max(gpus, key=LargestWorkingSet.order)

    @staticmethod
    def order(gpu: Gpu) -> tuple:
        """Order by working set."""
        return len(gpu.members), gpu.uuid

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        """Prefer the largest working set."""
        return reversed(gpus)

    def must_evict(self, gpu: Gpu) -> bool:
        """Evict only when the next step would not fit."""
        return gpu.pages_to_grow() > gpu.free_pages

    def victim(self, gpu: Gpu) -> ClusterRequest:
        """Return the newest member."""
        return max(gpu.members.values(), key=lambda request: request.arrival)


@SCHEDULING_RULES.register("released")
class Released(LargestWorkingSet):
    """Rule of the released scheduler (D12 a to c).

    Ties go to more requests of the same adapter, then to fewer free pages, then to the highest UUID. The oldest request
    is evicted, as soon as there are fewer free pages than requests. All pending prefills run in one step.

    One departure: the last request of a GPU stays unless it cannot grow; otherwise it would be evicted for ever.
    """

    prefills_per_step: int | None = None

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Consolidate, then keep adapters together, then fill memory."""
        adapter = request.adapter_id
        return max(gpus, key=lambda gpu: (len(gpu.members), gpu.requests_of[adapter], -gpu.free_pages, gpu.uuid))

    def must_evict(self, gpu: Gpu) -> bool:
        """Evict once there is less than one free page per request."""
        return super().must_evict(gpu) or gpu.free_pages < len(gpu.members) > 1

    def victim(self, gpu: Gpu) -> ClusterRequest:
        """Return the oldest member."""
        return min(gpu.members.values(), key=lambda request: request.arrival)


@SCHEDULING_RULES.register("least_loaded")
class LeastLoaded(LargestWorkingSet):
    """Smallest working set: the usual load balancer."""

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Spread."""
        return max(gpus, key=LeastLoaded.order)

    @staticmethod
    def order(gpu: Gpu) -> tuple:
        """Order by free places."""
        return -len(gpu.members), gpu.uuid

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        """Prefer the smallest working set."""
        return reversed(gpus)


@SCHEDULING_RULES.register("round_robin")
class RoundRobin(LargestWorkingSet):
    """GPUs in turn, in the order of UUIDs; a GPU without room loses its turn."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return the next one after the last choice."""
        chosen = min(gpus, key=lambda gpu: (gpu.uuid <= self._last, gpu.uuid))
        self._last = chosen.uuid
        return chosen

    @staticmethod
    def order(gpu: Gpu) -> tuple:
        """Order by UUID."""
        return (gpu.uuid,)

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        """Prefer the next one after the last choice."""
        return gpus.after((self._last,))


@SCHEDULING_RULES.register("adapter_affinity")
class AdapterAffinity(LargestWorkingSet):
    """Most requests of the same adapter, then Punica's rule: fewer adapters per batch, fewer loads."""

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Keep adapters together first."""
        adapter = request.adapter_id
        return max(gpus, key=lambda gpu: (gpu.requests_of[adapter], len(gpu.members), gpu.uuid))


@SCHEDULING_RULES.register("rank_aware")
class RankAware(LargestWorkingSet):
    """Least added cost if every row of a batch paid for the batch's largest rank, then Punica's rule. Requests of
    similar ranks are batched, so that a high rank does not slow low ones down. Kernels that read each adapter's own
    rank have no such cost.
    """

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Minimise added rows times rank."""
        return max(gpus, key=lambda gpu: (-self._added(request.rank, gpu), len(gpu.members), gpu.uuid))

    @staticmethod
    def _added(rank: int, gpu: Gpu) -> int:
        largest = max((member.rank for member in gpu.members.values()), default=0)
        return (len(gpu.members) + 1) * max(largest, rank) - len(gpu.members) * largest
