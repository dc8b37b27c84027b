"""`WorkLists`: a step cut into pieces that one program of a kernel takes, made once per step on the host.

A *tile* is up to `height` rows of one segment (all rows of one slot, in the sorted order); a kernel that multiplies
tiles reads which one is its own instead of searching the segments for it. Every height is listed at every step, so that
whatever height a captured graph was made with, it finds its list at every later step. Longest segments come first.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

HEIGHTS = (8, 16, 32, 64)
"""Rows of a tile, for which there is a list each."""
_ROWS_AT, _SLOT_AT = 56, 32  # bits of a record: rows | slot | first sorted position


class StepShape(NamedTuple):
    """Properties of a step that select kernel schedules, rounded up to powers of two, so that similar steps share their
    schedules and captured graphs.

    ``adapters``: in use; ``longest``: rows of the longest segment.
    """

    adapters: int
    longest: int

    @classmethod
    def even(cls, adapters: int, rows: int) -> StepShape:
        """Of `rows` rows spread evenly over `adapters` adapters (at most one a row)."""
        adapters = min(adapters, rows)
        each = -(-rows // adapters) if adapters else 0
        return cls(_power(adapters), _power(each))


def captured_adapters(rows: int, max_loras: int) -> list[int]:
    """Numbers of adapters for which a CUDA graph of ``rows`` decode rows is worth capturing, ascending: one, a quarter
    of the rows, and as many as rows (at most ``max_loras``).

    A graph keeps the kernels that suited the step it was captured with. It computes every step of as many rows rightly,
    but fastest those like its own, and between these three the kernels hardly change. So an engine captures
    `RowGroups.of_runs` of each of these counts, evenly filled, at most three graphs per number of rows, and replays the
    first that has as many adapters as the step.
    """
    return sorted({min(count, max_loras) for count in (1, -(-rows // 4), rows) if rows > 0})


class WorkLists:
    """The tiles of one step. ``tiles[i]``: int64 records for `HEIGHTS[i]`; ``totals``: their numbers, a list."""

    def __init__(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """The distinct slots, ascending, and their numbers of rows."""
        starts = counts.cumsum() - counts
        if slots.size and slots[0] < 0:
            slots, counts, starts = slots[1:], counts[1:], starts[1:]
        if slots.size > 1:
            by_length = (-counts).argsort(kind="stable")
            slots, counts, starts = slots[by_length], counts[by_length], starts[by_length]
        self._slots, self._counts, self._starts = slots << _SLOT_AT, counts, starts

    @cached_property
    def shape(self) -> StepShape:
        """The form of the step."""
        adapters = self._counts.size
        longest = int(self._counts[0]) if adapters else 0
        return StepShape(_power(adapters), _power(longest))

    @cached_property
    def tiles(self) -> list[np.ndarray]:
        """Records of the tiles of every height."""
        return [self._tiles(height) for height in HEIGHTS]

    def _tiles(self, height: int) -> np.ndarray:
        heads = self._slots | self._starts
        if not self._counts.size or self._counts[0] == 1:
            return heads | (1 << _ROWS_AT)
        per_segment = -(-self._counts // height)
        before = per_segment.cumsum()
        done = (np.arange(before[-1]) - (before - per_segment).repeat(per_segment)) * height
        rows = np.minimum(self._counts.repeat(per_segment) - done, height)
        return heads.repeat(per_segment) + done | rows << _ROWS_AT

    @cached_property
    def totals(self) -> list[int]:
        """Numbers of tiles of every height."""
        return [tiles.size for tiles in self.tiles]


def capacities(slots: int, tokens: int) -> list[int]:
    """Most records of the list of each height in a step of up to `tokens` rows on `slots` slots."""
    return [min(slots, tokens) + tokens // height for height in HEIGHTS]


def _power(number: int) -> int:
    """The smallest power of two that is at least `number` (0 for 0)."""
    return 1 << (number - 1).bit_length() if number > 0 else 0
