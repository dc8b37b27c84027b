"""Measurement of a grid: repeats spread in time, disturbed ones measured again, within a share of time.

A point is measured once per pass; odd passes run backwards, which cancels a drift. Rows are on disk at once. A repeat
that `measure.disturbance` marks is measured again at the end, up to `scale.tries` times; only a quieter one replaces
rows. What does not fit into the `budget` is left out and counted.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from experiments.harness.budget import SLACK, Budget, OutOfTime
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import is_read, keys_read
from experiments.measure.disturbance import Disturbance, Watch
from experiments.measure.records import ImpossibleRow, Row, RowFile

Group = list[Point]
"""Points of one repeat that are timed side by side."""
Noise = dict[tuple[str, int | None], float]
"""(config hash, repeat) -> `other_cpu` of rows that are marked as disturbed."""


@dataclass
class Outcome:
    """Outcome of a run, in points times repeats; its JSON is the last line on stdout."""

    experiment: str
    points: int = 0
    measured: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    disturbed: int = 0
    left_out: int = 0
    rows_file: str = ""
    figures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Passes:
    """Measurement of one experiment into `rows` within `budget`. `clocks`: clock -> its configuration. `columns`: of
    all rows; `digest`: a point's config hash; `noise`: marks rows of earlier runs.
    """

    def __init__(
        self, experiment: Experiment, clocks: Mapping[str, Config], columns: dict[str, Any],
        digest: Callable[[Point], str], rows: RowFile, noise: Noise, budget: Budget,
    ) -> None:  # fmt: skip
        self.experiment, self.rows, self.budget, self._clocks = experiment, rows, budget, clocks
        self.cfg = next(iter(clocks.values()))
        self._columns, self._digest, self._noise = columns, digest, noise
        self._wrong: set[str] = set()  # labels of points whose check failed

    def run(self, pending: Sequence[Point], outcome: Outcome) -> None:
        passes, begun = list(self._passes(pending)), False
        self._left, self.outcome = len(pending), outcome  # points to be measured, all passes together
        with tqdm(total=len(pending), desc=self.experiment.name, unit="point", dynamic_ncols=True) as self.progress:
            for index, groups in enumerate(passes):
                if index:
                    left = itertools.chain.from_iterable(passes[index:])
                    seconds = sum(self.budget.estimate(_key(group)) for group in left)
                    self._say(f"{len(passes) - index} of {len(passes)} passes left, at most {seconds / 60:.1f} min")
                new = any(self._noise_of(group) is None for group in groups)
                self._pass(groups, may_give_way=self.budget.firm or (index > 0 and (begun or not new)))
                begun |= new
            for _ in range(self.cfg.scale.tries):
                self._measure_marked(passes)
            if outcome.left_out:
                self._say(
                    f"{outcome.left_out} measurements did not fit into its time; the same command goes on with them"
                )
        outcome.disturbed = sum(map(len, self._marked(passes)))

    def _passes(self, pending: Sequence[Point]) -> Iterator[list[Group]]:
        for repeat in sorted({point.repeat for point in pending}):
            points = [point for point in pending if point.repeat == repeat]
            yield list(self.experiment.together(points[::-1] if repeat % 2 else points))

    def _pass(self, groups: list[Group], may_give_way: bool) -> None:
        for group in groups:
            self.progress.set_postfix_str(group[0].label(), refresh=True)
            if may_give_way and self.outcome.measured and not self.budget.fits(_key(group), slack=SLACK):
                self.outcome.left_out += len(group)  # rows of earlier runs stay, with their marks
            elif group[0].label() not in self._wrong:
                if self._measure(group):
                    self.outcome.measured += len(group)
                elif group[0].label() not in self._wrong:
                    self.outcome.left_out += len(group)
            self._left -= len(group)
            self.progress.update(len(group))

    def _measure_marked(self, passes: Iterable[list[Group]]) -> None:
        """Measure marked groups once more, the most disturbed first, where the time that each took before is left."""
        for group in sorted(self._marked(passes), key=lambda group: -(self._noise_of(group) or 0.0)):
            if self.budget.fits(_key(group)):
                self.progress.set_postfix_str(f"again: {group[0].label()}", refresh=True)
                self._measure(group)

    def _measure(self, group: Group) -> bool:
        """Measure `group`, and write its rows unless quieter ones are there; False where it failed or was stopped."""
        try:
            with self.budget.spending(_key(group), whole=not self.outcome.measured):
                watch = Watch(self.cfg.hardware.device) if self.experiment.watched else None
                readings = self.experiment.measure_together(self._in_time(group), group)
                found = watch.stop() if watch else None
        except CheckFailed as error:
            self._fail(group, error)
            return False
        except OutOfTime:
            self.experiment.release()  # what is kept may be half done
            return False
        before = self._noise_of(group)
        if before is None or found is None or not found.disturbed or (found.other_cpu or 0.0) < before:
            try:
                self._keep(group, readings, found)
            except ImpossibleRow as error:
                self._fail(group, error)
                return False
        return True

    def _keep(self, group: Group, readings: Sequence[Sequence[Reading]], found: Disturbance | None) -> None:
        pairs = [(point, one) for point, many in zip(group, readings, strict=True) for one in many]
        columns = asdict(found) if found else {}
        rows = [
            Row(config_hash=self._digest(point), **{**self._columns, **point.columns(), **one.columns(), **columns})
            for point, one in pairs
        ]
        self.rows.replace(rows)
        for point in group:
            self._noise.pop((self._digest(point), point.repeat), None)
            if found and found.disturbed:
                self._noise[self._digest(point), point.repeat] = found.other_cpu or 0.0

    def _noise_of(self, group: Group) -> float | None:
        """`other_cpu` of the marked rows of `group`; None where a point of it has none."""
        found = [self._noise.get((self._digest(point), point.repeat)) for point in group]
        return None if None in found else max(value for value in found if value is not None)

    def _marked(self, passes: Iterable[list[Group]]) -> list[Group]:
        return [group for groups in passes for group in groups if self._noise_of(group) is not None]

    def _in_time(self, group: Group) -> Config:
        """The configuration of `group`'s clock with no more seconds per point than time allows, where they are read."""
        cfg = self._clocks[group[0].timer]
        if not is_read("scale.seconds_per_point", keys_read(self.experiment)):
            return cfg
        seconds = self.budget.seconds_per_point(cfg.scale.seconds_per_point, self._left)
        return cfg.model_copy(update={"scale": cfg.scale.model_copy(update={"seconds_per_point": seconds})})

    def _fail(self, group: Group, error: Exception) -> None:
        digests = {self._digest(point) for point in group}
        named = {"metric": "", "value": 0.0, "unit": ""}
        self.rows.drop({Row(**{**self._columns, **point.columns(), **named}).point for point in group})
        self._noise = {key: noise for key, noise in self._noise.items() if key[0] not in digests}
        self._wrong.update(point.label() for point in group)
        self.outcome.failed.append(f"{group[0].label()}: {error}")
        self._say(f"no row for {group[0].label()}: {error}")

    def _say(self, text: str) -> None:
        self.progress.write(f"{self.experiment.name}: {text}", file=sys.stderr)


def _key(group: Group) -> str:
    """Return the same text for all repeats of `group` under one clock, forth and back."""
    return f"{group[0].timer} {min(str(point.key()) for point in group)}"
