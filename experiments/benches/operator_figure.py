"""Base of Figures 7 to 9, README and the studies of the operator: a grid over popularity, batch and rank. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from tqdm import tqdm

from experiments.harness import PROTOCOL, Config, Experiment, FigureConf, Point, Reading, sampled
from experiments.harness.schema import Count, Counts, DType
from experiments.harness.settings import slots_for

if TYPE_CHECKING:
    from experiments.benches.operators import Problem
    from experiments.measure.timing import Call

BEFORE = -1  # what is called before a round's points


class OperatorConf(FigureConf):
    """Shapes of one LoRA projection: x [T, h1], A [r, h1], B [h2, r]."""

    h1: Count
    h2: Count
    batch_sizes: Counts
    dtype: DType

    def settings(self, cfg: Config) -> dict[str, Any]:
        return {"h1": self.h1, "h2": self.h2, "dtype": self.dtype.name, "resident": self.resident(cfg)}

    def resident(self, cfg: Config) -> int:
        """Return the adapters on the device: a server's slots hold more than one batch uses."""
        return slots_for(cfg, self.batch_sizes)


def operator_conf(cfg: Config) -> OperatorConf:
    return cast(OperatorConf, cfg.figure)


def points_of_gpu(experiment: Experiment, cfg: Config, points: Iterable[Point]) -> list[Point]:
    if cfg.hardware.device != "cpu":
        return list(points)
    tqdm.write(f"{experiment.name}: nothing to measure on a CPU; it needs a GPU", file=sys.stderr)
    return []


class OperatorExperiment(Experiment):
    """Times the systems of a cell (same popularity, batch and rank) interleaved, after checking every one."""

    reads: ClassVar[Sequence[str]] = ("workload", "adapters.ranks", "adapters.slots", *PROTOCOL)
    differing: ClassVar[Sequence[str]] = ("system",)
    host_clock_too = True

    def points(self, cfg: Config) -> list[Point]:
        settings = self.settings(cfg)
        return [
            Point(self.panel(workload, rank), system, workload, batch_size=rows, rank=rank, settings=settings)
            for rank in cfg.adapters.ranks
            for rows in operator_conf(cfg).batch_sizes
            for workload in cfg.workload.names
            for system in cfg.system.names
        ]

    def panel(self, workload: str, rank: int) -> str:
        return workload

    def settings(self, cfg: Config) -> dict[str, Any]:
        return operator_conf(cfg).settings(cfg)

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        """Time all points interleaved; no readings for operators that this torch cannot run."""
        from experiments.benches import operators

        calls = {}
        for index, point in enumerate(points):
            try:
                calls[index] = self.calls(cfg, point)
            except operators.Unsupported as error:
                tqdm.write(f"{self.name}: no row for {point.label()}: {error}", file=sys.stderr)
        if calls and cfg.timer.name == "host_clock":  # emptied caches lack this program, too: a call of no point first
            calls = {BEFORE: self.calls(cfg, points[min(calls)]), **calls}
        samples = operators.microseconds(cfg, calls, apart=True)
        return [
            self.readings(cfg, point, samples[index]) if index in samples else [] for index, point in enumerate(points)
        ]

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        return sampled("latency", samples, "us")

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        from experiments.benches import operators

        if point.rank is None:
            return operators.prepare_backbone(cfg, cast(int, point.batch_size))
        return operators.prepare_checked(self.problems(cfg, point), point.system)

    def problems(self, cfg: Config, point: Point) -> list[Problem]:
        from experiments.benches.operators import problems

        return problems(cfg, point.workload, cast(int, point.batch_size), cast(int, point.rank))
