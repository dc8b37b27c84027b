"""Ranges of measurements: twice the farthest repeat, never less than the floor, one rule for all lines."""

import pytest

from experiments.report.expected import CPU_FLOOR, FLOOR, TIMES, comparable, left_out, ranges
from tests.experiments.expected.made_rows import frame, made


def only(table):
    """Return the single line of a table."""
    (line,) = table.itertuples()
    return line


def test_a_line_recorded_once_has_the_floor():
    line = only(ranges(frame(made(10.0))))
    assert (line.points, line.repeats) == (3, 0)
    assert (line.low, line.high) == pytest.approx((1 / (1 + FLOOR), 1 + FLOOR))


def test_a_cpu_has_a_floor_of_its_own():
    line = only(ranges(frame(made(10.0, 10.01, 9.99, hardware="cpu"))))
    assert (line.low, line.high) == pytest.approx((1 / (1 + CPU_FLOOR), 1 + CPU_FLOOR))


def test_repeats_closer_than_the_floor_do_not_narrow_it():
    assert only(ranges(frame(made(10.0, 10.01, 9.99)))).high == pytest.approx(1 + FLOOR)


def test_a_range_reaches_twice_as_far_as_the_farthest_repeat():
    line = only(ranges(frame(made(10.0, 13.0, 9.0))))
    assert line.high == pytest.approx(1.3**TIMES)
    assert line.low == pytest.approx(1 / line.high)
    assert line.repeats == 3


def test_lines_of_a_figure_and_metric_share_the_farthest_repeat():
    table = ranges(frame(made(10.0, 13.0, 9.0), made(20.0, system="Loop"), made(5.0, figure="9")))
    high = dict(zip(zip(table["figure"], table["system"], strict=True), table["high"], strict=True))
    assert high["8", "Loop"] == high["8", "SGMV"] > high["9", "SGMV"]


def test_a_disturbed_repeat_counts_only_where_none_was_quiet():
    quiet = made(10.0, 10.0, 10.0)
    loud = [row for row in made(10.0, 10.0, 10.0, 40.0, disturbed=True) if row.repeat == 3]
    assert only(ranges(frame(quiet, loud))).high == pytest.approx(1 + FLOOR)
    assert only(ranges(frame(made(10.0, 20.0, disturbed=True)))).high > 1 + FLOOR


def test_what_has_no_range_is_counted_by_reason():
    rows = frame(
        made(1.0), made(2.0, scale="smoke"), made(3.0, kind="simulated"), made(4.0, metric="added_latency"),
        made(0.0, system="none"), made(5.0, statistic="p90"),
    )  # fmt: skip
    assert list(left_out(rows).values()) == [3, 3, 3, 3]
    assert set(comparable(rows)["value"]) == {1.0, 8.0, 64.0}
    assert left_out(frame(made(1.0))) == {}
