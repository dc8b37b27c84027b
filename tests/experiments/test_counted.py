"""The rows that count: which scale, clock, repeat, and what becomes of several."""

from dataclasses import replace

import pytest
from fakes import BASE

from experiments.harness.counted import NOT_STEADY, clock_note, counted, frame_of, merged, unsteady

GRAPH, HOST = "cuda_graph", "host_clock"
STEADY, UNSTEADY, UNKNOWN = [5.0] * 10 + [5.49], [5.0] * 8 + [5.51] * 2, [5.0] * 30 + [None]


def of(**changes):
    return replace(BASE, **{"repeat": 0, **changes})


def host(*launches, **changes):
    """Rows of the host's clock, one batch size after the other, with these calibrations."""
    return [of(timer=HOST, batch_size=1 + i, calib_launch_us=us, **changes) for i, us in enumerate(launches)]


def points(*rows, clock=""):
    """The values of what counts, by batch and clock; in any order of the rows."""
    found = [merged(counted(frame_of(part), clock)) for part in (rows, rows[::-1])]
    told = [{(row.batch_size, row.timer): row.value for row in one.itertuples()} for one in found]
    assert told[0] == told[1]
    return told[0]


SCALES = [of(scale="paper", value=5.0), of(scale="gpu", value=6.0, date="2026-01-09"), of(batch_size=2)]
SMOKE = of(scale="smoke", value=1.0, batch_size=3)


@pytest.mark.parametrize(
    ("rows", "clock", "wanted"),
    [
        ([*SCALES, SMOKE], "", {(1, GRAPH): 5.0}),
        ([*SCALES, SMOKE], None, {(1, GRAPH): 5.0, (2, GRAPH): 10.0, (3, GRAPH): 1.0}),
        ([SMOKE], "", {(3, GRAPH): 1.0}),
        ([*SCALES, of(figure="9", batch_size=4)], "", {(1, GRAPH): 5.0, (4, GRAPH): 10.0}),
        ([of(), *host(5.0)], "", {(1, GRAPH): 10.0}),
        ([of(), *host(5.0)], HOST, {(1, HOST): 10.0}),
        ([of()], HOST, {(1, GRAPH): 10.0}),
        ([of(), *host(5.0)], None, {(1, GRAPH): 10.0, (1, HOST): 10.0}),
    ],
    ids=["scale", "scale of each point", "smoke alone", "another figure", "first clock", "the caller's clock",
         "a clock without rows", "each clock"],
)  # fmt: skip
def test_a_figure_has_the_largest_scale_and_a_metric_one_clock(rows, clock, wanted):
    assert points(*rows, clock=clock) == wanted


@pytest.mark.parametrize(
    ("launches", "counts"), [(STEADY, True), ([5.0] * 20 + [50.0], True), (UNSTEADY, False), (UNKNOWN, False)],
    ids=["steady", "one apart", "unsteady", "one not known"],
)  # fmt: skip
def test_the_clock_of_the_host_counts_where_all_launches_are_known_and_steady(launches, counts):
    rows = [*host(*launches), *(of(batch_size=1 + i) for i in range(len(launches)))]
    assert {timer for _, timer in points(*rows, clock=HOST)} == {HOST if counts else GRAPH}
    assert clock_note(frame_of(rows)) == ("" if counts else NOT_STEADY)
    assert len(points(*rows, clock=None)) == 2 * len(launches), "rows are compared one by one all the same"


def test_each_figure_and_scale_has_its_own_launches_and_a_cpu_has_no_other_clock():
    parts = [host(*STEADY, figure="9"), host(*UNSTEADY), host(*UNSTEADY, figure="9", scale="smoke")]
    found = unsteady(frame_of(row for part in parts for row in part))
    assert list(found) == [False] * len(STEADY) + [True] * 2 * len(UNSTEADY)
    assert not unsteady(frame_of([of(), *host(*UNKNOWN, hardware="cpu")])).any()


def test_what_the_host_alone_can_time_has_no_choice():
    rows = host(*UNKNOWN, figure="11", metric="step_latency")
    assert clock_note(frame_of(rows)) == ""
    assert len(points(*rows, of(figure="11"))) == len(rows) + 1, "by metric"
    simulated = of(figure="11", metric="step_latency", kind="simulated", timer="", panel="simulated")
    assert HOST in {timer for _, timer in points(*rows, simulated)}, "a simulation is no clock"


@pytest.mark.parametrize("clock", ["", None])
def test_the_newest_of_each_repeat_counts_undisturbed_before_others_and_a_row_of_all_before_repeats(clock):
    quiet = [of(repeat=i, value=value, date="2026-01-02") for i, value in enumerate((1.0, 2.0, 6.0))]
    loud = [of(repeat=i, value=value, disturbed=True) for i, value in enumerate((50.0, 60.0), start=7)]
    older = of(repeat=1, value=99.0, date="2026-01-01")
    assert points(*quiet, *loud, older, clock=clock) == {(1, GRAPH): 2.0}
    assert points(*loud, clock=clock) == {(1, GRAPH): 55.0}
    assert points(*quiet, of(repeat=None, value=4.0), clock=clock) == {(1, GRAPH): 4.0}


def test_ends_are_the_farthest_and_spreads_are_kept_apart_from_the_middle():
    rows = [of(repeat=i, statistic=name, value=value) for i in (0, 1)
            for name, value in (("p10", 1.0 + i), ("median", 2.0 + i), ("p90", 3.0 + i))]  # fmt: skip
    found = merged(counted(frame_of([*rows, of(repeat=2, statistic="p10", value=0.1, disturbed=True)])))
    assert found.set_index("statistic")["value"].to_dict() == {"p10": 1.0, "median": 2.5, "p90": 4.0}
    assert list(found[["lowest", "highest"]].itertuples(index=False, name=None)) == [(1, 2), (2, 3), (3, 4)]
    assert merged(counted(frame_of([]))).empty
