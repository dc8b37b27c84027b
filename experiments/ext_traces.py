"""Extension: throughput and latency of tenants' requests as production's clients send them, beside a popularity.

Claim: none of the paper's, whose requests arrive as a Poisson process of all tenants. Workload `Trace` has arrivals,
lengths and tenants of `workload.path`: the sample from ServeGen's clients, or a file of Azure, BurstGPT or Mooncake.
Others have its lengths in random order, as many adapters, and Poisson arrivals at the same mean rate. Expected shape:
equal throughput below capacity; later first tokens, above all the last ones, in bursts.

Loads are parts of the capacity under the first workload. Rows are those of `ext_latency_under_load`. Cost at
scale=laptop: about 30 seconds on two cores, 1 GB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from experiments.ext_latency_under_load import AT_BASELINE, CAPACITY, LatencyUnderLoad, LoadConf
from experiments.harness import Config, Point, main
from experiments.workload import drawn_adapters
from experiments.workload.arrivals import Span
from experiments.workload.traces import TRACE, Trace

if TYPE_CHECKING:
    from experiments.systems.loaded import LoadBench
    from experiments.systems.stream import Job


class Traces(LatencyUnderLoad):
    """Latency by load (the panels), system and workload."""

    name, figure, order, takes_trace = "ext_traces", "ext traces", 285, True
    defaults = {"model": "fitting"}  # on a CPU the smallest, so that a second has a hundred requests

    def points(self, cfg: Config) -> list[Point]:
        capacities = [self._point(cfg, CAPACITY, name, cfg.workload.names[0]) for name in cfg.system.names]
        return capacities + [point for point in super().points(cfg) if point.panel not in (CAPACITY, AT_BASELINE)]

    def _point(self, cfg: Config, panel: str, system: str, workload: str) -> Point:
        point, trace = super()._point(cfg, panel, system, workload), _trace(cfg)
        return replace(point, settings={**point.settings, "trace": trace.digest, "first": cfg.workload.names[0]})

    def _capacity(self, cfg: Config, point: Point, system: str) -> float:
        return super()._capacity(cfg, replace(point, workload=cfg.workload.names[0]), system)

    def _stream(self, cfg: Config, bench: LoadBench, workload: str) -> tuple[list[Job], Span]:
        from experiments.systems.stream import jobs_of

        figure, trace, seed = cast(LoadConf, cfg.figure), _trace(cfg), cfg.adapters.seed
        own = jobs_of(trace.lengths(figure.max_len), trace.adapters, bench.world.vocab_size)
        if workload == TRACE:
            return own, replace(figure.span, bursts=trace.arrivals)
        drawn = drawn_adapters(workload, len({*trace.adapters}), len(own), seed)
        pairs = zip(np.random.default_rng(seed).permutation(len(own)), drawn, strict=True)
        return [replace(own[place], adapter_id=int(adapter) + 1) for place, adapter in pairs], figure.span


def _trace(cfg: Config) -> Trace:
    return cfg.workload.trace(cast(LoadConf, cfg.figure).requests)


EXPERIMENT = main(Traces, __name__)
