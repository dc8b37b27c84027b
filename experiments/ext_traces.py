"""Extension: throughput and latency of tenants' requests as production's clients send them, beside a popularity.

Claim: none of the paper's, whose requests wait from the start or arrive as a Poisson process, whoever asks. Workload
`Trace` has the arrivals, lengths and tenants of `workload.path`: this repository's sample from ServeGen's clients, or a
file of Azure, BurstGPT or Mooncake. Others have its lengths in random order, as many adapters, and Poisson arrivals at
the same mean rate. Expected shape: equal throughput below capacity; later first tokens, above all the last ones, where
arrivals are bursts and one tenant's prompts are long.

Loads are parts of the capacity under the first workload; lengths are in proportion to `max_len`, the longest are cut.
Rows are those of `ext_latency_under_load`. Cost at scale=laptop: about 30 seconds on two cores, 2 GB.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from experiments.ext_latency_under_load import AT_BASELINE, CAPACITY, LatencyUnderLoad, LoadConf
from experiments.harness import Config, Point, main
from experiments.workload import drawn_adapters
from experiments.workload.arrivals import Span
from experiments.workload.traces import TRACE, Trace

if TYPE_CHECKING:
    from experiments.systems.loaded import LoadBench
    from experiments.systems.stream import Job


@dataclass(frozen=True, kw_only=True)
class TracedSpan(Span):
    """A span in which requests arrive as in a trace."""

    trace: Trace

    def arrivals(self, rate: float, seed: int) -> NDArray[np.float64]:
        return self.trace.arrivals(rate, self.deadline)


class Traces(LatencyUnderLoad):
    """Latency by load (the panels), system and workload."""

    name, figure, order, takes_trace = "ext_traces", "ext traces", 285, True

    def points(self, cfg: Config) -> list[Point]:
        first = cfg.workload.names[0]
        capacities = {name: self._point(cfg, CAPACITY, name, first) for name in cfg.system.names}
        loads = [p for p in super().points(cfg) if p.panel not in (CAPACITY, AT_BASELINE)]
        return [*capacities.values(), *loads]

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
            return own, TracedSpan(*astuple(figure.span), trace=trace)
        drawn = drawn_adapters(workload, len({*trace.adapters}), len(own), seed)
        places = np.random.Generator(np.random.PCG64(seed)).permutation(len(own))
        pairs = zip(places, drawn, strict=True)
        return [replace(own[place], adapter_id=int(adapter) + 1) for place, adapter in pairs], figure.span


def _trace(cfg: Config) -> Trace:
    return cfg.workload.trace(cast(LoadConf, cfg.figure).requests)


EXPERIMENT = Traces()

if __name__ == "__main__":
    main(EXPERIMENT)
