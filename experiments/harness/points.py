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
    """One thing to measure. The named fields become columns of its rows; `settings` holds all else that decides the
    number (shapes, dtype, seeds, limits; JSON values): a change of any of them makes old rows stale.
    """

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
        """The row columns that this point decides."""
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
    """One number that `measure` found for a point; the harness makes it a row.

    `disturbed` is for points that are derived from other rows; where something was timed, the harness knows it.
    """

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
    samples: Sequence[float] = field(default=(), compare=False, repr=False)  # of a count: what is counted

    def columns(self) -> dict[str, Any]:
        """The row columns that this reading decides."""
        return {name: value for name, value in vars(self).items() if name != "samples"}


def sampled(metric: str, samples: Sequence[float], unit: str) -> list[Reading]:
    """The readings of raw `samples` (already in `unit`): median, p10, p90 and count, which keeps the samples.

    Timings are skewed to the right (an interrupt only ever adds time), so there is no mean. Raises `ValueError` when
    there is no sample or one is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"samples of {metric} must be finite, at least one, not {samples!r}: raise scale.repeats")
    p10, median, p90 = map(float, np.percentile(values, [10, 50, 90]))
    spread = {"median": median, "p10": p10, "p90": p90}
    return [
        *(Reading(metric, value, unit, statistic) for statistic, value in spread.items()),
        Reading(metric, float(values.size), "samples", "count", samples=samples),
    ]


def model_settings(model: ModelConf) -> dict[str, Any]:
    """`model` as JSON values, for `Point.settings`."""
    return {**model.model_dump(), "dtype": model.dtype.name}


def by_cell(points: Sequence[Point], *differing: str) -> Iterator[list[Point]]:
    """Groups of consecutive points that are equal but for the columns `differing`: the cells that are timed side by
    side.
    """

    def cell(point: Point) -> str:
        same = {name: value for name, value in point.columns().items() if name not in differing}
        return json.dumps([same, dict(point.settings)], sort_keys=True)

    for _, group in itertools.groupby(points, key=cell):
        yield list(group)
