"""Systems on our engine: Punica, its variants, and the two policy baselines without LoRA.

Timed: `add_request` of the whole stream and every step until all are served, which includes copying adapters into
their slots when a request is admitted. Not timed: building the engine and registering adapters in host memory.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from experiments.systems.serving import SYSTEMS, Served, ServingSystem
from experiments.systems.stream import Job
from experiments.systems.world import World
from punica.adapters import LoRAModel, LoRARequest
from punica.engine import Engine, Request

MOST_ADAPTERS = 1 << 20  # in host memory, where copies share their tensors


class EngineSystem(ServingSystem):
    """An engine with `admission`, with or without LoRA."""

    index_rule: ClassVar[str] = "per_request"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        config = world.limits.engine_config(self.lora, self.index_rule)
        lora_config = config.lora_config(world.rank, max_cpu_loras=MOST_ADAPTERS) if self.lora else None
        self.engine = Engine(world.backbone(), lora_config, config, self.admission)
        self._merged: dict[int, LoRAModel] = {}

    def serve(self, jobs: Sequence[Job]) -> Served:
        requests = [self._request(index, job) for index, job in enumerate(jobs)]
        self._register(jobs)
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

    def _request(self, index: int, job: Job) -> Request:
        adapter = LoRARequest(f"adapter-{job.adapter_id}", job.adapter_id, "registered in memory")
        return Request(f"request-{index}", job.prompt, job.new_tokens, adapter)

    def _register(self, jobs: Sequence[Job]) -> None:
        """Every adapter of the stream in host memory and none in a slot, so that each stream starts cold."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in sorted({job.adapter_id for job in jobs}):
            original = self._merged.get(self.world.adapter_set(adapter_id))
            manager.add_adapter(self.world.adapter(adapter_id) if original is None else original.clone(adapter_id))
            self._merged.setdefault(self.world.adapter_set(adapter_id), manager.list_adapters()[adapter_id])


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
