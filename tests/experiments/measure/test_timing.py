"""The clocks: order of calls, budget, and what a sample measures."""

import gc

import pytest

from experiments.measure import timing
from experiments.measure.timing import Protocol, time_side_by_side


def protocol(**changes) -> Protocol:
    usual = {"repeats": 4, "min_repeats": 2, "seconds": 60.0, "flush_mib": 1}
    return Protocol(**{"timer": "host_clock", "device": "cpu", "warmup": 2, **usual, **changes})


def test_systems_are_interleaved_after_their_warm_up_and_their_inputs_used_in_turn():
    """Garbage collection is off while the clock runs."""
    order = []
    calls = {name: [lambda i=i, name=name: order.append((name, i, gc.isenabled())) for i in range(2)] for name in "ab"}
    samples = time_side_by_side(calls, protocol(repeats=3))
    warm = [(name, i, True) for name in "ab" for i in range(2)]
    assert order == [*warm, *[(name, i, False) for i in (0, 1, 0) for name in "ab"]]
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert gc.isenabled()


class Clock:
    """One that calls move and nothing else, in the place of `time`."""

    now = 0.0

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
