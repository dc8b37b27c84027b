"""Extension: scheduling rules of a cluster side by side, simulated: Punica's, and those of production's routers.

Claim: Punica's rule, the GPU with the largest working set, needs the fewest GPUs. Newer systems place requests by load,
adapter or rank, and claim up to twice the throughput, half the GPUs, or fewer loads. Expected shape: on the paper's
load all rules finish the same requests, the spreading ones on more GPUs; where adapters are many, rules that know where
they are load fewer; and only kernels that pad every adapter to the largest rank of a batch reward a placement by rank.

Panels: `paper's load` (rank 16, Skewed), and four of Zipf popularity with ranks 8 to 64: `mixed ranks`, the same under
kernels that pad, `flash crowd` (one cold adapter gets half of the requests for a third of the time) and `drift` (the
popular adapters change six times). Another `workload=` is the paper's load with its popularity, in a panel of its own.
Each with the paper's request rate on 16 GPUs, as Figure 13 has it, and with requests that all wait from the start:

    gpu_seconds, mean_active_gpus: GPU seconds in which a token came out, and GPUs per second
    capacity:     tokens per second while all GPUs are full and requests wait; `figure.waiting` above 32 per GPU
    p99_time_to_first_token, time_per_output_token: of the paper's rate
    loads_from_host, loads_from_disk: adapters loaded; load_wait: for loads, a request's mean
    simulated_seconds: of the hour, around its peak
    ..._low, ..._high: the same over all `seeds`; the rows above are of the first

A GPU has a slot for each of 32 adapters, its host memory `host_adapters`, disk the rest; loads take what `figure.loads`
recorded, beside steps. A rule sees only GPUs with room, since the queue is the cluster's: no request waits for a home.

Every row is `kind=simulated`; steps take what the cost model of Figure 13 says (the paper's A100, or `figure.cost`).

Cost on one core: half a minute at scale=laptop, for half a minute of the hour; half an hour at scale=paper.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import Field

from experiments.harness import Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import Count, Counts
from experiments.harness.settings import folders


class PlacementConf(FigureConf):
    """`ranks` of the adapters under Zipf; `gpus` and whose `cost`, and whose `loads`; `adapters` of crowd and drift, of
    which a host's memory has `host_adapters`; `seeds` of each simulation; `seconds` of the hour, around its
    peak; requests `waiting` at once.
    """

    ranks: Counts
    gpus: Count
    cost: str
    loads: str
    adapters: int = Field(ge=1)
    host_adapters: int = Field(ge=32)
    seeds: int = Field(ge=1)
    sizes: dict[str, Any]
    seconds: Count
    waiting: Count


class Placement(Experiment):
    """GPUs, throughput and latency of each rule (the systems) per load (the panels)."""

    name, figure, order, conf = "ext_placement", "ext placement", 292, PlacementConf
    reads = ("workload",)
    clock, drawn_by = "host_clock", "cluster.draw_placement"
    passes = 1  # a simulation repeats itself
    version = 3  # with loads of adapters, around the hour's peak, full GPUs by first tokens

    def points(self, cfg: Config) -> list[Point]:
        from experiments.cluster.placed import CROWD, DRIFT, LOAD, MIXED, MODEL, PADDED, settings
        from experiments.cluster.recorded import panel_of

        panels = {"Skewed": (LOAD,), "Zipf": (MIXED, PADDED, CROWD, DRIFT)}
        figure = cast(PlacementConf, cfg.figure)
        about = settings(cfg, figure)
        return [
            Point(panel_of(panel, figure.cost), rule, workload, MODEL, settings=about)
            for workload in cfg.workload.names
            for panel in panels.get(workload, (f"{LOAD}, {workload}",))
            for rule in cfg.system.names
        ]

    def is_derived(self, point: Point) -> bool:
        return True

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.cluster.placed import served

        return served(folders(cfg).paper, point)


EXPERIMENT = Placement()

if __name__ == "__main__":
    main(EXPERIMENT)
