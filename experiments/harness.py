"""Runs an experiment: configuration, resume, progress, rows, figure.

**To add an experiment** write two files and one test.

1. `experiments/figNN_name.py`: a docstring (the claim, the expected shape, the cost), a `FigureConf` dataclass with
   the figure's own fields, an `Experiment` subclass and two closing statements::

        @dataclass
        class Fig10Conf(FigureConf):                 # title, systems, workloads are there already
            batch_sizes: list[int] = MISSING
            seq_lens: list[int] = MISSING

        class Fig10(Experiment):
            name, figure, order, conf = "fig10_layer", "10", 60, Fig10Conf
            paper_file = "fig10_transformer_layer.csv"

            def points(self, cfg):                   # cheap, no torch: decides what is stale
                figure = cast(Fig10Conf, cfg.figure)
                return [Point(system="punica", workload=w, model=cfg.model.name, batch_size=b, seq_len=s, rank=r,
                              settings={"model": model_settings(cfg.model), "slots": cfg.adapters.slots})
                        for w in cfg.workload.names for s in figure.seq_lens
                        for r in cfg.adapters.ranks for b in figure.batch_sizes]

            def measure(self, cfg, point):           # imports torch here; check first, CheckFailed when wrong
                ...
                return sampled("layer_latency", microseconds, "us")      # median, p10, p90, count
                # or [Reading("throughput", 1053.6, "token/s"), ...]

            def plot(self, rows, paper):             # pandas frames; experiments.plots.overlay draws both
                ...

        EXPERIMENT = Fig10()
        if __name__ == "__main__":
            main(EXPERIMENT)

2. `conf/figure/figNN_name.yaml`, which begins with `defaults: [{/schema/figure@_here_: figNN_name}, _self_]` and takes
   what depends on the scale from there (`batch_sizes: ${scale.model_batch_sizes}`).

Nothing else: `experiments.catalogue` finds the script, `make reproduce` runs it in its `order`.

`cfg` is a typed `Config` in which `auto` is decided: `cfg.system.names`, `cfg.workload.names`, `cfg.hardware.device`
("cpu" or "cuda"), `cfg.timer.name`. The harness sets torch's threads and seed before the first measurement. Everything
that decides a point's number must be a column of its `Point` or in its `settings`: that is what makes rows stale.
To time several systems interleaved, override `together` (see `by_cell`) and `measure_together`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import hydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments.experiment import CheckFailed, Experiment, Point, Reading, config_hash, sampled
from experiments.schema import CONF, Config, ConfigError, FigureConf, ModelConf, register_app
from experiments.settings import Folders, folders, settle
from punica.measure import environment
from punica.measure.records import Row, RowFile, RowsError, ensure_writable

__all__ = [
    "CheckFailed", "Config", "ConfigError", "Experiment", "FigureConf", "Point", "Reading", "by_cell", "main",
    "model_settings", "run", "sampled",
]  # fmt: skip


@dataclass
class Outcome:
    """What a run did; its JSON is the last line on stdout."""

    experiment: str
    points: int = 0
    measured: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    rows_file: str = ""
    figures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def model_settings(model: ModelConf) -> dict[str, Any]:
    """`model` as JSON values, for `Point.settings`."""
    return {**asdict(model), "dtype": model.dtype.name}


def by_cell(points: Sequence[Point], *differing: str) -> Iterator[list[Point]]:
    """Groups of consecutive points that are equal but for the columns `differing` (by default `system`): the cells
    that are timed side by side.
    """
    apart = differing or ("system",)

    def cell(point: Point) -> str:
        same = {name: value for name, value in point.columns().items() if name not in apart}
        return json.dumps([same, dict(point.settings)], sort_keys=True)

    for _, group in itertools.groupby(points, key=cell):
        yield list(group)


def run(cfg: DictConfig, experiment: Experiment) -> Outcome:
    """Measure what is missing or stale of `experiment` under `cfg`, then draw it if its rows changed.

    Rows are on disk after every point, so an interruption loses at most the point in progress. A point whose result
    fails its check is listed in `Outcome.failed` and gets no row. Raises `ConfigError` for a choice that cannot run
    and `RowsError` for files that cannot be read or written, both before anything is measured.
    """
    started = time.perf_counter()
    settled = settle(cfg, experiment)
    places = folders(settled)
    rows = RowFile(places.fresh_rows / f"{experiment.name}.csv")
    digest = partial(config_hash, experiment, settled, machine=_machine())
    points = list(experiment.points(settled))
    done = set() if settled.force else {row.config_hash for row in rows.rows}
    pending = [point for point in points if digest(point) not in done]
    outcome = Outcome(experiment.name, len(points), skipped=len(points) - len(pending), rows_file=str(rows.path))
    if pending:
        ensure_writable(places.fresh_rows)
        _prepare(settled)
        rows.path.with_suffix(".json").write_text(_configuration(cfg), encoding="utf-8")
        try:
            _measure(experiment, settled, pending, digest, rows, outcome)
        finally:
            experiment.release()
    if settled.draw and rows.rows:
        outcome.figures = _draw(experiment, rows, places)
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def _machine() -> dict[str, str]:
    return {"device": environment.device_name(), "torch": environment.installed("torch")}


def _configuration(cfg: DictConfig) -> str:
    """The composed configuration as JSON, kept beside the rows for the figure's provenance; folders are left out."""
    content = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    return json.dumps({key: value for key, value in content.items() if key != "paths"}, indent=1) + "\n"


def _prepare(cfg: Config) -> None:
    """Give torch its threads and seed, and prove that the device is there."""
    import torch

    torch.set_num_threads(cfg.hardware.threads or environment.usable_cores())
    torch.manual_seed(0)
    if cfg.hardware.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"hardware={cfg.hardware.name} needs a GPU and torch sees none: choose hardware=cpu")


def _measure(
    experiment: Experiment,
    cfg: Config,
    pending: list[Point],
    digest: Callable[[Point], str],
    rows: RowFile,
    outcome: Outcome,
) -> None:
    """Measure `pending` group by group; every finished group is on disk before the next one starts."""
    stamp = environment.stamp()
    with tqdm(total=len(pending), desc=experiment.name, unit="point", dynamic_ncols=True) as progress:
        for group in experiment.together(pending):
            progress.set_postfix_str(group[0].label(), refresh=True)
            try:
                readings = experiment.measure_together(cfg, group)
            except CheckFailed as error:
                outcome.failed.append(f"{group[0].label()}: {error}")
                progress.write(f"{experiment.name}: no row for {group[0].label()}: {error}", file=sys.stderr)
            else:
                to_row = partial(_row, experiment, cfg, stamp)
                found = zip(group, readings, strict=True)
                rows.replace([to_row(point, digest(point), one) for point, many in found for one in many])
                outcome.measured += len(group)
                progress.set_postfix_str(_just_measured(group[-1], readings[-1]), refresh=False)
            progress.update(len(group))


def _row(
    experiment: Experiment, cfg: Config, stamp: Mapping[str, Any], point: Point, digest: str, reading: Reading
) -> Row:
    return Row(
        figure=experiment.figure,
        hardware=cfg.hardware.name,
        timer=cfg.timer.name,
        scale=cfg.scale.name,
        config_hash=digest,
        device=environment.device_name() if cfg.hardware.device == "cuda" else environment.cpu_name(),
        **asdict(reading),
        **point.columns(),
        **stamp,
    )


def _just_measured(point: Point, readings: Sequence[Reading]) -> str:
    first = readings[0] if readings else None
    return f"{point.label()}: {first.metric} {first.value:.4g} {first.unit}" if first else point.label()


def _draw(experiment: Experiment, rows: RowFile, places: Folders) -> list[str]:
    """Draw the figure unless it is newer than its rows; matplotlib is not imported when there is nothing to draw."""
    target = places.fresh_figures / f"{experiment.name}.png"
    if not target.exists() or target.stat().st_mtime < rows.path.stat().st_mtime:
        from experiments.plots.draw import draw

        return [str(path) for path in draw(experiment, rows.path, places.fresh_figures, places.paper)]
    return [str(target)]


class CheckOutputs(Callback):
    """Hydra callback: an unwritable output folder is one clear line, before Hydra makes its run folder there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        or_exit(lambda: ensure_writable(folders(config).fresh_rows.parent))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.on_run_start(config)


def or_exit(work: Callable[[], Any]) -> Any:
    """`work()`; what a user can mend ends the run with its message and no traceback."""
    try:
        return work()
    except (ConfigError, RowsError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: finished rows are on disk; run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(2)


def register(experiment: Experiment) -> None:
    """Make `experiment` a primary config of Hydra, with its schema and its own defaults."""
    described = sys.modules[type(experiment).__module__].__doc__ or experiment.name
    choices = {"figure": experiment.name, **experiment.defaults}
    register_app(experiment.name, described.strip(), experiment.conf, **choices)


def main(experiment: Experiment) -> None:
    """The command line of a figure's script: compose, run, print the outcome as one line of JSON."""
    register(experiment)

    def job(cfg: DictConfig) -> None:
        outcome = or_exit(lambda: run(cfg, experiment))
        print(json.dumps(asdict(outcome), separators=(",", ":")), flush=True)
        if outcome.failed:
            raise SystemExit(1)

    hydra.main(version_base="1.3", config_path=str(CONF), config_name=experiment.name)(job)()
