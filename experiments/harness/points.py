"""Points of a grid, readings of a point, and cells whose points are timed side by side."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.harness.schema import ModelConf


@dataclass(frozen=True)
class Point:
    """One thing to measure: the named fields are columns of its rows; `settings` all else that decides the number."""

    panel: str = ""
    system: str = ""
    workload: str = ""
    model: str = ""
    batch_size: int | None = None
    seq_len: int | None = None
    rank: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 0  # which of the passes over the grid; set by the harness, as is the clock
    timer: str = ""

    def columns(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def key(self) -> str:
        """Canonical text of everything that this point decides; the same for all its repeats and clocks."""
        columns = {name: value for name, value in self.columns().items() if name not in ("repeat", "timer")}
        return json.dumps({**columns, "settings": dict(self.settings)}, sort_keys=True)

    def label(self) -> str:
        """Short text for the progress bar."""
        numbers = (("batch", self.batch_size), ("len", self.seq_len), ("rank", self.rank))
        parts = [self.panel, self.system, self.workload, self.model]
        parts += [*(f"{name} {value}" for name, value in numbers if value is not None), self.timer]
        return ", ".join(dict.fromkeys(part for part in parts if part))


@dataclass(frozen=True)
class Reading:
    """One number that `measure` found; the harness makes it a row. `disturbed`: where the harness does not watch."""

    metric: str
    value: float
    unit: str
    statistic: str = "value"
    kind: str = "measured"
    disturbed: bool | None = None
    t_s: float | None = None  # of a series over time: seconds from its start
    gpu: int | None = None  # of one GPU among many
    cost_model: str = ""  # of a simulated number: what told it the time of a step
    engine: str = ""  # of a number from another process: versions and settings of the engine there

    def columns(self) -> dict[str, Any]:
        return dict(vars(self))


def sampled(metric: str, samples: Sequence[float], unit: str) -> list[Reading]:
    """Median, p10, p90 and count of raw `samples`; `ValueError` for none, or one that is not finite."""
    values = np.asarray(samples, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"samples of {metric} must be finite, at least one, not {samples!r}: raise scale.repeats")
    p10, median, p90 = map(float, np.percentile(values, [10, 50, 90]))
    spread = {"median": median, "p10": p10, "p90": p90}
    return [
        *(Reading(metric, value, unit, statistic) for statistic, value in spread.items()),
        Reading(metric, float(values.size), "samples", "count"),
    ]


def model_settings(model: ModelConf) -> dict[str, Any]:
    """`model` as JSON values, for `Point.settings`."""
    return {**model.model_dump(), "dtype": model.dtype.name}


def by_cell(points: Sequence[Point], *differing: str) -> Iterator[list[Point]]:
    """Groups of consecutive points equal but for the columns `differing`: cells timed side by side."""

    def cell(point: Point) -> str:
        same = {name: value for name, value in point.columns().items() if name not in differing}
        return json.dumps([same, dict(point.settings)], sort_keys=True)

    for _, group in itertools.groupby(points, key=cell):
        yield list(group)
