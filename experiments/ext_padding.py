"""Extension: the cost of padding, for adapters of several ranks in slots as wide as the largest.

Not in the paper, whose batches have one rank. Adapters of rank 8, 16, 32 and 64 take turns in slots of width 64. Claim:
SGMV that knows the true ranks reads only what is there, so a mix costs about the mean of what its ranks cost alone;
SGMV that does not reads zeros, and costs what rank 64 costs. Expected shape: where weights dominate (Distinct), padded
over true rank approaches the ratio of the bytes, 64 / 30 = 2.1; where rows share adapters, launches dominate and
padding is nearly free. Rows of B are 64 ranks apart at any rank, so memory, which moves 32 bytes or more at a time,
delivers more than rank 8 asks for. On a CPU, true ranks also break the batched multiplication of equal adapters into
one per adapter, so that many small adapters can lose more than they save.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, every system after a check against the reference, interleaved. Ranks are
rotated so that each appears equally often in every sample (see `benches.mixed_ranks`). Rows also carry the bytes read,
by arithmetic: A and B of the adapters present, x and y.

Cost at scale=laptop: about half a minute on two cores, 1 GB.
"""

from collections.abc import Sequence
from typing import cast

from experiments.benches.operator_conf import OperatorConf, operator_conf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import Config, Point, Reading, main, sampled
from punica.workload.popularity import popularity


class Padding(OperatorExperiment):
    """Latency and bytes of each system per popularity (the panels) and batch."""

    name, figure, order, conf = "ext_padding", "ext padding", 210, OperatorConf
    differing, drawn_by = ("system", "rank"), "extensions.draw_padding"
    defaults = {"adapters": "paper_ranks"}  # noqa: RUF012 (never written)

    def points(self, cfg: Config) -> list[Point]:
        figure, ranks = operator_conf(cfg), list(cfg.adapters.ranks)
        settings = {**figure.settings(cfg), "ranks": ranks}
        return [
            Point(workload, system, workload, batch_size=rows, rank=rank, settings=settings)
            for rows in figure.batch_sizes
            for workload in cfg.workload.names
            for system in cfg.system.names
            for rank in (ranks if system == "uniform rank" else [max(ranks)])
        ]

    def samples(self, cfg: Config, points: Sequence[Point]) -> list[list[float]]:
        from experiments.benches import mixed_ranks, operators

        calls, batches_per_call = {}, 1
        for index, point in enumerate(points):
            chosen = mixed_ranks.variant(point.system, cast(int, point.rank), cfg.adapters.ranks)
            batches = mixed_ranks.batches(cfg, point.workload, cast(int, point.batch_size), chosen)
            calls[index], batches_per_call = mixed_ranks.checked_rounds(cfg, batches)
        samples = operators.microseconds(cfg, calls)
        return [[value / batches_per_call for value in samples[index]] for index in range(len(points))]

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        from experiments.benches.mixed_ranks import TRUE_RANK, bytes_read, variant

        figure, rows, ranks = operator_conf(cfg), cast(int, point.batch_size), cfg.adapters.ranks
        adapters = popularity(point.workload).number_of_adapters(rows)
        own, true = (
            bytes_read(rows, adapters, chosen.mean_rank, figure.h1, figure.h2, figure.dtype.bytes)
            for chosen in (variant(point.system, cast(int, point.rank), ranks), variant(TRUE_RANK, max(ranks), ranks))
        )
        return [
            *sampled("latency", samples, "us"),
            Reading("bytes_read", own, "byte"),
            Reading("bytes_over_true_rank", own / true, "ratio"),
        ]


EXPERIMENT = Padding()

if __name__ == "__main__":
    main(EXPERIMENT)
