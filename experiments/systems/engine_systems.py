"""Systems on our engine: Punica, its variants, and the two policy baselines without LoRA.

Timed: steps, which includes copying adapters into their slots when a request is admitted; of a whole stream also
`add_request`. Not timed: building the engine, registering adapters in host memory, and putting the engine into the
state in which a window of the stream begins.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from experiments.systems.serving import SYSTEMS, WARM_STEPS, Served, ServingSystem, Step
from experiments.systems.stream import Job
from experiments.systems.world import World
from punica.adapters import LoRAModel, LoRARequest
from punica.engine import Engine, Request
from punica.engine.runner import ModelRunner
from punica.scheduling import RequestState, RequestStatus, StepLayout
from punica.workload import Stretch, Timeline

MOST_ADAPTERS = 1 << 20  # in host memory, where copies share their tensors


class EngineSystem(ServingSystem):
    """An engine with `admission`, with or without LoRA."""

    index_rule: ClassVar[str] = "per_request"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        config = world.limits.engine_config(self.lora, self.index_rule)
        lora_config = config.lora_config(world.rank, max_cpu_loras=MOST_ADAPTERS) if self.lora else None
        self.engine = Engine(world.backbone(), lora_config, config, self.admission)
        self.engine.runner.attention.cache = world.kv_cache  # one for all systems: they take turns
        self._merged: dict[int, LoRAModel] = {}
        self._names = itertools.count()

    def serve(self, jobs: Sequence[Job]) -> Served:
        requests = [self._request(job) for job in jobs]
        self._register({job.adapter_id for job in jobs})
        totals: Counter[str] = Counter()
        start = time.perf_counter()
        states = [self.engine.add_request(request) for request in requests]
        while self.engine.has_unfinished():
            step = self.engine.step().statistics
            totals.update(steps=1, rows=step.batch_size, idle=step.num_idle)
            totals.update(schedule=step.schedule_s, metadata=step.metadata_s, model=step.model_s)
        seconds = time.perf_counter() - start
        phases = {name: float(totals[name]) for name in ("schedule", "metadata", "model")}
        tokens = [state.output_token_ids for state in states]
        return Served(jobs, tokens, totals["steps"], totals["rows"], totals["idle"], seconds, phases)

    def run_steps(self, jobs: Sequence[Job], timeline: Timeline, start: int, count: int) -> list[Step]:
        warm = min(WARM_STEPS, start)
        self._set_up(jobs, timeline.at(start - warm), count + warm)
        steps = []
        try:
            for _ in range(count + warm):
                started = time.perf_counter()
                done = self.engine.step().statistics
                seconds, live = time.perf_counter() - started, done.batch_size - done.num_idle
                steps.append(Step(seconds, live + done.num_prefill_tokens, live, done.model_s))
        finally:
            self._clear()
        return steps[warm:]

    def forced(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._register({job.adapter_id for job in jobs})
        wanted = {
            self.engine.add_request(self._request(job)): list(own) for job, own in zip(jobs, tokens, strict=True)
        }
        found: dict[RequestState, list[torch.Tensor]] = {state: [] for state in wanted}
        with recorded(self.engine.runner) as seen:
            while self.engine.has_unfinished():
                self.engine.step()
                states, logits = seen.pop()
                for state, row in zip(states, logits, strict=True):
                    if len(found[state]) < len(wanted[state]):  # later rows are those of idle requests
                        found[state].append(row)
                        state.output_token_ids[-1] = wanted[state][len(found[state]) - 1]
        return [torch.stack(rows) for rows in found.values()]

    def _request(self, job: Job) -> Request:
        adapter = LoRARequest(f"adapter-{job.adapter_id}", job.adapter_id, "registered in memory")
        return Request(f"request-{next(self._names)}", job.prompt, job.new_tokens, adapter)

    def _register(self, adapter_ids: Collection[int]) -> None:
        """These adapters in host memory and none in a slot."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in sorted(adapter_ids):
            original = self._merged.get(self.world.adapter_set(adapter_id))
            manager.add_adapter(self.world.adapter(adapter_id) if original is None else original.clone(adapter_id))
            self._merged.setdefault(self.world.adapter_set(adapter_id), manager.list_adapters()[adapter_id])

    def _set_up(self, jobs: Sequence[Job], state: Stretch, steps: int) -> None:
        """The engine as it is before the one step of `state`: batch, blocks, slots, and as much of the queue as can
        join in `steps` steps.
        """
        running = state.members[: len(state.members) - state.joined]
        first = state.waiting - state.joined
        queue = jobs[first : first + steps + self.world.limits.max_batch_size]
        in_slots = self._in_slots([jobs[request].adapter_id for request, _ in running], jobs[:first])
        self._register({*in_slots, *(job.adapter_id for job in queue)})
        if self.engine.manager is not None:
            for adapter_id in reversed(in_slots):  # the least recently used first
                self.engine.manager.activate_adapter(adapter_id)
        for request, generated in running:
            self._put(jobs[request], generated)
        for job in queue:
            self.engine.add_request(self._request(job))

    def _in_slots(self, running: Sequence[int], earlier: Sequence[Job]) -> list[int]:
        """Adapters in the slots, the most recently used first: of the running requests, then of those before."""
        used = dict.fromkeys([*running, *(job.adapter_id for job in reversed(earlier))])
        return list(used)[: self.world.limits.max_batch_size]

    def _put(self, job: Job, generated: int) -> None:
        """A request in the batch that has `generated` tokens, all its new ones if it is an idle member."""
        request, engine = self._request(job), self.engine
        if generated == job.new_tokens:
            state = RequestState(request)
            state.status, state.finish_reason = RequestStatus.FINISHED, "length"
        else:
            state = engine.add_request(request)
            engine.scheduler.waiting.remove(state)
            state.status = RequestStatus.RUNNING
        vocabulary = self.world.vocab_size
        state.output_token_ids += [(7 * place + 1) % vocabulary for place in range(generated)]
        whole = engine.scheduler.rule.inseparable
        engine.blocks.reserve(request.request_id, request.final_kv_length if whole else state.num_tokens)
        engine.scheduler.running.append(state)

    def _clear(self) -> None:
        """Nobody waits or runs any more."""
        scheduler = self.engine.scheduler
        for state in [*scheduler.running, *scheduler.waiting]:
            if not state.has_ended:
                self.engine.abort_request(state.request_id)
        for state in list(scheduler.running):
            if state in scheduler.running:  # the members of an inseparable batch leave together
                scheduler.take_out(state)


@contextmanager
def recorded(runner: ModelRunner) -> Iterator[list[tuple[tuple[RequestState, ...], torch.Tensor]]]:
    """Inside, every step adds its requests, in the order of the rows, and their logits in float32 on the host."""
    run, compute = runner.run, runner.model.compute_logits
    layouts: list[StepLayout] = []
    seen: list[tuple[tuple[RequestState, ...], torch.Tensor]] = []

    def run_and_note(layout: StepLayout, meanwhile: Callable[[], None]) -> tuple[list[int], float, float]:
        layouts.append(layout)
        return run(layout, meanwhile)

    def compute_and_keep(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        seen.append((layouts.pop().requests, logits.float().cpu()))
        return logits

    runner.run, runner.model.compute_logits = run_and_note, compute_and_keep  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del runner.run, runner.model.compute_logits  # type: ignore[method-assign]


@SYSTEMS.register("punica")
class Punica(EngineSystem):
    """The paper's system: continuous batches, first come first served, every row with its own adapter."""

    admission, lora = "fcfs", True


@SYSTEMS.register("punica_last_admitted")
class PunicaLastAdmitted(EngineSystem):
    """Punica as the released harness ran it (D04): all decode rows take the adapter admitted last.

    Every step has one LoRA segment whatever the workload, and the tokens are wrong. It shows what that rule did to
    Figure 11, nothing else.
    """

    admission, lora, exact = "fcfs", True, False
    index_rule = "last_admitted"


@SYSTEMS.register("punica_static")
class PunicaStatic(EngineSystem):
    """Punica's operator in static batches of any mix: between PEFT's mixed batches and Punica, it tells what the
    operator gains from what continuous batching gains.
    """

    admission, lora = "static_mixed", True


@SYSTEMS.register("continuous_batching")
class ContinuousBatching(EngineSystem):
    """The policy of vLLM in the paper: continuous batches, one adapter at a time; backbone only."""

    admission, lora = "single_adapter", False


@SYSTEMS.register("static_batching")
class StaticBatching(EngineSystem):
    """The policy of FasterTransformer and DeepSpeed in the paper: static batches of one adapter; backbone only."""

    admission, lora = "static", False
