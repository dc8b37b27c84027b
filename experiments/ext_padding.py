"""Extension: the cost of padding, for adapters of rank 8, 16, 32 and 64 in slots as wide as the largest.

Claim: SGMV that knows the true ranks costs the mean of what its ranks cost alone; without, what rank 64 costs. Expected
shape: where weights dominate (Distinct), the ratio of the bytes, 64 / 30 = 2.1; where rows share adapters, nearly none.
Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, after a check, interleaved; systems

    true rank      the operator gets the table of ranks and reads each adapter at its own rank
    padded         the table says full width; the result is the same, since weights above the true rank are zero
    uniform rank   all adapters have one rank; the mean over ranks is the fair price of a mix

A sample is a *round*: as many batches, on adapters of their own, as hold each rank equally often, over their number.
Bytes read are arithmetic. Cost at scale=laptop: about half a minute on two cores, 1 GB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from experiments.benches.operator_figure import OperatorConf, OperatorExperiment, operator_conf
from experiments.harness import Config, Point, Reading, main, sampled
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call

TRUE_RANK, UNIFORM = "true rank", "uniform rank"


class Padding(OperatorExperiment):
    """Latency and bytes of each system per popularity (the panels) and batch; the rank is the width of the slots."""

    name, figure, order, conf = "ext_padding", "ext padding", 210, OperatorConf
    differing, drawn_by, apart = ("system", "rank"), "extensions.draw_padding", False
    defaults = {"adapters": "paper_ranks"}

    def points(self, cfg: Config) -> list[Point]:
        figure, ranks = operator_conf(cfg), list(cfg.adapters.ranks)
        settings = {**figure.settings(cfg), "ranks": ranks}
        return [
            Point(workload, system, workload, batch_size=rows, rank=rank, settings=settings)
            for rows in figure.batch_sizes
            for workload in cfg.workload.names
            for system in cfg.system.names
            for rank in (ranks if system == UNIFORM else [max(ranks)])
        ]

    def problems(self, cfg: Config, point: Point) -> list[Problem]:
        """The batches of one system: whole rounds; under `cuda_graph` as many as read more bytes than caches hold."""
        from experiments.benches.operators import copies, setup_operator

        ranks, rows = cfg.adapters.ranks, cast(int, point.batch_size)
        sizes = popularity(point.workload).group_sizes(rows)
        length = round_length(len(sizes), len(ranks))
        count = copies(cfg, math.ceil(bytes_read(cfg, rows, len(sizes), mean_rank(point, ranks))))
        true = () if point.system == UNIFORM else ranks
        made = setup_operator(cfg, sizes, cast(int, point.rank), -(-count // length) * length, true)
        return made if point.system == TRUE_RANK else [replace(one, ranks=None) for one in made]

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        """One call per round, every batch of the first round checked."""
        from experiments.benches.operators import OPERATORS, in_turn, prepare_checked

        problems = self.problems(cfg, point)
        length = round_length(len(problems[0].sizes), len(cfg.adapters.ranks))
        calls = [call for problem in problems[:length] for call in prepare_checked([problem], "SGMV")]
        calls += [OPERATORS.get("SGMV")(problem).call for problem in problems[length:]]
        return [partial(in_turn, calls[i : i + length]) for i in range(0, len(calls), length)]

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        rows, ranks = cast(int, point.batch_size), cfg.adapters.ranks
        adapters = popularity(point.workload).number_of_adapters(rows)
        own = bytes_read(cfg, rows, adapters, mean_rank(point, ranks))
        true = bytes_read(cfg, rows, adapters, sum(ranks) / len(ranks))
        length = round_length(adapters, len(ranks))
        return [
            *sampled("latency", [value / length for value in samples], "us"),
            Reading("bytes_read", own, "byte"),
            Reading("bytes_over_true_rank", own / true, "ratio"),
        ]


def mean_rank(point: Point, ranks: Sequence[int]) -> float:
    """Ranks that the system of `point` reads of a slot, on average."""
    return sum(ranks) / len(ranks) if point.system == TRUE_RANK else cast(int, point.rank)


def bytes_read(cfg: Config, rows: int, adapters: int, mean: float) -> float:
    """Bytes that one batch reads: A and B of its adapters, x [T, h1] and the old y [T, h2]."""
    figure = operator_conf(cfg)
    return figure.dtype.bytes * (figure.h1 + figure.h2) * (adapters * mean + rows)


def round_length(adapters: int, ranks: int) -> int:
    """Batches of `adapters` adapters until every one of `ranks` ranks has appeared equally often."""
    return math.lcm(adapters, ranks) // adapters


EXPERIMENT = Padding()

if __name__ == "__main__":
    main(EXPERIMENT)
