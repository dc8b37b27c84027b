"""What the scheduler of a cluster knows of one GPU: its working set and its KV pages, counted and never touched.

The blocks themselves belong to the runner on that GPU; the scheduler only has to know how many are free. Every decoding
request grows by one token per step, so its pages follow from the step at which it began. Requests are therefore
counted by the step (modulo the page size) at which they need their next page, and a step costs the same for 1 request
and for 32.
"""

from collections import Counter
from dataclasses import dataclass, field

from punica.checks import check_count


@dataclass(eq=False)
class ClusterRequest:
    """A request as the scheduler of a cluster sees it: sizes, no text.

    Attributes:
        request_id: unique among the unfinished requests.
        arrival: its number in the order of submission, kept when it is evicted.
        num_tokens: prompt plus generated tokens when it was last put in the queue: what its prefill computes.
        final_tokens: most tokens that its KV cache ever holds.
        adapter_id, rank: of its adapter; 0 and 0 for the plain backbone.
        gpu: where it is placed, ``None`` while it waits in the queue.
        first_step: the step of that GPU in which it was prefilled, ``None`` before.
        isolated: it is served alone, see `isolation.py`.
    """

    request_id: str
    arrival: int
    num_tokens: int
    final_tokens: int
    adapter_id: int
    rank: int
    gpu: "Gpu | None" = None
    first_step: int | None = None
    isolated: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens for which it holds pages: its prompt from placement on, one more with every step after its prefill."""
        if self.gpu is None:
            return 0
        return self.num_tokens + (0 if self.first_step is None else self.gpu.step - self.first_step)

    @property
    def total_tokens(self) -> int:
        """Prompt plus generated tokens; those of a step in flight are not known yet."""
        if self.gpu is None or self.first_step is None:
            return self.num_tokens
        return self.kv_tokens + (0 if self.gpu.in_flight else 1)


@dataclass(eq=False)
class Gpu:
    """The working set of one GPU (or one tensor-parallel group).

    Args:
        uuid: its name; the highest wins ties.
        max_batch_size: most requests in the working set.
        num_pages, page_size: KV pages, and tokens in a page.

    Attributes:
        members: the working set by request id, in order of placement. ``pending``: those that wait for their prefill.
        step: steps begun so far. ``in_flight``: the last of them has not ended.
        used_pages: held by the members, never more than ``num_pages``.
        requests_of: members per adapter id, without the plain backbone.
        rank_sum: sum of the ranks of the different adapters of the members.
        closed: nobody new finds room here, since it is set apart for isolated requests.
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
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_count("max_batch_size", self.max_batch_size)
        check_count("num_pages", self.num_pages)
        check_count("page_size", self.page_size)
        self._growing_at = [0] * self.page_size  # decoding members by the step, modulo page size, of their next page
        self._offsets = 0  # sum over decoding members of num_tokens - first_step

    @property
    def working_set(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def num_decoding(self) -> int:
        """Members that were prefilled."""
        return len(self.members) - len(self.pending)

    @property
    def free_pages(self) -> int:
        """Pages that no member holds."""
        return self.num_pages - self.used_pages

    @property
    def decoding_kv_tokens(self) -> int:
        """Tokens in the KV cache of all members that were prefilled."""
        return self._offsets + self.num_decoding * self.step

    @property
    def padded_rank_sum(self) -> int:
        """What ``rank_sum`` would be if every adapter of the batch were padded to the largest rank among them."""
        return len(self.requests_of) * max((member.rank for member in self.members.values()), default=0)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def has_room(self, request: ClusterRequest) -> bool:
        """Room in the batch and pages for its tokens, and beside others one page per request to grow into.

        Without those it would be evicted right away (the same rule as a single engine's).
        """
        if self.closed or len(self.members) >= self.max_batch_size:
            return False
        spare = len(self.members) + 1 if self.members else 0
        return self.pages_for(request.num_tokens) + spare <= self.num_pages - self.used_pages

    def pages_to_grow(self) -> int:
        """Pages that the decoding members need for the next step."""
        return self._growing_at[(self.step + 1) % self.page_size]

    def place(self, request: ClusterRequest) -> None:
        """Make it a member, waiting for its prefill, and reserve the pages of its tokens."""
        request.gpu, request.first_step = self, None
        self.members[request.request_id] = self.pending[request.request_id] = request
        self.used_pages += self.pages_for(request.num_tokens)
        if request.adapter_id:
            self.requests_of[request.adapter_id] += 1
            self.rank_sum += request.rank if self.requests_of[request.adapter_id] == 1 else 0

    def remove(self, request: ClusterRequest) -> None:
        """Take a member out and free its pages; ``num_tokens`` becomes all it has, to be computed again elsewhere."""
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
        request.gpu, request.first_step, request.num_tokens = None, None, total

    def begin_step(self, prefills: tuple[ClusterRequest, ...]) -> None:
        """Grow every decoding member by a token and let ``prefills`` begin to decode; the pages must be there."""
        self.used_pages += self.pages_to_grow()
        self.step += 1
        self.in_flight = True
        for request in prefills:
            del self.pending[request.request_id]
            request.first_step = self.step
            self._count(request, self.step, 1)

    def hold_back(self, request: ClusterRequest) -> None:
        """It was to begin in the last step and did not: it waits for its prefill again, before all others."""
        self._count(request, self.step, -1)
        request.first_step = None
        self.pending = {request.request_id: request, **self.pending}

    def _count(self, request: ClusterRequest, first_step: int, by: int) -> None:
        """It holds ``num_tokens + step - first_step`` tokens, and needs a page when that is 1 more than full pages."""
        self._offsets += by * (request.num_tokens - first_step)
        self._growing_at[(first_step - request.num_tokens + 1) % self.page_size] += by
