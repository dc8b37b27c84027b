"""The experiment: a grid of points, a way to measure one, a way to draw all. See `experiments.harness` to add one."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from experiments.harness.points import Point, Reading, by_cell
from experiments.harness.schema import Config, FigureConf

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
PROTOCOL = ("scale.warmup", "scale.repeats", "scale.min_repeats", "scale.seconds_per_point", "scale.patience")
"""Settings read by an experiment that `experiments.measure.timing` times."""


@dataclass(frozen=True)
class Overlay:
    """Figure drawn by `plots.overlay`: a panel per value of column `panel` (None: one), a line per value of `line`."""

    title: str
    metric: str
    line: str
    panel: str | None = None
    part: str = ""  # a system whose lines are dotted: a part of what the others time, without the paper's beside it


class CheckFailed(RuntimeError):
    """Wrong result, whose speed means nothing: raised by `measure`; the point gets no row."""


def difference(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """`CheckFailed` when `found` differs from `expected` by more than `tolerance`, relative."""
    check_error(name, difference(found, expected), tolerance)


def check_error(name: str, error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise CheckFailed(f"{name} differs from the reference by {error:.2e} (relative), above {tolerance:.0e}")


class Experiment(ABC):
    """One figure: set the class attributes, write `points`, and `measure` or, side by side, `measure_together`."""

    name: ClassVar[str]  # the script's and the YAML's file name, e.g. fig08_lora_operator
    figure: ClassVar[str]  # as in paper_results and `facts.paper.FIGURE_FILES`, e.g. "8"
    order: ClassVar[int]  # place in `make reproduce`
    conf: ClassVar[type[FigureConf]]  # schema of conf/figure/<name>.yaml
    defaults: ClassVar[Mapping[str, str]] = {}  # other choices of config groups, e.g. {"adapters": "paper_ranks"}
    reads: ClassVar[Sequence[str]] = ()  # groups and keys of the configuration, see `harness.settings.keys_read`
    clock: ClassVar[str | None] = None  # the one clock that it is timed with; None: the one of `timer=`
    host_clock_too: ClassVar[bool] = False  # by `timer=auto` on a GPU the paper's clock times it beside the graph
    overlay: ClassVar[Overlay | None] = None  # how rows are drawn; None: by `drawn_by`
    drawn_by: ClassVar[str] = ""  # `module.function` of experiments.plots that makes a figure of (rows, the paper's)
    differing: ClassVar[Sequence[str]] = ()  # columns of the points that are timed side by side; (): each point alone
    passes: ClassVar[int | None] = None  # over the grid; None: `scale.passes`
    watched: ClassVar[bool] = True  # whether other work disturbs it; False: simulated, or it says itself what did
    version: ClassVar[int] = 1  # raise it when `measure` changes what its numbers mean: old rows become stale
    takes_trace: ClassVar[bool] = False  # whether `workload=trace` is read
    _kept: tuple[object, object] = (None, None)

    @abstractmethod
    def points(self, cfg: Config) -> list[Point]:
        """The grid that `cfg` asks for, in measuring order. Cheap: no torch."""

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        """Check `point`'s result against a reference (`CheckFailed` when it is wrong), then time it."""
        return self.measure_together(cfg, [point])[0]

    def shown(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of `frame`, measured or the paper's, that `overlay` draws."""
        return frame

    def kept(self, key: object, build: Callable[[], T]) -> T:
        """`build()`, built once for all points that need it under the same `key` (a model, a cache); one at a time."""
        if self._kept[0] != key:
            self.release()
            self._kept = (key, build())
        return cast(T, self._kept[1])

    def release(self) -> None:
        """Drop what is kept: called once a run has measured everything."""
        self._kept = (None, None)

    def known_systems(self, cfg: Config) -> Sequence[str]:
        """Names that `system=` may choose."""
        figure, on_gpu = cfg.figure, cfg.hardware.device != "cpu"
        return [name for name in figure.systems if on_gpu or name not in figure.gpu_systems]

    def together(self, points: Sequence[Point]) -> Iterable[list[Point]]:
        """Split `points` into groups that `measure_together` gets at once."""
        return by_cell(points, *self.differing) if self.differing else [[point] for point in points]

    def measure_together(self, cfg: Config, points: Sequence[Point]) -> list[list[Reading]]:
        """Readings of each of `points`; overridden where systems are timed interleaved, side by side."""
        return [self.measure(cfg, point) for point in points]


def config_hash(experiment: Experiment, cfg: Config, point: Point, machine: Mapping[str, Any]) -> str:
    """Twelve hex digits over what decides the number of `point`, but for its code (`harness.source`)."""
    protocol = {
        "timer": cfg.timer.name,
        "scale": [getattr(cfg.scale, key.partition(".")[2]) for key in PROTOCOL],
        "flush_mib": cfg.hardware.flush_mib,
        "threads": cfg.hardware.threads,
        "hardware": cfg.hardware.name,
    }
    content = [experiment.name, experiment.version, point.key(), protocol, dict(machine)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
