"""Scheduling rules of other systems, each with its source; a rule is one class, registered under its name. Sources of
llm-d and Ray Serve were read in November 2026. A rule sees a GPU's adapters as its residency has them, or
without one as its members do.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet, OpenGpus


def is_home(gpu: Gpu, adapter: int) -> bool:
    """Check that ``adapter`` has a slot of ``gpu``, or will have one; the plain backbone (0) needs none."""
    if not adapter or gpu.requests_of[adapter]:
        return True
    residency = gpu.residency
    return residency is not None and (residency.in_slot(adapter) or residency.loading(adapter))


def free_slots(gpu: Gpu) -> int:
    """Count the slots of ``gpu`` without an adapter; without a residency every member could have one."""
    return gpu.max_batch_size - len(gpu.requests_of) if gpu.residency is None else gpu.residency.free_slots


@SCHEDULING_RULES.register("least_loaded")
class LeastLoaded(LargestWorkingSet):
    """Smallest working set: the usual load balancer, which knows nothing of adapters."""

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        return max(gpus, key=LeastLoaded.order)

    @staticmethod
    def order(gpu: Gpu) -> tuple:
        return -len(gpu.members), gpu.uuid

    def candidates(self, gpus: OpenGpus) -> Iterator[Gpu]:
        return reversed(gpus)


@SCHEDULING_RULES.register("llm_d")
class LlmD(LargestWorkingSet):
    """llm-d's router: homes of an adapter first, and few of them: until all are saturated; then another GPU, up to
    `MAX_REPLICAS`, with a host copy if possible. Of these a home before a free slot, then the shorter queue. Source:
    ``lora_affinity.go`` and the filter ``loraresidency``, https://github.com/llm-d/llm-d-router. Left out: a full home
    counts, and residency is read once per scrape.
    """

    MAX_REPLICAS = 2  # homes of an adapter, as in the filter's example; its default is no bound
    QUEUE, KV_USE = 8, 0.8  # waiting requests and share of KV pages above which a GPU is saturated, by default
    FREE_SLOT = 0.8  # score of a GPU with a free slot; one with the adapter scores 1, any other 0

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        adapter = request.adapter_id

        def score(gpu: Gpu) -> tuple[float, int, int, str]:
            fits = 1.0 if is_home(gpu, adapter) else self.FREE_SLOT if free_slots(gpu) > 0 else 0.0
            return fits, -len(gpu.pending), -len(gpu.members), gpu.uuid

        return max(self._kept(adapter, gpus), key=score)

    def _kept(self, adapter: int, gpus: Sequence[Gpu]) -> Sequence[Gpu]:
        homes = [gpu for gpu in gpus if is_home(gpu, adapter)]
        if not homes:
            return gpus
        if len(homes) >= self.MAX_REPLICAS or not all(map(self._is_saturated, homes)):
            return homes
        spare = [gpu for gpu in gpus if not (self._is_saturated(gpu) or is_home(gpu, adapter))]
        warm = [gpu for gpu in spare if gpu.residency is not None and gpu.residency.on_host(adapter)]
        return warm or spare or homes

    def _is_saturated(self, gpu: Gpu) -> bool:
        return len(gpu.pending) > self.QUEUE or gpu.used_pages > self.KV_USE * gpu.num_pages


@SCHEDULING_RULES.register("ray_serve")
class RayServe(LargestWorkingSet):
    """Ray Serve's power of two choices with model multiplexing: of two random GPUs with the adapter, or else with most
    free slots, the smaller working set. Source: https://github.com/ray-project/ray, pull request 54788. Left out:
    locality, waiting for a match, and spills.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        most = max(map(free_slots, gpus))
        matching = [gpu for gpu in gpus if is_home(gpu, request.adapter_id)]
        pool = matching or [gpu for gpu in gpus if free_slots(gpu) == most]
        return min(self._random.sample(pool, min(2, len(pool))), key=lambda gpu: len(gpu.members))


@SCHEDULING_RULES.register("loraserve")
class LoRAServe(LargestWorkingSet):
    """LoRAServe's placement by rank and demand (arXiv 2511.22880): adapters in the order of ranks, divided in equal
    parts of the demand, every `EPOCH` requests; one without a place goes to the nearest ranks. Left out: what a rank
    costs beyond its place, and remote access by GPUDirect RDMA. How demand is divided is ours.
    """

    WINDOW, EPOCH = 512, 128  # latest requests whose adapters tell the demand; requests between two divisions

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=self.WINDOW)  # rank and adapter
        self._seen: set[str] = set()  # GPUs offered since the last division
        self._parts: dict[int, dict[str, int]] = {}  # adapter -> GPU -> part of its demand
        self._ranks: dict[str, tuple[int, int]] = {}  # GPU -> its lowest and highest rank
        self._sent: Counter[tuple[int, str]] = Counter()
        self._left = 0  # requests until the next division

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
        """Return the GPU of the adapter that is furthest behind its part, else the nearest by rank."""
        adapter, rank = request.adapter_id, request.rank
        self._latest.append((rank, adapter))
        self._seen.update(gpu.uuid for gpu in gpus)
        if self._left == 0:
            self._divide()
        self._left -= 1
        parts = self._parts.get(adapter, {})
        if own := [gpu for gpu in gpus if gpu.uuid in parts]:
            chosen = min(own, key=lambda gpu: (self._sent[adapter, gpu.uuid] / parts[gpu.uuid], gpu.uuid))
            self._sent[adapter, chosen.uuid] += 1
            return chosen
        return min(gpus, key=lambda gpu: (self._distance(rank, gpu), len(gpu.members), gpu.uuid))

    def _distance(self, rank: int, gpu: Gpu) -> int:
        low, high = self._ranks.get(gpu.uuid, (rank, rank))
        return max(low - rank, rank - high, 0)

    def _divide(self) -> None:
        """Divide the line of adapters anew: a place on it counts demand times GPUs, so that all parts are integers."""
        gpus, total = sorted(self._seen), len(self._latest)
        parts: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self._ranks, place = {}, 0
        for (rank, adapter), demand in sorted(Counter(self._latest).items()):
            end = place + demand * len(gpus)
            while place < end:
                uuid = gpus[place // total]
                part = min(end, (place // total + 1) * total) - place
                parts[adapter][uuid] = part
                self._ranks[uuid] = self._ranks.get(uuid, (rank, rank))[0], rank
                place += part
        self._parts, self._seen, self._left = dict(parts), set(), self.EPOCH
        self._sent.clear()


@SCHEDULING_RULES.register("punica_consolidating")
class Consolidating(LargestWorkingSet):
    """Punica's rule with the consolidation of the paper's introduction, which its released code lacks (D12 h): a GPU
    gives up all requests if one with a larger working set has room, at most every `PERIOD` steps.
    """

    PERIOD = 256  # fewest steps of a GPU between two attempts; the paper gives no number

    def __init__(self) -> None:
        self._known: dict[str, Gpu] = {}  # from earlier placements
        self._sizes: dict[str, int] = {}  # working sets when last asked
        self._tried: dict[str, int] = {}  # steps of the last attempts

    def choose(self, request: ClusterRequest, gpus: Sequence[Gpu]) -> Gpu:
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
        if 0 < gpu.step - self._tried.get(uuid, -1) < self.PERIOD:
            return False
        self._tried[uuid] = gpu.step
        return True


def _takes(gpu: Gpu, other: Gpu) -> bool:
    """Check that ``gpu`` has more requests than ``other`` and room for all of them, with a spare page for each."""
    requests, members = other.members.values(), len(gpu.members) + len(other.members)
    if len(gpu.members) <= len(requests) or members > gpu.max_batch_size or not all(map(gpu.has_room, requests)):
        return False
    return sum(gpu.pages_for(request.total_tokens) for request in requests) + members <= gpu.free_pages
