"""LoRAServe's placement by rank and demand (arXiv 2511.22880).

Source: the paper's abstract. How the demand is divided is this file's own: no code of LoRAServe was found.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.placement import SCHEDULING_RULES, LargestWorkingSet

WINDOW, EPOCH = 512, 128
"""Latest requests whose adapters tell the demand, and requests between two divisions."""


@SCHEDULING_RULES.register("loraserve")
class LoRAServe(LargestWorkingSet):
    """Adapters in the order of their ranks, divided among the GPUs in equal parts of the demand: a GPU has adapters of
    similar ranks, an adapter on a border is shared in proportion. The division follows the demand, every `EPOCH`
    requests. An adapter without a place, or whose GPUs have no room, goes to the GPU whose ranks are nearest.

    Left out: what a rank costs beyond its place in the order, and remote access to adapters by GPUDirect RDMA.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # rank and adapter
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
        self._parts, self._seen, self._left = dict(parts), set(), EPOCH
        self._sent.clear()
