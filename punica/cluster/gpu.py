"""Scheduler's model of one GPU: its working set, and how many KV pages are in use.

The blocks themselves belong to the runner. A decoding request grows by one token per step, so requests are counted by
the step (modulo page size) at which they need their next page: a step costs the same for 1 request and for 32.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from punica.checks import check_count


@dataclass(eq=False)
class ClusterRequest:
    """Sizes and place of one request; its tokens are unknown here.

    Attributes:
        arrival: number in the order of submission, kept at an eviction.
        num_tokens: tokens of its prefill: prompt plus what was generated when it was last queued.
        final_tokens: most tokens that its KV cache ever holds.
        adapter_id, rank: of its adapter; 0 and 0 for the plain backbone.
        gpu: ``None`` while queued. ``first_step``: of that GPU, in which it was prefilled.
        quarantined: it is served alone, see `quarantine.py`.
    """

    request_id: str
    arrival: int
    num_tokens: int
    final_tokens: int
    adapter_id: int
    rank: int
    gpu: "Gpu | None" = None
    first_step: int | None = None
    quarantined: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens for which it holds pages: its prompt from placement on, one more with every step after its prefill."""
        if self.gpu is None:
            return 0
        return self.num_tokens + (0 if self.first_step is None else self.gpu.step - self.first_step)

    @property
    def total_tokens(self) -> int:
        """Prompt plus generated tokens, without those of a step in flight."""
        if self.gpu is None or self.first_step is None:
            return self.num_tokens
        return self.kv_tokens + (0 if self.gpu.in_flight else 1)


class PlacedRequest(NamedTuple):
    """A request that left the queue, and the GPU that it was given."""

    request_id: str
    gpu: str


@dataclass(frozen=True)
class StepWork:
    """Work of one step. ``decodes`` requests compute one token each, reading ``kv_tokens`` tokens of KV cache in all;
    ``prefill_tokens`` are rows of prompts; ``adapter_ranks`` is the sum of the adapters' ranks.
    """

    decodes: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    adapter_ranks: int = 0


@dataclass(eq=False)
class Gpu:
    """Working set of one GPU (or one tensor-parallel group), at most ``max_batch_size`` requests.

    Attributes:
        uuid: its name; the highest wins ties. ``num_pages`` of ``page_size`` tokens: its KV cache.
        members: the working set by request id, in order of placement. ``pending``: those that wait for their prefill.
        step: steps begun so far. ``in_flight``: the last of them has not ended.
        used_pages: held by the members, never more than ``num_pages``.
        requests_of: members per adapter id, without the plain backbone. ``rank_sum``: of their different adapters.
        reserved: it admits only quarantined requests.
        residency: of adapters, in a simulation that has it (``use``, ``release``).
        catch_up: called before free pages are read, where steps are not reported one by one.
    """

    uuid: str
    max_batch_size: int
    num_pages: int
    page_size: int
    members: dict[str, ClusterRequest] = field(default_factory=dict, init=False)
    pending: dict[str, ClusterRequest] = field(default_factory=dict, init=False)
    step: int = field(default=0, init=False)
    in_flight: bool = field(default=False, init=False)
    used_pages: int = field(default=0, init=False)
    requests_of: Counter[int] = field(default_factory=Counter, init=False)
    rank_sum: int = field(default=0, init=False)
    reserved: bool = field(default=False, init=False)
    residency: Any = field(default=None, init=False)
    catch_up: Callable[[], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_count("max_batch_size", self.max_batch_size)
        check_count("num_pages", self.num_pages)
        check_count("page_size", self.page_size)
        self._growing_at = [0] * self.page_size  # decoding members by the step, modulo page size, of their next page
        self._offsets = 0  # sum over decoding members of num_tokens - first_step

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page_size

    @property
    def working_set(self) -> int:
        return len(self.members)

    @property
    def num_decoding(self) -> int:
        return len(self.members) - len(self.pending)

    @property
    def free_pages(self) -> int:
        return self.num_pages - self.used_pages

    @property
    def decoding_kv_tokens(self) -> int:
        """Tokens in the KV cache of all prefilled members."""
        return self._offsets + self.num_decoding * self.step

    @property
    def padded_rank_sum(self) -> int:
        """``rank_sum`` with every adapter padded to the largest rank of the batch."""
        return len(self.requests_of) * max((member.rank for member in self.members.values()), default=0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def has_room(self, request: ClusterRequest) -> bool:
        """Check for room in the batch, pages for the request's tokens, and one spare page per request of a shared
        batch, as a single engine does; else it would be evicted right away.
        """
        if self.reserved or len(self.members) >= self.max_batch_size or request.final_tokens > self.capacity:
            return False
        if self.catch_up is not None:
            self.catch_up()
        spare = len(self.members) + 1 if self.members else 0
        return self.pages_for(request.num_tokens) + spare <= self.free_pages

    def pages_to_grow(self) -> int:
        """Count the pages that decoding members need for the next step."""
        return self._growing_at[(self.step + 1) % self.page_size]

    def place(self, request: ClusterRequest) -> None:
        """Add a member that waits for its prefill, and reserve the pages of its tokens."""
        request.gpu, request.first_step = self, None
        self.members[request.request_id] = self.pending[request.request_id] = request
        self.used_pages += self.pages_for(request.num_tokens)
        if request.adapter_id:
            self.requests_of[request.adapter_id] += 1
            self.rank_sum += request.rank if self.requests_of[request.adapter_id] == 1 else 0
        if self.residency is not None:
            self.residency.use(request.adapter_id, request.rank)

    def remove(self, request: ClusterRequest) -> None:
        """Remove a member and free its pages; ``num_tokens`` becomes all its tokens, to be recomputed elsewhere."""
        held, total = request.kv_tokens, request.total_tokens
        self.used_pages -= self.pages_for(held)
        del self.members[request.request_id]
        if request.first_step is None:
            del self.pending[request.request_id]
        else:
            self._count(request, request.first_step, -1)
        if request.adapter_id:
            self.requests_of[request.adapter_id] -= 1
            if not self.requests_of[request.adapter_id]:
                del self.requests_of[request.adapter_id]
                self.rank_sum -= request.rank
        if self.residency is not None:
            self.residency.release(request.adapter_id)
        request.gpu, request.first_step, request.num_tokens = None, None, total

    def begin_step(self, prefills: tuple[ClusterRequest, ...]) -> None:
        """Grow every decoding member by a token and start ``prefills``; the pages must be free."""
        self.used_pages += self.pages_to_grow()
        self.step += 1
        self.in_flight = True
        for request in prefills:
            del self.pending[request.request_id]
            request.first_step = self.step
            self._count(request, self.step, 1)

    def advance(self, steps: int) -> None:
        """End the step in flight and begin the next, ``steps`` times, with the same members, all of them prefilled."""
        cycles, rest = divmod(steps, self.page_size)
        first = (self.step + 1) % self.page_size
        wrapped = max(0, first + rest - self.page_size)
        grown = sum(self._growing_at[first : first + rest]) + sum(self._growing_at[:wrapped])
        self.used_pages += cycles * len(self.members) + grown
        self.step += steps

    def steps_that_fit(self, most: int, spare: bool) -> int:
        """Count the steps after the present one, up to ``most``, whose pages are free; with ``spare`` those that begin
        with a free page for each member.
        """
        count, free = len(self.members), self.num_pages - self.used_pages
        if free - count * (most // self.page_size + 1) >= count:
            return most
        place, growing = self.step % self.page_size, self._growing_at
        for step in range(most):
            place = (place + 1) % self.page_size
            if free < (count if spare else growing[place]):
                return step
            free -= growing[place]
        return most

    def defer(self, request: ClusterRequest) -> None:
        """Undo the prefill of a request that did not start in the last step; it is first among the pending again."""
        self._count(request, self.step, -1)
        request.first_step = None
        self.pending = {request.request_id: request, **self.pending}

    def _count(self, request: ClusterRequest, first_step: int, by: int) -> None:
        """Add (or remove, ``by=-1``) a decoding request of ``num_tokens + step - first_step`` tokens in the counts."""
        self._offsets += by * (request.num_tokens - first_step)
        self._growing_at[(first_step - request.num_tokens + 1) % self.page_size] += by
