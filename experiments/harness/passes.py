"""Measures a grid pass after pass, so that repeats of a point are spread in time; disturbed ones again while time is.

Rows are on disk after every group of points. What a pass measured beside other work is marked, and measured again
after the last pass, when that work may be over: at most `scale.tries` times, within the figure's share of time. A row
gives way only to a quieter one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from tqdm import tqdm

from experiments.harness.budget import Budget
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from punica.measure.disturbance import Disturbance, Watch
from punica.measure.records import Row, RowFile

MakeRow = Callable[..., Row]
"""`make_row(point, **columns of the reading and of its disturbance)`."""
Loud = Callable[[Point], float | None]
"""The `other_cpu` of the marked rows of a point that an earlier run left to be measured again; None where it has none.
"""
Group = list[Point]


@dataclass
class Measured:
    """What came of it: points measured, failed ones with the reason, points whose rows are marked as disturbed, and how
    many passes were left out for want of time.
    """

    points: int = 0
    failed: list[str] = field(default_factory=list)
    disturbed: int = 0
    passes_left_out: int = 0


class Passes:
    """The measuring of one experiment under `cfg` into `rows`."""

    def __init__(self, experiment: Experiment, cfg: Config, make_row: MakeRow, rows: RowFile, loud: Loud) -> None:
        self.experiment, self.cfg, self.rows, self._loud = experiment, cfg, rows, loud
        self.outcome = Measured()
        self._make_row = make_row
        self._marked: list[tuple[Group, Disturbance]] = []
        self._failed: set[str] = set()

    def run(self, pending: list[Point], derived: list[Point]) -> Measured:
        """Measure `pending`, repeat by repeat, then those that are marked again, then what is `derived` from them."""
        minutes = self.cfg.scale.minutes.get(self.experiment.name)
        budget = Budget(None if minutes is None else 60 * minutes, len(pending))
        repeats, left_out = sorted({point.repeat for point in pending}), []
        with tqdm(total=len(pending), desc=self.experiment.name, unit="point", dynamic_ncols=True) as progress:
            for index, repeat in enumerate(repeats):
                if index and not budget.next_pass():
                    left_out = repeats[index:]
                    progress.write(f"{self.experiment.name}: {_short_of_time(len(left_out), minutes)}", file=sys.stderr)
                    break
                self._pass([point for point in pending if point.repeat == repeat], budget, progress)
            self._again(budget, progress)
            self._derive([point for point in derived if point.repeat not in left_out], progress)
        self.outcome.passes_left_out = len(left_out)
        self.outcome.disturbed = sum(len(group) for group, _ in self._marked)
        return self.outcome

    def _pass(self, points: list[Point], budget: Budget, progress: tqdm) -> None:
        groups = list(self.experiment.together(points))
        if points[0].repeat % 2:  # forth and back, so that a drift of the machine cancels
            groups.reverse()
        for group in groups:
            progress.set_postfix_str(group[0].label(), refresh=True)
            if group[0].label() not in self._failed and (found := self._visit(group, budget, progress)):
                readings, disturbance = found
                before = self._earlier(group)
                if before is None or _quieter(disturbance, before):
                    self._keep(group, readings, disturbance)
                else:
                    disturbance = before
                self.outcome.points += len(group)
                values = [f": {one.metric} {one.value:.4g} {one.unit}" for one in readings[-1][:1]]
                progress.set_postfix_str("".join([group[-1].label(), *values]), refresh=False)
                if disturbance.disturbed:
                    self._marked.append((group, disturbance))
            budget.visited(len(group))
            progress.update(len(group))

    def _earlier(self, group: Group) -> Disturbance | None:
        """What disturbed the rows that an earlier run left of all of `group`; None when one has none."""
        found = [self._loud(point) for point in group]
        known = [other for other in found if other is not None]
        return Disturbance(True, max(known), None, None) if len(known) == len(group) else None

    def _visit(self, group: Group, budget: Budget, progress: tqdm) -> tuple[list[list[Reading]], Disturbance] | None:
        """Readings of `group` and what disturbed them; None when a result was wrong, which is noted."""
        scale = replace(self.cfg.scale, seconds_per_point=budget.seconds_per_point(self.cfg.scale.seconds_per_point))
        watch = Watch(self.cfg.hardware.device)
        try:
            readings = self.experiment.measure_together(replace(self.cfg, scale=scale), group)
        except CheckFailed as error:
            self._fail(group, error, progress)
            return None
        return readings, watch.stop()

    def _fail(self, group: Group, error: CheckFailed, progress: tqdm) -> None:
        self.rows.drop({self._make_row(point, metric="", value=0.0, unit="").point for point in group})
        self._failed.add(group[0].label())
        self.outcome.failed.append(f"{group[0].label()}: {error}")
        progress.write(f"{self.experiment.name}: no row for {group[0].label()}: {error}", file=sys.stderr)

    def _keep(self, group: Group, readings: Iterable[list[Reading]], disturbance: Disturbance | None) -> None:
        columns = {} if disturbance is None else asdict(disturbance)
        found = zip(group, readings, strict=True)
        self.rows.replace(
            [self._make_row(point, **{**asdict(one), **columns}) for point, many in found for one in many]
        )

    def _again(self, budget: Budget, progress: tqdm) -> None:
        """Measure marked groups again, the most disturbed first, while there is time for as much as they took."""
        for _ in range(self.cfg.scale.tries):
            waiting, self._marked = sorted(self._marked, key=lambda pair: -(pair[1].other_cpu or 0.0)), []
            for group, before in waiting:
                found = None
                if budget.left > 0:
                    progress.set_postfix_str(f"again: {group[0].label()}", refresh=True)
                    found = self._visit(group, budget, progress)
                if found and _quieter(found[1], before):
                    self._keep(group, *found)
                    before = found[1]
                if before.disturbed:
                    self._marked.append((group, before))

    def _derive(self, points: list[Point], progress: tqdm) -> None:
        for point in points:
            try:
                readings = self.experiment.measure(self.cfg, point)
            except CheckFailed as error:
                if point.label() not in self._failed:
                    self._fail([point], error, progress)
            else:
                self._keep([point], [readings], None)
                self.outcome.points += 1


def _short_of_time(passes: int, minutes: float | None) -> str:
    return (
        f"{passes} of its passes would not end within its {minutes:g} minutes and are left out; the next run measures "
        "them (or raise scale.minutes)"
    )


def _quieter(now: Disturbance, before: Disturbance) -> bool:
    return not now.disturbed or (now.other_cpu or 0.0) < (before.other_cpu or 0.0)
