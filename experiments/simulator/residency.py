"""Residency of adapters on one simulated GPU: slots, a cache in host memory, the rest on disk. Loads run one at a time
beside steps, first come first served; adapters of members stay, of others the least recently used one leaves.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from punica.checks import check_count


@dataclass(frozen=True)
class LoadCost:
    """Linear cost of a load, in seconds and seconds per rank, from host memory and from disk; ``name``: its source."""

    name: str
    host_base: float
    host_rank: float
    disk_base: float
    disk_rank: float

    def host_seconds(self, rank: int) -> float:
        return self.host_base + self.host_rank * rank

    def disk_seconds(self, rank: int) -> float:
        return self.disk_base + self.disk_rank * rank


@dataclass(frozen=True)
class ResidencyConfig:
    """``num_slots`` of a GPU; ``host_adapters`` of its host, empty at the start; ``None``: all, from the start."""

    num_slots: int
    cost: LoadCost
    host_adapters: int | None = None

    def __post_init__(self) -> None:
        if self.host_adapters is not None:
            check_count("host_adapters", self.host_adapters, self.num_slots, "num_slots; they keep a copy")


class Residency:
    """Adapters of one GPU at the present of ``clock`` (seconds). Members never have more adapters than slots."""

    def __init__(self, config: ResidencyConfig, clock: Callable[[], float]) -> None:
        self.num_slots = config.num_slots
        self.loads_from_host = self.loads_from_disk = 0  # begun so far
        self._config, self._clock = config, clock
        self._slots: dict[int, float] = {}  # adapter in a slot -> since when
        self._users: dict[int, int] = {}  # adapter -> members
        self._idle: OrderedDict[int, None] = OrderedDict()  # in a slot without members, least recently used first
        self._host: OrderedDict[int, None] = OrderedDict()  # in host memory, least recently used first
        self._queue: deque[tuple[int, int]] = deque()  # adapter and rank of loads to begin
        self._loading = inf, 0  # end and adapter of the load in flight

    @property
    def free_slots(self) -> int:
        """Slots that no member's adapter needs: empty, or with an adapter that may leave."""
        return self.num_slots - len(self._users)

    @property
    def load_ends(self) -> float:
        self._advance()
        return self._loading[0]

    def in_slot(self, adapter_id: int) -> bool:
        """Return True when a request with the adapter can join a step; always for 0, the plain backbone."""
        return self.in_slot_since(adapter_id) < inf

    def in_slot_since(self, adapter_id: int) -> float:
        """Return since when a request with the adapter can join a step; infinite while it cannot."""
        self._advance()
        return self._slots.get(adapter_id, inf) if adapter_id else -inf

    def loading(self, adapter_id: int) -> bool:
        self._advance()
        return self._loading[1] == adapter_id or (adapter_id in self._users and adapter_id not in self._slots)

    def on_host(self, adapter_id: int) -> bool:
        self._advance()
        return self._config.host_adapters is None or adapter_id in self._host

    def use(self, adapter_id: int, rank: int) -> None:
        """Add a member with the adapter, and queue its load where it is in no slot."""
        if not adapter_id:
            return
        self._advance()
        members = self._users.get(adapter_id, 0)
        self._users[adapter_id] = members + 1
        if members:
            return
        if adapter_id in self._slots:
            del self._idle[adapter_id]
        elif self._loading[1] != adapter_id:
            self._queue.append((adapter_id, rank))
            self._begin_load(self._clock())

    def release(self, adapter_id: int) -> None:
        """Remove a member with the adapter; a load that has begun is not stopped."""
        if not adapter_id:
            return
        self._advance()
        self._users[adapter_id] -= 1
        if self._users[adapter_id]:
            return
        del self._users[adapter_id]
        if adapter_id in self._slots:
            self._idle[adapter_id] = None
            self._touch(adapter_id)
        self._queue = deque(one for one in self._queue if one[0] != adapter_id)
        self._begin_load(self._clock())

    def _advance(self) -> None:
        now = self._clock()
        while self._loading[0] <= now:
            ended, adapter = self._loading
            self._loading = inf, 0
            self._slots[adapter] = ended
            if adapter not in self._users:
                self._idle[adapter] = None
            self._begin_load(ended)

    def _begin_load(self, now: float) -> None:
        if self._loading[1] or not self._queue:
            return
        if len(self._slots) == self.num_slots:  # one of them is idle, as members have at most so many adapters
            del self._slots[self._idle.popitem(last=False)[0]]
        adapter, rank = self._queue.popleft()
        seconds = self._config.cost.host_seconds(rank)
        if self._config.host_adapters is None or adapter in self._host:
            self.loads_from_host += 1
        else:
            self.loads_from_disk += 1
            seconds += self._config.cost.disk_seconds(rank)
        self._loading = now + seconds, adapter
        self._touch(adapter)

    def _touch(self, adapter: int) -> None:
        """Mark the adapter as most recently used in host memory, where the least recently used one makes room."""
        most = self._config.host_adapters
        if most is None:
            return
        self._host[adapter] = None
        self._host.move_to_end(adapter)
        if len(self._host) > most:
            oldest = next(one for one in self._host if one not in self._slots and one != adapter)
            del self._host[oldest]
