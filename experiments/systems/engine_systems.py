"""Systems on our engine: Punica, its variants, and the two policy baselines without LoRA. Timed are steps, with copies
of adapters on admission, and `add_request` of a whole stream; not building, registering and setting up.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from experiments.benches.engine_steps import clear, put
from experiments.facts.systems import System
from experiments.harness.experiment import CheckFailed
from experiments.systems.serving import WARM_STEPS, Served, ServingSystem, Step, World
from experiments.systems.stream import Job, Timeline, timeline_of
from punica.adapters import LoRARequest
from punica.config import LoRAConfig
from punica.engine import Engine, EngineConfig, Request, runner
from punica.engine.requests import StepOutput
from punica.scheduling import RequestState

MOST_ADAPTERS = 1 << 20  # in host memory, where copies share their tensors


def timed_step(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> tuple[Step, StepOutput]:
    start, output, end = clock(), engine.step(), clock()
    done = output.statistics
    return Step(start, end, done.batch_size - done.num_idle, done.num_prefill_tokens), output


class EngineSystem(ServingSystem):
    """The engine with the system's rules, with or without LoRA; subclasses change slots and requests."""

    def __init__(self, world: World, facts: System) -> None:
        super().__init__(world, facts)
        config = replace(world.limits.engine_config(facts.lora, facts.index_rule), prefill_chunk=facts.chunk)
        lora = self.lora_config(config) if facts.lora else None
        self.engine = Engine(world.backbone(), lora, config, facts.admission, cache=world.kv_cache, warm_up=False)
        self.names = itertools.count()

    def lora_config(self, config: EngineConfig) -> LoRAConfig:
        """Return slots as many as a batch can use, and all adapters in host memory."""
        return config.lora_config(self.world.rank, max_cpu_loras=MOST_ADAPTERS, fully_sharded_loras=self.facts.sharded)

    def request(self, job: Job) -> Request:
        adapter = LoRARequest(f"adapter-{job.adapter_id}", job.adapter_id, "registered in memory")
        return Request(f"request-{next(self.names)}", job.prompt, job.new_tokens, adapter)

    def register(self, adapter_ids: Collection[int]) -> None:
        """Put these adapters, and no others, into host memory; free all slots."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in sorted(adapter_ids):
            key = self.facts.sharded, self.world.adapter_set(adapter_id)
            if key in self.world.registered:
                manager.restore_adapter(self.world.registered[key].clone(adapter_id), None)
            else:
                manager.add_adapter(self.world.adapter(adapter_id))
                self.world.registered[key] = manager.list_adapters()[adapter_id]

    def capture_for(self, jobs: Sequence[Job]) -> None:
        timeline = timeline_of(jobs, self.facts.admission, self.world.limits.max_batch_size)
        self._capture(timeline, 0, timeline.steps)

    def serve(self, jobs: Sequence[Job]) -> Served:
        requests, steps = [self.request(job) for job in jobs], list[Step]()
        self.register({job.adapter_id for job in jobs})
        self.capture_for(jobs)
        with self.captures_nothing():
            start = time.perf_counter()
            states = [self.engine.add_request(request) for request in requests]
            while self.engine.has_unfinished():
                steps.append(timed_step(self.engine)[0])
            seconds = time.perf_counter() - start
        return Served(jobs, [state.output_token_ids for state in states], steps, seconds)

    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        warm = min(WARM_STEPS, start)
        return self.run_all_steps(jobs, timeline, start - warm, count + warm)[warm:]

    def run_all_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        self._capture(timeline, start, start + count + 1)  # one more is launched ahead
        with self.captures_nothing():
            self._set_up(jobs, timeline, start, count)
            try:
                return [timed_step(self.engine)[0] for _ in range(count)]
            finally:
                clear(self.engine)

    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.register({job.adapter_id for job in jobs})
        wanted = {self.engine.add_request(self.request(job)): list(own) for job, own in zip(jobs, tokens, strict=True)}
        found: dict[RequestState, list[torch.Tensor]] = {state: [] for state in wanted}

        def take(logits: torch.Tensor, requests: Sequence[RequestState], best: torch.Tensor) -> torch.Tensor:
            for state, row in zip(requests, logits.float().cpu(), strict=True):
                if len(found[state]) < len(wanted[state]):  # later rows are those of idle requests
                    found[state].append(row)
            return best.new_tensor([wanted[state][len(found[state]) - 1] for state in requests])

        with patch.object(runner, "choose_tokens", take):
            while self.engine.has_unfinished():
                self.engine.step()
        return [torch.stack(rows) for rows in found.values()]

    @contextmanager
    def captures_nothing(self) -> Iterator[None]:
        """Raise `CheckFailed` when a CUDA graph is captured inside, or refused for want of memory."""
        captured = self._graphs()
        yield
        if self._graphs() != captured:
            raise CheckFailed(f"{self.facts.name} captured a CUDA graph while it was timed")

    def _graphs(self) -> int:
        graphs = self.engine.runner.graphs
        return 0 if graphs is None else graphs.statistics.graphs + graphs.statistics.refused

    def _capture(self, timeline: Timeline, first: int, end: int) -> None:
        """Capture the CUDA graphs of these steps before the first step needs each."""
        for prompt_rows, decode_rows, adapters in sorted(step_shapes(timeline, first, end), reverse=True):
            if self.facts.index_rule == "last_admitted":
                adapters = min(adapters, 1)
            self.engine.capture_step(prompt_rows, decode_rows, adapters, uses_lora=self.facts.lora)

    def _set_up(self, jobs: Sequence[Job], timeline: Timeline, step: int, count: int) -> None:
        """Put the engine into its state before `step`, with as much of the queue as can join in `count` steps."""
        state = timeline.at(step)
        begun = state.begun - state.joined
        next_ones = timeline.order[begun : begun + count + self.world.limits.max_batch_size]
        queue = [jobs[request] for request in sorted(next_ones)]
        earlier = [jobs[request] for request in timeline.order[:begun]]
        in_slots = self._in_slots([jobs[request].adapter_id for request, _ in state.running], earlier)
        self.register({*in_slots, *(job.adapter_id for job in queue)})
        if self.engine.manager is not None:
            for adapter_id in reversed(in_slots):  # the least recently used first
                self.engine.manager.activate_adapter(adapter_id)
        for request, generated in state.running:
            put(self.engine, self.request(jobs[request]), generated)
        for job in queue:
            self.engine.add_request(self.request(job))

    def _in_slots(self, running: Sequence[int], earlier: Sequence[Job]) -> list[int]:
        """Adapters in the slots, the most recently used first: of the running requests, then of those before."""
        used = dict.fromkeys([*running, *(job.adapter_id for job in reversed(earlier))])
        return list(used)[: self.engine.config.full_slots]


def step_shapes(timeline: Timeline, first: int, end: int) -> set[tuple[int, int, int]]:
    """Return prompt rows, decode rows and different adapters of the latter, of steps `[first, end)`."""
    shapes = set()
    for stretch in timeline.between(first, end):
        members, earlier = ([request for request, _ in group] for group in (stretch.members, stretch.running))
        prompts = sum(timeline.prompts[request] for request in members[len(earlier) :])
        for rows, decoding in ((prompts, earlier), (0, members)) if stretch.joined else ((0, members),):
            if rows or stretch.steps > bool(stretch.joined):
                shapes.add((rows, len(decoding), len({timeline.adapters[request] for request in decoding})))
    return shapes
