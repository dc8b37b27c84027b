"""Continuous batching: the queue, the running batch, and which requests run in the next step.

Serving systems differ in their *admission rule* alone. All share a queue in order of arrival, a bounded batch, KV
blocks for each request and, with LoRA, adapter slots.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from punica.scheduling.admission import AdmissionRule, IsResident
from punica.scheduling.block_manager import BlockManager
from punica.scheduling.lookup import look_up
from punica.scheduling.prefix_cache import PrefixKey
from punica.scheduling.request import RequestState, RequestStatus


@dataclass(frozen=True)
class StepPlan:
    """Requests of one model invocation.

    ``prefills`` compute their tokens ``[first, end)``: what is before these is cached, what is behind is left to later
    steps. ``decodes`` compute one token each. ``idle`` are finished requests of an inseparable batch: each costs a
    decode row, whose output is discarded. ``preempted`` left the batch in this step, for want of blocks or of a slot
    pinned for another adapter. ``drafts``: perhaps the next tokens of some ``decodes``, which compute these too.
    """

    prefills: dict[RequestState, tuple[int, int]]
    decodes: tuple[RequestState, ...]
    idle: tuple[RequestState, ...]
    preempted: tuple[RequestState, ...]
    drafts: Mapping[RequestState, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.prefills or self.decodes)

    def only(self, members: Collection[RequestState]) -> "StepPlan":
        """Return the plan of those requests that are among ``members``; one that has finished since is idle."""
        here = set(members)
        prefills = {request: piece for request, piece in self.prefills.items() if request in here}
        others = [request for request in (*self.decodes, *self.idle) if request in here]
        decodes = tuple(request for request in others if request.status is RequestStatus.RUNNING)
        idle = tuple(request for request in others if request.status is not RequestStatus.RUNNING)
        return replace(self, prefills=prefills, decodes=decodes, idle=idle)


@dataclass(eq=False)
class Scheduler:
    """The queue, the running batch and their blocks. Between two steps exactly the requests in the batch own blocks.

    Args:
        blocks: the KV blocks; their owners are request ids.
        max_batch_size: most requests in the batch.
        max_tokens: most token rows in one invocation; only rules with several prefills per step reach it.
        max_adapters: distinct adapters that can be active at once (``None``: no limit, the engine runs no LoRA).
        chunk: rows of prompts in one invocation, for rules that cut prompts.
        grain: tokens of which pieces have a multiple, all but a prompt's last one.
        most_drafts: most drafts of a request in one step.

    Optional hooks: ``on_leave`` is called with every request that left both queue and batch. ``is_resident`` tells
    rules which adapters are in a slot. ``is_loaded`` keeps a request queued while its adapter's files are being read.
    ``key_of``, for a prefix cache, tells what keys and values of a request depend on beside its tokens; ``None``: not
    known yet, though its files were waited for if the second argument asks for that. ``draft`` proposes at most so many
    next tokens of a request.

    ``partial``: the running request whose prompt is not computed whole. It joined last.
    """

    rule: AdmissionRule
    blocks: BlockManager
    max_batch_size: int
    max_tokens: int
    max_adapters: int | None = None
    chunk: int | None = None
    grain: int = 1
    most_drafts: int = 0
    partial: RequestState | None = field(default=None, init=False)
    waiting: deque[RequestState] = field(default_factory=deque, init=False)
    running: list[RequestState] = field(default_factory=list, init=False)
    leaving: list[RequestState] = field(default_factory=list, init=False)
    on_leave: Callable[[RequestState], object] = field(default=bool, init=False)  # bool: true of every request
    is_resident: IsResident = field(default=bool, init=False)
    is_loaded: IsResident = field(default=bool, init=False)
    key_of: Callable[[RequestState, bool], PrefixKey | None] = field(default=PrefixKey.of_base, init=False)
    draft: Callable[[RequestState, int], Sequence[int]] = field(default_factory=lambda: look_up, init=False)

    def add(self, request: RequestState) -> None:
        request.computed, request.num_read, request.is_cached, request.status = 0, 0, False, RequestStatus.WAITING
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
        prefills: dict[RequestState, tuple[int, int]] = {}
        num_rows, left = len(self.running), self.chunk
        if (partial := self.partial) is not None and left is not None:
            decoding = tuple(request for request in decoding if request is not partial)
            end = self._end_of_piece(partial, partial.computed, left)
            rows = self._take_piece(partial, partial.computed, end, prefills)
            num_rows, left = num_rows - 1 + rows, left - rows
        if self.waiting:
            self._admit(num_rows, pinned, prefills, left)
        drafts = {}
        if self.most_drafts:
            num_rows = len(self.running) - len(prefills) + sum(end - first for first, end in prefills.values())
            drafts = self._drafts(decoding, self.max_tokens - num_rows)
        return StepPlan(prefills, decoding, idle, tuple(preempted), drafts)

    def most_drafts_of(self, request: RequestState) -> int:
        """Return how many drafts a request may have: none after which it has no token left to generate."""
        if not (self.most_drafts and request.params.is_greedy and request.may_draft):
            return 0
        return max(0, min(self.most_drafts, request.params.max_new_tokens - request.num_generated - 1))

    def take_back(self, prefills: dict[RequestState, tuple[int, int]]) -> None:
        """Queue requests of a step again, in order. A prompt that former steps began stays, without this piece."""
        for request, (first, _) in reversed(prefills.items()):
            if request in self.running and first > request.hit:
                request.computed, self.partial = first, request
            elif request in self.running:
                self.requeue(request)

    def restore(self, unfinished: Collection[RequestState]) -> None:
        """Make queue, batch and blocks whole after an error anywhere; all but the cached are queued again, in order."""
        kept = [one for one in self.running if (one.is_cached or one.num_read) and one in unfinished]
        self.running, self.leaving, self.partial, self.waiting = kept, [], None, deque()
        for request in kept:
            if not request.is_cached:  # its earlier pieces were computed
                request.computed, self.partial = request.num_read, request
        for request in unfinished:
            if request not in self.running:
                self.add(request)
        self.blocks.restore([request.request_id for request in self.running])

    def leave(self, request: RequestState) -> None:
        """Free place and blocks of a request whose last token is being computed, until it is retired or requeued.

        A prefix cache keeps the blocks until that token is read, as it registers no others.
        """
        if self.blocks.is_shared:
            self.running.remove(request)
        else:
            self._drop(request)
        self.leaving.append(request)

    def has_slots_beside(self, num_ending: int, pinned: Collection[int]) -> bool:
        """Check that those who may join have slots while ``num_ending`` running requests still have theirs."""
        joining = itertools.islice(self.waiting, self.max_batch_size - len(self.running) + num_ending)
        adapters = _slots_of(request.weights_key for request in (*self.running, *joining))
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
        self._drop(request)
        self.add(request)
        self.waiting.rotate(1)

    def remove(self, request: RequestState) -> None:
        """Remove a request for good: from the queue, or from the batch, running or finished."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.on_leave(request)
        else:
            self._release(request)
            self.retire_finished()  # the rest of an inseparable batch may be finished

    def has_slot(self, candidate: RequestState, pinned: Collection[int]) -> bool:
        """Check if the adapters of the batch, the candidate and the pins fit the slots together.

        A new version of an adapter replaces the previous one in its slot, unless a running request uses that one.
        """
        in_use = _slots_of(request.weights_key for request in (*self.running, *self.leaving))
        wanted = {
            one.adapter_id if one.weights is None and one.adapter_id not in in_use else one.weights_key
            for one in candidate.parts
        }
        adapters = in_use | (wanted - {0})
        return self.max_adapters is None or len(adapters.union(pinned)) <= self.max_adapters

    def _drop(self, request: RequestState) -> None:
        if request in self.leaving:
            self.leaving.remove(request)
            if not self.blocks.is_shared:
                return
        else:
            self.running.remove(request)
        if request is self.partial:
            self.partial = None
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
        in_use = dict.fromkeys(one.weights_key for request in by_worth for one in request.parts)
        unpinned = [key for key in in_use if key not in {0, *pinned}]
        leaving = set(unpinned[max(0, self.max_adapters - len(set(pinned))) :])
        preempted: list[RequestState] = []
        for request in [one for one in reversed(self.running) if not leaving.isdisjoint(_slots_of([one.weights_key]))]:
            if request.status is RequestStatus.FINISHED:
                self._release(request)
            else:
                self.preempt(request)
                preempted.append(request)
        self.retire_finished()  # the rest of an inseparable batch may be finished
        return preempted

    def _admit(
        self, num_rows: int, pinned: Collection[int], prefills: dict[RequestState, tuple[int, int]], left: int | None
    ) -> None:
        """Admit from the queue to a step of ``num_rows`` rows; ``left``: rows for prompts (None: no limit)."""
        while self.waiting and self.partial is None:  # none overtakes a prompt under way
            request = self.rule.candidate(self.waiting, self.is_resident)
            if len(self.running) >= self.max_batch_size or not self.rule.allows(request, self.running, [*prefills]):
                break
            if not self.has_slot(request, pinned):
                break
            request.prefix_key = key = self.key_of(request, not (self.running or self.leaving))
            # the last token is computed in any case
            hit = [] if key is None else self.blocks.find(request.tokens_between, request.num_tokens - 1, key)
            first = len(hit) * self.blocks.block_size
            end = self._end_of_piece(request, first, left)
            reserved = request.final_kv_length if self.rule.inseparable else request.num_tokens
            if not (first < end <= first + self.max_tokens - num_rows and self._may_start(request, hit, reserved)):
                break
            place = self.waiting.index(request)
            for earlier in itertools.islice(self.waiting, place):
                earlier.overtaken += 1
            del self.waiting[place]
            self.blocks.adopt(request.request_id, hit, request.num_tokens)
            self.blocks.reserve(request.request_id, reserved)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            request.hit = first
            rows = self._take_piece(request, first, end, prefills)
            num_rows, left = num_rows + rows, None if left is None else left - rows

    def _drafts(self, decoding: Sequence[RequestState], left: int) -> dict[RequestState, tuple[int, ...]]:
        """Return drafts for ``left`` rows, and reserve their blocks, but leave one free for each request."""
        drafts = {}
        for request in decoding:
            most, owner, size = self.most_drafts_of(request), request.request_id, self.blocks.block_size
            spare = max(0, self.blocks.num_free - len(self.running))
            most = min(most, left, (len(self.blocks.block_table(owner)) + spare) * size - request.num_tokens)
            if most > 0 and (found := tuple(self.draft(request, most)[:most])):
                drafts[request], left = found, left - len(found)
                self.blocks.reserve(owner, request.num_tokens + len(found))
        return drafts

    def _end_of_piece(self, request: RequestState, first: int, left: int | None) -> int:
        """Return the end of the tokens from ``first`` on that fit into ``left`` rows; at most ``first``: none do."""
        end = request.num_tokens
        if left is None or end - first <= left:
            return end
        return first + left - (first + left) % self.grain

    def _take_piece(
        self, request: RequestState, first: int, end: int, prefills: dict[RequestState, tuple[int, int]]
    ) -> int:
        """Have the step compute tokens ``[first, end)`` of a prompt; return how many they are."""
        request.computed, prefills[request] = end, (first, end)
        self.partial = request if end < request.num_tokens else None
        return end - first

    def _may_start(self, candidate: RequestState, hit: Sequence[int], num_tokens: int) -> bool:
        """Check for files of its adapter, and for blocks: in a batch one spare per request, or it is preempted soon."""
        whole = self.rule.inseparable
        spare = len(self.running) + 1 if self.running and not whole else 0
        if self.blocks.blocks_for(num_tokens) - self.blocks.num_owned(hit) + spare > self.blocks.num_free:
            return False
        return whole or not (self.running or self.leaving) or self.is_loaded(candidate)


def _slots_of(keys: Iterable[Hashable]) -> set[Hashable]:
    """Return the keys of single slots among ``weights_key``s: of mixtures those of their adapters, none of the base."""
    found = set(keys)
    mixed = [key for key in found if isinstance(key, tuple)]
    return found.difference(mixed).union(*mixed) - {0}
