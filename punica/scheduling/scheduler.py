"""Which requests run in the next step: admission, growth and preemption.

Only the *admission rule* differs from one serving system to another. Everything here is the same for all of them: the
queue is in order of arrival, the batch is bounded, a request needs KV blocks and, with LoRA, a slot.
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
    """What runs in one model invocation.

    ``prefills`` compute all their tokens, ``decodes`` one token each. ``idle`` are finished requests of an
    inseparable batch: they cost a decode row each and their output is thrown away. ``preempted`` left the batch in
    this step, for want of blocks or of a slot that was pinned for another adapter.
    """

    prefills: tuple[RequestState, ...]
    decodes: tuple[RequestState, ...]
    idle: tuple[RequestState, ...]
    preempted: tuple[RequestState, ...]

    @property
    def is_empty(self) -> bool:
        """Nothing to run."""
        return not (self.prefills or self.decodes)


@dataclass(eq=False)
class Scheduler:
    """The queue, the running batch and their blocks.

    Args:
        rule: the admission rule.
        blocks: the KV blocks; their owners are request ids.
        max_batch_size: most requests in the batch.
        max_tokens: most token rows in one invocation; only rules with several prefills per step meet it.
        max_adapters: distinct adapters that can be active at once (``None``: no limit, the engine runs no LoRA).

    ``on_leave`` may be set; it is told of every request that is in neither queue nor batch any more. ``is_resident``
    and ``is_loaded`` too, where adapters come and go: the first tells rules whose adapter lies in a slot, the second
    whether a request that could join has to wait for its adapter so that those who run need not.

    After every call, a request is in the queue or in the batch or gone, and exactly those in the batch own blocks.
    """

    rule: AdmissionRule
    blocks: BlockManager
    max_batch_size: int
    max_tokens: int
    max_adapters: int | None = None
    waiting: deque[RequestState] = field(default_factory=deque, init=False)
    running: list[RequestState] = field(default_factory=list, init=False)
    on_leave: Callable[[RequestState], None] = field(default_factory=lambda: _nobody_asks, init=False)
    is_resident: IsResident = field(default_factory=lambda: _always, init=False)
    is_loaded: IsResident = field(default_factory=lambda: _always, init=False)

    def add(self, request: RequestState) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self, pinned: Collection[int] = ()) -> StepPlan:
        """Give every decoding request room for one more token, then admit from the queue; the requests of the next
        step. ``pinned``: adapters that keep their slot whether or not a request uses it.

        When blocks run out the newest request is preempted: it loses its blocks and returns to the head of the queue,
        to be computed again later. Nobody joins in such a step: the blocks left over are fewer than the head needs.
        When adapters were pinned over the heads of running requests, those whose adapter joined last are preempted.
        """
        preempted = [*self._yield_slots(pinned), *self._grow()]
        decoding = tuple(request for request in self.running if request.status is RequestStatus.RUNNING)
        idle = tuple(self._finished())
        admitted = self._admit(len(self.running), pinned)
        return StepPlan(tuple(admitted), decoding, idle, tuple(preempted))

    def somebody_may_join(self, pinned: Collection[int] = ()) -> bool:
        """Whether :meth:`schedule` would admit from the queue if the batch stayed as it is."""
        if not self.waiting:
            return False
        request = self.rule.candidate(self.waiting, self.is_resident)
        return self._may_join(request, [], len(self.running), pinned)

    def go_on(self, requests: Collection[RequestState]) -> StepPlan:
        """The step of those of ``requests`` that are still in the batch, their blocks reserved; nobody joins, or is
        preempted for somebody's pin.
        """
        here = set(self.running)
        members = [request for request in requests if request in here]
        decoding, idle = (
            tuple(request for request in members if (request.status is RequestStatus.RUNNING) == decodes)
            for decodes in (True, False)
        )
        return StepPlan((), decoding, idle, ())

    def retire_finished(self) -> None:
        """Free the blocks and the places of finished requests; of an inseparable batch, once all are finished."""
        finished = self._finished()
        if not self.rule.inseparable or len(finished) == len(self.running):
            for request in finished:
                self._dismiss(request)

    def preempt(self, request: RequestState) -> None:
        """Put a running request back because blocks or slots ran out; counted."""
        self.put_back(request)
        request.preemptions += 1

    def put_back(self, request: RequestState) -> None:
        """Take a running request out of the batch and put it at the head of the queue, with its output so far."""
        self.drop(request)
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)

    def drop(self, request: RequestState) -> None:
        """Take a running request out of the batch and free its blocks."""
        self.running.remove(request)
        self.blocks.release(request.request_id)

    def take_out(self, request: RequestState) -> None:
        """Remove a request for good, wherever it is: in the queue, running, or a finished member of the batch."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self.on_leave(request)
        else:
            self._dismiss(request)
            self.retire_finished()  # of an inseparable batch it may have been the last unfinished member

    def has_slot(self, candidate: RequestState, pinned: Collection[int]) -> bool:
        """Whether the adapters of the batch, the candidate's and the pinned ones can be active together.

        A new version of an adapter takes the slot of the one before, unless a running request still uses that.
        """
        in_use = {request.weights_key for request in self.running}
        replaces = candidate.weights is None and candidate.adapter_id not in in_use
        adapters = {*in_use, candidate.adapter_id if replaces else candidate.weights_key} - {0}
        return self.max_adapters is None or len(adapters.union(pinned)) <= self.max_adapters

    def _dismiss(self, request: RequestState) -> None:
        """Take a member of the batch out for good."""
        self.drop(request)
        self.on_leave(request)

    def _finished(self) -> list[RequestState]:
        return [request for request in self.running if request.status is RequestStatus.FINISHED]

    def _yield_slots(self, pinned: Collection[int]) -> list[RequestState]:
        """Take running requests out until their adapters and the pinned ones fit; whose adapter joined last goes first.

        They wait again in their old order. Finished members of an inseparable batch go before all others, for good.
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
                self._dismiss(request)
            else:
                self.preempt(request)
                preempted.append(request)
        self.retire_finished()  # what is left of an inseparable batch may have nothing to do
        return preempted

    def _grow(self) -> list[RequestState]:
        preempted: list[RequestState] = []
        for request in list(self.running):
            while request.status is RequestStatus.RUNNING:
                if self.blocks.reserve(request.request_id, request.num_tokens):
                    break
                preempted.append(self.running[-1])
                self.preempt(preempted[-1])  # the newest; when it is `request` itself, the loop ends
        return preempted

    def _admit(self, num_rows: int, pinned: Collection[int]) -> list[RequestState]:
        admitted: list[RequestState] = []
        while self.waiting:
            request = self.rule.candidate(self.waiting, self.is_resident)
            if not self._may_join(request, admitted, num_rows, pinned):
                break
            self._take_from_queue(request)
            self.blocks.reserve(request.request_id, self._tokens_to_reserve(request))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            admitted.append(request)
            num_rows += request.num_tokens
        return admitted

    def _take_from_queue(self, request: RequestState) -> None:
        """It leaves the queue to join; those before it, who came earlier, are overtaken."""
        place = self.waiting.index(request)
        for earlier in itertools.islice(self.waiting, place):
            earlier.overtaken += 1
        del self.waiting[place]

    def _may_join(
        self, candidate: RequestState, admitted: list[RequestState], num_rows: int, pinned: Collection[int]
    ) -> bool:
        return (
            len(self.running) < self.max_batch_size
            and num_rows + candidate.num_tokens <= self.max_tokens
            and self.rule.allows(candidate, self.running, admitted)
            and self.has_slot(candidate, pinned)
            and self._has_blocks(candidate)
            and (self.rule.inseparable or not self.running or self.is_loaded(candidate))
        )

    def _tokens_to_reserve(self, request: RequestState) -> int:
        return request.final_kv_length if self.rule.inseparable else request.num_tokens

    def _has_blocks(self, candidate: RequestState) -> bool:
        """Room for its tokens, and beside others one block per request to grow into.

        Without those it would be preempted right away.
        """
        spare = len(self.running) + 1 if self.running and not self.rule.inseparable else 0
        return self.blocks.blocks_for(self._tokens_to_reserve(candidate)) + spare <= self.blocks.num_free


def _nobody_asks(request: RequestState) -> None:
    """Nothing is to be done when a request leaves."""


def _always(request: RequestState) -> bool:
    """Nothing has to be loaded for anybody."""
    return True
