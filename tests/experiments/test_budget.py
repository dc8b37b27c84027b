"""`make reproduce` ends in time: shares, estimates, and measurements that run on."""

import signal
import time
from contextlib import contextmanager, suppress

import pytest
from fakes import GRID, NAME, Fake, composed

from experiments.harness import budget as budget_module
from experiments.harness.budget import GRACE, Deadline, OutOfTime, stopped_after
from experiments.harness.resume import run
from experiments.measure.records import read_rows

FOUR = ("figure.batch_sizes=[1,2,4,8]",)


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
    """Takes `seconds` on the machine of the shares, three times as much at first; all but the first are `endless`."""

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


@pytest.mark.parametrize(
    ("minutes", "takes"),
    [
        ({"a": 1, "b": 1, "c": 3}, [("a", 60, 20), ("b", 70, 150), ("c", 130, 0)]),
        ({"a": 1, "b": 1, "c": 2}, [("a", 60, 120), ("b", 40, 400), ("c", 0, 0)]),
        ({"a": 1, "c": 1}, [("a", 60, 60), ("b", float("inf"), 1000), ("b too", float("inf"), 9), ("c", 60, 0)]),
        ({}, [("d", float("inf"), 0)]),
    ],
    ids=["time that is not used", "an overrun, in proportion", "a figure without minutes", "none has minutes"],
)
def test_the_time_left_is_shared_out_to_later_figures(minutes, takes):
    """`takes`: figure, its share, what it then takes, in seconds."""
    now = Machine()
    deadline = Deadline(minutes, clock=now)
    for name, share, seconds in takes:
        assert deadline.budget(name).left == share
        now.now += seconds


def test_one_figure_whose_second_point_is_endless_does_not_starve_the_others(tmp_path, on):
    machine = on()
    deadline = Deadline(dict.fromkeys("abcd", 1.0), clock=machine)
    for name in "abcd":
        working = Working(machine, 3.0, endless=name == "b")
        outcome = run(composed(tmp_path / name, *GRID, *FOUR), working, deadline.budget(name))
        assert outcome.left_out == (11 if name == "b" else 0)
    assert machine.now <= 60 * (4 + GRACE)


def test_after_the_deadline_every_figure_has_its_first_point_and_a_second_run_the_next(tmp_path, on):
    machine = on(1000.0)
    deadline = Deadline(dict.fromkeys("abc", 1.0), clock=machine)
    for name in "abc":
        outcome = run(composed(tmp_path / name, *GRID, *FOUR), Working(machine, 1.0), deadline.budget(name))
        assert (outcome.measured, outcome.left_out, outcome.failed) == (1, 11, [])
        assert {row.batch_size for row in read_rows(outcome.rows_file)} == {1}
    assert deadline.minutes_left == 3 - 3 * 3000 / 60
    late, again = Deadline({"a": 1.0}, clock=machine), Working(machine, 1.0)
    machine.now += 61
    run(composed(tmp_path / "a", *GRID, *FOUR), again, late.budget("a"))
    assert [batch for _, batch in again.measured] == [2]


class Endless(Fake):
    """Batch 2 never ends, whatever exceptions a library catches on the way; the clock begins with it."""

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
    outcome = run(composed(tmp_path, *GRID, *FOUR), endless, deadline.budget(NAME))
    assert {row.batch_size for row in read_rows(outcome.rows_file)} == {1}
    assert (outcome.left_out, outcome.failed) == (11, [])
    assert deadline.budget("next").left < 0.6


def test_an_interruption_in_time_leaves_no_alarm():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime), stopped_after(0.05):
        time.sleep(600)
    with stopped_after(600):
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
