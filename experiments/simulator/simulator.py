"""Discrete-event simulation of a cluster: the real policy, arrivals over time, steps that cost what a model predicts.

Events are arrivals and ends of strides. GPUs whose engines work ahead launch the next step when this one begins, so
that a request placed meanwhile joins one step later. It is deterministic. A request whose adapter is in no slot waits
for its load, as do those behind it. Left out: the network, sampling, and what a load takes from the step beside it.
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isnan, nan, nextafter

import numpy as np
from numpy.typing import NDArray

from experiments.simulator.latency import StepCost
from experiments.simulator.residency import Residency, ResidencyConfig
from experiments.workload import RequestLengths
from punica.cluster.gpu import Gpu, StepWork
from punica.cluster.policy import ClusterPolicy, ClusterStep


@dataclass(frozen=True)
class Trace:
    """n requests: ascending ``arrivals`` [n] in s, ``lengths``, ``adapters`` [n] (0: none) and ``ranks`` [n]."""

    arrivals: NDArray[np.float64]
    lengths: RequestLengths
    adapters: NDArray[np.int64]
    ranks: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes = {len(self.arrivals), len(self.lengths), len(self.adapters), len(self.ranks)}
        if len(sizes) != 1:
            raise ValueError(f"a trace has one arrival, length, adapter and rank per request, got {sorted(sizes)}")
        if not (np.isfinite(self.arrivals).all() and (np.diff(self.arrivals, prepend=0.0) >= 0).all()):
            raise ValueError("arrivals must ascend from 0 s on, all finite; sort them first")
        if min(self.adapters.min(initial=0), self.ranks.min(initial=0)) < 0:
            raise ValueError("adapters and ranks start at 0")
        rank_of = np.zeros(self.adapters.max(initial=0) + 1, dtype=np.int64)
        rank_of[self.adapters] = self.ranks
        twice = self.adapters[(rank_of[self.adapters] != self.ranks) & (self.adapters > 0)]
        if len(twice):
            raise ValueError(f"adapter {twice[0]} has two ranks; give each adapter one")


@dataclass(frozen=True)
class SimulationResult:
    """``first_token_s``, ``finish_s`` [n] on the clock of the arrivals; ``tokens`` [seconds], a prompt's with its first
    token (D13); ``batch`` [gpus, seconds], requests that got a token, one that leaves and its successor both;
    ``seconds_by_batch`` [max_batch_size + 1]; ``longest_queue``; loads, and ``load_wait_s``: how much later requests
    first in line joined for their loads.
    """

    cost_model: str
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    tokens: NDArray[np.int64]
    batch: NDArray[np.int64]
    seconds_by_batch: NDArray[np.float64]
    longest_queue: int
    steps: int
    evictions: int
    loads_from_host: int = 0
    loads_from_disk: int = 0
    load_wait_s: float = 0.0


def simulate(
    trace: Trace, policy: ClusterPolicy, cost: StepCost, padded_ranks: bool = False, works_ahead: bool = False,
    adapters: ResidencyConfig | None = None,
) -> SimulationResult:  # fmt: skip
    """Serve a trace on the GPUs of ``policy``, which must be new. ``padded_ranks``: kernels read adapters at the
    batch's largest rank; ``works_ahead``: engines launch ahead; ``adapters``: their memory (None: all in slots).
    ValueError for what cannot be served; RuntimeError when a step takes no time.
    """
    if not policy.gpus or policy.requests:
        raise ValueError(f"the policy has {len(policy.gpus)} GPUs and {len(policy.requests)} requests; give a new one")
    if adapters is not None and adapters.num_slots < policy.max_batch_size:
        slots, batch = adapters.num_slots, policy.max_batch_size
        raise ValueError(f"num_slots is {slots} for batches of {batch}; give a slot for each request")
    return _Simulation(trace, policy, cost, padded_ranks, works_ahead, adapters).run()


class _StepRecord:
    """Steps of all GPUs: tokens by second, prompts with their first token; GPU time by batch size; and how many."""

    def __init__(self, max_batch_size: int) -> None:
        self.tokens: defaultdict[int, int] = defaultdict(int)
        self.seconds_by_batch = [0.0] * (max_batch_size + 1)
        self.steps = 0


class _Stride:
    """Steps in a row of the same requests on the GPU of ``row``, computed at once: until a request ends, waits for its
    prefill, or pages could run out. A request placed meanwhile cuts it; `catch_up` updates the policy's model first.
    """

    def __init__(self, gpu: Gpu, row: int, record: _StepRecord) -> None:
        self.gpu, self.row, self.record = gpu, row, record
        self.stop = inf  # of the stride, or of a load that it waits for
        self.is_running = False  # a step is in flight
        self.batch: list[int] = []  # [seconds], different requests that got a token
        self.size = 0  # requests of its steps
        # heap of the last step of each request that was prefilled here, its number, name and first step
        self.leaving: list[tuple[int, int, str, int]] = []
        self.known_at = inf  # when the next step was launched, beside the last one; infinite where it was not
        self._ends: list[float] = []  # of its steps
        self._done = 0  # steps that have ended
        self._began = 0.0  # the step in flight
        self._joined = self._prompt_tokens = 0  # prefills of the first step, and their tokens

    @property
    def began(self) -> float:
        return self._ends[self._done - 1] if self._done else self._began

    def begin(self, now: float, work: StepWork, joined: int, prompt_tokens: int, cost: StepCost, further: int) -> float:
        """Begin a step of ``work`` with ``joined`` prefills, and ``further`` steps of these; return its end."""
        self.is_running, self._done, self._began = True, 0, now
        self.size, self._joined, self._prompt_tokens = work.decodes + joined, joined, prompt_tokens
        first_end = now + _positive(cost.seconds(work), cost)
        self._ends = [first_end]
        if further:
            kv_tokens = self.gpu.decoding_kv_tokens + self.size
            each = cost.decode_seconds(self.size, kv_tokens, work.adapter_ranks, further)
            _positive(min(each[0], each[-1]), cost)  # linear between
            self._ends = list(itertools.accumulate(each, initial=first_end))
        self.stop = self._ends[-1]
        return first_end

    def cut(self, now: float, row: int) -> bool:
        """End the stride with the step in flight; False when it does so already."""
        self.catch_up(now, row)
        if len(self._ends) == self._done + 1:
            return False
        del self._ends[self._done + 1 :]
        self.stop = self._ends[-1]
        return True

    def catch_up(self, now: float, row: int) -> None:
        """End the steps that end until ``now``; of those at ``now`` the ones up to GPU ``row``, whose event it is."""
        if not self.is_running or self._ends[self._done] > now:
            return
        ended = (bisect_right if self.row <= row else bisect_left)(self._ends, now)
        if ended > self._done:
            self.gpu.advance(ended - self._done)
            self._record(ended)

    def end(self) -> float:
        """End the last step, and return when it began. Its caller tells the policy."""
        if further := len(self._ends) - 1 - self._done:
            self.gpu.advance(further)
            self._record(len(self._ends) - 1)
        began = self.began
        self._record(len(self._ends))
        self.is_running, self.stop = False, inf
        return began

    def _record(self, ended: int) -> None:
        ends, done, record = self._ends, self._done, self.record
        record.seconds_by_batch[self.size] += ends[ended - 1] - self.began
        record.steps += ended - done
        self._done = ended
        if done == 0:
            second = int(ends[0])
            record.tokens[second] += self.size + self._prompt_tokens
            self._count(second, self._joined)
            done = 1
        while done < ended:
            second = int(ends[done])
            until = bisect_left(ends, second + 1, done, ended)
            record.tokens[second] += self.size * (until - done)
            self._count(second, 0)
            done = until

    def _count(self, second: int, joined: int) -> None:
        """Count the requests of a second: all of its first step, those that joined in later ones."""
        batch = self.batch
        if second < len(batch):
            batch[second] += joined
        else:
            batch.extend([0] * (second - len(batch)))
            batch.append(self.size)


def _positive(seconds: float, cost: StepCost) -> float:
    if not seconds > 0:
        raise RuntimeError(f"cost model {cost.name!r} gives a step of {seconds!r} s; it must be positive")
    return seconds


class _Simulation:
    """State of a simulation: strides of all GPUs, and the events at which they stop."""

    def __init__(
        self, trace: Trace, policy: ClusterPolicy, cost: StepCost, padded_ranks: bool, works_ahead: bool,
        adapters: ResidencyConfig | None,
    ) -> None:  # fmt: skip
        self.trace, self.policy, self.cost = trace, policy, cost
        self.padded_ranks, self.works_ahead = padded_ranks, works_ahead
        self.now, self.row = 0.0, len(policy.gpus)  # of the event; the row of an arrival is behind those of all GPUs
        self.record = _StepRecord(policy.max_batch_size)
        self.strides = [_Stride(policy.gpus[uuid], row, self.record) for row, uuid in enumerate(sorted(policy.gpus))]
        self.stride_of = {stride.gpu.uuid: stride for stride in self.strides}
        self.events: list[tuple[float, int]] = []  # times and rows; outdated where the GPU stops at another time
        self.arrivals = trace.arrivals.tolist()
        self.known = list(self.arrivals)  # when the engine of each request knew of it
        self.prompts, self.outputs = trace.lengths.prompt.tolist(), trace.lengths.output.tolist()
        self.first_token: list[float] = [nan] * len(trace.arrivals)
        self.finish: list[float] = [nan] * len(trace.arrivals)
        self.evictions = self.longest_queue = 0
        self.joins = itertools.count()
        self.held: dict[str, float] = {}  # request that waits for a load -> since when
        self.load_wait_s = 0.0
        for stride in self.strides:
            stride.gpu.catch_up = lambda stride=stride: stride.catch_up(self.now, self.row)
            if adapters is not None:
                stride.gpu.residency = Residency(adapters, lambda: self.now)

    def run(self) -> SimulationResult:
        arrivals, events = self.arrivals, self.events
        adapters, ranks = self.trace.adapters.tolist(), self.trace.ranks.tolist()
        arrived = 0
        while arrived < len(arrivals) or events:
            if events and (arrived == len(arrivals) or events[0][0] <= arrivals[arrived]):
                self.now, self.row = heapq.heappop(events)
                stride = self.strides[self.row]
                if stride.stop != self.now:
                    continue
                if stride.is_running:  # else a wait for a load ends
                    self._end(stride)
                    self._place()
                if not stride.is_running:
                    self._begin(stride)
            else:
                i, self.now, self.row, arrived = arrived, arrivals[arrived], len(self.strides), arrived + 1
                prompt = self.prompts[i]
                self.policy.submit(str(i), prompt, prompt + self.outputs[i] - 1, adapters[i], ranks[i])
                self._place()
        return self._result()

    def _expect(self, stride: _Stride) -> None:
        heapq.heappush(self.events, (stride.stop, stride.row))

    def _place(self) -> None:
        """Place queued requests; begin strides of idle GPUs that got one, and cut those of others."""
        if not self.policy.num_queued:
            return
        placed = self.policy.place()
        if self.works_ahead:
            self._tell((name for name, _ in placed), self.now)
        for _, uuid in placed:
            stride = self.stride_of[uuid]
            if not stride.is_running:
                self._begin(stride)
            elif stride.cut(self.now, self.row):
                self._expect(stride)
        self.longest_queue = max(self.longest_queue, self.policy.num_queued)

    def _end(self, stride: _Stride) -> None:
        gpu, began = stride.gpu, stride.end()
        self.policy.end_step(gpu.uuid)
        leaving = []
        while stride.leaving and stride.leaving[0][0] == gpu.step:
            _, _, name, first_step = heapq.heappop(stride.leaving)
            request = self.policy.requests.get(name)
            if request and request.gpu is gpu and request.first_step == first_step:  # not evicted since
                leaving.append(name)
        head = next(iter(gpu.pending), None)
        goes_on = stride.size > len(leaving) or (head is not None and self.known[int(head)] <= began)
        stride.known_at = began if self.works_ahead and goes_on else inf
        for name in leaving:
            self.finish[int(name)] = self.now
            self.policy.finish(name)

    def _begin(self, stride: _Stride) -> None:
        """Begin the next stride; without a request that can run, wait for a load."""
        gpu = stride.gpu
        joins = self._most_joins(gpu, stride.known_at) if gpu.pending else None
        begins_afresh, stride.known_at = stride.known_at == inf, inf
        step = self.policy.begin_step(gpu.uuid, joins)
        if self.works_ahead and begins_afresh:
            # an order brings one prompt; others are told after this one has launched the next step, too
            self._tell(gpu.pending, nextafter(self.now, inf))
        if not step.is_empty:
            self._run(stride, step)
        elif gpu.pending and (gpu.residency is None or gpu.residency.load_ends == inf):
            self._begin(stride)  # it was launched before its head could join, and evicted what decoded
        elif gpu.pending and gpu.residency is not None:
            stride.stop = gpu.residency.load_ends
            self._expect(stride)
        if step.evicted:
            self.evictions += len(step.evicted)
            for name in step.evicted:
                self._end_wait(name)
            self._place()

    def _run(self, stride: _Stride, step: ClusterStep) -> None:
        """Begin ``step``, and as many further steps of the same requests as no decision falls between."""
        gpu, prefill_tokens, new = stride.gpu, 0, []
        for name in step.prefills:
            i, length = int(name), self.policy.requests[name].num_tokens
            prefill_tokens += length
            last = gpu.step + self.prompts[i] + self.outputs[i] - length - 1
            heapq.heappush(stride.leaving, (last, next(self.joins), name, gpu.step))
            self._end_wait(name)
            if isnan(self.first_token[i]):
                new.append(i)
        kv_tokens = gpu.decoding_kv_tokens - prefill_tokens
        work = StepWork(step.num_decodes, kv_tokens, prefill_tokens, self._ranks(gpu))
        most = 0 if gpu.pending else stride.leaving[0][0] - gpu.step
        further = gpu.steps_that_fit(most, self.policy.rule.spare_pages)
        prompts = sum(self.prompts[i] for i in new)
        first_end = stride.begin(self.now, work, len(step.prefills), prompts, self.cost, further)
        for i in new:
            self.first_token[i] = first_end
        self._expect(stride)

    def _ranks(self, gpu: Gpu) -> int:
        """Sum the ranks that a step reads. Without residency a pending request's adapter counts already."""
        if gpu.residency is None or not gpu.pending:
            return gpu.padded_rank_sum if self.padded_ranks else gpu.rank_sum
        prefilled = {one.adapter_id: one.rank for one in gpu.members.values() if one.first_step is not None}
        prefilled.pop(0, None)
        return len(prefilled) * max(prefilled.values(), default=0) if self.padded_ranks else sum(prefilled.values())

    def _tell(self, names: Iterable[str], when: float) -> None:
        for name in names:
            self.known[int(name)] = when

    def _most_joins(self, gpu: Gpu, known_at: float) -> int:
        """Requests at the head of a GPU's pending ones that could join until ``known_at``, adapters loaded."""
        until = min(known_at, self.now)
        for count, (name, request) in enumerate(gpu.pending.items()):
            if self.known[int(name)] > until:
                return count
            if gpu.residency is not None and gpu.residency.in_slot_since(request.adapter_id) > until:
                if not count:
                    self.held.setdefault(name, self.now)
                return count
        return len(gpu.pending)

    def _end_wait(self, name: str) -> None:
        self.load_wait_s += self.now - self.held.pop(name, self.now)

    def _result(self) -> SimulationResult:
        seconds = max(self.record.tokens, default=-1) + 1
        batch = np.zeros((len(self.strides), seconds), dtype=np.int64)
        for line, stride in zip(batch, self.strides, strict=True):
            line[: len(stride.batch)] = stride.batch
        tokens = np.zeros(seconds, dtype=np.int64)
        tokens[list(self.record.tokens)] = list(self.record.tokens.values())
        residencies = [stride.gpu.residency for stride in self.strides if stride.gpu.residency is not None]
        return SimulationResult(
            self.cost.name, np.array(self.first_token), np.array(self.finish), tokens, batch,
            np.array(self.record.seconds_by_batch), self.longest_queue, self.record.steps, self.evictions,
            sum(one.loads_from_host for one in residencies), sum(one.loads_from_disk for one in residencies),
            self.load_wait_s,
        )  # fmt: skip
