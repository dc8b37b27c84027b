"""Repeats spread in time, disturbed points measured again, and a figure that keeps to its share of time."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import QUIET, Fake, composed

from experiments.harness import CheckFailed, Point, Reading, sampled
from experiments.harness.budget import Budget
from experiments.harness.resume import run
from experiments.harness.samples import read_samples, samples_file
from experiments.measure.records import RowsError, read_rows

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


def test_what_is_left_is_said_once_a_pass_has_shown_what_it_costs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Budget, "estimate", lambda self, key: 90.0)
    run(composed(tmp_path, *GRID), Fake())
    said = [line for line in capsys.readouterr().err.splitlines() if "passes left" in line]
    assert said == [f"{NAME}: 2 of 3 passes left, at most 6.0 min", f"{NAME}: 1 of 3 passes left, at most 3.0 min"]


def test_more_passes_measure_only_the_new_ones(tmp_path):
    run(composed(tmp_path, *GRID), Fake())
    fake = Fake()
    run(composed(tmp_path, *GRID, "scale.passes=4"), fake)
    assert [batch for _, batch in fake.measured] == [2, 1]
    assert sorted(row.repeat for row in rows_of(tmp_path)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("script", "order"),
    [([QUIET, BUSY], [1, 2, 2, 2, 1, 1, 2]), ([BUSY, BUSY], [1, 2, 2, 1, 1, 2, 1, 2])],
    ids=["after its pass, where a burst spoiled it", "after the last pass, where other work went on"],
)
def test_a_disturbed_point_is_measured_again(tmp_path, machine, script, order):
    machine.script = script
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert [batch for _, batch in fake.measured] == order
    assert outcome.disturbed == 0
    assert len(rows_of(tmp_path)) == 6
    assert not any(row.disturbed for row in rows_of(tmp_path))


def test_a_point_that_stays_disturbed_is_tried_twice_and_marked_with_its_quietest_row(tmp_path, machine):
    machine.script = [BUSY, QUIET, replace(BUSY, other_cpu=0.5), QUIET, QUIET, replace(BUSY, other_cpu=0.1)]
    fake = Fake()
    outcome = run(composed(tmp_path, *GRID), fake)
    assert len(fake.measured) == 6 + 2
    assert outcome.disturbed == 1
    assert [(row.repeat, row.batch_size, row.other_cpu) for row in rows_of(tmp_path) if row.disturbed] == [(0, 1, 0.1)]


def test_a_worse_second_try_does_not_replace_the_first(tmp_path, machine):
    machine.script = [BUSY, QUIET, replace(BUSY, other_cpu=0.5), QUIET, QUIET, replace(BUSY, other_cpu=0.5)]
    run(composed(tmp_path, *GRID), Fake())
    assert [row.other_cpu for row in rows_of(tmp_path) if row.disturbed] == [0.25]


class Spiky(Fake):
    """Batch 2 takes the microseconds of `spikes`, in measuring order; others take 2."""

    def __init__(self, *spikes):
        super().__init__()
        self.left = list(spikes)

    def measure(self, cfg, point):
        super().measure(cfg, point)
        return sampled("latency", [self.left.pop(0) if point.batch_size == 2 else 2.0] * 2, "us")


@pytest.mark.parametrize("spikes", [(40.0, 2.0, 2.0, 2.1), (2.0, 2.0, 40.0, 2.1)], ids=["first", "last"])
def test_a_repeat_twenty_times_slower_than_its_siblings_is_measured_again(tmp_path, spikes):
    outcome = run(composed(tmp_path, *GRID), Spiky(*spikes))
    assert sorted(row.value for row in rows_of(tmp_path) if row.batch_size == 2) == [2.0, 2.0, 2.1]
    assert (outcome.measured, outcome.disturbed, any(row.disturbed for row in rows_of(tmp_path))) == (6, 0, False)


def test_a_repeat_that_stays_slower_than_its_siblings_is_marked_and_the_next_run_measures_it(tmp_path):
    spiky = Spiky(2.0, 40.0, 41.0, 2.0, 42.0)
    outcome = run(composed(tmp_path, *GRID), spiky)
    marked = [row for row in read_rows(outcome.rows_file) if row.disturbed]
    assert {(row.batch_size, row.repeat) for row in marked} == {(2, 1)}
    assert {row.statistic for row in marked} == {"median", "p10", "p90", "count"}
    assert (outcome.disturbed, spiky.left) == (1, [])
    outcome = run(composed(tmp_path, *GRID), Spiky(2.0))
    assert (outcome.measured, outcome.disturbed, any(row.disturbed for row in rows_of(tmp_path))) == (1, 0, False)


class Drawn(Spiky):
    """Each repeat draws other requests: no protocol of timed calls."""

    reads = ("workload", "adapters.ranks")


def test_repeats_that_draw_other_requests_are_not_siblings(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Drawn(2.0, 40.0, 2.0))
    assert (outcome.measured, outcome.disturbed) == (6, 0)


def test_an_impossible_reading_fails_its_point_alone(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Spiky(0.0))
    assert (outcome.measured, {row.batch_size for row in rows_of(tmp_path)}) == (3, {1})
    assert "latency=0.0 us of SGMV, figure 8: a measured duration must be above 0" in outcome.failed[0]


def samples_of(outcome):
    return read_samples(samples_file(Path(outcome.rows_file)))


def test_raw_samples_are_kept_by_point_and_repeat(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Fake())
    lines = samples_of(outcome)
    assert {(line["batch_size"], line["repeat"]) for line in lines} == {(b, r) for b in (1, 2) for r in range(3)}
    assert [line["samples"] for line in lines] == [[1.0, 2.0, 3.0]] * 6
    counts = {(row.config_hash, row.repeat): row.value for row in rows_of(tmp_path, "count")}
    assert {(line["config_hash"], line["repeat"]): len(line["samples"]) for line in lines} == counts


def test_samples_are_those_of_the_rows_that_stay(tmp_path):
    """Of a spike that was measured again, and of a run with other settings."""
    outcome = run(composed(tmp_path, *GRID), Spiky(40.0, 2.0, 2.0, 2.1))
    assert sorted(line["samples"] for line in samples_of(outcome)) == [[2.0, 2.0]] * 5 + [[2.1, 2.1]]
    outcome = run(composed(tmp_path, *GRID, "scale.warmup=7", "scale.passes=1"), Fake())
    assert [line["samples"] for line in samples_of(outcome)] == [[1.0, 2.0, 3.0]] * 2


def test_damaged_samples_are_one_error_with_the_remedy(tmp_path):
    outcome = run(composed(tmp_path, *GRID), Fake())
    path = samples_file(Path(outcome.rows_file))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RowsError, match=r"jsonl.gz is damaged .*: delete it, the rows stay"):
        read_samples(path)


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


def within(minutes, slow, firm=False):
    return Budget(60 * minutes, firm=firm, clock=lambda: slow.now)


@pytest.mark.parametrize("firm", [False, True])
@pytest.mark.parametrize(("minutes", "passes", "left_out"), [(1.0, 3, 0), (0.65, 2, 1), (0.33, 1, 2)])
def test_passes_that_would_not_end_in_time_are_left_out(tmp_path, minutes, passes, left_out, firm):
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID), slow, within(minutes, slow, firm))
    assert (outcome.measured, outcome.left_out) == (2 * passes, 2 * left_out)
    assert {row.repeat for row in rows_of(tmp_path)} == set(range(passes))
    missing = Slow()
    run(composed(tmp_path, *GRID), missing)
    assert len(missing.measured) == 2 * left_out


@pytest.mark.parametrize("firm", [False, True])
def test_a_repeat_is_measured_where_the_time_left_has_room_for_it_though_not_for_its_whole_pass(tmp_path, firm):
    class WithSetUp(Slow):
        def measure(self, cfg, point):
            self.now += 0.0 if self.measured else 30.0
            return super().measure(cfg, point)

    slow = WithSetUp()
    outcome = run(composed(tmp_path, *GRID, "scale.passes=2"), slow, within(1.5, slow, firm))
    assert [batch for _, batch in slow.measured] == [1, 2, 2]
    assert (outcome.measured, outcome.left_out) == (3, 1)  # batch 1 took 40 seconds before
    assert {(row.batch_size, row.repeat) for row in rows_of(tmp_path)} == {(1, 0), (2, 0), (2, 1)}


def test_the_first_pass_gives_way_to_a_deadline_alone(tmp_path):
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID, "+figure.minutes.smoke=0.0001"), slow)
    assert (outcome.measured, outcome.left_out) == (2, 4)
    slow = Slow()
    outcome = run(composed(tmp_path / "firm", *GRID), slow, within(0.1, slow, firm=True))
    assert (outcome.measured, outcome.left_out) == (1, 5)
    assert [row.batch_size for row in rows_of(tmp_path / "firm")] == [1]


def test_samples_give_way_before_passes_do(tmp_path):
    slow = Slow()
    run(composed(tmp_path, *GRID, "scale.seconds_per_point=4.5"), slow, within(1.0, slow))
    assert slow.allowed == pytest.approx([4.5] * 6)
    slow = Slow()
    run(composed(tmp_path, *GRID, "scale.seconds_per_point=9.0"), slow, within(1.0, slow))
    assert slow.allowed == pytest.approx([5.0] * 6)


def test_nothing_is_tried_again_once_the_time_is_spent(tmp_path, machine):
    slow = Slow()
    machine.script = [BUSY] * 6
    outcome = run(composed(tmp_path, *GRID), slow, within(1.0, slow))
    assert len(slow.allowed) == 6
    assert outcome.disturbed == 6


def test_what_is_tried_again_must_fit_by_what_it_took_before(tmp_path, machine):
    """The most disturbed is too dear for the 15 seconds that are left; the other one fits once."""

    class Uneven(Slow):
        def measure(self, cfg, point):
            self.now += 10.0 if point.batch_size == 2 else 0.0
            return super().measure(cfg, point)

    machine.script = [BUSY, replace(BUSY, other_cpu=0.5), replace(BUSY, other_cpu=0.1), replace(BUSY, other_cpu=0.1)]
    uneven = Uneven()
    outcome = run(composed(tmp_path, *GRID, "scale.passes=1"), uneven, within(0.75, uneven))
    assert [batch for _, batch in uneven.measured] == [1, 2, 1]
    assert {row.batch_size: row.other_cpu for row in rows_of(tmp_path)} == {1: 0.1, 2: 0.5}
    assert outcome.disturbed == 2


def test_marked_rows_that_time_is_too_short_for_stay_and_stay_marked(tmp_path, machine):
    machine.script = [BUSY] * 6
    run(composed(tmp_path, *GRID, "scale.tries=0"), Slow())
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID), slow, within(0.1, slow, firm=True))
    assert (outcome.measured, outcome.left_out, outcome.disturbed) == (1, 5, 5)
    assert sorted(row.disturbed for row in rows_of(tmp_path)) == [False] + [True] * 5


@pytest.mark.parametrize(("firm", "measured", "left_out"), [(True, 2, 1), (False, 3, 0)])
def test_a_new_pass_is_begun_behind_marked_rows_even_if_not_all_of_it_fits(
    tmp_path, machine, firm, measured, left_out
):
    machine.script = [BUSY, QUIET]
    run(composed(tmp_path, *GRID, "scale.tries=0", "scale.passes=1"), Slow())
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID, "scale.passes=2"), slow, within(0.4, slow, firm))
    assert (outcome.measured, outcome.left_out) == (measured, left_out)
    assert {row.repeat for row in rows_of(tmp_path)} == {0, 1}


@pytest.mark.parametrize("firm", [False, True])
def test_marked_rows_alone_are_measured_again_pass_by_pass_as_far_as_they_fit(tmp_path, machine, firm):
    machine.script = [BUSY] * 6
    run(composed(tmp_path, *GRID, "scale.tries=0"), Slow())
    slow = Slow()
    outcome = run(composed(tmp_path, *GRID, "scale.tries=0"), slow, within(0.4, slow, firm))
    assert (outcome.measured, outcome.left_out, outcome.disturbed) == (2, 4, 4)


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
    assert by_repeat == {0: 1.0 + 3.0, 1: 4.0 + 5.0, 2: 6.0 + 7.0}  # the second, as the third
    assert [row.disturbed for row in rows if row.metric == "total"] == [True] * 3


def test_what_cannot_be_derived_for_want_of_time_is_left_out_and_not_wrong(tmp_path):
    class Short(Summed, Slow):
        def measure(self, cfg, point):
            self.now += 10.0
            if point.panel == "sum" and len(rows_of(tmp_path, "value")) < 2:
                raise CheckFailed("a row is missing")
            return Summed.measure(self, cfg, point)

    short = Short()
    short.path = tmp_path / "cpu" / "smoke" / "rows" / f"{NAME}.csv"
    outcome = run(composed(tmp_path, *GRID, "scale.passes=1"), short, within(0.1, short, firm=True))
    assert (outcome.measured, outcome.left_out, outcome.failed) == (1, 2, [])


def test_a_simulation_that_runs_on_is_stopped_and_left_out(tmp_path):
    class Endless(Summed):
        def measure(self, cfg, point):
            while point.panel == "sum":
                time.sleep(0.001)
            return super().measure(cfg, point)

    outcome = run(composed(tmp_path, *GRID, "scale.passes=1"), Endless(), Budget(2.0, firm=True))
    assert (outcome.measured, outcome.left_out, outcome.failed) == (2, 1, [])
