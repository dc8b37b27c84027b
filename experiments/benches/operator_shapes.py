"""The LoRA operators that are tuned and tabled: shapes, bytes and the time of the bytes. Imports no torch."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from experiments.workload.popularity import PAPER_WORKLOADS, popularity

HIDDEN, INTERMEDIATE = 4096, 11008
Projection = tuple[int, tuple[int, ...]]
"""Input width, and output widths of the slices."""
PROJECTIONS: dict[str, Projection] = {
    "qkv": (HIDDEN, (HIDDEN,) * 3),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INTERMEDIATE,) * 2),
    "down": (INTERMEDIATE, (HIDDEN,)),
}
"""The packed projections of one Llama-2-7B layer."""
UP: Projection = (HIDDEN, (INTERMEDIATE,))


@dataclass(frozen=True)
class Operator:
    """One timed operator: `sizes` are the rows of each adapter (in all T), `widths` the output sizes of the slices."""

    k: int
    widths: tuple[int, ...]
    rank: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    """True rank of each adapter; empty: all of them `rank`, and the kernels get no table of ranks."""

    @property
    def tokens(self) -> int:
        """Rows of the batch."""
        return sum(self.sizes)

    def bytes(self) -> int:
        """Bytes that must move in half precision: the weights of the adapters present, x read, y read and written."""
        ranks = sum(self.ranks) if self.ranks else self.rank * len(self.sizes)
        weights = ranks * (self.k * len(self.widths) + sum(self.widths))
        return 2 * (weights + self.tokens * (self.k + 2 * sum(self.widths)))


COPY_RATE = 4.25
"""TB/s of a device-to-device copy on an H200."""


def floor_us(operator: Operator) -> float:
    """Time of the bytes alone, at the copy rate."""
    return operator.bytes() / COPY_RATE / 1e6


def decode(projection: Projection, rank: int, pattern: str, tokens: int) -> Operator:
    """A decode batch of `tokens` rows whose adapters have the popularity `pattern`."""
    return Operator(*projection, rank, tuple(popularity(pattern).group_sizes(tokens)))


def prefill(projection: Projection, rank: int, adapters: int, tokens: int) -> Operator:
    """A prefill of `tokens` rows, as many of each adapter."""
    return Operator(*projection, rank, (tokens // adapters,) * adapters)


DECODE_GRID = tuple(product((1, 2, 4, 8, 16, 32, 48, 64), PAPER_WORKLOADS))
"""(rows, popularity) of the decode batches."""
PREFILL_GRID = tuple(product((512, 2048, 8192), (1, 4, 16), (16, 64)))
"""(rows, adapters, rank) of the prefills."""
STREAM = ((1.1, 2.8), (2.2, 3.0), (8.7, 3.9), (17.3, 6.0), (34.6, 9.9))
"""MB -> us of two dependent kernels that only read that much, half each, and pass one vector, both starting early: the
practical floor of a two-kernel design, measured with the anchors on an H200 (paper_results/README.md)."""


def stream_us(operator: Operator) -> float:
    """The two-kernel stream at the operator's bytes: interpolated, and beyond the last point at the copy rate."""
    megabytes = operator.bytes() / 1e6
    sizes, times = zip(*STREAM, strict=True)
    return float(np.interp(megabytes, sizes, times)) + max(0.0, megabytes - sizes[-1]) / COPY_RATE
