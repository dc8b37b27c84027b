"""Sketches of two ideas, each with nothing beside it: adapters kept together, and ranks kept together."""

from collections.abc import Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet


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
