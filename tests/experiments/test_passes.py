"""Repeats spread in time, disturbed points measured again, and a figure that keeps to its share of time."""

import time
from dataclasses import replace

import pytest
from fakes import GRID, QUIET, Fake, composed, rows_of

from experiments.harness import Reading, sampled
from experiments.harness.budget import Budget
from experiments.harness.resume import run

BUSY, QUIETER, LOUDER = (replace(QUIET, disturbed=True, other_cpu=share) for share in (0.25, 0.1, 0.5))


def test_passes_go_over_the_whole_grid_forth_and_back_and_more_of_them_measure_only_the_new(tmp_path):
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert (outcome.points, outcome.measured, outcome.disturbed) == (6, 6, 0)
    assert [batch for _, batch in fake.measured] == [1, 2, 2, 1, 1, 2]
    found = rows_of(tmp_path)
    assert {(row.repeat, row.batch_size) for row in found} == {(r, b) for r in range(3) for b in (1, 2)}
    assert len({row.config_hash for row in found}) == 2  # repeats are of one setting
    assert {(row.other_cpu, row.calib_gemm_us, row.disturbed) for row in found} == {(0.001, 100.0, False)}
    fake = Fake()
    run(composed(tmp_path, *GRID, "scale.passes=4"), fake)
    assert [batch for _, batch in fake.measured] == [2, 1]
    assert sorted(row.repeat for row in rows_of(tmp_path)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("script", "order", "marked"),
    [
        ([BUSY, LOUDER], [1, 2, 2, 1, 1, 2, 2, 1], []),
        ([BUSY, *[QUIET] * 5, LOUDER, QUIETER], [1, 2, 2, 1, 1, 2, 1, 1], [(0, 1, 0.1)]),
        ([BUSY, *[QUIET] * 5, LOUDER, LOUDER], [1, 2, 2, 1, 1, 2, 1, 1], [(0, 1, 0.25)]),
    ],
    ids=["the loudest first", "twice, the quietest stays", "a worse one"],
)
def test_a_disturbed_point_is_measured_again(tmp_path, machine, script, order, marked):
    machine.script = script
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert [batch for _, batch in fake.measured] == order
    assert [(row.repeat, row.batch_size, row.other_cpu) for row in rows_of(tmp_path) if row.disturbed] == marked
    assert (outcome.disturbed, len(rows_of(tmp_path))) == (len(marked), 6)


def test_a_group_is_the_same_back(tmp_path):
    class Beside(Fake):
        differing = ("batch_size",)

    outcome = run(composed(tmp_path, *GRID), Beside(wrong=[1, 2]))
    assert (outcome.measured, len(outcome.failed)) == (0, 1)
    beside, budget = Beside(), Budget(None)
    run(composed(tmp_path, *GRID, "force=true"), beside, budget)
    assert (beside.measured[:4], len(budget._costs)) == ([("Distinct", rows) for rows in (1, 2, 2, 1)], 1)


class Stopped(Fake):
    """Batch 2 takes no time."""

    def measure(self, cfg, point):
        return [Reading("latency", point.batch_size % 2, "us")]


def test_an_impossible_reading_fails_its_point_alone(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Stopped())
    assert (outcome.measured, {row.batch_size for row in rows_of(tmp_path, "value")}) == (3, {1})
    assert "latency=0 us of SGMV, figure 8: a measured duration must be above 0" in outcome.failed[0]


def test_readings_have_quantiles_and_none_of_what_is_not_finite():
    found = sampled("latency", [*range(1, 101), 1e9], "us")
    assert [(one.statistic, one.value) for one in found] == [
        ("median", 51.0), ("p10", 11.0), ("p90", 91.0), ("count", 101.0),
    ]  # fmt: skip
    for bad in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="must be finite, at least one"):
            sampled("latency", bad, "us")


class Slow(Fake):
    """A measurement of batch 2 takes `two` seconds of a clock that only it moves, of batch 1 ten; the first also its
    `set_up`. `allowed`: the seconds of each point's samples.
    """

    def __init__(self, two=10.0, set_up=0.0):
        super().__init__()
        self.now, self.two, self.set_up, self.allowed = 0.0, two, set_up, []

    def measure(self, cfg, point):
        self.allowed.append(cfg.scale.seconds_per_point)
        self.now += (self.two if point.batch_size == 2 else 10.0) + (0.0 if self.measured else self.set_up)
        return super().measure(cfg, point)

    def within(self, minutes, firm=False):
        return Budget(60 * minutes, firm=firm, clock=lambda: self.now)


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize(("minutes", "passes", "left_out"), [(1.0, 3, 0), (0.65, 2, 1), (0.33, 1, 2)])
def test_passes_that_would_not_end_in_time_are_left_out(tmp_path, minutes, passes, left_out, firm):
    slow, missing = Slow(), Slow()
    outcome = run(composed(tmp_path, *GRID), slow, slow.within(minutes, firm))
    assert (outcome.measured, outcome.left_out) == (2 * passes, 2 * left_out)
    assert {row.repeat for row in rows_of(tmp_path)} == set(range(passes))
    run(composed(tmp_path, *GRID), missing)
    assert len(missing.measured) == 2 * left_out


@pytest.mark.parametrize("firm", [False, True])
def test_a_repeat_is_measured_where_the_time_left_has_room_for_it_though_not_for_its_whole_pass(tmp_path, firm):
    slow = Slow(set_up=30.0)
    outcome = run(composed(tmp_path, *GRID, "scale.passes=2"), slow, slow.within(1.5, firm))
    assert [batch for _, batch in slow.measured] == [1, 2, 2]
    assert (outcome.measured, outcome.left_out) == (3, 1)  # batch 1 took 40 seconds before


def test_the_first_pass_gives_way_to_a_deadline_alone(tmp_path):
    slow = Slow()
    outcome = run(composed(tmp_path / "soft", *GRID, "+figure.minutes.smoke=0.0001"), Slow())
    assert (outcome.measured, outcome.left_out) == (2, 4)
    outcome = run(composed(tmp_path, *GRID), slow, slow.within(0.1, firm=True))
    assert (outcome.measured, outcome.left_out) == (1, 5)
    assert [row.batch_size for row in rows_of(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("before", "script", "words", "minutes", "firm", "counts", "repeats"),
    [
        (3, [BUSY] * 6, [], 0.1, True, (1, 5, 5), 3),
        (1, [BUSY, QUIET], ["scale.passes=2"], 0.4, True, (2, 1, 0), 2),
        (1, [BUSY, QUIET], ["scale.passes=2"], 0.4, False, (3, 0, 0), 2),
        (3, [BUSY] * 6, ["scale.tries=0"], 0.4, True, (2, 4, 4), 3),
        (3, [BUSY] * 6, ["scale.tries=0"], 0.4, False, (2, 4, 4), 3),
    ],
    ids=["too short", "a new pass, in part", "a new pass, without deadline", "as they fit", "as they fit, no deadline"],
)
def test_marked_rows_are_measured_again_as_far_as_they_fit_and_stay_marked_else(
    tmp_path, machine, before, script, words, minutes, firm, counts, repeats
):
    machine.script = list(script)
    run(composed(tmp_path, *GRID, "scale.tries=0", f"scale.passes={before}"), Slow())
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID, *words), slow, slow.within(minutes, firm))
    assert (outcome.measured, outcome.left_out, outcome.disturbed) == counts
    found = rows_of(tmp_path)
    assert (sum(row.disturbed for row in found), {row.repeat for row in found}) == (counts[2], set(range(repeats)))


class Computed(Slow):
    """Nothing watches it; it says itself what was disturbed."""

    watched = False

    def measure(self, cfg, point):
        super().measure(cfg, point)
        return [Reading("total", 1.0, "us", disturbed=point.batch_size == 2)]


def test_what_is_not_watched_has_no_witnesses_and_is_taken_once_in_a_run(tmp_path, machine):
    machine.script = [BUSY] * 2
    computed = Computed()
    outcome = run(composed(tmp_path, *GRID, "scale.passes=1"), computed)
    assert (outcome.measured, outcome.disturbed, machine.script) == (2, 0, [BUSY] * 2)
    found = rows_of(tmp_path, "value")
    assert [(row.batch_size, row.disturbed, row.other_cpu) for row in found] == [(1, False, None), (2, True, None)]
    again = Computed()
    run(composed(tmp_path, *GRID, "scale.passes=1"), again)
    assert [batch for _, batch in again.measured] == [2]


def test_a_measurement_that_runs_on_is_stopped_and_left_out(tmp_path):
    class Endless(Computed):
        def measure(self, cfg, point):
            while point.batch_size == 2:
                time.sleep(0.001)
            return super().measure(cfg, point)

    outcome = run(composed(tmp_path, *GRID, "scale.passes=1"), Endless(), Budget(2.0, firm=True))
    assert (outcome.measured, outcome.left_out, outcome.failed) == (1, 1, [])
