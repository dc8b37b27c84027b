"""Extension: several weighted adapters per row, in two launches.

Claim: none of the paper's, whose rows have one adapter. k adapters of a pool of 8 are added to each of 32 rows,
y += sum_j g_j x A_j^T B_j^T, h1 = h2 = 4096, without the base product. Expected shape: on a GPU k = 4 at most 1.55
times k = 1 where rows share their adapters, as launches and not bytes cost; k calls k times one. Systems

    mixture      `Ops.mix`, both launches for all k
    k calls      today's operator k times, on x scaled by the gates
    PEFT layer   PEFT's linear layer with k active adapters, without its base product; Identical alone

Workloads: Identical, all rows mix the same k; Distinct, row t mixes k from adapter t on. Gates differ by row (for PEFT
by adapter). All are checked against the reference first. Cost at scale=laptop: about 25 seconds on two cores.
"""

from collections.abc import Sequence
from itertools import product
from typing import cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment
from experiments.harness import PROTOCOL, Config, Point, Reading, main, sampled
from experiments.harness.schema import Count, Counts


class MixturesConf(OperatorConf):
    fans: Counts  # adapters of a row ...
    pool: Count = 8  # ... out of so many

    def resident(self, cfg: Config) -> int:
        return self.pool


class Mixtures(OperatorExperiment):
    """Latency per workload, rank and k (the panels), and system."""

    name, figure, order, conf = "ext_mixtures", "ext mixtures", 298, MixturesConf
    reads = ("workload", "adapters.ranks", *PROTOCOL)
    drawn_by, host_clock_too = "extensions.draw_mixtures", False
    defaults = {"adapters": "low_and_high"}

    def points(self, cfg: Config) -> list[Point]:
        figure = cast(MixturesConf, cfg.figure)
        settings = {fan: {**figure.settings(cfg), "fan": fan} for fan in figure.fans}
        grid = product(cfg.workload.names, figure.fans, figure.batch_sizes, cfg.adapters.ranks, cfg.system.names)
        return [
            Point(f"{workload}, rank {rank}, k = {fan}", system, workload, "", rows, None, rank, settings[fan])
            for workload, fan, rows, rank, system in grid
            if system != "PEFT layer" or workload == "Identical"
        ]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        from experiments.benches import mixtures, operators

        first, names = points[0], [point.system for point in points]
        case = first.workload, first.settings["fan"], cast(int, first.batch_size), cast(int, first.rank)
        samples = operators.microseconds(cfg, mixtures.checked_calls(cfg, names, *case))
        return [sampled("latency", samples[name], "us") for name in names]


EXPERIMENT = main(Mixtures, __name__)
