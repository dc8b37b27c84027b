"""The rows that count: which scale, clock, repeat, and what becomes of several."""

from dataclasses import replace

import pytest

from experiments.harness.counted import NOT_STEADY, clock_note, counted, frame_of, merged, unsteady
from experiments.measure.records import Row

BASE = Row(
    figure="8", panel="Skewed", system="SGMV", workload="Skewed", model="", hardware="h200", batch_size=1, seq_len=None,
    rank=16, metric="latency", value=10.0, unit="us", statistic="median", timer="cuda_graph", scale="laptop", repeat=0,
)  # fmt: skip


def points(*rows, clock=""):
    """The values of what counts, by batch and clock; in any order of the rows."""
    found = [merged(counted(frame_of(part), clock)) for part in (rows, rows[::-1])]
    told = [{(row.batch_size, row.timer): row.value for row in one.itertuples()} for one in found]
    assert told[0] == told[1]
    return told[0]


def of(**changes):
    return replace(BASE, **changes)


def test_a_figure_has_the_largest_scale_and_points_that_are_compared_one_by_one_their_own():
    rows = of(scale="paper", value=5.0), of(scale="gpu", value=6.0, date="2026-01-09"), of(batch_size=2)
    smoke = of(scale="smoke", value=1.0, batch_size=3)
    assert points(*rows, smoke) == {(1, "cuda_graph"): 5.0}
    assert points(*rows, clock=None) == {(1, "cuda_graph"): 5.0, (2, "cuda_graph"): 10.0}
    assert points(smoke) == {(3, "cuda_graph"): 1.0}
    assert points(*rows, of(figure="9", batch_size=4)) == {(1, "cuda_graph"): 5.0, (4, "cuda_graph"): 10.0}


@pytest.mark.parametrize(
    ("clock", "wanted"),
    [("", {"cuda_graph"}), ("host_clock", {"host_clock"}), ("events", {"cuda_graph"}),
     (None, {"cuda_graph", "host_clock"})],
)  # fmt: skip
def test_a_metric_has_the_clock_of_the_caller_or_the_first_known(clock, wanted):
    assert {timer for _, timer in points(of(), host(5.0), clock=clock)} == wanted


def host(*launches, **changes):
    """Rows of the host's clock, one batch size after the other, with these calibrations."""
    rows = [of(timer="host_clock", batch_size=1 + i, calib_launch_us=us, **changes) for i, us in enumerate(launches)]
    return rows[0] if len(rows) == 1 else rows


STEADY, UNSTEADY, UNKNOWN = [5.0] * 10 + [5.49], [5.0] * 8 + [5.51] * 2, [5.0] * 30 + [None]


@pytest.mark.parametrize(
    ("launches", "counts"), [(STEADY, True), ([5.0] * 20 + [50.0], True), (UNSTEADY, False), (UNKNOWN, False)],
    ids=["steady", "one apart", "unsteady", "one not known"],
)  # fmt: skip
def test_the_clock_of_the_host_counts_where_all_launches_are_known_and_steady(launches, counts):
    rows = [*host(*launches), *(of(batch_size=1 + i) for i in range(len(launches)))]
    found = {timer for _, timer in points(*rows, clock="host_clock")}
    assert found == {"host_clock" if counts else "cuda_graph"}
    assert clock_note(frame_of(rows)) == ("" if counts else NOT_STEADY)
    assert len(points(*rows, clock=None)) == 2 * len(launches), "rows are compared one by one all the same"


def test_each_figure_and_scale_has_its_own_launches_and_a_cpu_has_no_other_clock():
    steady, unsteady_ = host(*STEADY, figure="9"), host(*UNSTEADY)
    smoke = host(*UNSTEADY, figure="9", scale="smoke")
    frame = frame_of([*steady, *unsteady_, *smoke])
    assert list(unsteady(frame)) == [False] * len(steady) + [True] * (len(unsteady_) + len(smoke))
    assert not unsteady(frame_of(host(*UNKNOWN, hardware="cpu"))).any()
    assert not unsteady(frame_of([of()])).any()


def test_what_the_host_alone_can_time_has_no_choice():
    rows = host(*UNKNOWN, figure="11", metric="step_latency")
    assert {timer for _, timer in points(*rows)} == {"host_clock"}
    assert clock_note(frame_of(rows)) == ""
    beside = of(figure="11")
    assert len(points(*rows, beside)) == len(rows) + 1, "by metric"
    simulated = of(figure="11", metric="step_latency", kind="simulated", timer="", panel="simulated")
    assert "host_clock" in {timer for _, timer in points(*rows, simulated)}, "a simulation is no clock"


@pytest.mark.parametrize("clock", ["", None])
def test_the_newest_of_each_repeat_counts_undisturbed_before_others_and_a_row_of_all_before_repeats(clock):
    quiet = [of(repeat=i, value=value, date="2026-01-02") for i, value in enumerate((1.0, 2.0, 6.0))]
    loud = [of(repeat=i, value=value, disturbed=True) for i, value in enumerate((50.0, 60.0), start=7)]
    older = of(repeat=1, value=99.0, date="2026-01-01")
    assert points(*quiet, *loud, older, clock=clock) == {(1, "cuda_graph"): 2.0}
    assert points(*loud, clock=clock) == {(1, "cuda_graph"): 55.0}
    assert points(*quiet, of(repeat=None, value=4.0), clock=clock) == {(1, "cuda_graph"): 4.0}


def test_ends_are_the_farthest_and_spreads_are_kept_apart_from_the_middle():
    rows = [of(repeat=i, statistic=name, value=value) for i in (0, 1)
            for name, value in (("p10", 1.0 + i), ("median", 2.0 + i), ("p90", 3.0 + i))]  # fmt: skip
    found = merged(counted(frame_of([*rows, of(repeat=2, statistic="p10", value=0.1, disturbed=True)])))
    assert found.set_index("statistic")["value"].to_dict() == {"p10": 1.0, "median": 2.5, "p90": 4.0}
    assert set(found["repeats"]) == {2}
    assert list(found[["lowest", "highest"]].itertuples(index=False, name=None)) == [(1, 2), (2, 3), (3, 4)]


def test_without_rows_nothing_counts():
    assert merged(counted(frame_of([]))).empty
