"""The LoRA operators that are tuned and tabled: shapes, bytes and the time of the bytes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """One timed operator: `sizes` are the rows of each adapter (their sum is T), `widths` the output sizes of the
    slices.
    """

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

    def bytes(self, itemsize: int = 2) -> int:
        """Bytes that must move: the weights of the adapters present, x read, y read and written."""
        weights = sum(
            r * (self.k * len(self.widths) + sum(self.widths)) for r in self.ranks or [self.rank] * len(self.sizes)
        )
        return itemsize * (weights + self.tokens * (self.k + 2 * sum(self.widths)))


def floor_us(operator: Operator, terabytes_per_second: float = 4.25) -> float:
    """Time of the bytes alone, at the device-to-device copy rate of an H200."""
    return operator.bytes() / terabytes_per_second / 1e6
