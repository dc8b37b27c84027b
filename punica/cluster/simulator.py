"""Discrete-event simulation of a cluster: the real policy, arrivals over time, and steps that cost what a model
predicts.

There are two kinds of events: an arrival, and the end of a GPU's step. Every GPU with requests runs one step after the
other. GPUs whose engines work ahead launch the next step when this one begins, unless all requests end with it: a
request that arrives meanwhile joins one step later. The simulation is deterministic: the same trace gives the same
result, to the bit.

Left out: the network between scheduler and runners, sampling, and the load of an adapter (2 ms, hidden behind a step of
30). The cost model must contain the step that hides it, see `StepCost.slowed`.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from punica.cluster.latency import StepCost, StepWork
from punica.cluster.policy import ClusterPolicy, ClusterStep
from punica.cluster.residency import Residency, ResidencyConfig
from punica.workload import RequestLengths


@dataclass(frozen=True)
class Trace:
    """Requests of a simulation, n in all. ``arrivals`` [n] in seconds, ascending; ``lengths`` of the requests;
    ``adapters`` [n], from 1 on (0: the plain backbone); ``ranks`` [n] of these adapters. ValueError when the sizes
    differ or arrivals descend.
    """

    arrivals: NDArray[np.float64]
    lengths: RequestLengths
    adapters: NDArray[np.int64]
    ranks: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes = {len(self.arrivals), len(self.lengths), len(self.adapters), len(self.ranks)}
        if len(sizes) != 1:
            raise ValueError(f"a trace has one arrival, length, adapter and rank per request, got {sorted(sizes)}")
        if len(self.arrivals) and (self.arrivals[0] < 0 or np.any(np.diff(self.arrivals) < 0)):
            raise ValueError("arrivals must ascend from 0 s on; sort them first")


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation with ``cost_model`` (its name).

    Attributes:
        gpus: names, in the order of the rows of ``batch``.
        first_token_s, finish_s: [n] float64, on the clock of the arrivals.
        tokens: [seconds] int64, tokens in each second; prompts count when their first token does (the paper's
            throughput, D13), tokens recomputed after an eviction do not.
        batch: [gpus, seconds] int64, different requests that got a token on a GPU in a second, as the released code
            counts for the heat map of Figure 13. A request that leaves and its successor both count, so a full GPU can
            exceed its largest batch.
        seconds_by_batch: [max_batch_size + 1] float64, GPU time in steps by batch size; 0 at size 0.
        longest_queue: most requests that waited for a GPU. ``steps``, ``evictions``: how many.
        loads_from_host, loads_from_disk: loads of adapters; 0 where residency is not simulated.
        load_wait_s: seconds between the step that a request, first in line on its GPU, could have joined but for its
            adapter's load, and the step that it joined; summed over requests.
    """

    cost_model: str
    gpus: tuple[str, ...]
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

    @property
    def busy_seconds(self) -> float:
        """GPU time in steps, summed over all GPUs."""
        return float(self.seconds_by_batch.sum())


def simulate(
    trace: Trace, policy: ClusterPolicy, cost: StepCost, padded_ranks: bool = False, works_ahead: bool = False,
    adapters: ResidencyConfig | None = None,
) -> SimulationResult:  # fmt: skip
    """Serve a trace on the GPUs of ``policy``, which must be new: GPUs added, nothing submitted.

    ``padded_ranks``: kernels read every adapter of a batch at the batch's largest rank. ``works_ahead``: engines launch
    steps ahead, as ours on a GPU. ``adapters``: memory of adapters; ``None``: all are in slots. ValueError for a used
    policy, a request larger than any GPU, or fewer slots than requests of a batch; RuntimeError when a step takes no
    time.
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
    return _Simulation(trace, policy, cost, padded_ranks, works_ahead, adapters).run()


@dataclass(eq=False)
class _Simulation:
    trace: Trace
    policy: ClusterPolicy
    cost: StepCost
    padded_ranks: bool
    works_ahead: bool
    adapters: ResidencyConfig | None
    now: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)  # ends of steps: time, GPU
    steps: int = 0
    evictions: int = 0
    longest_queue: int = 0

    def __post_init__(self) -> None:
        count = len(self.trace.arrivals)
        self.prompts, self.outputs = self.trace.lengths.prompt.tolist(), self.trace.lengths.output.tolist()
        self.first_token: list[float] = [np.nan] * count
        self.finish: list[float] = [np.nan] * count
        self.current: dict[str, tuple[float, ClusterStep]] = {}  # GPU -> start and content of its step in flight
        # GPU -> step -> requests that end with it, with the step in which they began there
        self.ends: dict[str, defaultdict[int, list[tuple[str, int]]]] = {
            uuid: defaultdict(list) for uuid in self.policy.gpus
        }
        self.known_at: dict[str, float] = {}  # GPU -> when its next step was launched, beside the present one
        self.tokens: defaultdict[int, int] = defaultdict(int)
        self.batch: dict[str, defaultdict[int, int]] = {uuid: defaultdict(int) for uuid in self.policy.gpus}
        self.by_batch = [0.0] * (self.policy.max_batch_size + 1)
        self.residencies: list[Residency] = []
        self.held: dict[str, float] = {}  # request that waits for its load -> since when
        self.load_wait_s = 0.0
        self.wakes: dict[str, float] = {}  # idle GPU whose requests wait for a load -> its end
        if self.adapters is not None:
            for gpu in self.policy.gpus.values():
                gpu.residency = Residency(self.adapters, lambda: self.now)
                self.residencies.append(gpu.residency)

    def run(self) -> SimulationResult:
        arrivals = self.trace.arrivals.tolist()
        adapters, ranks = self.trace.adapters.tolist(), self.trace.ranks.tolist()
        arrived = 0
        while arrived < len(arrivals) or self.events:
            if self.events and (arrived == len(arrivals) or self.events[0][0] <= arrivals[arrived]):
                now, uuid = heapq.heappop(self.events)
                self.now = now
                if uuid in self.current:
                    self._end_step(now, uuid)
                elif self.wakes.get(uuid) == now:
                    self._begin_step(now, uuid)
            else:
                i, now, arrived = arrived, arrivals[arrived], arrived + 1
                self.now = now
                prompt = self.prompts[i]
                self.policy.submit(str(i), prompt, prompt + self.outputs[i] - 1, adapters[i], ranks[i])
                self._place(now)
        return self._result()

    def _place(self, now: float) -> None:
        """Place queued requests, and start idle GPUs that got one."""
        if not self.policy.num_queued:
            return
        for _, uuid in self.policy.place():
            if uuid not in self.current:
                self._begin_step(now, uuid)
        self.longest_queue = max(self.longest_queue, self.policy.num_queued)

    def _begin_step(self, now: float, uuid: str) -> None:
        step = self.policy.begin_step(uuid, self._most_joins(uuid, self.known_at.pop(uuid, np.inf)))
        gpu, requests = self.policy.gpus[uuid], self.policy.requests
        if not step.is_empty:
            prefill_tokens = 0
            for name in step.prefills:
                length = requests[name].num_tokens
                self.load_wait_s += now - self.held.pop(name, now)
                prefill_tokens += length
                left = self.prompts[int(name)] + self.outputs[int(name)] - length
                self.ends[uuid][gpu.step + left - 1].append((name, gpu.step))
            kv_tokens = gpu.decoding_kv_tokens - prefill_tokens
            ranks = gpu.padded_rank_sum if self.padded_ranks else gpu.rank_sum
            seconds = self.cost.seconds(StepWork(step.num_decodes, kv_tokens, prefill_tokens, ranks))
            if not seconds > 0:
                raise RuntimeError(f"cost model {self.cost.name!r} gives a step of {seconds!r} s; it must be positive")
            self.current[uuid] = now, step
            if self.works_ahead and len(gpu.members) > len(self.ends[uuid].get(gpu.step, ())):
                self.known_at[uuid] = now
            heapq.heappush(self.events, (now + seconds, uuid))
        elif gpu.residency is not None and gpu.pending:
            self.wakes[uuid] = gpu.residency.load_ends
            heapq.heappush(self.events, (self.wakes[uuid], uuid))
        if step.evicted:
            self.evictions += len(step.evicted)
            self._place(now)

    def _most_joins(self, uuid: str, known_at: float) -> int:
        """Count the requests at the head of a GPU's pending ones that arrived until ``known_at`` and whose adapters are
        loaded.
        """
        gpu = self.policy.gpus[uuid]
        count = 0
        for name, request in gpu.pending.items():
            if self.trace.arrivals[int(name)] > known_at:
                break
            if gpu.residency is not None and not gpu.residency.in_slot(request.adapter_id):
                if not count:
                    self.held.setdefault(name, self.now)
                break
            count += 1
        return count

    def _end_step(self, now: float, uuid: str) -> None:
        began, step = self.current.pop(uuid)
        self.policy.end_step(uuid)
        self._record(now, began, uuid, step)
        for name, first_step in self.ends[uuid].pop(self.policy.gpus[uuid].step, ()):
            request = self.policy.requests.get(name)
            # after an eviction it ends elsewhere
            if request and request.gpu and request.gpu.uuid == uuid and request.first_step == first_step:
                self.finish[int(name)] = now
                self.policy.finish(name)
        self._place(now)
        if uuid not in self.current:
            self._begin_step(now, uuid)

    def _record(self, now: float, began: float, uuid: str, step: ClusterStep) -> None:
        size = step.num_decodes + len(step.prefills)
        second, seen = int(now), self.batch[uuid]
        seen[second] = seen[second] + len(step.prefills) if second in seen else size
        self.by_batch[size] += now - began
        self.steps += 1
        self.tokens[second] += size
        for name in step.prefills:
            if np.isnan(self.first_token[int(name)]):
                self.first_token[int(name)] = now
                self.tokens[second] += self.prompts[int(name)]

    def _result(self) -> SimulationResult:
        seconds = max(self.tokens, default=-1) + 1
        uuids = tuple(sorted(self.policy.gpus))
        batch = np.zeros((len(uuids), seconds), dtype=np.int64)
        for row, uuid in enumerate(uuids):
            batch[row, list(self.batch[uuid])] = list(self.batch[uuid].values())
        tokens = np.zeros(seconds, dtype=np.int64)
        tokens[list(self.tokens)] = list(self.tokens.values())
        return SimulationResult(
            self.cost.name, uuids, np.array(self.first_token), np.array(self.finish), tokens, batch,
            np.array(self.by_batch), self.longest_queue, self.steps, self.evictions,
            sum(one.loads_from_host for one in self.residencies), sum(one.loads_from_disk for one in self.residencies),
            self.load_wait_s,
        )  # fmt: skip
