"""A run of one experiment: stale or missing points are measured (`passes`), and changed rows are drawn. A point can ask
for the number of another: rows on disk, of its own repeat and settings.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.harness.budget import Budget
from experiments.harness.experiment import Experiment, config_hash
from experiments.harness.passes import Outcome, Passes
from experiments.harness.points import Point
from experiments.harness.schema import Config, ConfigError
from experiments.harness.settings import Folders, by_clocks, folders, is_read, keys_read, settle, typed
from experiments.harness.source import source_of
from experiments.measure import environment
from experiments.measure.records import Row, RowFile, ensure_writable


def run(cfg: DictConfig | Config, experiment: Experiment, budget: Budget | None = None) -> Outcome:
    """Measure what is missing, stale or disturbed of `experiment`, and draw it if its rows changed. `budget` None:
    `figure.minutes`, in which repeats alone give way. A failed check is in `Outcome.failed`, without a row;
    `ConfigError` and `RowsError` come before anything is measured.
    """
    started = time.perf_counter()
    given = typed(cfg, experiment)
    settled = settle(given, experiment)
    minutes = settled.figure.minutes.get(settled.scale.name)
    budget = budget or Budget(None if minutes is None else 60 * minutes)
    places, source = folders(settled), source_of(experiment)
    rows = RowFile(places.fresh_rows / f"{experiment.name}.csv")
    clocks, here = by_clocks(given, settled, experiment), machine()

    def digest(point: Point) -> str:
        return config_hash(experiment, clocks[point.timer], point, here)

    timed = [replace(point, timer=name) for name, one in clocks.items() for point in experiment.points(one)]
    grid = list({digest(point): point for point in timed}.values())  # a value given twice is one point
    passes = experiment.passes or settled.scale.passes
    points = [replace(point, repeat=repeat) for repeat in range(passes) for point in grid]
    current = [] if settled.force else [row for row in rows.rows if row.source_hash == source]
    noise = {(row.config_hash, row.repeat): row.other_cpu or 0.0 for row in current if row.disturbed}
    done = {(row.config_hash, row.repeat) for row in current} - set(noise)
    pending = [point for point in points if (digest(point), point.repeat) not in done]
    outcome = Outcome(experiment.name, len(points), skipped=len(points) - len(pending), rows_file=str(rows.path))
    if pending:
        ensure_writable(places.fresh_rows)
        _prepare(settled)
        rows.path.with_suffix(".json").write_text(_configuration(given, experiment), encoding="utf-8")
        device = environment.device_name() if settled.hardware.device == "cuda" else environment.cpu_name()
        columns = {"figure": experiment.figure, "source_hash": source, "device": device, **environment.stamp()}
        columns |= {"hardware": settled.hardware.name, "scale": settled.scale.name}
        try:
            Passes(experiment, clocks, columns, digest, rows, noise, budget).run(pending, outcome)
        finally:
            experiment.release()
    if settled.draw and rows.rows:
        outcome.figures = _draw(experiment, rows, places)
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def _configuration(cfg: Config, experiment: Experiment) -> str:
    """The part of the configuration that `experiment` reads, kept beside the rows; without paths of the machine."""
    keys = keys_read(experiment) - {"paths"}

    def read(part: dict[str, Any], above: str = "") -> dict[str, Any]:
        kept = {key: value for key, value in part.items() if is_read(above + key, keys) and not isinstance(value, Path)}
        return {key: read(value, f"{above}{key}.") if isinstance(value, dict) else value for key, value in kept.items()}

    return json.dumps(read(cfg.model_dump()), indent=1, default=lambda value: value.value) + "\n"


def _prepare(cfg: Config) -> None:
    """Set torch's threads, seed and, on a CPU, the faster of its matrix products; refuse a GPU that is not there."""
    import torch

    from experiments.harness.products import use_faster_products

    torch.set_num_threads(cfg.hardware.threads or environment.usable_cores())
    torch.manual_seed(0)
    if cfg.hardware.device == "cpu":
        use_faster_products()
    if cfg.hardware.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"hardware={cfg.hardware.name} needs a GPU and torch sees none: choose hardware=cpu")


def _draw(experiment: Experiment, rows: RowFile, places: Folders) -> list[str]:
    """Draw the figure unless it is newer than its rows; matplotlib is not imported when there is nothing to draw."""
    target = places.fresh_figures / f"{experiment.name}.png"
    if not target.exists() or target.stat().st_mtime < rows.path.stat().st_mtime:
        from experiments.plots.draw import draw

        return [str(path) for path in draw(experiment, rows.path, places.fresh_figures, places.paper)]
    return [str(target)]


def machine() -> dict[str, Any]:
    """Return the properties of this machine that decide a number, for `config_hash`."""
    return {"device": environment.device_name(), "torch": environment.installed("torch")}


def row_on_disk(experiment: Experiment, cfg: Config, point: Point, metric: str) -> Row | None:
    """`metric` of `point` in its repeat, as this code measured it here; None where it was not."""
    wanted = config_hash(experiment, cfg, point, machine()), source_of(experiment), point.repeat, metric
    rows = RowFile(folders(cfg).fresh_rows / f"{experiment.name}.csv").rows
    return next((row for row in rows if (row.config_hash, row.source_hash, row.repeat, row.metric) == wanted), None)
