"""Extension: scheduling rules of a cluster, simulated: Punica's, its released code's, and what newer systems propose.

Claim: Punica's rule, the GPU with the largest working set, needs the fewest GPUs. Newer papers place requests by load,
adapter or rank and claim up to twice the throughput and half the GPUs. Expected shape: on the paper's load all rules
finish the same requests, the spreading ones on three times the GPUs; where all GPUs are full, rules differ by what they
put into a batch: fewer adapters (`adapter_affinity`), or ranks of a kind (`rank_aware`), which kernels reward that pad
every adapter of a batch to its largest rank and kernels that read true ranks do not.

Panels: `paper's load` (rank 16, Skewed), `mixed ranks` (Zipf popularity, ranks 8 to 64), and the latter under kernels
that pad (`mixed ranks, padded`). Another `workload=` is the paper's load with its popularity, in a panel of its own.
Each with the paper's request rate on 16 GPUs, as Figure 13 has it, and with requests that all wait from the start:

    gpu_seconds, mean_active_gpus: GPU seconds in which a token came out, and GPUs per second
    capacity:     tokens per second of all GPUs while more requests wait than they can hold
    p99_time_to_first_token, time_per_output_token: of the paper's rate
    simulated_seconds: of the hour, from its start
    ..._low, ..._high: the same over all `seeds`; the rows above are of the first

Loads of adapters are left out, which `adapter_affinity` is made to save: it is shown and not judged.

Every row is `kind=simulated`; steps take what the cost model of Figure 13 says (the paper's A100, or `figure.cost`).

Cost at scale=laptop: half a minute on one core, for the first minute of the hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from omegaconf import MISSING

from experiments.harness import Config, Experiment, FigureConf, Point, Reading, main
from experiments.harness.schema import low

PAPER_LOAD, MIXED, PADDED = "paper's load", "mixed ranks", "mixed ranks, padded"
MIXED_WORKLOAD = "Zipf"
PANELS = {"Skewed": (PAPER_LOAD,), MIXED_WORKLOAD: (MIXED, PADDED)}
"""Panels by workload; any other has the paper's load with its own popularity."""


@dataclass
class PlacementConf(FigureConf):
    """`ranks` of the adapters under Zipf; `gpus` and whose `cost`; `seeds` of each simulation; `seconds` of the hour,
    from its start; requests `waiting` at once.
    """

    ranks: list[int] = MISSING
    gpus: int = MISSING
    cost: str = MISSING
    seeds: int = low(1)
    sizes: dict[str, Any] = MISSING
    seconds: int = MISSING
    waiting: int = MISSING


class Placement(Experiment):
    """GPUs, throughput and latency of each rule (the systems) per load (the panels)."""

    name, figure, order, conf = "ext_placement", "ext placement", 292, PlacementConf
    reads = ("workload",)
    clock, drawn_by = "host_clock", "cluster.draw_placement"
    passes = 1  # a simulation repeats itself

    def points(self, cfg: Config) -> list[Point]:
        from experiments.cluster.placed import MODEL, settings
        from experiments.cluster.recorded import panel_of

        figure = cast(PlacementConf, cfg.figure)
        about = settings(cfg, figure)
        return [
            Point(panel_of(panel, figure.cost), rule, workload, MODEL, settings=about)
            for workload in cfg.workload.names
            for panel in PANELS.get(workload, (f"{PAPER_LOAD}, {workload}",))
            for rule in cfg.system.names
        ]

    def is_derived(self, point: Point) -> bool:
        return True

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.cluster.hour import RANK
        from experiments.cluster.placed import served

        ranks = cast(PlacementConf, cfg.figure).ranks if point.workload == MIXED_WORKLOAD else (RANK,)
        return served(cfg, point, ranks, padded=point.panel.startswith(PADDED))


EXPERIMENT = Placement()

if __name__ == "__main__":
    main(EXPERIMENT)
