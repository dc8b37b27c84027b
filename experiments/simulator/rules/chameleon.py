"""Chameleon's weighted size of a request (MICRO 2025, arXiv 2411.17741)."""

from collections.abc import Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet

PROMPT, OUTPUT = 0.4, 0.6
"""Weights of a token of the prompt and of the output."""


@SCHEDULING_RULES.register("chameleon")
class Chameleon(LargestWorkingSet):
    """Least weighted work, and the largest request is evicted: its queues serve small requests first.

    Left out: the queue by size, since a cluster's queue is first come first served. The length of an output is its
    bound, where Chameleon predicts it. Chameleon schedules one GPU; balancing by weighted work is this rule's own.
    """

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Balance the weighted work."""
        return min(gpus, key=lambda gpu: (sum(map(weighted_size, gpu.members.values())), gpu.uuid))

    def victim(self, gpu: Gpu) -> ClusterRequest:
        """Return the largest member, the newest of equal ones."""
        return max(gpu.members.values(), key=lambda request: (weighted_size(request), request.arrival))


def weighted_size(request: ClusterRequest) -> float:
    """Weigh prompt and output, times the adapter's rank."""
    output = request.final_tokens - request.num_tokens
    return (PROMPT * request.num_tokens + OUTPUT * output) * max(1, request.rank)
