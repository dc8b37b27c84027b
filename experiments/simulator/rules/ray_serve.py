"""Ray Serve's router with model multiplexing, as Ray Serve LLM uses it for adapters.

Source: ``pow_2`` router and multiplex mixin of https://github.com/ray-project/ray, and its pull request 54788.
"""

import random
from collections.abc import Sequence

from experiments.simulator.rules.held import free_slots, is_home
from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet


@SCHEDULING_RULES.register("ray_serve")
class RayServe(LargestWorkingSet):
    """Power of two choices: of two random GPUs the one with the smaller working set. Both have the adapter where any
    does, and otherwise the most free slots (Ray's replicas with the fewest models).

    Left out: locality, the time for which Ray waits for a match, and its spill of requests from replicas that have 64
    more than others, which is more than a batch. The random numbers have a fixed seed.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return the better of two."""
        most = max(map(free_slots, gpus))
        matching = [gpu for gpu in gpus if is_home(gpu, request.adapter_id)]
        pool = matching or [gpu for gpu in gpus if free_slots(gpu) == most]
        return min(self._random.sample(pool, min(2, len(pool))), key=lambda gpu: len(gpu.members))
