"""`RowGroups`: the slot of every row of a step, on the host, from which all other metadata are derived; its tiles.

A *tile* is up to ``height`` rows of one segment (all rows of one slot, in sorted order), longest segments first. A
program reads the record of its tile. Every height is listed at every step, for captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

HEIGHTS = (8, 16, 32, 64)
"""Rows of a tile; one list each."""
_ROWS_AT, _SLOT_AT = 56, 32  # bits of a record: rows | slot | first sorted position


class StepShape(NamedTuple):
    """Adapters in use and rows of the longest segment, as powers of two: similar steps share schedules and graphs."""

    adapters: int
    longest: int

    @classmethod
    def even(cls, adapters: int, rows: int) -> StepShape:
        """Spread ``rows`` rows evenly over ``adapters`` adapters (at most one a row)."""
        adapters = min(adapters, rows)
        each = -(-rows // adapters) if adapters else 0
        return cls(_power(adapters), _power(each))


def captured_adapters(rows: int, max_loras: int) -> list[int]:
    """Numbers of adapters for which a CUDA graph of ``rows`` decode rows is worth capturing, ascending: one, a quarter
    of the rows, and as many as rows (at most ``max_loras``). A graph keeps the schedules of the step that it was
    captured with, which hardly change between these three; an engine replays the first with the step's adapters.
    """
    return sorted({min(count, max_loras) for count in (1, -(-rows // 4), rows) if rows > 0})


class TileLists:
    """The tiles of one step, of the distinct ``slots``, ascending, and their numbers of rows."""

    def __init__(self, slots: np.ndarray, counts: np.ndarray) -> None:
        starts = counts.cumsum() - counts
        if slots.size and slots[0] < 0:
            slots, counts, starts = slots[1:], counts[1:], starts[1:]
        if slots.size > 1:
            by_length = (-counts).argsort(kind="stable")
            slots, counts, starts = slots[by_length], counts[by_length], starts[by_length]
        self._slots, self._counts, self._starts = slots << _SLOT_AT, counts, starts

    @cached_property
    def shape(self) -> StepShape:
        adapters = self._counts.size
        return StepShape(_power(adapters), _power(int(self._counts[0]) if adapters else 0))

    @cached_property
    def records(self) -> list[np.ndarray]:
        """Records of the tiles of every height, int64."""
        return [self._of(height) for height in HEIGHTS]

    @cached_property
    def totals(self) -> list[int]:
        return [records.size for records in self.records]

    def _of(self, height: int) -> np.ndarray:
        heads = self._slots | self._starts
        if not self._counts.size or self._counts[0] == 1:
            return heads | (1 << _ROWS_AT)
        per_segment = -(-self._counts // height)
        before = per_segment.cumsum()
        done = (np.arange(before[-1]) - (before - per_segment).repeat(per_segment)) * height
        rows = np.minimum(self._counts.repeat(per_segment) - done, height)
        return heads.repeat(per_segment) + done | rows << _ROWS_AT


def capacities(slots: int, tokens: int) -> list[int]:
    """Most records of each list in a step of up to ``tokens`` rows on ``slots`` slots."""
    return [min(slots, tokens) + tokens // height for height in HEIGHTS]


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 0


class RowGroups:
    """T rows as B runs of neighbours that share a slot (the segments of the paper's section 4); never changed.

    ``slots``, ``lengths``: int64 ``[B]``, slot (``-1`` = no adapter) and rows of each run; neighbouring runs differ in
    their slot and none is empty. ``num_rows``: T. ``no_lora``: no row has an adapter (T = 0 included).
    """

    def __init__(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.slots, self.lengths = slots, lengths
        self.num_rows = int(lengths.sum())
        self.no_lora = not slots.size or bool(slots.max() < 0)

    @classmethod
    def of_rows(cls, slots: np.ndarray) -> RowGroups:
        if not slots.size:
            return NO_ROWS
        slots = slots.astype(np.int64, copy=False)
        edges = _edges(slots)
        groups = cls(slots[edges[:-1]], edges[1:] - edges[:-1])
        groups.row_slots = slots
        return groups

    @classmethod
    def of_runs(cls, slots: Sequence[int], lengths: Sequence[int]) -> RowGroups:
        """From runs in the order of their rows, empty or equal ones too. ValueError: a negative length."""
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
        return TileLists(*self.present)

    def equals(self, other: RowGroups) -> bool:
        pairs = (self.slots, other.slots), (self.lengths, other.lengths)
        return self is other or all(np.array_equal(*pair) for pair in pairs)


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
    """``slots`` on the host. TypeError: no integer tensor. ValueError: not 1-D, or outside ``[-1, max_loras)``."""
    if not isinstance(slots, torch.Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(slots).__name__}")
    if slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {slots.dtype}; expected an integer dtype (slots, -1 = no adapter)")
    if slots.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(slots.shape)}; expected 1-D, one slot per row")
    values = slots.cpu().numpy().copy()  # copied: the caller may reuse the tensor
    limit = np.iinfo(values.dtype).max if max_loras is None else max_loras - 1
    if values.size and (values.min() < -1 or values.max() > limit):
        row = int(np.flatnonzero((values < -1) | (values > limit))[0])
        below = "" if max_loras is None else f" and below max_loras={max_loras}"
        raise ValueError(f"{name}[{row}] is {int(values[row])}; slots are >= 0{below}, and -1 means no adapter")
    return values
