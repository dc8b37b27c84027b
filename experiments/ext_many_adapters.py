"""Extension: many more adapters than slots, and more than host memory holds.

Claim: how many adapters there are costs little throughput, and a request whose adapter must be loaded waits hardly
longer. Expected shape: throughput of 1,000 adapters close to that of 32; the first token of requests that must load
later by milliseconds. While all slots are in use a request for another adapter waits. First come, first served, it
delays all requests behind it; `punica_resident_first` lets at most 32 of those with a loaded adapter pass.

Adapters of a stream are drawn by popularity (`experiments.workload.drawn_adapters`). Panels:

    N adapters                 all in host memory, a slot per place in the batch.
    N adapters, S slots        the same, with fewer slots than the batch has places.
    N adapters, M in memory    in PEFT folders, M of which host memory holds, the most popular ones at first.

In each the capacity is measured first, then requests arrive by the clock, as in `ext_latency_under_load`, at half
(`load`) of what `punica` takes in that panel and repeat: the same ones for both rules.

    time_to_first_token_resident, _loading, _from_memory, _from_disk: of requests whose adapter is in a slot when it is
                  their turn, of the others, and of those by where it is; loading_over_resident
    slot_hit_rate, memory_hit_rate: requests that find their adapter there when they arrive; _at_join: at their turn
    weight_sets:  adapters with weights of their own, as many as `ROOM` of memory or of the drive has room for

Where folders are in memory, as in some /tmp, `disk` has no drive's time: set TMPDIR. Cost at scale=laptop: about 60
seconds on two cores, 3 GB. On an H200 a command measures one repeat of what it names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from shutil import disk_usage
from tempfile import gettempdir
from typing import cast

from experiments.ext_latency_under_load import ArrivalsConf, settings_of
from experiments.fig11_textgen import check_length
from experiments.harness import Config, ConfigError, Experiment, Point, Reading, main
from experiments.harness.resume import row_on_disk
from experiments.harness.schema import Count, Counts

ROOM, ROOM_ON_DRIVE = 0.7, 0.25
"""Part of what is free, of host memory and of the drive (which takes long to write), that adapters may take."""
GIVES_RATE = "punica"  # the system at whose capacity in a panel the rate of all is taken


class ManyConf(ArrivalsConf):
    adapters: Counts  # in host memory, with a slot per place in the batch
    batch_size: Count
    few_slots: Count
    adapters_on_few: Count
    in_memory: Count
    adapters_on_disk: Count
    load: Count = 50  # percent of the capacity of `GIVES_RATE` at which latencies are measured


class ManyAdapters(Experiment):
    """Throughput, hits and waits by number of adapters (the panels), popularity and rule of admission."""

    name, figure, order, conf = "ext_many_adapters", "ext many adapters", 290, ManyConf
    reads = ("model", "workload", "adapters.ranks", "adapters.alpha", "adapters.seed")
    clock, drawn_by = "host_clock", "load.draw_many"

    def points(self, cfg: Config) -> list[Point]:
        figure, rank = cast(ManyConf, cfg.figure), cfg.adapters.ranks[0]
        check_length(cfg, "figure.max_len", figure.max_len)
        if figure.in_memory < figure.batch_size:
            raise ConfigError(
                f"figure.in_memory={figure.in_memory} must be at least figure.batch_size={figure.batch_size}: host "
                "memory has a copy of every slot"
            )
        settings, systems = {**settings_of(cfg), "load": figure.load}, dict.fromkeys((GIVES_RATE, *cfg.system.names))
        return [
            Point(panel, system, workload, cfg.model.name, figure.batch_size, None, rank, settings)
            for panel, workload, system in product(holdings(figure), cfg.workload.names, systems)
        ]

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Each alone, panel by panel, and in each the system first whose capacity gives the rate."""
        panels = [point.panel for point in points]
        ordered = sorted(points, key=lambda point: (panels.index(point.panel), point.system != GIVES_RATE))
        return [[point] for point in ordered]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        import torch

        from experiments.systems.loaded import LoadBench, capacity_of, load
        from experiments.systems.open_loop import place_readings, user_readings, users_of
        from experiments.systems.weights import Limits
        from punica.parallel.memory import free_bytes

        figure, rank = cast(ManyConf, cfg.figure), cfg.adapters.ranks[0]
        limits = Limits(figure.batch_size, figure.max_len)

        def build() -> LoadBench:
            size = cfg.model.lora_parameters(rank) * cfg.model.dtype.bytes
            free = ROOM * free_bytes(torch.device("cpu")), ROOM_ON_DRIVE * disk_usage(gettempdir()).free
            fitting = [max(figure.batch_size, int(room / size)) for room in free]
            sets = min(max(adapters for adapters, *_ in holdings(figure).values()), fitting[0])
            return LoadBench(cfg, limits, sets, min(figure.adapters_on_disk, *fitting))

        bench = self.kept((cfg.model.name, rank, limits, cfg.hardware.device), build)
        adapters, *held = holdings(figure)[point.panel]
        jobs = bench.jobs(point.workload, adapters)

        def capacity(name: str) -> list[Reading]:
            return capacity_of(bench.system(name, *held), jobs, figure.seconds)

        readings = capacity(point.system)
        own = giving = readings[0].value
        if point.system != GIVES_RATE:
            known = row_on_disk(self, cfg, replace(point, system=GIVES_RATE), "capacity")
            giving = capacity(GIVES_RATE)[0].value if known is None else known.value  # time may have left its row out
        rate = giving * figure.load / 100
        span, system = figure.span.at(rate), bench.system(point.system, *held)
        trace = load(system, jobs, rate, span, cfg.adapters.seed + point.repeat)
        users, sets = users_of(trace, span), bench.world.sets if held[1] is None else bench.folders
        return [
            Reading("adapters", adapters, "adapters", "count"),
            Reading("weight_sets", min(adapters, sets), "adapters", "count"),
            *readings,
            Reading("offered_rate", rate, "request/s"),
            Reading("load", rate / own, "share"),
            *user_readings(users, trace),
            *place_readings(users),
        ]


def holdings(figure: ManyConf) -> dict[str, tuple[int, int | None, int | None]]:
    """Panel -> adapters, slots (None: one per place) and adapters in host memory (None: all)."""
    few, disk = figure.adapters_on_few, figure.adapters_on_disk
    return {
        **{f"{count} adapters": (count, None, None) for count in figure.adapters},
        f"{few} adapters, {figure.few_slots} slots": (few, figure.few_slots, None),
        f"{disk} adapters, {figure.in_memory} in memory": (disk, None, figure.in_memory),
    }


EXPERIMENT = main(ManyAdapters, __name__)
