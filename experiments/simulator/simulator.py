"""Discrete-event simulation of a cluster: the real policy, arrivals over time, and steps that cost what a model
predicts.

Events are arrivals, and ends of strides, which are steps in a row without a decision between (`stride.py`). Every GPU
with requests runs one step after the other. GPUs whose engines work ahead launch the next step when this one begins,
unless all requests end with it: a request that is placed meanwhile joins one step later. The simulation is
deterministic: the same trace gives the same result, to the bit.

Adapters may have to be loaded (`residency.py`). A request whose adapter is in no slot waits for its load, and those
behind it on its GPU wait too; other steps run beside. Left out: the network between scheduler and runners, sampling,
and what a load takes from the step beside it.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, isnan, nan, nextafter

import numpy as np
from numpy.typing import NDArray

from experiments.simulator.latency import StepCost
from experiments.simulator.residency import Residency, ResidencyConfig
from experiments.simulator.stride import StepRecord, Stride
from experiments.workload import RequestLengths
from punica.cluster.gpu import Gpu, StepWork
from punica.cluster.policy import ClusterPolicy, ClusterStep


@dataclass(frozen=True)
class Trace:
    """Requests of a simulation, n in all. ``arrivals`` [n] in seconds, ascending; ``lengths`` of the requests;
    ``adapters`` [n], from 1 on (0: the plain backbone); ``ranks`` [n] of these adapters. ValueError for any other.
    """

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
    """Result of a simulation with ``cost_model`` (its name).

    Attributes:
        first_token_s, finish_s: [n] float64, on the clock of the arrivals.
        tokens: [seconds] int64, tokens in each second; prompts count when their first token does (the paper's
            throughput, D13), tokens recomputed after an eviction do not.
        batch: [gpus, seconds] int64, different requests that got a token on a GPU (in the order of names) in a second,
            as the released code counts for the heat map of Figure 13. A request that leaves and its successor both
            count, so a full GPU can exceed its largest batch.
        seconds_by_batch: [max_batch_size + 1] float64, GPU time in steps by batch size; 0 at size 0.
        longest_queue: most requests that waited for a GPU. ``steps``, ``evictions``: how many.
        loads_from_host, loads_from_disk: loads of adapters; 0 where residency is not simulated.
        load_wait_s: seconds between the step that a request, first in line on its GPU, could have joined but for its
            adapter's load, and the step that it joined; summed over requests.
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
    adapters: ResidencyConfig | None = None, own_queue: bool = False,
) -> SimulationResult:  # fmt: skip
    """Serve a trace on the GPUs of ``policy``, which must be new: GPUs added, nothing submitted.

    ``padded_ranks``: kernels read every adapter of a batch at the batch's largest rank. ``works_ahead``: engines launch
    steps ahead, as ours on a GPU. ``adapters``: memory of adapters; ``None``: all are in slots. ``own_queue``: it is
    the queue of one engine, which knows requests from their arrival on, and so gives a place away when it launches the
    last step of a request. A cluster's scheduler tells it when that step has ended. ValueError for a used policy, a
    request larger than any GPU, or fewer slots than requests of a batch; RuntimeError when a step takes no time.
    """
    if not policy.gpus or policy.requests:
        raise ValueError(
            f"the policy has {len(policy.gpus)} GPUs and {len(policy.requests)} requests; start from one with GPUs and "
            "without requests"
        )
    if adapters is not None and adapters.num_slots < policy.max_batch_size:
        raise ValueError(
            f"num_slots is {adapters.num_slots} for batches of {policy.max_batch_size}: a request could wait for a "
            "slot, of which the policy knows nothing; give as many slots, or lower the policy's max_batch_size"
        )
    return _Simulation(trace, policy, cost, padded_ranks, works_ahead, own_queue, adapters).run()


class _Simulation:
    """State of a simulation: strides of all GPUs, and the events at which they stop.

    Attributes:
        now, row: time of the event, and row of its GPU among the names; an arrival is behind all rows.
        events: times and rows; outdated where the GPU stops at another time.
        known: when the engine of each request knew of it. It is the arrival, unless engines that work ahead are told
            by a scheduler (``is_told``).
    """

    def __init__(
        self, trace: Trace, policy: ClusterPolicy, cost: StepCost, padded_ranks: bool, works_ahead: bool,
        own_queue: bool, adapters: ResidencyConfig | None,
    ) -> None:  # fmt: skip
        self.trace, self.policy, self.cost = trace, policy, cost
        self.padded_ranks, self.works_ahead = padded_ranks, works_ahead
        self.is_told = works_ahead and not own_queue
        self.now, self.row = 0.0, len(policy.gpus)
        self.record = StepRecord(policy.max_batch_size)
        self.strides = [Stride(policy.gpus[uuid], row, self.record) for row, uuid in enumerate(sorted(policy.gpus))]
        self.stride_of = {stride.gpu.uuid: stride for stride in self.strides}
        self.events: list[tuple[float, int]] = []
        self.arrivals = trace.arrivals.tolist()
        self.known = list(self.arrivals)
        self.prompts, self.outputs = trace.lengths.prompt.tolist(), trace.lengths.output.tolist()
        self.first_token: list[float] = [nan] * len(trace.arrivals)
        self.finish: list[float] = [nan] * len(trace.arrivals)
        self.evictions = self.longest_queue = 0
        self.joins = itertools.count()
        self.held: dict[str, float] = {}  # request that waits for a load -> since when
        self.load_wait_s = 0.0
        for stride in self.strides:
            stride.gpu.catch_up = partial(self._catch_up, stride)
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
                if stride.stop == self.now:
                    self._stop(stride)
            else:
                i, self.now, self.row, arrived = arrived, arrivals[arrived], len(self.strides), arrived + 1
                prompt = self.prompts[i]
                self.policy.submit(str(i), prompt, prompt + self.outputs[i] - 1, adapters[i], ranks[i])
                self._place()
        return self._result()

    def _catch_up(self, stride: Stride) -> None:
        stride.catch_up(self.now, self.row)

    def _expect(self, stride: Stride) -> None:
        heapq.heappush(self.events, (stride.stop, stride.row))

    def _place(self) -> None:
        """Place queued requests; begin strides of idle GPUs that got one, and cut those of others."""
        if not self.policy.num_queued:
            return
        placed = self.policy.place()
        if self.is_told:
            self._tell((name for name, _ in placed), self.now)
        for _, uuid in placed:
            stride = self.stride_of[uuid]
            if not stride.is_running:
                self._begin(stride)
            elif stride.cut(self.now, self.row):
                self._expect(stride)
        self.longest_queue = max(self.longest_queue, self.policy.num_queued)

    def _stop(self, stride: Stride) -> None:
        """End a stride, or a wait for a load, and begin the next stride."""
        if stride.is_running:
            self._end(stride)
            self._place()
        if not stride.is_running:
            self._begin(stride)

    def _end(self, stride: Stride) -> None:
        """End a stride, and the requests that have all their tokens."""
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

    def _begin(self, stride: Stride) -> None:
        """Begin the next stride; without a request that can run, wait for a load."""
        gpu = stride.gpu
        joins = self._most_joins(gpu, stride.known_at) if gpu.pending else None
        begins_afresh, stride.known_at = stride.known_at == inf, inf
        step = self.policy.begin_step(gpu.uuid, joins)
        if self.is_told and begins_afresh:
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

    def _run(self, stride: Stride, step: ClusterStep) -> None:
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
        """Count the requests at the head of a GPU's pending ones that could join until ``known_at``: their engine knew
        them, and their adapters were loaded.
        """
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
