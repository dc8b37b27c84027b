"""Between the requests of users and the steps of runners: what is sent where, what came back, and what is lost with a
runner. No Ray in here.

    add -> policy: queue -> place -> begin(runner): StepCommand  ...  end(runner, StepReply): tokens, results

A request is known by its `RequestState` in here and nowhere else: whatever happens to runners, what it has generated is
what arrived, once. When a GPU runs out of pages (`ClusterPolicy` says who leaves) or dies, its requests wait again and
go on elsewhere, prompt and generated tokens computed again (who was there when runners died perhaps alone:
`suspicion.py`). Their draws depend on seed and number of token only
(`punica.engine.sampler`), so they end as they would have there.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from punica.adapters import LoRARequest, LRUCache, PEFTHelper
from punica.checks import check_count, clip
from punica.cluster.folders import StoredFiles
from punica.cluster.latency import StepWork
from punica.cluster.policy import ClusterPolicy
from punica.cluster.runner import JoiningRequest, RunnerDescription, StepCommand, StepReply
from punica.cluster.suspicion import Suspicion
from punica.engine.arrival import Arrivals, check_tokens
from punica.engine.text import TextCodec
from punica.scheduling import Request, RequestState

_MOST_REMEMBERED = 1024  # adapters whose rank is known


class ClusterFull(RuntimeError):
    """So many requests wait for a GPU that no more are taken."""


@dataclass(frozen=True)
class EndedStep:
    """What came of a step of ``work``, as the scheduler counts it: ``tokens`` by request id, and the requests that
    ended, ``finished`` well or ``failed``.
    """

    work: StepWork
    tokens: dict[str, int]
    finished: tuple[RequestState, ...]
    failed: tuple[RequestState, ...]


@dataclass(eq=False)
class _Entry:
    """An unfinished request: its state, the name under which policy and runners know it (a user may use the id of one
    that was aborted again while that is still in a runner), and whether it is why runners died.
    """

    key: str
    state: RequestState
    files: StoredFiles | None
    suspicion: Suspicion = field(default_factory=Suspicion)


@dataclass(eq=False)
class _RunnerBook:
    """Keys of the requests that are in a runner, and of those among them that have to leave with its next step; the one
    that is to begin in the step in flight, and the work of that step.
    """

    inside: set[str] = field(default_factory=set)
    drop: set[str] = field(default_factory=set)
    begins: str | None = None
    work: StepWork = field(default_factory=StepWork)


class Dispatcher:
    """The scheduler's desk.

    Args:
        description: of the runners, which are of one kind.
        rule: name of a scheduling rule with one prefill per step.
        max_queued: most requests that wait for a GPU when one is added.
        files_of: where the files of an adapter are to be had by a runner; ``None``: in its folder.

    Attributes:
        policy: its decisions. ``codec``: of the runners' tokenizer.
        startable: runners with something to do and no step in flight.
        decisions_s: seconds of each call of ``policy.place`` and ``policy.begin_step`` since somebody emptied it.
    """

    def __init__(
        self, description: RunnerDescription, rule: str, max_queued: int,
        files_of: Callable[[LoRARequest], StoredFiles | None] = lambda adapter: None,
    ) -> None:  # fmt: skip
        self.description = description
        self.max_queued = check_count("max_queued", max_queued)
        self.policy = ClusterPolicy(rule, description.max_batch_size, description.page_size)
        if self.policy.rule.prefills_per_step != 1:
            raise ValueError(f"scheduling rule {rule!r} puts several prompts into a step; the engine runs one per step")
        self.codec = None if description.tokenizer is None else TextCodec(description.tokenizer)
        self._arrivals = Arrivals(description.seed, description.defaults, self.codec)
        self.startable: set[str] = set()
        self.decisions_s: list[float] = []
        self._files_of = files_of
        self._entries: dict[str, _Entry] = {}  # by key
        self._keys: dict[str, str] = {}  # of the unfinished requests by their id
        self._runners: dict[str, _RunnerBook] = {}
        self._numbers = itertools.count()
        self._ranks: LRUCache[tuple[str, str], int] = LRUCache(_MOST_REMEMBERED)

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether `add` would refuse."""
        return self.policy.num_queued >= self.max_queued

    def is_in_use(self, request_id: str) -> bool:
        """Whether a request of that name has not ended."""
        return request_id in self._keys

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._entries)

    def add(self, request: Request) -> RequestState:
        """Take a request; what is known of it from now on. Its adapter is looked at by the runner that it comes to.

        Raises, before anything changes: TypeError (no Request), ValueError (its id is in use; tokens outside of the
        vocabulary; longer than a runner's ``max_model_len`` or than its pages; an adapter where runners have no LoRA),
        `ClusterFull`.
        """
        self._check(request)
        key, state = f"{request.request_id}#{next(self._numbers)}", self._arrivals.note(request)
        adapter = request.adapter
        files, rank = (self._files_of(adapter), self._rank(adapter)) if isinstance(adapter, LoRARequest) else (None, 0)
        self.policy.submit(key, state.num_tokens, state.final_kv_length, request.adapter_id, rank)
        self._entries[key], self._keys[request.request_id] = _Entry(key, state, files), key
        self._place()
        return state

    def abort(self, request_id: str) -> RequestState:
        """Take an unfinished request out, wherever it is. ValueError for an unknown id."""
        if not isinstance(request_id, str) or request_id not in self._keys:
            raise ValueError(f"no unfinished request {clip(request_id)}; unfinished: {clip(sorted(self._keys))}")
        entry = self._entries[self._keys[request_id]]
        self._take_out(entry)
        entry.state.abort()
        self._place()
        return entry.state

    # --- runners -----------------------------------------------------------------------------------------------------

    def join(self, uuid: str, description: RunnerDescription) -> None:
        """A runner is ready. ValueError when it is of another kind than the others."""
        if description.kind != self.description.kind:
            raise ValueError(
                f"runner {clip(uuid)} is {clip(description)}, the others are {clip(self.description)}; runners of one "
                "cluster must have the same sizes, seed and end tokens"
            )
        self.policy.add_gpu(uuid, description.num_pages)
        self._runners[uuid] = _RunnerBook()
        self._place()

    def leave(self, uuid: str) -> None:
        """A runner is given back: its requests wait again, at their places in the queue, with all that arrived."""
        self._forget(uuid)
        self._place()

    def died(self, uuid: str, reason: str) -> tuple[RequestState, ...]:
        """As `leave`, of a runner that died, with the error that told of it. Those of its requests that are taken for
        the cause (`suspicion.py`) have failed and are returned.
        """
        book, failed = self._forget(uuid), []
        for key in sorted((book.inside - book.drop) & self._entries.keys()):
            entry = self._entries[key]
            suspicion, was_alone = entry.suspicion, entry.suspicion.alone
            suspicion.lost(in_company=len(book.inside) > 1)
            if suspicion.is_cause:
                deaths = suspicion.losses_alone
                entry.state.fail(f"RuntimeError: {deaths} runners died with this request alone in them, of: {reason}")
                self._take_out(entry)
                failed.append(entry.state)
            elif suspicion.alone and not was_alone:
                self.policy.isolate(key)
        self._place()
        return tuple(failed)

    def begin(self, uuid: str) -> StepCommand | None:
        """The next step of a runner, ``None`` if it has nothing to do."""
        self.startable.discard(uuid)
        book = self._runners[uuid]
        with self._timed():
            step = self.policy.begin_step(uuid)
        book.drop.update(book.inside.intersection(step.evicted))
        if step.evicted:
            self._place()
        if step.is_empty:
            return None
        drop = tuple(sorted(book.drop))
        book.inside -= book.drop
        book.drop, book.begins = set(), next(iter(step.prefills), None)
        joins = None
        for key in set(step.prefills) - book.inside:  # the others wait there for their adapters
            entry = self._entries[key]
            state, params = entry.state, replace(entry.state.params, seed=entry.state.seed)
            request = Request(key, state.prompt_token_ids, params, state.adapter)
            joins = JoiningRequest(request, tuple(state.output_token_ids), entry.files)
            book.inside.add(key)
        gpu, prompt = self.policy.gpus[uuid], sum(self.policy.requests[key].num_tokens for key in step.prefills)
        book.work = StepWork(step.num_decodes, gpu.decoding_kv_tokens - prompt, prompt, gpu.rank_sum)
        return StepCommand(drop, joins)

    def end(self, uuid: str, reply: StepReply) -> EndedStep:
        """Take in what a step did. RuntimeError when that is not what the scheduler counts on."""
        book, held_back = self._runners[uuid], self._held_back(uuid, reply)
        _compare(uuid, "requests in the step", book.inside, {*reply.tokens, *reply.failed, *reply.waiting})
        self.policy.end_step(uuid, held_back)
        work = replace(book.work, prefill_tokens=0) if reply.waiting else book.work
        tokens: dict[str, int] = {}
        finished: list[RequestState] = []
        failed: list[RequestState] = []
        arrived = book.inside - book.drop - reply.waiting
        for key in sorted(arrived, key=lambda key: self.policy.requests[key].arrival):
            entry, state = self._entries[key], self._entries[key].state
            if key in reply.tokens:
                tokens[state.request_id] = reply.tokens[key]
            _take_in(state, reply, key)
            if state.has_ended:
                (failed if state.error else finished).append(state)
                self._take_out(entry)
            elif entry.suspicion.alone and entry.suspicion.survived():
                self.policy.end_isolation(key)
                book.drop.add(key)
        ended = reply.finished.union(reply.failed)
        book.inside -= ended
        book.drop -= ended
        if not book.drop:
            _compare(uuid, "KV blocks in use", self._used_pages(uuid), reply.used_blocks)
        self._place()
        if self.policy.gpus[uuid].members:
            self.startable.add(uuid)
        return EndedStep(work, tokens, tuple(finished), tuple(failed))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        name, known = clip(request.request_id), self.description
        if request.request_id in self._keys:
            raise ValueError(f"request_id {name} is in use by an unfinished request; choose another id")
        check_tokens(request, known.vocab_size, has_tokenizer=self.codec is not None)
        length = request.final_kv_length + 1
        if length > known.max_model_len:
            raise ValueError(
                f"request {name} has {length} tokens, prompt and new ones, max_model_len of the runners is "
                f"{known.max_model_len}; shorten it or raise EngineConfig.max_model_len"
            )
        if request.adapter is not None and not known.has_lora:
            raise ValueError(f"request {name} names an adapter, but the runners' engines have no LoRA layers")
        if request.adapter is not None and not isinstance(request.adapter, LoRARequest):
            raise TypeError(f"adapter must be a LoRARequest or None, got {type(request.adapter).__name__}")
        if self.is_full:
            raise ClusterFull(
                f"request {name} is refused: {self.policy.num_queued} requests wait for a GPU, max_queued is "
                f"{self.max_queued}; ask again later, or add a runner"
            )

    def _rank(self, adapter: LoRARequest) -> int:
        """As its folder says, if that can be seen from here; for rules that look at ranks."""
        rank = self._ranks.get(adapter.source)
        if rank is None:
            rank = 0
            with suppress(OSError, TypeError, ValueError):  # a runner will say what is wrong with it
                rank = PEFTHelper.from_local_dir(adapter.absolute_path).r
            self._ranks.put(adapter.source, rank)
        return rank

    def _forget(self, uuid: str) -> _RunnerBook:
        """Take a runner out, and what is known of it; its requests wait again."""
        self.policy.remove_gpu(uuid)
        self.startable.discard(uuid)
        return self._runners.pop(uuid)

    def _place(self) -> None:
        if not self.policy.num_queued:
            return
        with self._timed():
            placed = self.policy.place()
        self.startable.update(uuid for _, uuid in placed if not self.policy.gpus[uuid].in_flight)

    def _take_out(self, entry: _Entry) -> None:
        """Out of the policy and out of the books; a runner that has it learns that with its next step."""
        gpu = self.policy.requests[entry.key].gpu
        self.policy.cancel(entry.key)
        if gpu is not None:
            book = self._runners[gpu.uuid]
            if entry.key in book.inside:
                book.drop.add(entry.key)
            if not gpu.members:
                self.startable.discard(gpu.uuid)
        del self._entries[entry.key], self._keys[entry.state.request_id]

    def _held_back(self, uuid: str, reply: StepReply) -> str | None:
        """The request that was to begin and waits in the runner for its adapter, unless it is not wanted any more."""
        book = self._runners[uuid]
        if not reply.waiting:
            return None
        _compare(uuid, "requests that may wait", {book.begins}, set(reply.waiting))
        return None if book.begins in book.drop else book.begins

    def _used_pages(self, uuid: str) -> int:
        """Of what is in the runner: the policy also counts the pages of those that wait there for their prefill."""
        gpu = self.policy.gpus[uuid]
        return gpu.used_pages - sum(gpu.pages_for(request.num_tokens) for request in gpu.pending.values())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.decisions_s.append(time.perf_counter() - start)


def _take_in(state: RequestState, reply: StepReply, key: str) -> None:
    """What a step did for a request."""
    if key in reply.failed:
        if key in reply.tokens:
            with suppress(Exception):  # a token that cannot be decoded, which is why it failed
                state.append(reply.tokens[key])
        state.fail(reply.failed[key])
        return
    state.append(reply.tokens[key])
    if key in reply.logprobs:
        state.logprobs.append(reply.logprobs[key])
    _compare(key, "the end", state.has_ended, key in reply.finished)


def _compare(name: str, what: str, scheduled: Any, real: Any) -> None:
    """RuntimeError where scheduler and runner have come apart, which no request could be trusted after."""
    if scheduled != real:
        raise RuntimeError(
            f"{what} of {clip(name)}: the scheduler counts on {clip(scheduled)}, the runner says {clip(real)}; this is "
            "a fault of the library, please report it"
        )
