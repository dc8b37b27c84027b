"""`make reproduce` ends in time: shares, estimates, and measurements that run on."""

import signal
import time
from contextlib import contextmanager, suppress

import pytest
from fakes import Fake, composed

from experiments.harness import budget as budget_module
from experiments.harness.budget import GRACE, SLACK, Budget, Deadline, OutOfTime, stopped_after
from experiments.harness.catalogue import experiments
from experiments.harness.resume import run
from experiments.measure.records import read_rows

NAME = "fig08_lora_operator"
GRID = ("workload=distinct", "figure.batch_sizes=[1,2,4,8]", "scale.passes=3", "scale.tries=2")
COST = 14
"""Measurements' worth of time in the twelve of `GRID`, as the first takes three times as much."""


class Machine:
    """A clock that only work moves, and that stops work: `factor` times as slow as the one that shares are for."""

    def __init__(self, factor=1.0):
        self.now, self.factor, self.stop = 0.0, factor, float("inf")

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now = min(self.stop, self.now + self.factor * seconds)
        if self.now == self.stop:
            raise OutOfTime

    @contextmanager
    def stopped_after(self, seconds):
        self.stop = self.now + seconds
        try:
            yield
        finally:
            self.stop = float("inf")


class Working(Fake):
    """Takes `seconds` per measurement on the machine that shares are for, three times as much for the first; all but
    the first are `endless`.
    """

    def __init__(self, machine, seconds, endless=False):
        super().__init__()
        self.machine, self.seconds, self.endless = machine, seconds, endless

    def measure(self, cfg, point):
        self.machine.work(self.seconds * (1 if self.measured else 3) * (1e6 if self.measured and self.endless else 1))
        return super().measure(cfg, point)


@pytest.fixture
def on(monkeypatch):
    """Makes a machine whose clock stops measurements."""

    def made(factor=1.0):
        machine = Machine(factor)
        monkeypatch.setattr(budget_module, "stopped_after", machine.stopped_after)
        return machine

    return made


def minutes(tmp_path):
    found = {one.name: composed(tmp_path, name=one.name).figure.minutes for one in experiments()}
    return {name: by_scale["laptop"] for name, by_scale in found.items() if "laptop" in by_scale}


def reproduce(tmp_path, machine, shares, seconds, endless=""):
    """One figure per share, as the command runs them; outcomes and rows by name. It ends in time."""
    deadline, found = Deadline(shares, clock=machine), {}
    for name in shares:
        place = tmp_path / name
        working = Working(machine, seconds(name), name == endless)
        outcome = run(composed(place, *GRID), working, deadline.budget(name))
        rows = read_rows(outcome.rows_file) if outcome.measured else []
        found[name] = outcome, [row for row in rows if row.statistic == "median"]
    assert machine.now <= 60 * (sum(shares.values()) + GRACE * shares[name])
    return found


def test_time_that_a_figure_does_not_use_goes_to_the_later_ones():
    now = Machine()
    deadline = Deadline({"a": 1, "b": 1, "c": 3}, clock=now)
    assert deadline.budget("a").left == 60
    now.now += 20
    assert deadline.budget("b").left == 70  # its quarter of 280 seconds
    now.now += 150  # 80 too many
    assert deadline.budget("c").left == 130  # all that is left
    now.now += 200
    assert Deadline({}, clock=now).budget("d").left == float("inf")


def test_a_figure_that_overruns_takes_from_all_later_ones_in_proportion():
    now = Machine()
    deadline = Deadline({"a": 1, "b": 1, "c": 2}, clock=now)
    deadline.budget("a")
    now.now += 120
    assert deadline.budget("b").left == 40
    now.now += 400
    assert deadline.budget("c").left == 0


def test_a_figure_without_minutes_takes_nothing_from_those_that_have_some():
    now = Machine()
    deadline = Deadline({"a": 1, "c": 1}, clock=now)
    assert deadline.budget("a").left == 60
    now.now += 60
    for name in ("b", "b too"):
        assert deadline.budget(name).left == float("inf")
        now.now += 1000
    assert deadline.budget("c").left == 60


@pytest.mark.slow
def test_a_machine_as_fast_as_meant_leaves_nothing_out(tmp_path, on):
    shares = minutes(tmp_path)
    found = reproduce(tmp_path, on(), shares, lambda name: 60 * shares[name] / COST)
    assert all((outcome.measured, outcome.left_out) == (12, 0) for outcome, _ in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_machine_ends_in_time_with_rows_of_every_figure(tmp_path, on, factor):
    shares = minutes(tmp_path)
    found = reproduce(tmp_path, on(factor), shares, lambda name: 60 * shares[name] / COST)
    assert sum(outcome.left_out for outcome, _ in found.values()) >= 12 * len(found) * (1 - 1.1 / factor)
    for outcome, rows in found.values():
        assert outcome.failed == []
        assert outcome.measured == len(rows) > 0
        assert outcome.left_out == 12 - outcome.measured
        assert len({(row.batch_size, row.repeat) for row in rows}) == len(rows)
        assert {row.repeat for row in rows} == set(range(1 + max(row.repeat for row in rows)))


def test_a_machine_ten_times_slower_ends_in_time(tmp_path, on):
    """Where a share has room for ten measurements instead of a hundred, repeats give way and first passes end."""
    shares = dict.fromkeys("abc", 1.0)
    found = reproduce(tmp_path, on(10.0), shares, lambda name: 60 / 100)
    for outcome, _ in found.values():
        assert outcome.measured >= 4
        assert outcome.measured + outcome.left_out == 12


def test_one_figure_whose_second_point_is_endless_does_not_starve_the_others(tmp_path, on):
    shares = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    found = reproduce(tmp_path, on(), shares, lambda name: 3.0, endless="b")
    assert {name: outcome.left_out for name, (outcome, _) in found.items()} == {"a": 0, "b": 11, "c": 0, "d": 0}


def test_after_the_deadline_every_figure_has_its_first_point_whole_and_the_overrun_is_known(tmp_path, on):
    machine = on(1000.0)
    shares = dict.fromkeys("abc", 1.0)
    deadline, kept = Deadline(shares, clock=machine), {}
    for name in shares:
        working = Working(machine, 1.0)
        kept[name] = run(composed(tmp_path / name, *GRID), working, deadline.budget(name))
        assert [batch for _, batch in working.measured] == [1]
        assert {row.batch_size for row in read_rows(kept[name].rows_file)} == {1}
    assert {(one.measured, one.left_out, tuple(one.failed)) for one in kept.values()} == {(1, 11, ())}
    assert deadline.minutes_left == 3 - 3 * 3000 / 60
    late, again = Deadline({"a": 1.0}, clock=machine), Working(machine, 1.0)
    machine.now += 61
    run(composed(tmp_path / "a", *GRID), again, late.budget("a"))
    assert [batch for _, batch in again.measured] == [2], "a second run makes progress"


def test_a_set_up_that_took_the_share_is_not_taken_for_the_cost_of_what_follows(tmp_path, on):
    class Starting(Working):
        def measure(self, cfg, point):
            self.machine.now += 0.0 if self.measured else 50.0
            return super().measure(cfg, point)

    machine = on()
    outcome = run(composed(tmp_path, *GRID), Starting(machine, 0.5), Deadline({NAME: 1.0}, clock=machine).budget(NAME))
    assert (outcome.measured, outcome.left_out) == (10, 2)  # its own repeats are not begun, as they took 51 seconds


def test_what_was_not_measured_yet_is_taken_to_cost_as_much_as_its_cheaper_neighbour(on):
    machine = on()
    budget = Budget(100.0, firm=True, clock=machine)
    for key, seconds in (("a", 5.0), ("b", 30.0)):
        with budget.spending(key):
            machine.work(seconds)
    assert (budget.estimate("a"), budget.estimate("b"), budget.estimate("new")) == (5.0, 30.0, 5.0)
    machine.now += 45  # 20 are left
    assert [budget.fits(key) for key in ("a", "b", "new")] == [True, False, True]
    assert [budget.fits(key, slack=SLACK) for key in ("a", "b", "new")] == [True, True, True]  # it may end 10 too late
    assert [budget.fits(*keys, slack=SLACK) for keys in (["a", "b"], ["b"])] == [False, True]
    machine.now += 15
    assert [budget.fits(key, slack=SLACK) for key in ("a", "b", "new")] == [True, False, True]


class Endless(Fake):
    """Batch 2 never ends, whatever exceptions a library catches on the way. The clock begins with it, so that what is
    before may take as long as it will.
    """

    begun = None

    def seconds(self):
        return 0.0 if self.begun is None else time.monotonic() - self.begun

    def measure(self, cfg, point):
        if point.batch_size == 2:
            self.begun = time.monotonic()
        while point.batch_size == 2:
            with suppress(Exception):
                time.sleep(0.01)
        return super().measure(cfg, point)


def test_a_measurement_that_runs_on_is_stopped_and_has_no_row(tmp_path):
    endless = Endless()
    deadline = Deadline({NAME: 0.01, "next": 0.01}, clock=endless.seconds)
    outcome = run(composed(tmp_path, *GRID), endless, deadline.budget(NAME))
    assert {row.batch_size for row in read_rows(outcome.rows_file)} == {1}
    assert outcome.left_out == 11
    assert outcome.failed == []
    assert deadline.budget("next").left < 0.6


def test_an_interruption_in_time_leaves_no_alarm():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime), stopped_after(0.05):
        time.sleep(600)
    with stopped_after(600):
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
