"""Batches whose adapters have several ranks, in slots as wide as the largest, for `ext_padding`.

Slot s holds an adapter of rank `ranks[s % len(ranks)]`; its weights above that rank are zero. Three systems run on it:

* ``true rank``: the operator gets the table of ranks and reads each adapter at its own rank;
* ``padded``: the table says full width, at which it reads every slot. The result is the same, because of the zeros;
* ``uniform rank``: all adapters have one rank, in slots of that width. The mean over the ranks is what a mix would cost
  if every adapter cost what it costs among its like.

A batch of n adapters holds each rank equally often only if n is a multiple of the number of ranks. So one sample is a
*round*: as many batches, on adapters of their own, as make the total a multiple, and its time is divided by their
number. Otherwise Identical would be timed with rank 8 alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from experiments.benches import operators
from experiments.benches.operator_conf import operator_conf
from experiments.benches.operators import OPERATORS, Problem
from experiments.harness.schema import Config, DType
from punica.measure.timing import Call
from punica.workload.popularity import popularity

TRUE_RANK, PADDED, UNIFORM = "true rank", "padded", "uniform rank"


@dataclass(frozen=True)
class Variant:
    """One system of one cell: `width` is that of its slots, `mean_rank` what it reads of a slot on average."""

    system: str
    width: int
    mean_rank: float


def variant(system: str, rank: int, ranks: Sequence[int]) -> Variant:
    """`system` at `rank`: the rank of all adapters for `uniform rank`, else the width of the slots."""
    return Variant(system, rank, sum(ranks) / len(ranks) if system == TRUE_RANK else rank)


def bytes_read(rows: int, adapters: int, mean_rank: float, h1: int, h2: int, element_bytes: int) -> float:
    """Bytes that one batch reads: A and B of its adapters, x [T, h1] and the old y [T, h2]."""
    return element_bytes * (h1 + h2) * (adapters * mean_rank + rows)


def round_length(adapters: int, ranks: int) -> int:
    """Batches of `adapters` adapters until every one of `ranks` ranks has appeared equally often."""
    return math.lcm(adapters, ranks) // adapters


def copies(cfg: Config, workload: str, rows: int, mean_rank: float) -> int:
    """Batches that rotate: whole rounds; under `cuda_graph` as many as read more bytes than the caches hold."""
    figure, adapters = operator_conf(cfg), popularity(workload).number_of_adapters(rows)
    length = round_length(adapters, len(cfg.adapters.ranks))
    if cfg.timer.name != "cuda_graph":
        return length
    each = bytes_read(rows, adapters, mean_rank, figure.h1, figure.h2, figure.dtype.bytes)
    return math.ceil(operators.flush_bytes(cfg) / each / length) * length or length


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
def _mixed_bank(
    slots: int, ranks: tuple[int, ...], h1: int, h2: int, dtype: DType, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and B in slots of the largest rank with zeros above the true ranks, and the ranks, [1, slots] int32."""
    a, b = (weights.clone() for weights in operators.bank(slots, max(ranks), h1, h2, dtype, device))
    for slot in range(slots):
        rank = ranks[slot % len(ranks)]
        a[slot, rank:] = 0
        b[slot, :, rank:] = 0
    table = torch.tensor(ranks, dtype=torch.int32).repeat(-(-slots // len(ranks)))[:slots]
    return a, b, table[None].to(device)


def _weights(cfg: Config, chosen: Variant) -> operators.Weights:
    """Return A, B and the table of ranks of all slots; narrow slots share the memory of wide ones."""
    figure, device, ranks = operator_conf(cfg), cfg.hardware.device, tuple(cfg.adapters.ranks)
    slots, shape = bank_slots(cfg), (figure.h1, figure.h2, figure.dtype, device)
    if chosen.system == UNIFORM:
        a, b = operators.bank(slots, max(ranks), *shape)
        fitting = slots * max(ranks) // chosen.width
        elements = fitting * chosen.width
        a = a.view(-1)[: elements * figure.h1].view(fitting, chosen.width, figure.h1)
        return a, b.view(-1)[: elements * figure.h2].view(fitting, figure.h2, chosen.width), None
    a, b, table = _mixed_bank(slots, ranks, *shape)
    return a, b, table if chosen.system == TRUE_RANK else None


def batches(cfg: Config, workload: str, rows: int, chosen: Variant) -> list[Problem]:
    """The batches of one variant: whole rounds, each batch on its own x, y and adapters."""
    count = copies(cfg, workload, rows, chosen.mean_rank)
    return operators.rotated(cfg, popularity(workload).group_sizes(rows), count, _weights(cfg, chosen))


def checked_rounds(cfg: Config, problems: Sequence[Problem]) -> tuple[list[Call], int]:
    """One call per round of `problems`, every batch of the first round checked, and the batches in a round."""
    length = round_length(len(problems[0].sizes), len(cfg.adapters.ranks))
    calls = [call for problem in problems[:length] for call in operators.prepare_checked([problem], "SGMV")]
    calls += [OPERATORS.get("SGMV")(problem).call for problem in problems[length:]]
    return [partial(operators.in_turn, calls[i : i + length]) for i in range(0, len(calls), length)], length
