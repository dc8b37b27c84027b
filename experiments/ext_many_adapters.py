"""Extension: many more adapters than slots, and more than host memory holds.

The paper's Distinct has one adapter for each request and hides loading behind decoding (section 5.2). Claim: how many
adapters there are costs little throughput, and a request whose adapter must be loaded waits hardly longer. Expected
shape: throughput of 1,000 adapters close to that of 32; time to first token of requests that must load above that of
resident ones by a load, milliseconds. While all slots are in use a request for another adapter waits. First come, first
served, it delays all requests behind it; `punica_resident_first` lets at most 32 of those with a loaded adapter pass.

Adapters of a stream are drawn by popularity (`experiments.workload.drawn_adapters`), which may be any registered one; a
popularity of few groups, such as Identical, asks for as few adapters. Panels:

    N adapters                 all in host memory, a slot per place in the batch.
    N adapters, S slots        the same, with fewer slots than the batch has places.
    N adapters, M in memory    in PEFT folders, M of which host memory holds (`max_cpu_loras`), the most popular ones at
                               first: others are read on demand

In each the capacity is measured first (`capacity`, `throughput`: more requests wait than the batch has places for),
then requests arrive by the clock, as in `ext_latency_under_load`, which see for the latencies. Both rules of admission
get the same ones: at half (`load`) of what `punica` takes in that panel and repeat, which is measured whatever `system`
says, from one seed.

    time_to_first_token_resident, _loading, _from_memory, _from_disk: of requests whose adapter is in a slot when it is
                  their turn, of the others, and of those by where it is. One that arrives while its adapter is in a
                  slot may find it gone by then, and loads
    loading_over_resident: the ratio of the medians of the first two
    slot_hit_rate, memory_hit_rate: requests that find their adapter in a slot, and in host memory or a slot, when they
                  arrive; with _at_join: when it is their turn
    requests, unfinished, lost, doubled, starved: see `systems.open_loop`
    weight_sets, aliases: adapters with weights of their own, and ids of the same weights as another: those that
                  `ROOM` of host memory, or of the drive, cannot hold, each with a slot and a load of its own
    page_cache_share: share of the folders in the system's page cache when the load began, after it was told to forget
                  them. Where it is 1 (folders in memory, as in some /tmp), `disk` is without the drive's time; it is
                  so, too, for an adapter that is read a second time

Cost at scale=laptop: about 60 seconds on two cores, 3 GB. On an H200 with Llama-2 7B, expected: a command measures one
repeat of what it names and ends before ten minutes; the same command once more measures the next repeat.

    python -m experiments.ext_many_adapters scale=gpu scale.tries=0 workload=zipf system=punica  # 6 minutes
    python -m experiments.ext_many_adapters scale=gpu scale.tries=0 workload=zipf  # the other rule: 6 minutes
    ...                                                                    # and so workload=uniform, workload=skewed

Two minutes of each build and check systems and capture graphs, once for each kind of panel; a panel takes 25 seconds,
ten of them for arrivals, about 200. At scale=paper five times as long. Not in these: drawing 1,000 sets of weights into
80 GB of page-locked memory, and writing folders.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from experiments.ext_latency_under_load import check_length
from experiments.harness import Config, ConfigError, Experiment, FigureConf, Point, Reading, main
from experiments.harness.on_disk import givers_first, value_on_disk
from experiments.harness.points import model_settings
from experiments.harness.schema import Count, Counts
from experiments.harness.span import Span

if TYPE_CHECKING:
    from experiments.systems.loaded import Loaded
    from experiments.systems.stream import Job
    from experiments.systems.world import World


ROOM, ROOM_ON_DRIVE = 0.7, 0.25
"""Part of what is free, of host memory and of the drive (which takes long to write), that adapters may take."""
GIVES_RATE = "punica"
"""The system at whose capacity in a panel the rate of all is taken."""


class ManyConf(FigureConf):
    """Numbers of adapters, the stream, and the seconds of a point."""

    adapters: Counts  # in host memory, with a slot per place in the batch
    batch_size: Count
    few_slots: Count
    adapters_on_few: Count
    in_memory: Count
    adapters_on_disk: Count
    load: Count  # percent of the capacity of `GIVES_RATE` at which latencies are measured
    requests: Count  # different ones of the stream, which come again and again
    lengths: str  # released or stated, see systems.stream
    max_len: Count
    warm: float
    seconds: float
    least: float  # requests to be expected in them; where a rate is too low for that, they are more seconds
    longest: float  # up to these
    drain: float
    check_requests: Count
    check_tokens: Count
    sizes: dict[str, Any]  # what depends on the scale


@dataclass(frozen=True)
class Holding:
    """Places of a panel's adapters: `slots` None is one per place, `in_memory` None all."""

    adapters: int
    slots: int | None = None
    in_memory: int | None = None

    @property
    def panel(self) -> str:
        slots = "" if self.slots is None else f", {self.slots} slots"
        memory = "" if self.in_memory is None else f", {self.in_memory} in memory"
        return f"{self.adapters} adapters{slots}{memory}"


class ManyAdapters(Experiment):
    """Throughput, hits and waits by number of adapters (the panels), popularity and rule of admission."""

    name, figure, order, conf = "ext_many_adapters", "ext many adapters", 290, ManyConf
    reads = ("model", "workload", "engine.block_size", "adapters.ranks", "adapters.alpha", "adapters.seed")
    clock, drawn_by = "host_clock", "load.draw_many"

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(ManyConf, cfg.figure)
        check_length(cfg, figure.max_len)
        if figure.in_memory < figure.batch_size:
            raise ConfigError(
                f"figure.in_memory={figure.in_memory} must be at least figure.batch_size={figure.batch_size}: host "
                "memory has a copy of every slot"
            )
        return [
            Point(holding.panel, system, workload, cfg.model.name, figure.batch_size, None, cfg.adapters.ranks[0],
                  _settings(cfg))
            for holding in holdings(figure)
            for workload in cfg.workload.names
            for system in dict.fromkeys((GIVES_RATE, *cfg.system.names))
        ]  # fmt: skip

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone, panel by panel, and in each the system first whose capacity gives the rate."""
        panels = [point.panel for point in (points[::-1] if points[0].repeat % 2 else points)]
        return givers_first(points, lambda point: (panels.index(point.panel), point.system != GIVES_RATE))

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.systems.load_bench import capacity_of, load
        from experiments.systems.load_readings import place_readings, user_readings, users_of

        figure, bench = cast(ManyConf, cfg.figure), self._bench(cfg)
        holding = next(one for one in holdings(figure) if one.panel == point.panel)
        system, jobs = bench.system(point.system, holding), bench.jobs(point.workload, holding.adapters)
        capacity = capacity_of(system, jobs, figure.seconds)
        giving = capacity.requests if point.system == GIVES_RATE else self._giving(cfg, point)
        rate = giving * figure.load / 100
        trace = load(system, jobs, rate, bench.span, cfg.adapters.seed + point.repeat)
        users = users_of(trace, bench.span.at(rate))
        return [
            Reading("adapters", holding.adapters, "adapters", "count"),
            *bench.held(system, holding),
            *capacity.readings(),
            Reading("offered_rate", rate, "request/s"),
            Reading("load", rate / capacity.requests, "share"),
            *user_readings(users, trace),
            *place_readings(users),
        ]

    def _giving(self, cfg: Config, point: Point) -> float:
        """The capacity of `GIVES_RATE` in the panel and repeat of `point`; measured if time left its row out."""
        from experiments.systems.load_bench import capacity_of

        known = value_on_disk(self, cfg, replace(point, system=GIVES_RATE), "capacity")
        if known is not None:
            return known
        figure, bench = cast(ManyConf, cfg.figure), self._bench(cfg)
        holding = next(one for one in holdings(figure) if one.panel == point.panel)
        jobs = bench.jobs(point.workload, holding.adapters)
        return capacity_of(bench.system(GIVES_RATE, holding), jobs, figure.seconds).requests

    def _bench(self, cfg: Config) -> ManyBench:
        key = (cfg.model.name, cfg.adapters.ranks[0], cast(ManyConf, cfg.figure).batch_size, cfg.hardware.device)
        return self.kept(key, lambda: ManyBench(cfg))


class ManyBench:
    """Engines of one world, checked; those of one way to hold adapters at a time."""

    def __init__(self, cfg: Config) -> None:
        import torch

        from experiments.systems.weights import Limits
        from experiments.systems.world import World
        from punica.parallel.memory import free_bytes

        figure, adapters = cast(ManyConf, cfg.figure), cfg.adapters
        limits = Limits(figure.batch_size, figure.max_len, cfg.engine.block_size)
        self._folders = TemporaryDirectory(prefix="adapters-")
        size = cfg.model.lora_parameters(adapters.ranks[0]) * cfg.model.dtype.bytes
        free = ROOM * free_bytes(torch.device("cpu")), ROOM_ON_DRIVE * disk_usage(self._folders.name).free
        fitting = [max(figure.batch_size, int(place / size)) for place in free]
        sets = min(max(holding.adapters for holding in holdings(figure)), fitting[0])
        self._on_disk = min(figure.adapters_on_disk, *fitting)
        self.world: World = World(
            cfg.model, cfg.hardware.device, limits, adapters.ranks[0], adapters.alpha, adapters.seed, sets
        )
        self.span: Span = Span(figure.warm, figure.seconds, figure.drain, figure.least, figure.longest)
        self._figure, self._seed = figure, adapters.seed
        self._systems: dict[tuple[str, int | None, int | None], Loaded] = {}

    def jobs(self, workload: str, adapters: int) -> list[Job]:
        """The stream in which each request draws one of `adapters` adapters."""
        from experiments.systems.stream import paper_stream
        from experiments.workload import drawn_adapters

        figure = self._figure
        jobs = paper_stream("Identical", figure.requests, figure.max_len, self.world.vocab_size, figure.lengths)
        drawn = drawn_adapters(workload, adapters, len(jobs), self._seed)
        return [replace(job, adapter_id=int(index) + 1) for job, index in zip(jobs, drawn, strict=True)]

    def system(self, name: str, holding: Holding) -> Loaded:
        """The system called `name` with adapters held like that, its tokens checked."""
        key = (name, holding.slots, holding.in_memory)
        if key not in self._systems:
            for other in [other for other in self._systems if other[1:] != key[1:]]:
                del self._systems[other]
            gc.collect()  # a manager refers to itself
            self._systems[key] = self._checked(name, holding)
        return self._systems[key]

    def held(self, system: Loaded, holding: Holding) -> list[Reading]:
        """Return what a panel's adapters are: weights of their own, aliases, and where folders are."""
        own = min(holding.adapters, self.world.sets if holding.in_memory is None else self._on_disk)
        found = [
            Reading("weight_sets", own, "adapters", "count"),
            Reading("aliases", holding.adapters - own, "adapters", "count"),
        ]
        cached = getattr(system, "cached", None)
        return found if cached is None else [*found, Reading("page_cache_share", cached, "share")]

    def _checked(self, name: str, holding: Holding) -> Loaded:
        from experiments.systems.load_bench import check_system
        from experiments.systems.loaded import FromFolders, Loaded

        system: Loaded
        if holding.in_memory is None:
            system = Loaded(self.world, name, holding.slots)
        else:
            root = Path(self._folders.name)
            system = FromFolders(self.world, name, holding.slots, holding.in_memory, root, self._on_disk)
        figure = self._figure
        check_system(system, self.jobs("Uniform", figure.batch_size), figure.check_requests, figure.check_tokens)
        return system


def holdings(figure: ManyConf) -> Sequence[Holding]:
    """The panels, those of one kind of engine side by side."""
    return [
        *(Holding(adapters) for adapters in figure.adapters),
        Holding(figure.adapters_on_few, slots=figure.few_slots),
        Holding(figure.adapters_on_disk, in_memory=figure.in_memory),
    ]


def _settings(cfg: Config) -> dict[str, Any]:
    figure, adapters = cast(ManyConf, cfg.figure), cfg.adapters
    return {
        "model": model_settings(cfg.model),
        "stream": [figure.lengths, figure.requests, figure.max_len],
        "seconds": [figure.warm, figure.seconds, figure.drain, figure.least, figure.longest, figure.load],
        "block_size": cfg.engine.block_size,
        "adapters": [adapters.alpha, adapters.seed],
        "check": [figure.check_requests, figure.check_tokens],
    }


EXPERIMENT = ManyAdapters()

if __name__ == "__main__":
    main(EXPERIMENT)
