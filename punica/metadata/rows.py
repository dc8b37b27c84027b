"""`RowGroups`: the slot of every row of a step, on the host. All other metadata are derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from punica.metadata.tiles import TileLists


class RowGroups:
    """T rows as B runs of neighbours that share a slot (the segments of the paper's section 4); never changed.

    Attributes:
        slots, lengths: int64 ``[B]``, slot (``-1`` = no adapter) and number of rows of each run; neighbouring runs
            differ in their slot and none is empty.
        num_rows: T.
        no_lora: whether no row has an adapter (T = 0 included).
    """

    def __init__(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.slots, self.lengths = slots, lengths
        self.num_rows = int(lengths.sum())
        self.no_lora = not slots.size or bool(slots.max() < 0)

    @classmethod
    def of_rows(cls, slots: np.ndarray) -> RowGroups:
        """From the slot of every row, integers ``[T]``."""
        if not slots.size:
            return NO_ROWS
        slots = slots.astype(np.int64, copy=False)
        edges = _edges(slots)
        groups = cls(slots[edges[:-1]], edges[1:] - edges[:-1])
        groups.row_slots = slots
        return groups

    @classmethod
    def of_runs(cls, slots: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        """From runs in the order of their rows; empty ones are dropped and equal neighbours joined.

        ValueError: a negative length.
        """
        runs, sizes = np.array(slots, dtype=np.int64), np.array(lengths, dtype=np.int64)
        if sizes.min(initial=0) < 0:
            raise ValueError(f"lengths[{int(sizes.argmin())}] is {int(sizes.min())}; a run has 0 rows or more")
        if not sizes.all():
            runs, sizes = runs[sizes > 0], sizes[sizes > 0]
        if not runs.size:
            return NO_ROWS
        first = _edges(runs)[:-1]
        if first.size < runs.size:
            runs, sizes = runs[first], np.add.reduceat(sizes, first)
        return cls(runs, sizes)

    @cached_property
    def starts(self) -> np.ndarray:
        """First row of each run, int64 ``[B]``."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def row_slots(self) -> np.ndarray:
        """Slot of each row, int64 ``[T]``."""
        return self.slots.repeat(self.lengths)

    @cached_property
    def _by_slot(self) -> np.ndarray:
        return self.slots.argsort(kind="stable")

    @cached_property
    def order(self) -> np.ndarray:
        """The rows sorted stably by slot, int64 ``[T]``: position -> row."""
        lengths = self.lengths[self._by_slot]
        moved = self.starts[self._by_slot] - (lengths.cumsum() - lengths)
        return np.arange(self.num_rows) + moved.repeat(lengths)

    @cached_property
    def present(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct slots, ascending (``-1`` first if present), and how many rows each has."""
        slots = self.slots[self._by_slot]
        if not slots.size:
            return slots, self.lengths
        first = _edges(slots)[:-1]
        return slots[first], np.add.reduceat(self.lengths[self._by_slot], first)

    @cached_property
    def tiles(self) -> TileLists:
        """The rows cut into tiles for the programs of a kernel."""
        return TileLists(*self.present)

    def equals(self, other: RowGroups) -> bool:
        """Tell whether both have the same slots for the same rows."""
        return self is other or (
            np.array_equal(self.slots, other.slots) and np.array_equal(self.lengths, other.lengths)
        )


def _edges(values: np.ndarray) -> np.ndarray:
    """First positions of runs of equal neighbours, then the number of values (at least one)."""
    changes = np.flatnonzero(values[1:] != values[:-1])
    edges = np.zeros(changes.size + 2, np.int64)
    np.add(changes, 1, out=edges[1:-1])
    edges[-1] = values.size
    return edges


NO_ROWS = RowGroups(np.empty(0, np.int64), np.empty(0, np.int64))
"""A step of no rows."""


def check_slots(name: str, slots: torch.Tensor, max_loras: int | None = None) -> np.ndarray:
    """``slots`` on the host; a tensor on a device is read back once.

    TypeError unless it is an integer tensor; ValueError unless it is 1-D with values in ``[-1, max_loras)`` (None: no
    upper limit).
    """
    if not isinstance(slots, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(slots).__name__}")
    if slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {slots.dtype}; expected an integer dtype (slots, -1 = no adapter)")
    if slots.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(slots.shape)}; expected 1-D, one slot per row")
    values = slots.cpu().numpy().copy()  # copied: the caller may reuse the tensor
    if values.size and (values.min() < -1 or (max_loras is not None and values.max() >= max_loras)):
        bad = values < -1 if max_loras is None else (values < -1) | (values >= max_loras)
        row = int(np.flatnonzero(bad)[0])
        limit = f"must be in [-1, {max_loras}): -1 for no adapter, else a slot below max_loras={max_loras}"
        limit = "slots are >= 0, and -1 means no adapter" if max_loras is None else limit
        raise ValueError(f"{name}[{row}] is {int(values[row])}; {limit}")
    return values
