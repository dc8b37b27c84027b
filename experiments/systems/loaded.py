"""Engines that are loaded by the clock: their capacity with an endless queue, and Poisson arrivals at a part of it.
Measured are requests of some seconds after a warm-up (`Span`); one unfinished counts with the time it has waited.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, cast

from experiments.benches.engine_steps import clear, put
from experiments.facts.systems import SYSTEMS
from experiments.harness.points import Reading
from experiments.harness.schema import Config
from experiments.systems.check import check_tokens
from experiments.systems.engine_systems import MOST_ADAPTERS, EngineSystem, timed_step
from experiments.systems.open_loop import DISK, MEMORY, SLOT, Arrival, Trace, drive
from experiments.systems.serving import Step, World, class_of
from experiments.systems.stream import Job, paper_stream, shortened, timeline_of
from experiments.systems.weights import Limits
from experiments.workload import drawn_adapters, released_lengths
from experiments.workload.arrivals import Span
from punica.adapters import LoRAModel, LoRARequest, write_random_adapter
from punica.config import LoRAConfig
from punica.engine import EngineConfig, Request

FOLDERS = 4  # different adapters on disk, where nothing says more; others are further ids of the same folders
LONGEST_PROMPT = int(released_lengths(1000).prompt.max())
"""Tokens, of the stream's requests at 2,048 tokens: most prompt rows of a step with at most one prompt."""
CHECKED = 4, 6  # requests compared with Hugging Face before timing, and positions of each, given the same tokens
LIVES = 3  # lifetimes of the longest request after which nothing is left of how the batch began


class Loaded(EngineSystem):
    """The system `name` with adapters in host memory; `slots` None: as many as a batch can use."""

    def __init__(self, world: World, name: str, slots: int | None = None, in_memory: int = MOST_ADAPTERS) -> None:
        self._slots, self._in_memory = slots, in_memory
        if not issubclass(class_of(name), EngineSystem):
            raise ValueError(f"{name} does not run on our engine: choose a system that does")
        super().__init__(world, SYSTEMS.get(name))
        # arrivals decide which steps occur: all that can have their CUDA graphs
        most = self.engine.config.max_num_batched_tokens
        takes_many = timeline_of([Job((0,), 1, 1)] * 2, self.facts.admission, 2).stretches[0].joined > 1
        self.engine.capture_graphs(most if takes_many else min(LONGEST_PROMPT, most))

    def lora_config(self, config: EngineConfig) -> LoRAConfig:
        slots = self._slots or config.full_slots
        return config.lora_config(self.world.rank, max_loras=slots, max_cpu_loras=max(slots, self._in_memory))

    def capture_for(self, jobs: Sequence[Job]) -> None:
        """Capture nothing: all graphs are there."""

    def place_of(self, request: Request) -> str:
        manager = self.engine.manager
        if manager is None or manager.is_active(request.adapter_id):
            return SLOT
        return DISK if manager.get_adapter(request.adapter_id) is None else MEMORY


class FromFolders(Loaded):
    """`Loaded` with adapters in PEFT folders below `root`, host memory holds the `in_memory` most popular."""

    def __init__(
        self, world: World, name: str, slots: int | None, in_memory: int, root: Path, folders: int = FOLDERS
    ) -> None:
        super().__init__(world, name, slots, in_memory)
        self._read: dict[str, LoRAModel] = {}
        self._folders = [root / str(index) for index in range(min(folders, world.sets))]
        for index, folder in enumerate(self._folders):
            if not folder.exists():
                write_random_adapter(  # the world's own weights, which the reference has
                    folder, world.config, world.rank, world.seed + index,
                    alpha=world.alpha, dtype=world.dtype, device=world.device,
                )  # fmt: skip

    def register(self, adapter_ids: Collection[int]) -> None:
        """Put the most popular ones into host memory; the system's page cache forgets the folders."""
        manager = self.engine.manager
        if manager is None:
            return
        manager.remove_all_adapters()
        for adapter_id in reversed(sorted(adapter_ids)[: self._in_memory]):  # the least popular one is evicted first
            adapter = self._adapter(adapter_id)
            if adapter.lora_path not in self._read:
                manager.add_adapter(adapter)
                self._read[adapter.lora_path] = manager.list_adapters()[adapter_id]
                manager.remove_adapter(adapter_id)
            manager.restore_adapter(self._read[adapter.lora_path].clone(adapter_id), adapter)
        for file in (file for folder in self._folders for file in folder.iterdir()):
            with file.open("rb") as opened:  # read from the drive next time
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def request(self, job: Job) -> Request:
        return Request(f"request-{next(self.names)}", job.prompt, job.new_tokens, self._adapter(job.adapter_id))

    def _adapter(self, adapter_id: int) -> LoRARequest:
        folder = self._folders[self.world.adapter_set(adapter_id) % len(self._folders)]
        return LoRARequest(f"adapter-{adapter_id}", adapter_id, str(folder))


def begin_steadily(system: Loaded, jobs: Sequence[Job]) -> int:
    """Give `system` the batch of the middle of an endless queue, after `LIVES` times the longest of `jobs`; return how
    many have begun. Inseparable batches begin with the next one.
    """
    engine, longest = system.engine, max(job.new_tokens for job in jobs)
    if engine.scheduler.rule.inseparable:
        return 0
    most, slots = engine.config.max_batch_size, engine.scheduler.max_adapters
    enough = ((LIVES + 1) * longest + 1) * most  # new tokens, so that requests wait until then
    tokens = itertools.accumulate(job.new_tokens for job in itertools.cycle(jobs))
    count = sum(1 for _ in itertools.takewhile(lambda total: total < enough, tokens))
    queue = list(itertools.islice(itertools.cycle(jobs), count + 1))
    state = timeline_of(queue, system.facts.admission, most, slots).at(LIVES * longest)
    for request, generated in state.running:
        put(engine, system.request(queue[request]), generated)
    return state.begun - state.joined


def capacity_of(
    system: Loaded, jobs: Sequence[Job], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[Reading]:
    """Serve `jobs` in a cycle for `seconds`, from the middle of an endless queue; inseparable batches are counted
    whole. `capacity` is new tokens per second over those of a mean request. `CheckFailed` if a CUDA graph was captured.
    """
    system.register({job.adapter_id for job in jobs})
    engine = system.engine
    steps, ended, fill, first = list[Step](), list[int](), engine.config.max_batch_size, -1
    stream = itertools.islice(itertools.cycle(jobs), begin_steadily(system, jobs), None)
    with system.captures_nothing():
        while True:
            if not (engine.scheduler.rule.inseparable and engine.scheduler.running):
                first = len(steps) if first < 0 and len(steps) >= fill else first
                if 0 <= first <= len(steps) - fill and steps[-1].end >= steps[first].start + seconds:
                    break
            while len(engine.scheduler.waiting) <= fill:
                engine.add_request(system.request(next(stream)))
            step, output = timed_step(engine, clock)
            steps.append(step)
            ended.append(len(output.finished))
        clear(engine)
    counted = steps[first:]
    passed, new = counted[-1].end - counted[0].start, sum(step.live for step in counted)
    return [
        Reading("capacity", new / passed / fmean(job.new_tokens for job in jobs), "request/s"),
        Reading("throughput", sum(step.tokens for step in counted) / passed, "token/s"),
        Reading("mean_batch_size", new / len(counted), "requests"),
        Reading("steps", len(counted), "steps", "count"),
        Reading("finished", sum(ended[first:]), "requests", "count"),
    ]


def load(system: Loaded, jobs: Sequence[Job], rate: float, span: Span, seed: int) -> Trace:
    """Serve `jobs` in a Poisson process of `rate` per second over `span`; `CheckFailed` if a graph was captured."""
    system.register({job.adapter_id for job in jobs})
    times = span.arrivals(rate, seed)
    arrivals = [Arrival(system.request(job), float(at)) for job, at in zip(itertools.cycle(jobs), times, strict=False)]
    with system.captures_nothing():
        return drive(system.engine, arrivals, span.measured, span.deadline, system.place_of)


def check_system(system: Loaded, jobs: Sequence[Job], count: int, tokens: int) -> None:
    """Raise `CheckFailed` unless the first tokens of `count` of `jobs` are right, on adapters that folders have."""
    short = shortened(jobs, count, tokens)
    check_tokens(system, [replace(job, adapter_id=1 + place % FOLDERS) for place, job in enumerate(short)])


class LoadBench:
    """The systems of `cfg` on one world, checked, one way to hold adapters at a time; `folders` with own weights."""

    def __init__(self, cfg: Config, limits: Limits, sets: int | None = None, folders: int = FOLDERS) -> None:
        adapters = cfg.adapters
        self.figure, self.folders = cast(Any, cfg.figure), folders
        self._root = TemporaryDirectory(prefix="adapters-")
        self.world = World(
            cfg.model, cfg.hardware.device, limits, adapters.ranks[0], adapters.alpha, adapters.seed, sets
        )
        self._systems: dict[tuple[str, int | None, int | None], Loaded] = {}

    def jobs(self, workload: str, adapters: int | None = None) -> list[Job]:
        """The stream of `workload`; with `adapters`, each request draws one of so many by this popularity."""
        figure = self.figure
        sizes = figure.requests, figure.max_len, self.world.vocab_size, figure.lengths
        if adapters is None:
            return paper_stream(workload, *sizes)
        drawn = drawn_adapters(workload, adapters, figure.requests, self.world.seed)
        jobs = zip(paper_stream("Identical", *sizes), drawn, strict=True)
        return [replace(job, adapter_id=int(index) + 1) for job, index in jobs]

    def system(self, name: str, slots: int | None = None, in_memory: int | None = None) -> Loaded:
        """The system called `name`, its tokens checked. `in_memory` None: all adapters are."""
        key = (name, slots, in_memory)
        if key not in self._systems:
            for other in [other for other in self._systems if other[1:] != key[1:]]:
                del self._systems[other]
            gc.collect()  # a manager refers to itself
            system = (
                Loaded(self.world, name, slots)
                if in_memory is None
                else FromFolders(self.world, name, slots, in_memory, Path(self._root.name), self.folders)
            )
            check_system(system, self.jobs("Distinct"), *CHECKED)
            self._systems[key] = system
        return self._systems[key]
