"""Numbers that one point needs of another, read from the rows on disk: those of its own repeat and settings."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.harness.experiment import Experiment, config_hash
from experiments.harness.points import Point
from experiments.harness.schema import Config
from experiments.harness.settings import folders
from experiments.harness.source import source_of
from experiments.measure import environment
from experiments.measure.records import Row, read_rows


def machine() -> dict[str, Any]:
    """Return the properties of this machine that decide a number, for `config_hash`."""
    return {"device": environment.device_name(), "torch": environment.installed("torch")}


def value_on_disk(experiment: Experiment, cfg: Config, point: Point, metric: str) -> float | None:
    """Read the number of `row_on_disk`, None without a row."""
    row = row_on_disk(experiment, cfg, point, metric)
    return None if row is None else row.value


def row_on_disk(experiment: Experiment, cfg: Config, point: Point, metric: str) -> Row | None:
    """`metric` of `point`, in its repeat, as this code measured it under `cfg` on this machine; None where it was not.

    `RowsError` for a file that cannot be read.
    """
    path = folders(cfg).fresh_rows / f"{experiment.name}.csv"
    if not path.exists():
        return None
    digest, source = config_hash(experiment, cfg, point, machine()), source_of(experiment)
    wanted = (digest, source, point.repeat, metric)
    for row in read_rows(path):
        if (row.config_hash, row.source_hash, row.repeat, row.metric) == wanted:
            return row
    return None


def givers_first(points: Sequence[Point], place: Callable[[Point], Any]) -> list[list[Point]]:
    """Order `points` of one repeat by `place`, each alone: for points that read the rows of others.

    `Passes` reverses odd repeats; they are ordered backwards here.
    """
    back = points[0].repeat % 2 == 1
    ordered = sorted(points[::-1] if back else points, key=place)
    return [[point] for point in (ordered[::-1] if back else ordered)]
