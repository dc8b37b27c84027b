"""Scheduling over many GPUs (section 5.1 of the paper), as one object without clock, network or torch.

The same object decides for a simulation, for actors on a cluster and in tests: its owner tells it what happened
(``submit``, ``end_step``, ``finish``, ``cancel``, ``remove_gpu``) and asks what to do (``place``, ``begin_step``,
``scale_signal``).

>>> policy = ClusterPolicy(max_batch_size=2)
>>> policy.add_gpu("gpu-a", num_pages=8), policy.add_gpu("gpu-b", num_pages=8)
(None, None)
>>> for name in "uvw":
...     policy.submit(name, num_tokens=20, final_tokens=40)
>>> [(name, gpu) for name, gpu in policy.place()]
[('u', 'gpu-b'), ('v', 'gpu-b'), ('w', 'gpu-a')]
"""

import heapq
from dataclasses import dataclass

from punica.checks import check_count, clip
from punica.cluster.gpu import ClusterRequest, Gpu
from punica.cluster.isolation import Isolation, PlacedRequest
from punica.cluster.placement import SCHEDULING_RULES, SchedulingRule
from punica.workload import MAX_BATCH

PAGE_SIZE = 16
"""Tokens in a KV page of the released code; the paper leaves it open."""


@dataclass(frozen=True)
class ClusterStep:
    """What one GPU runs next. ``prefills`` compute their whole prompt (and what they had generated before an eviction),
    ``num_decodes`` requests one token each. ``evicted`` went back to the queue, in this order.
    """

    prefills: tuple[str, ...]
    num_decodes: int
    evicted: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Nothing to run; such a step has not begun."""
        return not (self.prefills or self.num_decodes)


@dataclass(frozen=True)
class ScaleSignal:
    """``add_gpu``: no GPU is lightly loaded, or the queue's head finds no room: ask the cloud for one. ``release``:
    idle GPUs that can be given back, none while one is asked for.
    """

    add_gpu: bool
    release: tuple[str, ...]


class ClusterPolicy:
    """The queue, and the working set of every GPU.

    Args:
        rule: name in `SCHEDULING_RULES`; the default is the paper's.
        max_batch_size: most requests on a GPU (the paper's 32).
        page_size: tokens in a KV page.
        light_load: a GPU with fewer requests, and room for one more of the mean size of its own, is lightly loaded. The
            paper gives no number; half a batch by default.

    The queue is first come first served: in order of submission, whoever it is that fits; an evicted request goes back
    to its place in that order. After every call a request is in the queue, on one GPU, or gone.
    """

    def __init__(
        self, rule: str = "punica", max_batch_size: int = MAX_BATCH, page_size: int = PAGE_SIZE,
        light_load: int | None = None,
    ) -> None:  # fmt: skip
        self.rule: SchedulingRule = SCHEDULING_RULES.get(rule)()
        self.max_batch_size = check_count("max_batch_size", max_batch_size)
        self.page_size = check_count("page_size", page_size)
        half = max(1, max_batch_size // 2)
        self.light_load = check_count("light_load", half if light_load is None else light_load)
        self.gpus: dict[str, Gpu] = {}
        self._isolation = Isolation()
        self.requests: dict[str, ClusterRequest] = {}
        self._queue: list[tuple[int, ClusterRequest]] = []  # a heap by arrival
        self._blocked: ClusterRequest | None = None  # head of the queue that found no room
        self._freed: dict[str, Gpu] = {}  # GPUs that gained room since
        self._open: dict[str, Gpu] = {}  # GPUs whose batch has room; most others are full
        self._most_tokens = 0  # that any GPU holds
        self._submitted = 0

    @property
    def queued(self) -> tuple[str, ...]:
        """Requests without a GPU, the next to be placed first."""
        queue = [request for _, request in sorted(self._queue, key=lambda entry: entry[0])]
        return tuple(request.request_id for request in (*self._isolation.queue, *queue))

    @property
    def num_queued(self) -> int:
        """Length of the queue."""
        return len(self._queue) + len(self._isolation.queue)

    def add_gpu(self, uuid: str, num_pages: int) -> None:
        """A GPU with ``num_pages`` free KV pages joins; ValueError when there is one of that name."""
        if uuid in self.gpus:
            raise ValueError(f"GPU {clip(uuid)} is in the cluster already; remove it first, or choose another name")
        gpu = self.gpus[uuid] = Gpu(uuid, self.max_batch_size, num_pages, self.page_size)
        self._freed[uuid] = self._open[uuid] = gpu
        self._most_tokens = max(self._most_tokens, num_pages * self.page_size)

    def remove_gpu(self, uuid: str) -> tuple[str, ...]:
        """A GPU crashed or is given back: its requests return to the queue, oldest first, with what they had generated
        in the steps that ended. ValueError for an unknown GPU.
        """
        gpu = self._gpu(uuid)
        members = sorted(gpu.members.values(), key=lambda request: request.arrival)
        for request in members:
            self._requeue(request)
        self._isolation.forget(gpu)
        del self.gpus[uuid], self._open[uuid]
        self._freed.pop(uuid, None)
        self._most_tokens = max((one.num_pages * self.page_size for one in self.gpus.values()), default=0)
        return tuple(request.request_id for request in members)

    def submit(self, request_id: str, num_tokens: int, final_tokens: int, adapter_id: int = 0, rank: int = 0) -> None:
        """Put a new request at the end of the queue.

        ``num_tokens``: its prompt. ``final_tokens``: most tokens its KV cache will hold (`Request.final_kv_length`).
        ValueError for a name that is in use, and when no GPU of the cluster could hold it alone.
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
        request = ClusterRequest(request_id, self._submitted, num_tokens, final_tokens, adapter_id, rank)
        self._submitted += 1
        self.requests[request_id] = request
        heapq.heappush(self._queue, (request.arrival, request))

    def place(self) -> list[PlacedRequest]:
        """Give requests a GPU, in the order of the queue, until its head finds no room; before them, isolated ones.

        A head that found none before asks only GPUs that gained room since; without that, every step of a full cluster
        would look at all of its GPUs.
        """
        placed, opened = self._isolation.place(self.gpus.values())
        if opened is not None:
            self._freed[opened.uuid] = self._open[opened.uuid] = opened
        while self._queue:
            head = self._queue[0][1]
            asked = self._freed if head is self._blocked else self._open
            roomy = [gpu for gpu in asked.values() if self._could_hold(gpu, head)]
            if not roomy:
                self._blocked, self._freed = head, {}
                break
            self._blocked = None
            heapq.heappop(self._queue)
            chosen = self.rule.choose(head, roomy)
            chosen.place(head)
            if chosen.working_set == self.max_batch_size:
                del self._open[chosen.uuid]
            placed.append(PlacedRequest(head.request_id, chosen.uuid))
        return placed

    def begin_step(self, uuid: str, joins: bool = True) -> ClusterStep:
        """What the GPU runs next; until `end_step` it is in flight. RuntimeError when a step is in flight already.

        Requests are evicted until the others can grow; `place` says where they go on. ``joins=False``: nobody joins in
        this step, which is empty where nobody decodes; who was placed waits for the next one.
        """
        gpu = self._gpu(uuid)
        if gpu.in_flight:
            raise RuntimeError(f"step {gpu.step} of GPU {clip(uuid)} has not ended; call end_step first")
        evicted = []
        while gpu.members and self.rule.must_evict(gpu):
            victim = self.rule.victim(gpu)
            self._requeue(victim)
            evicted.append(victim.request_id)
        prefills = tuple(gpu.pending.values())[: self.rule.prefills_per_step if joins else 0]
        step = ClusterStep(tuple(request.request_id for request in prefills), gpu.num_decoding, tuple(evicted))
        if not step.is_empty:
            gpu.begin_step(prefills)
        return step

    def end_step(self, uuid: str, held_back: str | None = None) -> None:
        """The step in flight is done: each of its requests has one more token. RuntimeError when there is none.

        ``held_back``: the one of its prefills that the GPU did not run, and is asked to run first in the next step.
        """
        gpu = self._gpu(uuid)
        if not gpu.in_flight:
            raise RuntimeError(f"GPU {clip(uuid)} runs no step; call begin_step first")
        gpu.in_flight = False
        if held_back is not None:
            gpu.hold_back(self._request(held_back))

    def finish(self, request_id: str) -> None:
        """It has all its tokens: free its place. RuntimeError when it waits in the queue, where nothing can finish."""
        request = self._request(request_id)
        if request.gpu is None:
            raise RuntimeError(f"request {clip(request_id)} waits in the queue; cancel it instead")
        self._leave(request.gpu, request)
        del self.requests[request_id]

    def cancel(self, request_id: str) -> None:
        """It is not wanted any more, wherever it is. ValueError for an unknown request."""
        request = self._request(request_id)
        self._take_out(request)
        del self.requests[request_id]

    def isolate(self, request_id: str) -> None:
        """Serve it alone from now on: not beside others, who could be harmed by it. One such request is served at a
        time, on a GPU that is set apart for them as long as there are any; in the order of their submission.
        """
        request = self._request(request_id)
        self._take_out(request)
        request.isolated = True
        self._requeue(request)

    def end_isolation(self, request_id: str) -> None:
        """It may run beside others: it goes back to its place in the queue."""
        request = self._request(request_id)
        self._take_out(request)
        request.isolated = False
        self._requeue(request)

    def total_tokens(self, request_id: str) -> int:
        """Prompt plus generated tokens, without those of a step in flight."""
        return self._request(request_id).total_tokens

    def scale_signal(self) -> ScaleSignal:
        """Section 5.1: ask for a GPU when none is lightly loaded, give idle ones back.

        One idle GPU stays when no other GPU is lightly loaded, since it would be asked for again at once; all stay that
        do while requests wait for a place, or may hold one that waits. Call it after `place`.
        """
        blocked = self._head_is_blocked()
        idle = [uuid for uuid, gpu in sorted(self.gpus.items()) if not gpu.members]
        lightly = any(gpu.members and self._is_lightly_loaded(gpu) for gpu in self.gpus.values())
        add = blocked or not (idle or lightly)
        return ScaleSignal(add, () if self._queue else tuple(idle if lightly else idle[:-1]))

    def _head_is_blocked(self) -> bool:
        """Whether requests wait, and no GPU has room for the one that is next."""
        return bool(self._queue) and not any(self._could_hold(gpu, self._queue[0][1]) for gpu in self._open.values())

    def _is_lightly_loaded(self, gpu: Gpu) -> bool:
        """Few requests, and room beside them: pages for one more as large as they are on the mean, and to grow into."""
        count = gpu.working_set
        mean = -(-gpu.used_pages // count) if count else 1
        return count < min(self.light_load, self.max_batch_size) and mean + count + 1 <= gpu.free_pages

    def _could_hold(self, gpu: Gpu, request: ClusterRequest) -> bool:
        return gpu.has_room(request) and request.final_tokens <= gpu.num_pages * gpu.page_size

    def _requeue(self, request: ClusterRequest) -> None:
        if request.gpu is not None:
            self._leave(request.gpu, request)
        if request.isolated:
            self._isolation.add(request)
            return
        heapq.heappush(self._queue, (request.arrival, request))

    def _take_out(self, request: ClusterRequest) -> None:
        """From its GPU or its queue."""
        if request.gpu is not None:
            self._leave(request.gpu, request)
        elif request.isolated:
            self._isolation.queue.remove(request)
        else:
            self._queue.remove((request.arrival, request))
            heapq.heapify(self._queue)

    def _leave(self, gpu: Gpu, request: ClusterRequest) -> None:
        gpu.remove(request)
        self._freed[gpu.uuid] = self._open[gpu.uuid] = gpu

    def _gpu(self, uuid: str) -> Gpu:
        if uuid not in self.gpus:
            raise ValueError(f"unknown GPU {clip(uuid)}; the cluster has {', '.join(sorted(self.gpus)) or 'none'}")
        return self.gpus[uuid]

    def _request(self, request_id: str) -> ClusterRequest:
        if request_id not in self.requests:
            raise ValueError(f"unknown request {clip(request_id)}; it has finished, or was never submitted")
        return self.requests[request_id]
