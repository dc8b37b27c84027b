"""The clocks: order of calls, budget, and what a sample measures."""

import gc

import pytest

from experiments.measure import timing
from experiments.measure.timing import Protocol, time_side_by_side


def protocol(**changes) -> Protocol:
    usual = {"repeats": 4, "min_repeats": 2, "seconds": 60.0, "flush_mib": 1}
    return Protocol(**{"timer": "host_clock", "device": "cpu", "warmup": 2, **usual, **changes})


def test_systems_are_interleaved_after_their_warm_up():
    order = []
    calls = {name: [lambda name=name: order.append(name)] for name in ("a", "b")}
    samples = time_side_by_side(calls, protocol(repeats=3))
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


def test_several_inputs_are_used_in_turn():
    order = []
    calls = {"a": [lambda i=i: order.append(i) for i in range(3)]}
    time_side_by_side(calls, protocol(warmup=0, repeats=5))
    assert order == [0, 1, 2, 0, 1]


class Clock:
    """One that calls move and nothing else, in the place of `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def take(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timing, "time", made := Clock())
    return made


def test_a_sample_is_the_time_of_one_call(clock):
    samples = time_side_by_side({"slow": [lambda: clock.take(2.0)], "fast": [lambda: clock.take(0.25)]}, protocol())
    assert samples == {"slow": [2.0] * 4, "fast": [0.25] * 4}


@pytest.mark.parametrize(("seconds", "samples"), [(0.0, 3), (4.5, 5), (60.0, 8)])
def test_a_spent_budget_stops_at_the_minimum_or_later(clock, seconds, samples):
    limits = protocol(repeats=8, min_repeats=3, seconds=seconds)
    assert len(time_side_by_side({"a": [lambda: clock.take(1.0)]}, limits)["a"]) == samples


@pytest.mark.parametrize(("patience", "samples"), [(10.0, 5), (4.0, 5), (3.9, 4), (0.0, 2)])
def test_a_call_too_slow_for_the_fewest_repeats_gets_fewer_and_two_at_least(clock, patience, samples):
    """The fifth begins after four seconds."""
    limits = protocol(repeats=8, min_repeats=5, seconds=0.1, patience=patience)
    assert len(time_side_by_side({"a": [lambda: clock.take(1.0)]}, limits)["a"]) == samples
    once = protocol(min_repeats=1, seconds=0.1, patience=patience)
    assert len(time_side_by_side({"a": [lambda: clock.take(1.0)]}, once)["a"]) == 1


@pytest.mark.parametrize(("apart", "order"), [(True, "zab" * 3), (False, "zazb" * 3)])
def test_the_caches_are_emptied_before_every_call_or_once_a_round_for_systems_apart(monkeypatch, apart, order):
    seen = []
    monkeypatch.setattr(timing, "_flusher", lambda protocol: lambda: seen.append("z"))
    calls = {name: [lambda name=name: seen.append(name)] for name in "ab"}
    time_side_by_side(calls, protocol(repeats=3, warmup=0), apart)
    assert "".join(seen) == order


def test_garbage_collection_is_off_while_timing_and_on_again_after():
    seen = []
    time_side_by_side({"a": [lambda: seen.append(gc.isenabled())]}, protocol(warmup=0))
    assert seen == [False] * 4
    assert gc.isenabled()


@pytest.mark.parametrize("calls", [{}, {"a": []}], ids=["no-system", "no-call"])
def test_nothing_to_time_is_refused(calls):
    with pytest.raises(ValueError, match="at least one"):
        time_side_by_side(calls, protocol())
