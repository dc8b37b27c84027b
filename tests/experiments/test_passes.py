"""Repeats spread in time, disturbed points measured again, and a figure that keeps to its share of time."""

from dataclasses import replace

import pytest
from fakes import QUIET, Fake, composed

from experiments.harness import Point, Reading
from experiments.harness import passes as passes_module
from experiments.harness.budget import Budget
from experiments.harness.resume import run
from punica.measure.records import read_rows

GRID = ("workload=distinct", "figure.batch_sizes=[1,2]", "scale.passes=3", "scale.tries=2")
NAME = "fig08_lora_operator"
BUSY = replace(QUIET, disturbed=True, other_cpu=0.25)


def rows_of(tmp_path, statistic="median"):
    rows = read_rows(tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv")
    return [row for row in rows if row.statistic == statistic]


def test_passes_go_over_the_whole_grid_one_after_the_other(tmp_path):
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert (outcome.points, outcome.measured, outcome.disturbed) == (6, 6, 0)
    assert [batch for _, batch in fake.measured] == [1, 2, 2, 1, 1, 2]
    assert sorted((row.repeat, row.batch_size) for row in rows_of(tmp_path)) == [
        (r, b) for r in range(3) for b in (1, 2)
    ]
    assert len({row.config_hash for row in rows_of(tmp_path)}) == 2  # repeats are of one setting
    assert {(row.other_cpu, row.calib_gemm_us, row.disturbed) for row in rows_of(tmp_path)} == {(0.001, 100.0, False)}


def test_more_passes_measure_only_the_new_ones(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    fake = Fake()
    run(composed(tmp_path, *GRID, "scale.passes=4"), fake)
    assert [batch for _, batch in fake.measured] == [2, 1]
    assert sorted(row.repeat for row in rows_of(tmp_path)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_disturbed_point_is_measured_again_when_the_passes_are_done(tmp_path, machine):
    machine.script = [QUIET, BUSY]
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert [batch for _, batch in fake.measured] == [1, 2, 2, 1, 1, 2, 2]
    assert outcome.disturbed == 0
    assert len(rows_of(tmp_path)) == 6
    assert not any(row.disturbed for row in rows_of(tmp_path))


def test_a_point_that_stays_disturbed_is_tried_twice_and_marked_with_its_quietest_row(tmp_path, machine):
    machine.script = [BUSY, *[QUIET] * 5, replace(BUSY, other_cpu=0.5), replace(BUSY, other_cpu=0.1)]
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert len(fake.measured) == 6 + 2
    assert outcome.disturbed == 1
    assert [(row.repeat, row.batch_size, row.other_cpu) for row in rows_of(tmp_path) if row.disturbed] == [(0, 1, 0.1)]


def test_a_worse_second_try_does_not_replace_the_first(tmp_path, machine):
    machine.script = [BUSY, *[QUIET] * 5, *[replace(BUSY, other_cpu=0.5)] * 2]
    run(composed(tmp_path, *GRID), Fake())
    assert [row.other_cpu for row in rows_of(tmp_path) if row.disturbed] == [0.25]


def test_a_wrong_point_is_tried_in_one_pass_only(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Fake(wrong=[2]))
    assert len(outcome.failed) == 1
    assert outcome.measured == 3


class Slow(Fake):
    """Every measurement takes ten seconds of a clock that only it moves, and says what it was allowed."""

    now = 0.0

    def __init__(self):
        super().__init__()
        self.allowed = []

    def measure(self, cfg, point):
        self.allowed.append(cfg.scale.seconds_per_point)
        self.now += 10.0
        return super().measure(cfg, point)


@pytest.mark.parametrize(("minutes", "passes", "left_out"), [(1.0, 3, 0), (0.65, 2, 1), (0.1, 1, 2)])
def test_passes_that_would_not_end_in_time_are_left_out_but_never_the_first(
    tmp_path, monkeypatch, minutes, passes, left_out
):
    slow = Slow()
    monkeypatch.setattr(passes_module, "Budget", lambda *given: Budget(*given, clock=lambda: slow.now))
    outcome = run(composed(tmp_path, *GRID, f"+scale.minutes.{NAME}={minutes}"), slow)
    assert (outcome.measured, outcome.passes_left_out) == (2 * passes, left_out)
    assert {row.repeat for row in rows_of(tmp_path)} == set(range(passes))
    missing = Slow()
    run(composed(tmp_path, *GRID), missing)
    assert len(missing.measured) == 2 * left_out


def test_samples_give_way_before_passes_do(tmp_path, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(passes_module, "Budget", lambda *given: Budget(*given, clock=lambda: slow.now))
    run(composed(tmp_path, *GRID, f"+scale.minutes.{NAME}=1.0", "scale.seconds_per_point=4.5"), slow)
    assert slow.allowed == pytest.approx([4.5] * 6)
    slow.allowed.clear()
    run(composed(tmp_path, *GRID, f"+scale.minutes.{NAME}=1.0", "scale.seconds_per_point=9.0"), slow)
    assert slow.allowed == pytest.approx([5.0] * 6)


def test_nothing_is_tried_again_once_the_time_is_spent(tmp_path, monkeypatch, machine):
    slow = Slow()
    machine.script = [BUSY] * 6
    monkeypatch.setattr(passes_module, "Budget", lambda *given: Budget(*given, clock=lambda: slow.now))
    outcome = run(composed(tmp_path, *GRID, f"+scale.minutes.{NAME}=1.0"), slow)
    assert len(slow.allowed) == 6
    assert outcome.disturbed == 6


class Summed(Fake):
    """A point that is the sum of what is on disk of its repeat."""

    def points(self, cfg):
        return [Point("sum", "SGMV", "Distinct", batch_size=0), *super().points(cfg)]

    def is_derived(self, point):
        return point.panel == "sum"

    def count(self):
        self.measured.append(())
        return len(self.measured)

    def measure(self, cfg, point):
        if point.panel != "sum":
            return [Reading("latency", float(self.count()), "us")]
        rows = read_rows(self.path)
        return [Reading("total", sum(row.value for row in rows if row.repeat == point.repeat), "us", disturbed=True)]


def test_what_is_derived_comes_last_and_again_when_anything_changed(tmp_path, machine):
    machine.script = [QUIET, BUSY]
    summed = Summed()
    summed.path = tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv"
    run(composed(tmp_path, *GRID), summed)
    rows = rows_of(tmp_path, "value")
    by_repeat = {r: sum(row.value for row in rows if row.repeat == r and row.metric == "latency") for r in range(3)}
    assert {row.repeat: row.value for row in rows if row.metric == "total"} == by_repeat
    assert by_repeat == {
        0: 1.0 + 7.0,
        1: 3.0 + 4.0,
        2: 5.0 + 6.0,
    }  # the disturbed second was measured again as the seventh
    assert [row.disturbed for row in rows if row.metric == "total"] == [True] * 3
