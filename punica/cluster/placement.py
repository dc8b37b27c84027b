"""Placement and eviction rules of a cluster: their protocol, their registry, and the paper's two.

`punica` is section 5.1 of the paper. `released` is its released code where the two differ (disagreement D12 of
``paper_results/README.md``). A new rule is one class with :data:`SCHEDULING_RULES` ``.register("name")``.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.open_gpus import OpenGpus
from punica.registry import Registry


class SchedulingRule(Protocol):
    """Placement and eviction; ``prefills_per_step``: most prompts in one step of a GPU, ``None`` for all that are
    pending. ``spare_pages``: it may evict as soon as some member has no free page, and not only for the next step's.
    """

    prefills_per_step: int | None
    spare_pages: bool

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return one of ``gpus``: at least one, all with room for the request."""

    def must_evict(self, gpu: Gpu) -> bool:
        """Return True when a member has to leave before the next step: at least when the pages do not suffice. While
        they do, with ``spare_pages`` while there is a free page for each member, the answer changes with the members
        alone.
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
    spare_pages: bool = False

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
    spare_pages: bool = True

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
