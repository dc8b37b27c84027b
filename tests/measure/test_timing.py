"""The clocks: order of calls, budget, and what a sample measures."""

import gc
import time

import pytest

from punica.measure.timing import Protocol, time_side_by_side


def protocol(**changes) -> Protocol:
    values = {
        "timer": "host_clock",
        "device": "cpu",
        "warmup": 2,
        "repeats": 4,
        "min_repeats": 2,
        "seconds": 60.0,
        "flush_mib": 1,
    }
    return Protocol(**{**values, **changes})


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


def test_a_sample_is_the_time_of_one_call():
    samples = time_side_by_side({"slow": [lambda: time.sleep(0.02)], "fast": [lambda: None]}, protocol())
    assert 0.02 <= min(samples["slow"]) < 0.2
    assert min(samples["fast"]) < 0.005


def test_a_spent_budget_stops_at_the_minimum():
    samples = time_side_by_side({"a": [lambda: time.sleep(0.01)]}, protocol(repeats=1000, min_repeats=3, seconds=0.0))
    assert len(samples["a"]) == 3


def test_garbage_collection_is_off_while_timing_and_on_again_after():
    seen = []
    time_side_by_side({"a": [lambda: seen.append(gc.isenabled())]}, protocol(warmup=0))
    assert seen == [False] * 4
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timer": "stopwatch"}, "known: cuda_graph, events, host_clock"),
        ({"timer": "cuda_graph"}, "needs a CUDA device"),
        ({"repeats": 0}, "at least 1"),
    ],
)
def test_bad_protocols_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        protocol(**changes)


@pytest.mark.parametrize("calls", [{}, {"a": []}], ids=["no-system", "no-call"])
def test_nothing_to_time_is_refused(calls):
    with pytest.raises(ValueError, match="at least one"):
        time_side_by_side(calls, protocol())
