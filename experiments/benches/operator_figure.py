"""Base of Figures 7, 8, 9 and README: a grid over popularity, batch and rank, systems timed side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from tqdm import tqdm

from experiments.benches.operator_conf import operator_conf
from experiments.harness import PROTOCOL, Config, Experiment, Point, Reading, sampled

if TYPE_CHECKING:
    from experiments.measure.timing import Call


class OperatorExperiment(Experiment):
    """Times the systems of a cell (same popularity, batch and rank) interleaved, after checking every one."""

    reads: ClassVar[Sequence[str]] = ("workload", "adapters.ranks", "adapters.slots", *PROTOCOL)
    differing: ClassVar[Sequence[str]] = ("system",)
    host_clock_too = True

    def points(self, cfg: Config) -> list[Point]:
        """Return every system at every rank, batch and popularity."""
        settings = self.settings(cfg)
        return [
            Point(self.panel(workload, rank), system, workload, batch_size=rows, rank=rank, settings=settings)
            for rank in cfg.adapters.ranks
            for rows in operator_conf(cfg).batch_sizes
            for workload in cfg.workload.names
            for system in cfg.system.names
        ]

    def panel(self, workload: str, rank: int) -> str:
        """Name the panel of a point."""
        return workload

    def settings(self, cfg: Config) -> dict[str, Any]:
        """Return the settings that decide a point's number beside its columns."""
        return operator_conf(cfg).settings(cfg)

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        samples = self.samples(cfg, points)
        return [self.readings(cfg, point, one) if one else [] for point, one in zip(points, samples, strict=True)]

    def readings(self, cfg: Config, point: Point, samples: list[float]) -> list[Reading]:
        """Return the readings of one point from its microseconds."""
        return sampled("latency", samples, "us")

    def operator(self, point: Point) -> str:
        """Return the name in `experiments.benches.operators.OPERATORS` of `point.system`."""
        return point.system

    def calls(self, cfg: Config, point: Point) -> list[Call]:
        """Prepare checked calls of `point` on different inputs."""
        from experiments.benches import operators

        rows = cast(int, point.batch_size)
        if point.rank is None:
            return operators.prepare_backbone(cfg, rows)
        batches = operators.problems(cfg, point.workload, rows, point.rank)
        return operators.prepare_checked(batches, self.operator(point))

    def samples(self, cfg: Config, points: Sequence[Point]) -> list[list[float]]:
        """Measure the microseconds of each point, all interleaved; none for operators that this torch cannot run."""
        from experiments.benches import operators

        calls = {}
        for index, point in enumerate(points):
            try:
                calls[index] = self.calls(cfg, point)
            except operators.Unsupported as error:
                tqdm.write(f"{self.name}: no row for {point.label()}: {error}", file=sys.stderr)
        samples = operators.microseconds(cfg, calls, apart=True)
        return [samples.get(index, []) for index in range(len(points))]
