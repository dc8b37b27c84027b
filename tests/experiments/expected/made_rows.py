"""Rows of one system with chosen values per repeat."""

from dataclasses import replace

import pandas as pd

from experiments.harness.counted import frame_of
from experiments.measure.records import Row

BASE = Row(
    figure="8", panel="", system="SGMV", workload="Distinct", model="", hardware="h200", batch_size=1, seq_len=None,
    rank=16, metric="latency", value=10.0, unit="us", statistic="median", timer="host_clock", scale="laptop",
    date="2026-01-02", device="A GPU",
)  # fmt: skip


def made(*values: float, batches: tuple[int, ...] = (1, 8, 64), **changes: object) -> list[Row]:
    """One row per batch and value; several values are repeats 0, 1, ... and one is a row without a repeat."""
    numbers = range(len(values)) if len(values) > 1 else [None]
    return [
        replace(BASE, **{"batch_size": batch, "repeat": repeat, "value": value * batch, **changes})
        for batch in batches
        for repeat, value in zip(numbers, values, strict=True)
    ]


def frame(*rows: list[Row]) -> pd.DataFrame:
    """Build one frame of all rows."""
    return frame_of(row for part in rows for row in part)
