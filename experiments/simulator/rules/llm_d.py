"""llm-d's router: its LoRA residency filter, then its LoRA affinity scorer.

Source: ``lora_affinity.go`` and the filter ``loraresidency`` with its README, https://github.com/llm-d/llm-d-router,
read in November 2026.
"""

from collections.abc import Sequence

from experiments.simulator.rules.held import free_slots, is_home, is_warm
from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet

MAX_REPLICAS = 2
"""Most homes of an adapter, as in the filter's example; its default is no bound."""
QUEUE, KV_USE = 8, 0.8
"""Waiting requests and share of KV pages in use above which the filter takes a GPU for saturated, by default."""
FREE_SLOT = 0.8
"""Score of a GPU with a free slot; one with the adapter scores 1, any other 0."""


@SCHEDULING_RULES.register("llm_d")
class LlmD(LargestWorkingSet):
    """Homes of an adapter first, and few of them.

    The filter keeps the GPUs with the adapter in a slot (its homes) until all are saturated. Then another GPU may
    become one, with a host copy if possible, unless there are `MAX_REPLICAS` homes or every GPU is saturated. Of what
    is kept the scorer takes a home before a free slot before any other, then the shorter queue.

    Left out: GPUs without room are never offered, so a full home neither counts nor keeps a request waiting; and
    residency is known at once, where llm-d reads it once per scrape.
    """

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Filter, then score."""
        adapter = request.adapter_id

        def score(gpu: Gpu) -> tuple[float, int, int, str]:
            fits = 1.0 if is_home(gpu, adapter) else FREE_SLOT if free_slots(gpu) > 0 else 0.0
            return fits, -len(gpu.pending), -len(gpu.members), gpu.uuid

        return max(self._kept(adapter, gpus), key=score)

    def _kept(self, adapter: int, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
        homes = [gpu for gpu in gpus if is_home(gpu, adapter)]
        if not homes:
            return gpus
        if len(homes) >= MAX_REPLICAS or not all(map(_is_saturated, homes)):
            return homes
        spare = [gpu for gpu in gpus if not (_is_saturated(gpu) or is_home(gpu, adapter))]
        return [gpu for gpu in spare if is_warm(gpu, adapter)] or spare or homes


def _is_saturated(gpu: Gpu) -> bool:
    return len(gpu.pending) > QUEUE or gpu.used_pages > KV_USE * gpu.num_pages
