"""Cluster scheduling policy (section 5.1 of the paper) without clock, network or torch, for actors and simulation.

Its owner reports events (``submit``, ``end_step``, ``finish``, ``cancel``, ``remove_gpu``) and asks for decisions
(``place``, ``begin_step``, ``scale_signal``).

>>> policy = ClusterPolicy(max_batch_size=2)
>>> policy.add_gpu("gpu-a", num_pages=8), policy.add_gpu("gpu-b", num_pages=8)
(None, None)
>>> for name in "uvw":
...     policy.submit(name, num_tokens=20, final_tokens=40)
>>> [(name, gpu) for name, gpu in policy.place()]
[('u', 'gpu-b'), ('v', 'gpu-b'), ('w', 'gpu-a')]
"""

import bisect
import heapq
import itertools
from dataclasses import dataclass

from punica.checks import check_count, clip
from punica.cluster.gpu import ClusterRequest, Gpu, PlacedRequest
from punica.cluster.placement import SCHEDULING_RULES, OpenGpus
from punica.cluster.quarantine import Quarantine

PAGE_SIZE = 16
"""Tokens in a KV page of the released code; the paper leaves it open."""

MAX_BATCH = 32
"""Largest batch of the paper (sections 5.1 and 7)."""


@dataclass(frozen=True)
class ClusterStep:
    """Next step of one GPU: requests that compute their prompt (and what was generated before an eviction), the number
    of those that compute one token, and requests that went back to the queue.
    """

    prefills: tuple[str, ...]
    num_decodes: int
    evicted: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to run; such a step has not begun."""
        return not (self.prefills or self.num_decodes)


@dataclass(frozen=True)
class ScaleSignal:
    """Autoscaling advice: whether a GPU is wanted, and else which idle ones can be given back."""

    add_gpu: bool
    release: tuple[str, ...]


class ClusterPolicy:
    """Queue of a cluster, and the working set of every GPU.

    Args:
        rule: name in `SCHEDULING_RULES`.
        max_batch_size: most requests on a GPU. ``page_size``: tokens in a KV page.
        light_load: a GPU with fewer requests, and room for one more of their mean size, is lightly loaded. The paper
            gives no number; half a batch by default.

    First come first served; an evicted request returns to its place in the order of submission.
    """

    def __init__(
        self, rule: str = "punica", max_batch_size: int = MAX_BATCH, page_size: int = PAGE_SIZE,
        light_load: int | None = None,
    ) -> None:  # fmt: skip
        self.rule = SCHEDULING_RULES.get(rule)()
        self._is_ordered = "candidates" in vars(type(self.rule))  # a subclass may choose otherwise
        self.max_batch_size = check_count("max_batch_size", max_batch_size)
        self.page_size = check_count("page_size", page_size)
        half = max(1, max_batch_size // 2)
        self.light_load = check_count("light_load", half if light_load is None else light_load)
        self.gpus: dict[str, Gpu] = {}
        self._quarantine = Quarantine()
        self.requests: dict[str, ClusterRequest] = {}
        self._queue: list[tuple[int, ClusterRequest]] = []  # a heap by arrival
        self._blocked: ClusterRequest | None = None  # queue head without room
        self._freed: dict[str, Gpu] = {}  # gained room since
        self._open = OpenGpus(self.rule.order if self._is_ordered else None)  # GPUs whose batch has room
        self._most_tokens = 0  # capacity of the largest GPU
        self._arrivals = itertools.count()

    @property
    def num_queued(self) -> int:
        return len(self._queue) + len(self._quarantine.queue)

    def add_gpu(self, uuid: str, num_pages: int) -> None:
        """Add a GPU with ``num_pages`` free KV pages; ValueError for a name in use."""
        if uuid in self.gpus:
            raise ValueError(f"GPU {clip(uuid)} is in the cluster already; remove it first, or choose another name")
        gpu = self.gpus[uuid] = Gpu(uuid, self.max_batch_size, num_pages, self.page_size)
        self._gained_room(gpu)
        self._most_tokens = max(self._most_tokens, gpu.capacity)

    def remove_gpu(self, uuid: str) -> tuple[str, ...]:
        """Remove a GPU; return the ids of its requests, which are queued again with the tokens of ended steps."""
        gpu = self._gpu(uuid)
        members = sorted(gpu.members.values(), key=lambda request: request.arrival)
        for request in members:
            self._requeue(request)
        if gpu is self._quarantine.gpu:
            self._quarantine.gpu = None
        del self.gpus[uuid]
        self._open.discard(gpu)
        self._freed.pop(uuid, None)
        self._most_tokens = max((one.capacity for one in self.gpus.values()), default=0)
        return tuple(request.request_id for request in members)

    def submit(self, request_id: str, num_tokens: int, final_tokens: int, adapter_id: int = 0, rank: int = 0) -> None:
        """Queue a request of a prompt of ``num_tokens``, whose KV cache grows to ``final_tokens``. ValueError: a name
        in use, or too large for every GPU.
        """
        if request_id in self.requests:
            raise ValueError(f"request {clip(request_id)} is not finished; request ids are unique among these")
        check_count("num_tokens", num_tokens)
        check_count("final_tokens", final_tokens, num_tokens, "its prompt")
        if self.gpus and final_tokens > self._most_tokens:
            raise ValueError(
                f"request {clip(request_id)} needs {final_tokens} tokens of KV cache, the largest GPU holds "
                f"{self._most_tokens}; shorten its output, or add a GPU with more pages"
            )
        request = ClusterRequest(request_id, next(self._arrivals), num_tokens, final_tokens, adapter_id, rank)
        self.requests[request_id] = request
        heapq.heappush(self._queue, (request.arrival, request))

    def place(self) -> list[PlacedRequest]:
        """Place quarantined requests, then others in queue order until the head finds no room. That is tried again only
        on GPUs that gained some: else every step of a full cluster would scan all.
        """
        placed, freed = self._quarantine.place(self.gpus.values())
        if freed is not None:
            self._gained_room(freed)
        while self._queue:
            head = self._queue[0][1]
            roomy = self._with_room(head)
            if not roomy:
                self._blocked, self._freed = head, {}
                break
            self._blocked = None
            heapq.heappop(self._queue)
            chosen = self.rule.choose(head, roomy)
            chosen.place(head)
            if chosen.working_set == self.max_batch_size:
                self._open.discard(chosen)
            else:
                self._open.put(chosen)
            placed.append(PlacedRequest(head.request_id, chosen.uuid))
        return placed

    def _with_room(self, head: ClusterRequest) -> list[Gpu]:
        """Return GPUs with room for ``head``, the rule's choice at least."""
        if head is self._blocked:
            return [gpu for gpu in self._freed.values() if gpu.has_room(head)]
        if not self._is_ordered:
            return [gpu for gpu in self._open if gpu.has_room(head)]
        first = next((gpu for gpu in self.rule.candidates(self._open) if gpu.has_room(head)), None)
        return [] if first is None else [first]

    def begin_step(self, uuid: str, most_joins: int | None = None) -> ClusterStep:
        """Begin a GPU's next step, after evictions until the others can grow. ``most_joins`` bounds the prefills.
        RuntimeError: a step is in flight already.
        """
        gpu = self._gpu(uuid)
        if gpu.in_flight:
            raise RuntimeError(f"step {gpu.step} of GPU {clip(uuid)} has not ended; call end_step first")
        evicted = []
        while gpu.members and self.rule.must_evict(gpu):
            victim = self.rule.victim(gpu)
            self._requeue(victim)
            evicted.append(victim.request_id)
        prefills = tuple(gpu.pending.values())[: self.rule.prefills_per_step][:most_joins]
        step = ClusterStep(tuple(request.request_id for request in prefills), gpu.num_decoding, tuple(evicted))
        if not step.is_empty:
            gpu.begin_step(prefills)
        return step

    def end_step(self, uuid: str, deferred: str | None = None) -> None:
        """End the step in flight: each of its requests has one more token. ``deferred``: the prefill that the GPU did
        not run; it is first in the next step. RuntimeError: no step is in flight.
        """
        gpu = self._gpu(uuid)
        if not gpu.in_flight:
            raise RuntimeError(f"GPU {clip(uuid)} runs no step; call begin_step first")
        gpu.in_flight = False
        if deferred is not None:
            gpu.defer(self._request(deferred))

    def finish(self, request_id: str) -> None:
        """Remove a request that has all its tokens; RuntimeError for a queued one, which cannot have finished."""
        if self._request(request_id).gpu is None:
            raise RuntimeError(f"request {clip(request_id)} waits in the queue; cancel it instead")
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Remove a request, queued or placed; ValueError for an unknown one."""
        self._remove(self._request(request_id))
        del self.requests[request_id]

    def quarantine(self, request_id: str, begins: bool = True) -> None:
        """Serve a request alone from now on: one at a time, in order of submission, on a GPU reserved for them. With
        ``begins=False`` return it to its place in the queue.
        """
        request = self._request(request_id)
        self._remove(request)
        request.quarantined = begins
        self._requeue(request)

    def scale_signal(self) -> ScaleSignal:
        """Advise on scaling (section 5.1), after `place`: add a GPU when none is lightly loaded, release idle ones, but
        not one that would be wanted again at once, and none while requests are queued.
        """
        blocked = bool(self._queue) and not any(gpu.has_room(self._queue[0][1]) for gpu in self._open)
        idle = [uuid for uuid, gpu in sorted(self.gpus.items()) if not gpu.members]
        lightly = any(gpu.members and self._is_lightly_loaded(gpu) for gpu in self.gpus.values())
        add = blocked or not (idle or lightly)
        return ScaleSignal(add, () if self._queue else tuple(idle if lightly else idle[:-1]))

    def _is_lightly_loaded(self, gpu: Gpu) -> bool:
        """Check for few requests, pages for one more of their mean size, and a spare page per request."""
        count = gpu.working_set
        mean = -(-gpu.used_pages // count) if count else 1
        return count < min(self.light_load, self.max_batch_size) and mean + count + 1 <= gpu.free_pages

    def _requeue(self, request: ClusterRequest) -> None:
        self._leave_gpu(request)
        if request.quarantined:
            bisect.insort(self._quarantine.queue, request, key=lambda one: one.arrival)
        else:
            heapq.heappush(self._queue, (request.arrival, request))

    def _remove(self, request: ClusterRequest) -> None:
        if request.gpu is not None:
            self._leave_gpu(request)
        elif request.quarantined:
            self._quarantine.queue.remove(request)
        else:
            self._queue.remove((request.arrival, request))
            heapq.heapify(self._queue)

    def _leave_gpu(self, request: ClusterRequest) -> None:
        if (gpu := request.gpu) is not None:
            gpu.remove(request)
            self._gained_room(gpu)

    def _gained_room(self, gpu: Gpu) -> None:
        self._freed[gpu.uuid] = gpu
        self._open.put(gpu)

    def _gpu(self, uuid: str) -> Gpu:
        if uuid not in self.gpus:
            raise ValueError(f"unknown GPU {clip(uuid)}; the cluster has {', '.join(sorted(self.gpus)) or 'none'}")
        return self.gpus[uuid]

    def _request(self, request_id: str) -> ClusterRequest:
        if request_id not in self.requests:
            raise ValueError(f"unknown request {clip(request_id)}; it has finished, or was never submitted")
        return self.requests[request_id]
