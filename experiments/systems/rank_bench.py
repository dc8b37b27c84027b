"""Figure 11's bench on one tensor-parallel rank, for Figure 12.

All ranks run the same windows of the same streams in the same order. The backbone is cut; Hugging Face's model is whole
on the first rank, so tokens are checked on a model of the same widths with few layers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from statistics import fmean
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist

from experiments.benches.model_steps import random_llama
from experiments.benches.step_parts import watched_kernels
from experiments.harness.points import Reading
from experiments.harness.schema import ModelConf
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.check import Agreement, check_tokens
from experiments.systems.engine_systems import EngineSystem
from experiments.systems.hf_backend import PeftBackend
from experiments.systems.serving import built
from experiments.systems.stream import Job, shortened
from experiments.systems.weights import Limits, exported
from experiments.systems.world import World
from punica.parallel import SingleProcessGroup, current_group, get_tensor_model_parallel_rank, tensor_parallel

T = TypeVar("T")
WATCHED_STEPS = 10
"""Steps in which collectives are watched: profiling a step of 80 layers takes longer than the step."""


class RankWorld(World):
    """World of this rank. The first rank computes references and broadcasts them."""

    @cached_property
    def peft(self) -> PeftBackend:
        """Whole model, from the same seed; read by the first rank alone."""
        return PeftBackend(self, self.kv_cache)

    def exported(self) -> dict[str, torch.Tensor]:
        """Return the whole weights under Hugging Face names, drawn again."""
        with tensor_parallel(SingleProcessGroup()):
            return exported(random_llama(self.model, self.device))

    def reference(self, job: Job, tokens: Sequence[int], lora: bool) -> torch.Tensor:
        """Return the reference's logits on all ranks."""
        found = [super().reference(job, tokens, lora) if get_tensor_model_parallel_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return cast(torch.Tensor, found[0])


class RankBench(StreamBench):
    """Worker of `systems.ranks`: the bench, with collectives and memory of ranks."""

    def __init__(
        self, model: ModelConf, device: str, limits: Limits, stream: StreamConf, check: tuple[int, int],
        check_layers: int, adapters: dict[str, Any],
    ) -> None:  # fmt: skip
        small = model.model_copy(update={"num_hidden_layers": min(check_layers, model.num_hidden_layers)})
        self._small = cache(partial(built, world=RankWorld(small, device, limits, **adapters)))
        super().__init__(RankWorld(model, device, limits, **adapters), stream, *check)

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Time one draw; with the share of collectives in its first piece, and memory of this rank."""
        readings = super().measure(system, workload, draw)
        readings += self._collectives(system, workload, draw)
        return [*readings, *_memory(self._engine_system(system))]

    def _agreement(self, system: str, workload: str) -> Agreement:
        if (system, workload) not in self._checked:
            jobs = shortened(self.jobs(workload), *self._check)
            self._checked[system, workload] = check_tokens(self._small(system), jobs)
        return self._checked[system, workload]

    def _engine_system(self, name: str) -> EngineSystem:
        system = self._system(name)
        if not isinstance(system, EngineSystem):
            raise TypeError(f"{name} does not run on ranks: choose a system on our engine")
        return system

    def _collectives(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Run the first steps of a piece again and time their collectives, in which ranks also wait."""
        drawn, engine_system = self.drawn(system, workload), self._engine_system(system)
        window = drawn.windows[draw]

        def run() -> None:
            # on gloo; else a rank waits, in its first collective on the GPU, until the others are watched as well
            dist.all_reduce(torch.zeros(1))
            engine_system.run_steps(drawn.jobs, drawn.timeline, window.starts[0], min(window.length, WATCHED_STEPS))

        with _timed_steps(engine_system) as steps:
            spent = (_on_cpu if self.world.device == "cpu" else _on_gpu)(run)
        return [
            Reading("collective_latency", 1e3 * spent / len(steps), "ms"),
            Reading("collective_share", spent / sum(steps), "ratio"),
        ]


@contextmanager
def _timed_steps(system: EngineSystem) -> Iterator[list[float]]:
    """Collect the seconds of every step of the engine inside."""
    engine, seconds = system.engine, list[float]()
    step = engine.step

    def timed() -> Any:
        started = time.perf_counter()
        output = step()
        seconds.append(time.perf_counter() - started)
        return output

    engine.step = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del engine.step  # type: ignore[method-assign]


def _on_cpu(work: Callable[[], None]) -> float:
    """Time the group's collectives, by a clock around each; seconds."""
    group: Any = current_group()
    spent = 0.0

    def clocked(collective: Callable[..., T]) -> Callable[..., T]:
        def run(*args: Any) -> T:
            nonlocal spent
            started = time.perf_counter()
            found = collective(*args)
            spent += time.perf_counter() - started
            return found

        return run

    names = ("all_reduce", "all_gather")
    for name in names:
        setattr(group, name, clocked(getattr(group, name)))
    try:
        work()
    finally:
        for name in names:
            delattr(group, name)
    return spent


def _on_gpu(work: Callable[[], None]) -> float:
    """Profile NCCL's kernels, inside of graphs too; seconds."""
    kernels = watched_kernels(work)
    return sum(kernel.end - kernel.start for kernel in kernels if kernel.name.startswith("nccl"))


def _memory(system: EngineSystem) -> list[Reading]:
    """Memory of this rank: weights, KV cache, adapter slots, graphs."""
    memory, graphs = system.engine.memory, system.engine.runner.graphs
    readings = [Reading("weight_memory", memory.weights, "byte"), Reading("kv_memory", memory.kv_cache, "byte")]
    if system.facts.lora:
        readings.append(Reading("adapter_memory", memory.adapter_slots, "byte"))
    if graphs is not None:
        readings.append(Reading("graphs", graphs.statistics.graphs, "graphs", "count"))
        readings.append(Reading("graph_memory", graphs.statistics.bytes, "byte"))
        readings.append(Reading("capture_time", graphs.statistics.seconds, "s"))
    return readings


class RankedBench:
    """Bench of all ranks: rows of the first, of memory the largest on any rank, of collectives the mean, as the time
    that a rank waits for another one is the other's gain.
    """

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def measure(self, system: str, workload: str, draw: int) -> list[Reading]:
        """Call `RankBench.measure` on all ranks."""
        ranks = self._ranks.call("measure", system, workload, draw)
        return [replace(first, value=_over_ranks(first, ranks)) for first in ranks[0]]

    def serve_whole(self, system: str, workload: str) -> Any:
        """Call `RankBench.serve_whole` on all ranks."""
        return self._ranks.call("serve_whole", system, workload)[0]

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()


def _over_ranks(first: Reading, ranks: list[list[Reading]]) -> float:
    values = [reading.value for readings in ranks for reading in readings if reading.metric == first.metric]
    if first.unit == "byte":
        return max(values)
    return fmean(values) if first.metric.startswith("collective_") else first.value
