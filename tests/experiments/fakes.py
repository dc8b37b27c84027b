"""An experiment that costs nothing, for tests of the harness."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from experiments.benches.operator_figure import OperatorConf
from experiments.harness import PROTOCOL, CheckFailed, Config, Experiment, Point, Reading, sampled
from experiments.harness.catalogue import experiments
from experiments.harness.command import register
from experiments.harness.passes import Outcome
from experiments.harness.resume import run
from experiments.harness.schema import CONF, REPOSITORY
from experiments.harness.settings import settle
from experiments.measure.disturbance import Disturbance
from experiments.measure.records import Row, read_rows

NAME = "fig08_lora_operator"
GRID = ("workload=distinct", "figure.batch_sizes=[1,2]", "scale.passes=3", "scale.tries=2")
PAPER = REPOSITORY / "paper_results"
BASE = Row(
    figure="8", panel="Skewed", system="SGMV", workload="Skewed", model="", hardware="h200", batch_size=1, seq_len=None,
    rank=16, metric="latency", value=10.0, unit="us", statistic="median", timer="cuda_graph", scale="laptop",
)  # fmt: skip
QUIET = Disturbance(disturbed=False, other_cpu=0.001, calib_gemm_us=100.0, calib_copy_us=1000.0)
"""What a measurement on a machine of one's own finds."""


def rows_of(tmp_path, statistic="median"):
    """Rows on disk of a run at smoke scale."""
    found = read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv")
    return [row for row in found if row.statistic == statistic]


class Fake(Experiment):
    """Counts its measurements; `wrong` batch sizes fail their check, `stop_at` ends the run like Ctrl-C."""

    name, figure, order, conf = NAME, "8", 1, OperatorConf
    reads = ("workload", "adapters.ranks", *PROTOCOL)

    def __init__(self, wrong: Sequence[int] = (), stop_at: int | None = None) -> None:
        self.wrong, self.stop_at, self.measured = wrong, stop_at, []

    def points(self, cfg: Config) -> list[Point]:
        assert isinstance(cfg.figure, OperatorConf)
        return [
            Point(workload, "SGMV", workload, batch_size=rows, rank=16, settings={"h1": cfg.figure.h1})
            for workload in cfg.workload.names
            for rows in cfg.figure.batch_sizes
        ]

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        if point.batch_size == self.stop_at:
            raise KeyboardInterrupt
        if point.batch_size in self.wrong:
            raise CheckFailed("off by one")
        self.measured.append((point.workload, point.batch_size))
        return sampled("latency", [1.0, 2.0, 3.0], "us")


ConfigStore.__deepcopy__ = lambda store, _: store  # Hydra copies it at each composition, which is half of the time


@cache
def _register_all() -> None:
    for experiment in experiments():
        register(experiment)


@cache
def _composed(name: str, overrides: tuple[str, ...], options: tuple[tuple[str, int], ...]) -> tuple[bytes, object]:
    """A configuration, pickled, and the options that Hydra chose from, kept so that no other gets their id."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(compose(name, overrides=list(overrides))), dict(_options(ConfigStore.instance().repo))


def _options(group: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is registered with Hydra, by its path."""
    for name, found in group.items():
        if isinstance(found, dict):
            yield from _options(found, f"{above}/{name}")
        else:
            yield f"{above}/{name}", found.node


def composed(tmp_path, *overrides: str, name: str = NAME) -> DictConfig:
    """The configuration of experiment `name` at smoke scale with outputs in `tmp_path`, and `overrides` on top. Hydra
    takes a tenth of a second, so it is asked once for the same.
    """
    _register_all()
    options = tuple((path, id(node)) for path, node in _options(ConfigStore.instance().repo))
    keys = [override.partition("=")[0] for override in overrides]
    usual = (choice for choice in ("scale=smoke", "hardware=cpu") if choice.partition("=")[0] not in keys)
    config = pickle.loads(_composed(name, (*usual, *overrides), options)[0])
    places = {"outputs": tmp_path, "results": f"{tmp_path}/results", "figures": f"{tmp_path}/figures"}
    given = {"draw": False, **{f"paths.{path}": str(place) for path, place in places.items()}}
    for key in given.keys() - keys:
        OmegaConf.update(config, key, given[key])
    return config


def settled(tmp_path, experiment: Experiment, *overrides: str) -> Config:
    return settle(composed(tmp_path, *overrides, name=experiment.name), experiment)


def points_of(tmp_path, experiment: Experiment, *overrides: str) -> list[Point]:
    return experiment.points(settled(tmp_path, experiment, *overrides))


def measured(tmp_path, experiment: Experiment, *overrides: str) -> tuple[Outcome, list[Row]]:
    """Measure and draw an experiment without a failure; its outcome and its rows, to which a second run adds none."""
    outcome = run(composed(tmp_path, *overrides, "draw=true", name=experiment.name), experiment)
    assert (outcome.failed, len(outcome.figures)) == ([], 2)
    assert run(composed(tmp_path, *overrides, name=experiment.name), experiment).measured == 0
    return outcome, read_rows(outcome.rows_file)


def git(root, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def interpreted(code: str, *words: str) -> list[str]:
    """The lines that `code` prints in Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    begin = "import fast_interpreter\nfast_interpreter.install()\n"
    paths = os.pathsep.join(["tests/experiments", "tests/ops/triton_ops", str(REPOSITORY)])
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", begin + code, *words], capture_output=True, text=True, cwd=REPOSITORY,
                          env={**os.environ, **environment}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
