"""Load balancers, which know nothing of adapters."""

from collections.abc import Iterator, Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.open_gpus import OpenGpus
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet


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
