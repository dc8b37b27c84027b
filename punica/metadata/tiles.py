"""`TileLists`: the tiles of a step, made once per step on the host, and `StepShape`, which selects schedules.

A *tile* is up to ``height`` rows of one segment (all rows of one slot, in sorted order), longest segments first. A
program reads the record of its tile instead of searching the segments. Every height is listed at every step, so that a
captured graph finds its list at every later step.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

HEIGHTS = (8, 16, 32, 64)
"""Rows of a tile; one list each."""
_ROWS_AT, _SLOT_AT = 56, 32  # bits of a record: rows | slot | first sorted position


class StepShape(NamedTuple):
    """Adapters in use and rows of the longest segment, rounded up to powers of two, so that similar steps share their
    schedules and captured graphs.
    """

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
    of the rows, and as many as rows (at most ``max_loras``).

    A graph keeps the schedules of the step that it was captured with. It is right for every step of as many rows, and
    between these three the schedules hardly change. An engine captures `RowGroups.of_runs` of each count, evenly
    filled, and replays the first that has as many adapters as the step.
    """
    return sorted({min(count, max_loras) for count in (1, -(-rows // 4), rows) if rows > 0})


class TileLists:
    """The tiles of one step, of the distinct ``slots``, ascending, and their numbers of rows.

    ``records[i]``: int64, of the tiles of `HEIGHTS[i]` rows.
    """

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
        """Shape of the step."""
        adapters = self._counts.size
        return StepShape(_power(adapters), _power(int(self._counts[0]) if adapters else 0))

    @cached_property
    def records(self) -> list[np.ndarray]:
        """Records of the tiles of every height."""
        return [self._of(height) for height in HEIGHTS]

    @cached_property
    def totals(self) -> list[int]:
        """Number of tiles of every height."""
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
    """The smallest power of two that is at least `number` (0 for 0)."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
