"""Measures a grid pass after pass, so that repeats of a point are spread in time; disturbed ones again while time is.

Rows are on disk after every group of points. What a pass measured beside other work is marked, and measured again, at
most `scale.tries` times: after each pass where few are marked, as a burst does it, ahead of further repeats of others,
and after the last one, when whatever it was may be over. A row gives way only to a quieter one.
What does not fit into the figure's share of time (`budget`) is left out and counted. The first pass that measures
anything new is begun in any case, so that runs of one command add up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from tqdm import tqdm

from experiments.harness.budget import Budget, OutOfTime
from experiments.harness.experiment import CheckFailed, Experiment
from experiments.harness.points import Point, Reading
from experiments.harness.schema import Config
from experiments.harness.settings import is_read, keys_read
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
    """What came of it: points measured, failed ones with the reason, points whose rows are marked as disturbed, and
    points that were left out for want of time.
    """

    points: int = 0
    failed: list[str] = field(default_factory=list)
    disturbed: int = 0
    left_out: int = 0


class _Marked(NamedTuple):
    """Points whose rows are marked: what disturbed them, and how often they were measured again."""

    group: Group
    disturbance: Disturbance
    tries: int = 0


class Passes:
    """The measuring of one experiment under `cfg` into `rows`, within `budget`."""

    def __init__(
        self, experiment: Experiment, cfg: Config, make_row: MakeRow, rows: RowFile, loud: Loud, budget: Budget
    ) -> None:
        self.experiment, self.cfg, self.rows, self._loud, self._budget = experiment, cfg, rows, loud, budget
        self.outcome = Measured()
        self._make_row = make_row
        self._marked: list[_Marked] = []
        self._failed: set[str] = set()
        self._short: set[int] = set()  # repeats of which something was left out

    def run(self, pending: list[Point], derived: list[Point]) -> Measured:
        """Measure `pending`, repeat by repeat, then those that are marked again, then what is `derived` from them."""
        self._budget.expect(len(pending))
        with tqdm(total=len(pending), desc=self.experiment.name, unit="point", dynamic_ncols=True) as progress:
            passes, began = list(self._passes(pending)), False
            for index, groups in enumerate(passes):
                self._say_what_is_left(passes[index:], index, progress)
                new = [self._earlier(group) is None for group in groups]  # else rows that an earlier run left marked
                may_give_way = index > 0 and (began or not any(new))
                if may_give_way and not self._budget.pass_fits([_key(group) for group in groups]):
                    for group in groups:
                        self._leave_out(group)
                else:
                    self._pass(groups, progress)
                    if 2 * len(self._marked) <= len(groups):  # else other work goes on, and would spoil them again
                        self._again(progress)
                    began |= any(new)
            for _ in range(self.cfg.scale.tries):
                self._again(progress)
            self._derive(derived, progress)
            if self.outcome.left_out:
                progress.write(f"{self.experiment.name}: {_short_of_time(self.outcome.left_out)}", file=sys.stderr)
        self.outcome.disturbed = sum(len(marked.group) for marked in self._marked)
        return self.outcome

    def _passes(self, pending: list[Point]) -> Iterator[list[Group]]:
        for repeat in sorted({point.repeat for point in pending}):
            groups = list(self.experiment.together([point for point in pending if point.repeat == repeat]))
            yield groups[::-1] if repeat % 2 else groups  # forth and back, so that a drift of the machine cancels

    def _say_what_is_left(self, passes: list[list[Group]], index: int, progress: tqdm) -> None:
        """How long what is left will take at most, once one pass has shown what its points cost with their set-up."""
        if index:
            seconds = sum(self._budget.estimate(_key(group)) for groups in passes for group in groups)
            left = f"{len(passes)} of {index + len(passes)} passes left, at most {seconds / 60:.1f} min"
            progress.write(f"{self.experiment.name}: {left}", file=sys.stderr)

    def _pass(self, groups: list[Group], progress: tqdm) -> None:
        for group in groups:
            progress.set_postfix_str(group[0].label(), refresh=True)
            if not self._budget.begins(_key(group)):
                self._leave_out(group)
            elif group[0].label() not in self._failed:
                self._first(group, progress)
            self._budget.visited(len(group))
            progress.update(len(group))

    def _first(self, group: Group, progress: tqdm) -> None:
        """Measure `group` for the first time in its pass."""
        found = self._visit(group, progress)
        if found is None:
            if group[0].label() not in self._failed:
                self._leave_out(group)
            return
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
            self._marked.append(_Marked(group, disturbance))

    def _leave_out(self, group: Group) -> None:
        """No time for `group`: what an earlier run left of it stays, with its mark."""
        self._short.add(group[0].repeat)
        self.outcome.left_out += len(group)
        if before := self._earlier(group):
            self._marked.append(_Marked(group, before))

    def _earlier(self, group: Group) -> Disturbance | None:
        """What disturbed the rows that an earlier run left of all of `group`; None when one has none."""
        found = [self._loud(point) for point in group]
        known = [other for other in found if other is not None]
        return Disturbance(True, max(known), None, None) if len(known) == len(group) else None

    def _visit(self, group: Group, progress: tqdm) -> tuple[list[list[Reading]], Disturbance] | None:
        """Readings of `group` and what disturbed them; None when a result was wrong, which is noted, or when it was
        stopped because it ran on beyond the figure's share.
        """
        try:
            with self._budget.spending(_key(group)):
                watch = Watch(self.cfg.hardware.device)
                readings = self.experiment.measure_together(self._in_time(), group)
                return readings, watch.stop()
        except CheckFailed as error:
            self._fail(group, error, progress)
        except OutOfTime:
            self.experiment.release()  # what is kept may be half done
        return None

    def _in_time(self) -> Config:
        """The configuration with no more seconds for a point than there is time for; as it is for an experiment that
        does not read them, so that its rows on disk can be told by it (`harness.on_disk`).
        """
        if not is_read("scale.seconds_per_point", keys_read(self.experiment)):
            return self.cfg
        wanted = self.cfg.scale.seconds_per_point
        scale = replace(self.cfg.scale, seconds_per_point=self._budget.seconds_per_point(wanted))
        return replace(self.cfg, scale=scale)

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

    def _again(self, progress: tqdm) -> None:
        """Measure marked groups once more, the most disturbed first, where there is time for what each took before."""
        waiting, self._marked = sorted(self._marked, key=lambda marked: -(marked.disturbance.other_cpu or 0.0)), []
        for group, before, tries in waiting:
            found = None
            if tries < self.cfg.scale.tries and self._budget.fits(_key(group)):
                tries += 1
                progress.set_postfix_str(f"again: {group[0].label()}", refresh=True)
                found = self._visit(group, progress)
            if found and _quieter(found[1], before):
                self._keep(group, *found)
                before = found[1]
            if before.disturbed and group[0].label() not in self._failed:
                self._marked.append(_Marked(group, before, tries))

    def _derive(self, points: list[Point], progress: tqdm) -> None:
        """What is computed from rows; nothing where those rows were left out."""
        for point in points:
            try:
                readings = self.experiment.measure(self.cfg, point)
            except CheckFailed as error:
                if point.repeat in self._short:
                    self.outcome.left_out += 1
                elif point.label() not in self._failed:
                    self._fail([point], error, progress)
            else:
                self._keep([point], [readings], None)
                self.outcome.points += 1


def _key(group: Group) -> str:
    """The same for all repeats of `group`."""
    return group[0].key()


def _short_of_time(points: int) -> str:
    return f"{points} of its measurements did not fit into its share of time; the same command goes on with them"


def _quieter(now: Disturbance, before: Disturbance) -> bool:
    return not now.disturbed or (now.other_cpu or 0.0) < (before.other_cpu or 0.0)
