"""`SegmentPlan`: a step's rows grouped into batched matmuls for `punica.ops.torch_ops`, once per step.

A *run* is neighbouring segments of equal length whose slots are consecutive (``slot, slot + 1, ...``). It multiplies a
plain view of the rows ``[count, length, in]`` with a plain view of the stacked weights ``[count, out, in]``: one
batched matmul, nothing gathered. A ragged batch decays into runs of one segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.rows import RowGroups

# Reordering rows pays when it saves more than one run for this many rows: moving a row costs less than starting a
# matmul.
_ROWS_MOVED_PER_RUN_SAVED = 4


class Run(NamedTuple):
    """``segments`` segments of ``length`` rows from row ``start`` on; segment i uses slot ``slot + i``. ``rank``: the
    true one of all its adapters, ``None`` the full width (plans leave it ``None``).
    """

    slot: int
    start: int
    segments: int
    length: int
    rank: int | None = None


@dataclass(frozen=True)
class SegmentPlan:
    """The rows of a step grouped by adapter, for the operators of `punica.ops.torch_ops`.

    Attributes:
        num_tokens: rows the plan covers, T. Rows of a tensor beyond it are padding without adapter.
        runs: the runs, in the order of their rows: in place, or of the R gathered ones where ``rows`` (int64 ``[R]``,
            on the CPU) is given. ``all_active``: all T rows have an adapter. ``max_slot``: largest in use, or -1.
    """

    num_tokens: int
    runs: tuple[Run, ...]
    rows: Tensor | None
    all_active: bool
    max_slot: int

    @staticmethod
    def of(groups: RowGroups) -> SegmentPlan:
        """Group the rows by adapter: in place when that gives few runs (a batch laid out by adapter); otherwise ordered
        by slot, and the operators gather and scatter the rows (never the weights, which are larger).
        """
        slots, counts = groups.present
        total, active = groups.num_rows, int(counts[slots >= 0].sum())
        runs = _join(zip(groups.slots.tolist(), groups.starts.tolist(), groups.lengths.tolist(), strict=True))
        starts = counts.cumsum() - counts - (total - active)
        by_slot = _join(zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True))
        rows = None
        if (len(runs) - len(by_slot)) * _ROWS_MOVED_PER_RUN_SAVED > active:
            runs, rows = by_slot, torch.from_numpy(groups.order[total - active :])
        return SegmentPlan(total, runs, rows, active == total, int(slots[-1]) if slots.size else -1)


def _join(segments: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Join ``(slot, start, length)`` segments, given in row order, into runs; those without adapter are left out."""
    runs: list[Run] = []
    for slot, start, length in segments:
        if slot < 0:
            continue
        if runs:
            last = runs[-1]
            follows = slot == last.slot + last.segments and start == last.start + last.segments * last.length
            if follows and length == last.length:
                runs[-1] = last._replace(segments=last.segments + 1)
                continue
        runs.append(Run(slot, start, 1, length))
    return tuple(runs)
