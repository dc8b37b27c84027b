"""Where the rows of each adapter lie, decided once per model invocation on the host.

The paper builds its segment indices once per invocation and reuses them in all 7 L operator calls; a
:class:`SegmentPlan` is that for the torch operators. It holds *runs*: neighbouring segments of equal length whose
slots are consecutive (``slot, slot + 1, ...``). A run multiplies a plain view of the rows ``[count, length, in]``
with a plain view of the stacked weights ``[count, out, in]``: one batched matmul, nothing gathered. A ragged batch
decays into runs of one segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.checks import check_slots

# Reordering rows pays when it saves more than one run for this many rows: moving a row costs less than starting a
# matmul.
_ROWS_MOVED_PER_RUN_SAVED = 4


class Run(NamedTuple):
    """``segments`` segments of ``length`` rows from row ``start`` on; segment i uses slot ``slot + i``.

    ``rank`` is the true rank of all its adapters, ``None`` the full width of the weights (plans leave it ``None``).
    """

    slot: int
    start: int
    segments: int
    length: int
    rank: int | None = None


@dataclass(frozen=True)
class SegmentPlan:
    """The rows of a step grouped by adapter, for :func:`punica.ops.torch_ops.shrink` and ``expand``.

    Attributes:
        num_tokens: rows the plan covers, T. Rows of a tensor beyond it are padding without adapter.
        runs: the runs, in the order of their rows.
        rows: ``None`` when the runs address the rows where they lie (views only); else int64 CPU row numbers ``[R]``,
            and the runs address the R gathered rows.
        all_active: true when every one of the ``num_tokens`` rows has an adapter.
        max_slot: largest slot in use, -1 when none is.
        shrinks, expands: prepared calls on this plan (:mod:`punica.ops.segment_calls`), filled by the operators. They
            hold on to their weights as long as the plan lives: one step, or longer while the mapping stays.
    """

    num_tokens: int
    runs: tuple[Run, ...]
    rows: Tensor | None
    all_active: bool
    max_slot: int
    shrinks: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    expands: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)


def _merge(segments: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Join ``(slot, start, length)`` segments, given in row order, into runs."""
    runs: list[Run] = []
    for slot, start, length in segments:
        if runs:
            last = runs[-1]
            follows = slot == last.slot + last.segments and start == last.start + last.segments * last.length
            if follows and length == last.length:
                runs[-1] = last._replace(segments=last.segments + 1)
                continue
        runs.append(Run(slot, start, 1, length))
    return tuple(runs)


def plan_segments(slots: Tensor) -> SegmentPlan:
    """Group the rows of a step by adapter.

    Rows stay where they lie when that gives few runs (a batch laid out by adapter); otherwise the plan orders them by
    slot, stably, and the operators gather and scatter the rows (never the weights, which are larger).

    Args:
        slots: integer CPU ``[T]``, slot of every row, ``-1`` = no adapter.

    Raises:
        TypeError: ``slots`` is not integer.
        ValueError: it is not a vector, not on the CPU, or holds a value below -1.
    """
    check_slots(slots, "slots")
    if slots.device.type != "cpu":
        raise ValueError(f"slots is on {slots.device}; plans are made on the host, pass the CPU copy of the mapping")
    values, counts = torch.unique_consecutive(slots, return_counts=True)
    in_place: list[tuple[int, int, int]] = []
    totals: dict[int, int] = {}
    start = 0
    for slot, count in zip(values.tolist(), counts.tolist(), strict=True):
        if slot < -1:
            raise ValueError(f"slots holds {slot} at row {start}; expected a slot >= 0, or -1 for no adapter")
        if slot >= 0:
            in_place.append((slot, start, count))
            totals[slot] = totals.get(slot, 0) + count
        start += count
    active = sum(totals.values())
    by_slot: list[tuple[int, int, int]] = []
    offset = 0
    for slot in sorted(totals):
        by_slot.append((slot, offset, totals[slot]))
        offset += totals[slot]
    runs, sorted_runs = _merge(in_place), _merge(by_slot)
    rows = None
    if (len(runs) - len(sorted_runs)) * _ROWS_MOVED_PER_RUN_SAVED > active:
        runs = sorted_runs
        rows = torch.argsort(slots, stable=True)[start - active :]
    return SegmentPlan(start, runs, rows, active == start, max(totals, default=-1))
