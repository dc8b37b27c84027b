"""Extension: the cost of padding, for adapters of several ranks in slots as wide as the largest.

Not in the paper, whose batches have one rank. Adapters of rank 8, 16, 32 and 64 take turns in slots of width 64. Claim:
SGMV that knows the true ranks reads only what is there, so a mix costs about the mean of what its ranks cost alone;
SGMV that does not reads zeros, and costs what rank 64 costs. Expected shape: where weights dominate (Distinct), padded
over true rank approaches the ratio of the bytes, 64 / 30 = 2.1; where rows share adapters, launches dominate and
padding is nearly free. Rows of B are 64 ranks apart at any rank, so memory, which moves 32 bytes or more at a time,
delivers more than rank 8 asks for. On a CPU, true ranks also break the batched multiplication of equal adapters into
one per adapter, so that many small adapters can lose more than they save.

Timed: y += x A^T B^T at h1 = 4096, h2 = 11008, after a check against the reference, interleaved; systems

    true rank      the operator gets the table of ranks and reads each adapter at its own rank
    padded         the table says full width; the result is the same, since weights above the true rank are zero
    uniform rank   all adapters have one rank, in slots of that width; the mean over ranks is the fair price of a mix

A batch holds each rank equally often only if the number of ranks divides its adapters. So one sample is a *round*: as
many batches, on adapters of their own, as make the total a multiple, over their number. Otherwise Identical would be
timed with rank 8 alone. Rows also carry the bytes read, by arithmetic: A and B of the adapters present, x and y.

Cost at scale=laptop: about half a minute on two cores, 1 GB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

from experiments.benches.operator_conf import OperatorConf, operator_conf
from experiments.benches.operator_figure import OperatorExperiment
from experiments.harness import Config, Point, Reading, main, sampled
from experiments.workload.popularity import popularity

if TYPE_CHECKING:
    from experiments.benches.operators import Problem, Weights
    from experiments.harness.schema import DType
    from experiments.measure.timing import Call

TRUE_RANK, UNIFORM = "true rank", "uniform rank"


class Padding(OperatorExperiment):
    """Latency and bytes of each system per popularity (the panels) and batch; the rank is the width of the slots."""

    name, figure, order, conf = "ext_padding", "ext padding", 210, OperatorConf
    differing, drawn_by = ("system", "rank"), "extensions.draw_padding"
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

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        rows, width = cast(int, point.batch_size), cast(int, point.rank)
        return checked_rounds(cfg, batches(cfg, point.workload, rows, point.system, width))

    def samples(self, cfg: Config, points: Sequence[Point]) -> list[list[float]]:
        from experiments.benches.operators import microseconds

        samples = microseconds(cfg, {index: self.calls(cfg, point) for index, point in enumerate(points)})
        return [samples[index] for index in range(len(points))]

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        rows, width, ranks = cast(int, point.batch_size), cast(int, point.rank), cfg.adapters.ranks
        adapters = popularity(point.workload).number_of_adapters(rows)
        own, true = (
            bytes_read(cfg, rows, adapters, mean)
            for mean in (mean_rank(point.system, width, ranks), sum(ranks) / len(ranks))
        )
        length = round_length(adapters, len(ranks))
        return [
            *sampled("latency", [value / length for value in samples], "us"),
            Reading("bytes_read", own, "byte"),
            Reading("bytes_over_true_rank", own / true, "ratio"),
        ]


def mean_rank(system: str, width: int, ranks: Sequence[int]) -> float:
    """Ranks that `system` reads of a slot of `width`, on average."""
    return sum(ranks) / len(ranks) if system == TRUE_RANK else width


def bytes_read(cfg: Config, rows: int, adapters: int, mean: float) -> float:
    """Bytes that one batch reads: A and B of its adapters, x [T, h1] and the old y [T, h2]."""
    figure = operator_conf(cfg)
    return figure.dtype.bytes * (figure.h1 + figure.h2) * (adapters * mean + rows)


def round_length(adapters: int, ranks: int) -> int:
    """Batches of `adapters` adapters until every one of `ranks` ranks has appeared equally often."""
    return math.lcm(adapters, ranks) // adapters


def copies(cfg: Config, workload: str, rows: int, mean: float) -> int:
    """Batches that rotate: whole rounds; under `cuda_graph` as many as read more bytes than the caches hold."""
    from experiments.benches.operators import flush_bytes

    adapters = popularity(workload).number_of_adapters(rows)
    length = round_length(adapters, len(cfg.adapters.ranks))
    if cfg.timer.name != "cuda_graph":
        return length
    return math.ceil(flush_bytes(cfg) / bytes_read(cfg, rows, adapters, mean) / length) * length or length


def bank_slots(cfg: Config) -> int:
    """Slots of the widest rank whose memory suffices for every batch of the whole grid."""
    ranks = cfg.adapters.ranks
    width, mean = max(ranks), sum(ranks) / len(ranks)
    needed = operator_conf(cfg).resident(cfg)
    for workload in cfg.workload.names:
        for rows in operator_conf(cfg).batch_sizes:
            adapters = popularity(workload).number_of_adapters(rows)
            for rank, read in [(width, mean), *((rank, rank) for rank in ranks)]:
                needed = max(needed, math.ceil(copies(cfg, workload, rows, read) * adapters * rank / width))
    return needed


@lru_cache(maxsize=1)
def _mixed_bank(slots: int, ranks: tuple[int, ...], h1: int, h2: int, dtype: DType, device: str) -> Weights:
    """A and B in slots of the largest rank, slot s with rank `ranks[s % len(ranks)]` and zeros above; the ranks."""
    import torch

    from experiments.benches.operators import bank

    a, b = (weights.clone() for weights in bank(slots, max(ranks), h1, h2, dtype, device))
    for slot in range(slots):
        rank = ranks[slot % len(ranks)]
        a[slot, rank:] = 0
        b[slot, :, rank:] = 0
    table = torch.tensor(ranks, dtype=torch.int32).repeat(-(-slots // len(ranks)))[:slots]
    return a, b, table[None].to(device)


def _weights(cfg: Config, system: str, width: int) -> Weights:
    """Return A, B and the table of ranks of all slots; narrow slots share the memory of wide ones."""
    from experiments.benches.operators import bank

    figure, ranks, slots = operator_conf(cfg), tuple(cfg.adapters.ranks), bank_slots(cfg)
    shape = (figure.h1, figure.h2, figure.dtype, cfg.hardware.device)
    if system != UNIFORM:
        a, b, table = _mixed_bank(slots, ranks, *shape)
        return a, b, table if system == TRUE_RANK else None
    a, b = bank(slots, max(ranks), *shape)
    fitting = slots * max(ranks) // width
    a = a.view(-1)[: fitting * width * figure.h1].view(fitting, width, figure.h1)
    return a, b.view(-1)[: fitting * width * figure.h2].view(fitting, figure.h2, width), None


def batches(cfg: Config, workload: str, rows: int, system: str, width: int) -> list[Problem]:
    """The batches of one system: whole rounds, each batch on its own x, y and adapters."""
    from experiments.benches.operators import rotated

    count = copies(cfg, workload, rows, mean_rank(system, width, cfg.adapters.ranks))
    return rotated(cfg, popularity(workload).group_sizes(rows), count, _weights(cfg, system, width))


def checked_rounds(cfg: Config, problems: Sequence[Problem]) -> list[Call]:
    """One call per round of `problems`, every batch of the first round checked."""
    from experiments.benches.operators import OPERATORS, in_turn, prepare_checked

    length = round_length(len(problems[0].sizes), len(cfg.adapters.ranks))
    calls = [call for problem in problems[:length] for call in prepare_checked([problem], "SGMV")]
    calls += [OPERATORS.get("SGMV")(problem).call for problem in problems[length:]]
    return [partial(in_turn, calls[i : i + length]) for i in range(0, len(calls), length)]


EXPERIMENT = Padding()

if __name__ == "__main__":
    main(EXPERIMENT)
