"""Request dispatcher of a cluster: commands to runners, replies to results, recovery from lost runners. No Ray.

    add -> policy: queue -> place -> begin(runner): StepCommand  ...  end(runner, StepReply): tokens, results

Generated tokens are kept here, in a request's `RequestState`: a lost runner neither loses nor repeats one. A request
that is evicted, or whose runner died, is queued again, and another runner recomputes its tokens. Sampling depends on
seed and token number alone, so its further tokens stay the same.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from punica.adapters import LoRARequest, LRUCache
from punica.adapters.read import AdapterVersion
from punica.adapters.request import config_of
from punica.checks import clip
from punica.cluster.adapter_files import LoadedVersions, StoredFiles
from punica.cluster.gpu import StepWork
from punica.cluster.policy import ClusterPolicy
from punica.cluster.quarantine import MAX_SOLO_CRASHES, CrashRecord
from punica.cluster.runner import JoiningRequest, RunnerDescription, StepCommand, StepReply
from punica.engine.requests import StateFactory, check_request
from punica.scheduling import Request, RequestState

_MOST_REMEMBERED = 1024  # entries of the cache of adapter ranks


@dataclass(frozen=True)
class EndedStep:
    """Result of a runner's step: ``work`` as the scheduler counts it, ``tokens`` by request id, and ended requests."""

    work: StepWork
    tokens: dict[str, int]
    finished: tuple[RequestState, ...]
    failed: tuple[RequestState, ...]


@dataclass(eq=False)
class _TrackedRequest:
    """Unfinished request. ``key``: its name in policy and runners, also unique when a user reuses the id of an aborted
    request that is still in a runner. ``version``: of its adapter's folder, once it has begun.
    """

    key: str
    state: RequestState
    files: StoredFiles | None
    version: AdapterVersion | None = None
    crashes: CrashRecord = field(default_factory=CrashRecord)


@dataclass(eq=False)
class _RunnerState:
    """Requests in a runner, by key. ``drop``: those to leave with its next step. ``probed``: that is due even without
    requests. ``starting``: the prefill of the step in flight. ``behind``: the next one, if it waits in the runner too.
    """

    inside: set[str] = field(default_factory=set)
    drop: set[str] = field(default_factory=set)
    probed: bool = False
    starting: str | None = None
    behind: str | None = None
    work: StepWork = field(default_factory=StepWork)


class Dispatcher:
    """Translator of policy decisions into runner commands, and of replies into results.

    ``description``: of the runners. ``rule``: a scheduling rule with one prefill per step. ``files_of``: returns the
    stored files of an adapter; ``None``: runners read its folder.

    ``num_evicted``: requests evicted so far. ``recomputed``: requests that joined a runner with tokens of another one;
    its reader clears it.
    """

    def __init__(
        self, description: RunnerDescription, rule: str = "punica",
        files_of: Callable[[LoRARequest], StoredFiles | None] = lambda adapter: None,
    ) -> None:  # fmt: skip
        self.description = description
        self.policy = self._policy(rule)
        self._states = StateFactory(description.seed, description.defaults, description.codec)
        self.num_evicted = 0
        self.recomputed: list[str] = []
        self._files_of = files_of
        self._entries: dict[str, _TrackedRequest] = {}  # by key
        self._keys: dict[str, str] = {}  # by id of an unfinished request
        self._runners: dict[str, _RunnerState] = {}
        self._numbers = itertools.count()
        self._ranks: LRUCache[tuple[str, str], int] = LRUCache(_MOST_REMEMBERED)
        self._versions = LoadedVersions()

    def is_in_use(self, request_id: str) -> bool:
        return request_id in self._keys

    @property
    def startable(self) -> set[str]:
        """Runners with something to do and no step in flight."""
        gpus = self.policy.gpus
        due = (uuid for uuid, one in self._runners.items() if gpus[uuid].members or one.drop or one.probed)
        return {uuid for uuid in due if not gpus[uuid].in_flight}

    @property
    def num_unfinished(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> RequestState:
        """Queue a request; return its state, updated as tokens arrive. The runner that it joins checks its adapter."""
        known = self.description
        limits = known.vocab_size, known.max_model_len
        check_request(request, self.is_in_use, *limits, has_tokenizer=known.codec is not None)
        adapter = request.adapter
        if adapter is not None and not known.has_lora:
            name = clip(request.request_id)
            raise ValueError(f"request {name} names an adapter, but the runners' engines have no LoRA layers")
        if adapter is not None and not isinstance(adapter, LoRARequest):
            kind = type(adapter).__name__
            raise TypeError(f"adapter must be a LoRARequest or None, got {kind}; runners serve no mixtures")
        key, state = f"{request.request_id}#{next(self._numbers)}", self._states.make(request)
        files, rank = (None, 0) if adapter is None else (self._files_of(adapter), self._rank(adapter))
        self.policy.submit(key, state.num_tokens, state.final_kv_length, request.adapter_id, rank)
        self._entries[key], self._keys[request.request_id] = _TrackedRequest(key, state, files), key
        self._place()
        return state

    def use_rule(self, rule: str) -> None:
        policy = self._policy(rule)
        busy = [uuid for uuid, one in self._runners.items() if one.inside or self.policy.gpus[uuid].in_flight]
        if self._entries or busy:
            raise ValueError(
                f"rule {clip(rule)} was not taken: {len(self._entries)} requests are unfinished, {len(busy)} runners "
                "have work; call step until they have none"
            )
        for uuid, gpu in self.policy.gpus.items():
            policy.add_gpu(uuid, gpu.num_pages)
        self.policy = policy

    def abort(self, request_id: str) -> RequestState:
        if not isinstance(request_id, str) or request_id not in self._keys:
            raise ValueError(f"no unfinished request {clip(request_id)}; unfinished: {clip(sorted(self._keys))}")
        entry = self._entries[self._keys[request_id]]
        self._remove(entry)
        entry.state.abort()
        self._place()
        return entry.state

    def join(self, uuid: str, description: RunnerDescription) -> None:
        """Add a runner that is ready. ValueError when it is of another kind than the others."""
        if description != self.description:
            raise ValueError(
                f"runner {clip(uuid)} is {clip(description)}, the others are {clip(self.description)}; runners of one "
                "cluster must have the same sizes, seed and end tokens"
            )
        self.policy.add_gpu(uuid, description.num_pages)
        self._runners[uuid] = _RunnerState()
        self._versions.start(description.versions)
        self._place()

    def leave(self, uuid: str) -> None:
        """Remove a runner; its requests return to their places in the queue with the tokens that arrived."""
        self._forget(uuid)
        self._place()

    def died(self, uuid: str, reason: str) -> tuple[RequestState, ...]:
        """Remove a runner that crashed with error ``reason``; return its requests that fail for it."""
        runner, failed = self._forget(uuid), []
        for key in sorted((runner.inside - runner.drop) & self._entries.keys()):
            entry = self._entries[key]
            crashes, was_quarantined = entry.crashes, entry.crashes.quarantined
            crashes.add_crash(shared=len(runner.inside) > 1)
            if (deaths := crashes.solo_crashes) >= MAX_SOLO_CRASHES:
                entry.state.fail(f"RuntimeError: {deaths} runners died with this request alone in them, of: {reason}")
                self._remove(entry)
                failed.append(entry.state)
            elif crashes.quarantined and not was_quarantined:
                self.policy.quarantine(key)
        self._place()
        return tuple(failed)

    def probe(self) -> None:
        for uuid, gpu in self.policy.gpus.items():
            if not gpu.in_flight:
                self._runners[uuid].probed = True

    def begin(self, uuid: str) -> StepCommand | None:
        """Return the next step of a runner, ``None`` if it has nothing to do.

        An engine that works ahead may have launched this step already; then a request joins the one after. Where the
        prefill of this step came with an earlier order, the next prefill comes with this one. A step without members
        takes out aborted requests, or answers :meth:`probe`.
        """
        runner = self._runners[uuid]
        step = self.policy.begin_step(uuid)
        runner.drop.update(runner.inside.intersection(step.evicted))
        if step.evicted:
            self.num_evicted += len(step.evicted)
            self._place()
        if step.is_empty:
            if not (runner.drop or runner.probed):
                return None
            self.policy.gpus[uuid].begin_step(())
        runner.probed = False
        drop = tuple(sorted(runner.drop))
        runner.inside -= runner.drop
        runner.drop, runner.starting = set(), next(iter(step.prefills), None)
        gpu = self.policy.gpus[uuid]
        runner.behind = next(iter(gpu.pending), None) if runner.starting in runner.inside else None
        key = runner.behind or runner.starting
        joins = None
        if key is not None and key not in runner.inside:
            joins = self._joining(key)
            runner.inside.add(key)
        prompt = sum(self.policy.requests[key].num_tokens for key in step.prefills)
        runner.work = StepWork(step.num_decodes, gpu.decoding_kv_tokens - prompt, prompt, gpu.rank_sum)
        return StepCommand(drop, joins)

    def end(self, uuid: str, reply: StepReply) -> EndedStep:
        """Apply a runner's reply. RuntimeError when it contradicts the scheduler."""
        runner = self._runners[uuid]
        _compare(uuid, "requests that may wait", {runner.starting, runner.behind} & reply.waiting, set(reply.waiting))
        _compare(uuid, "tokens before their turn", set(), {runner.behind} & reply.tokens.keys())
        _compare(uuid, "requests in the step", runner.inside, {*reply.tokens, *reply.failed, *reply.waiting})
        self.policy.end_step(uuid, runner.starting if runner.starting in reply.waiting - runner.drop else None)
        work = replace(runner.work, prefill_tokens=0) if runner.starting in reply.waiting else runner.work
        tokens: dict[str, int] = {}
        finished, failed = list[RequestState](), list[RequestState]()
        arrived = runner.inside - runner.drop - reply.waiting
        for key in sorted(arrived, key=lambda key: self.policy.requests[key].arrival):
            entry, state, error = self._entries[key], self._entries[key].state, None
            if key in reply.versions and entry.version is None:
                entry.version, error = reply.versions[key], self._versions.begin(state.adapter, reply.versions[key])
            if error is not None:
                state.fail(error)
            else:
                _apply(state, reply, key)
                tokens |= {state.request_id: reply.tokens[key]} if key in reply.tokens else {}
            if state.has_ended:
                (failed if state.error else finished).append(state)
                self._remove(entry)
            elif entry.crashes.quarantined and entry.crashes.add_token():
                self.policy.quarantine(key, begins=False)
                runner.drop.add(key)
        ended = reply.finished.union(reply.failed)
        runner.inside -= ended
        runner.drop -= ended
        if not runner.drop:
            gpu = self.policy.gpus[uuid]
            reserved = sum(gpu.pages_for(request.num_tokens) for request in gpu.pending.values())
            _compare(uuid, "KV blocks in use", gpu.used_pages - reserved, reply.used_blocks)
        self._place()
        return EndedStep(work, tokens, tuple(finished), tuple(failed))

    def _policy(self, rule: str) -> ClusterPolicy:
        policy = ClusterPolicy(rule, self.description.max_batch_size, self.description.page_size)
        if policy.rule.prefills_per_step != 1:
            raise ValueError(f"scheduling rule {rule!r} puts several prompts into a step; the engine runs one per step")
        return policy

    def _rank(self, adapter: LoRARequest) -> int:
        """Return the rank in the adapter's folder, 0 where it cannot be read from here; for rules that use ranks."""
        if (rank := self._ranks.get(adapter.source)) is None:
            rank = 0
            with suppress(OSError, TypeError, ValueError):  # the runner's check reports it
                rank = config_of(adapter).r
            self._ranks.put(adapter.source, rank)
        return rank

    def _joining(self, key: str) -> JoiningRequest:
        """Describe a request to the runner that it joins, and note it as recomputed where it has tokens."""
        entry = self._entries[key]
        state, params = entry.state, replace(entry.state.params, seed=entry.state.seed)
        self.recomputed += [state.request_id] if state.output_token_ids else []
        adapter, version = self._versions.wanted(state.adapter, entry.version)
        request = Request(key, state.prompt_token_ids, params, adapter)
        return JoiningRequest(request, tuple(state.output_token_ids), entry.files, version)

    def _forget(self, uuid: str) -> _RunnerState:
        self.policy.remove_gpu(uuid)
        return self._runners.pop(uuid)

    def _place(self) -> None:
        if self.policy.num_queued:
            self.policy.place()

    def _remove(self, entry: _TrackedRequest) -> None:
        gpu = self.policy.requests[entry.key].gpu
        self.policy.cancel(entry.key)
        if gpu is not None:
            runner = self._runners[gpu.uuid]
            runner.drop |= {entry.key} & runner.inside
        del self._entries[entry.key], self._keys[entry.state.request_id]


def _apply(state: RequestState, reply: StepReply, key: str) -> None:
    if key in reply.failed:
        if key in reply.tokens:
            with suppress(Exception):  # undecodable token, the reason of the failure
                state.append(reply.tokens[key])
        state.fail(reply.failed[key])
        return
    state.append(reply.tokens[key])
    if key in reply.logprobs:
        state.logprobs.append(reply.logprobs[key])
    _compare(key, "the end", state.has_ended, key in reply.finished)


def _compare(name: str, what: str, scheduled: Any, real: Any) -> None:
    """Raise RuntimeError when scheduler and runner disagree: no request could be trusted after that."""
    if scheduled != real:
        raise RuntimeError(
            f"{what} of {clip(name)}: the scheduler counts on {clip(scheduled)}, the runner says {clip(real)}; this is "
            "a fault of the library, please report it"
        )
