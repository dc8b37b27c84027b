"""Continuous batching: the queue, the running batch, and which requests run in the next step.

Serving systems differ in their *admission rule* alone. All share a queue in order of arrival, a bounded batch, KV
blocks for each request and, with LoRA, adapter slots.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from punica.scheduling.admission import AdmissionRule, IsResident
from punica.scheduling.block_manager import BlockManager
from punica.scheduling.request import RequestState, RequestStatus


@dataclass(frozen=True)
class StepPlan:
    """Requests of one model invocation.

    ``prefills`` compute all their tokens, ``decodes`` one token each. ``idle`` are finished requests of an
    inseparable batch: each costs a decode row, whose output is discarded. ``preempted`` left the batch in this step,
    for want of blocks or of a slot pinned for another adapter.
    """

    prefills: tuple[RequestState, ...]
    decodes: tuple[RequestState, ...]
    idle: tuple[RequestState, ...]
    preempted: tuple[RequestState, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.prefills or self.decodes)

    def only(self, members: Collection[RequestState]) -> "StepPlan":
        """Return the plan of those requests that are among ``members``; one that has finished since is idle."""
        here = set(members)
        prefills, others = ([r for r in part if r in here] for part in (self.prefills, (*self.decodes, *self.idle)))
        decodes = tuple(request for request in others if request.status is RequestStatus.RUNNING)
        idle = tuple(request for request in others if request.status is not RequestStatus.RUNNING)
        return StepPlan(tuple(prefills), decodes, idle, self.preempted)


@dataclass(eq=False)
class Scheduler:
    """The queue, the running batch and their blocks. Between two steps exactly the requests in the batch own blocks.

    Args:
        rule: the admission rule.
        blocks: the KV blocks; their owners are request ids.
        max_batch_size: most requests in the batch.
        max_tokens: most token rows in one invocation; only rules with several prefills per step reach it.
        max_adapters: distinct adapters that can be active at once (``None``: no limit, the engine runs no LoRA).

    Optional hooks: ``on_leave`` is called with every request that left both queue and batch. ``is_resident`` tells
    rules which adapters are in a slot. ``is_loaded`` keeps a request queued while its adapter's files are being read.
    """

    rule: AdmissionRule
    blocks: BlockManager
    max_batch_size: int
    max_tokens: int
    max_adapters: int | None = None
    waiting: deque[RequestState] = field(default_factory=deque, init=False)
    running: list[RequestState] = field(default_factory=list, init=False)
    leaving: list[RequestState] = field(default_factory=list, init=False)
    on_leave: Callable[[RequestState], object] = field(default=bool, init=False)  # bool: true of every request
    is_resident: IsResident = field(default=bool, init=False)
    is_loaded: IsResident = field(default=bool, init=False)

    def add(self, request: RequestState) -> None:
        self.waiting.append(request)

    def schedule(self, pinned: Collection[int] = ()) -> StepPlan:
        """Reserve one more token for every decoding request, admit from the queue, and return the next step.

        ``pinned``: adapters that keep their slot without a request. If they leave fewer slots than the batch needs,
        the requests whose adapters joined last are preempted.

        When blocks run out the newest request is preempted: it loses its blocks and is computed again later, from the
        head of the queue. Such a step admits no request: the free blocks are fewer than the head needs.
        """
        preempted = self._preempt_for_pins(pinned) if pinned else []
        for request in list(self.running):
            while request.status is RequestStatus.RUNNING:
                if self.blocks.reserve(request.request_id, request.num_tokens):
                    break
                preempted.append(self.running[-1])
                self.preempt(preempted[-1])  # the newest; when it is `request` itself, the loop ends
        decoding = tuple(request for request in self.running if request.status is RequestStatus.RUNNING)
        idle = tuple(self._finished())
        admitted = self._admit(len(self.running), pinned) if self.waiting else []
        return StepPlan(tuple(admitted), decoding, idle, tuple(preempted))

    def leave(self, request: RequestState) -> None:
        """Free place and blocks of a request whose last token is being computed, until it is retired or requeued."""
        self._drop(request)
        self.leaving.append(request)

    def has_slots_beside(self, num_ending: int, pinned: Collection[int]) -> bool:
        """Check that those who may join have slots while ``num_ending`` running requests still have theirs."""
        joining = itertools.islice(self.waiting, self.max_batch_size - len(self.running) + num_ending)
        adapters = {request.weights_key for request in (*self.running, *joining)} - {0}
        return self.max_adapters is None or len(adapters.union(pinned)) <= self.max_adapters

    def can_grow(self) -> bool:
        """Check for blocks for the next token of each running request."""
        if len(self.running) <= self.blocks.num_free:
            return True  # each needs one at most
        growing = (request for request in self.running if request.status is RequestStatus.RUNNING)
        return sum(self.blocks.missing(r.request_id, r.num_tokens) for r in growing) <= self.blocks.num_free

    def retire_finished(self) -> None:
        """Release finished requests; those of an inseparable batch once all members are finished."""
        finished = self._finished()
        if not self.rule.inseparable or len(finished) == len(self.running):
            for request in finished:
                self._release(request)

    def preempt(self, request: RequestState) -> None:
        self.requeue(request)
        request.preemptions += 1

    def requeue(self, request: RequestState) -> None:
        """Move a running request to the head of the queue."""
        self._drop(request)
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)

    def remove(self, request: RequestState) -> None:
        """Remove a request for good: from the queue, or from the batch, running or finished."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self.on_leave(request)
        else:
            self._release(request)
            self.retire_finished()  # the rest of an inseparable batch may be finished

    def has_slot(self, candidate: RequestState, pinned: Collection[int]) -> bool:
        """Check if the adapters of the batch, the candidate and the pins fit the slots together.

        A new version of an adapter replaces the previous one in its slot, unless a running request uses that one.
        """
        in_use = {request.weights_key for request in (*self.running, *self.leaving)}
        replaces = candidate.weights is None and candidate.adapter_id not in in_use
        adapters = {*in_use, candidate.adapter_id if replaces else candidate.weights_key} - {0}
        return self.max_adapters is None or len(adapters.union(pinned)) <= self.max_adapters

    def _drop(self, request: RequestState) -> None:
        if request in self.leaving:
            self.leaving.remove(request)
            return
        self.running.remove(request)
        self.blocks.release(request.request_id)

    def _release(self, request: RequestState) -> None:
        self._drop(request)
        self.on_leave(request)

    def _finished(self) -> list[RequestState]:
        return [r for r in (*self.leaving, *self.running) if r.status is RequestStatus.FINISHED]

    def _preempt_for_pins(self, pinned: Collection[int]) -> list[RequestState]:
        """Preempt until the adapters of the batch and the pinned ones fit: those whose adapter joined last go first.

        They are queued again in their old order. Finished members of an inseparable batch leave first, for good.
        """
        if self.max_adapters is None:
            return []
        by_worth = sorted(self.running, key=lambda request: request.status is RequestStatus.FINISHED)
        in_use = dict.fromkeys(request.weights_key for request in by_worth)
        unpinned = [key for key in in_use if key not in {0, *pinned}]
        leaving = set(unpinned[max(0, self.max_adapters - len(set(pinned))) :])
        preempted: list[RequestState] = []
        for request in [request for request in reversed(self.running) if request.weights_key in leaving]:
            if request.status is RequestStatus.FINISHED:
                self._release(request)
            else:
                self.preempt(request)
                preempted.append(request)
        self.retire_finished()  # the rest of an inseparable batch may be finished
        return preempted

    def _admit(self, num_rows: int, pinned: Collection[int]) -> list[RequestState]:
        admitted: list[RequestState] = []
        while self.waiting:
            request = self.rule.candidate(self.waiting, self.is_resident)
            if not self._is_admissible(request, admitted, num_rows, pinned):
                break
            place = self.waiting.index(request)
            for earlier in itertools.islice(self.waiting, place):
                earlier.overtaken += 1
            del self.waiting[place]
            self.blocks.reserve(request.request_id, self._tokens_to_reserve(request))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            admitted.append(request)
            num_rows += request.num_tokens
        return admitted

    def _is_admissible(
        self, candidate: RequestState, admitted: list[RequestState], num_rows: int, pinned: Collection[int]
    ) -> bool:
        return (
            len(self.running) < self.max_batch_size
            and num_rows + candidate.num_tokens <= self.max_tokens
            and self.rule.allows(candidate, self.running, admitted)
            and self.has_slot(candidate, pinned)
            and self._has_blocks(candidate)
            and (self.rule.inseparable or not (self.running or self.leaving) or self.is_loaded(candidate))
        )

    def _tokens_to_reserve(self, request: RequestState) -> int:
        return request.final_kv_length if self.rule.inseparable else request.num_tokens

    def _has_blocks(self, candidate: RequestState) -> bool:
        """Check for blocks; in a batch with one spare per request, without which it would be preempted right away."""
        spare = len(self.running) + 1 if self.running and not self.rule.inseparable else 0
        return self.blocks.blocks_for(self._tokens_to_reserve(candidate)) + spare <= self.blocks.num_free
