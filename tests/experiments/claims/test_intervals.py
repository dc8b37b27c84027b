"""Intervals come from repeats; a bound inside is within noise; disturbed points and points of one run mark."""

import pandas as pd
import pytest
from claim_rows import decode, frame, growths, repeated, serving, verdict_of

from experiments.claims import VERDICTS

REPRODUCED, _, NOISE, DIFFERS, *_ = VERDICTS


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.30, 1.40, 1.48), REPRODUCED),
        ((1.30, 1.40, 1.51), NOISE),  # the shape test's 1.5 lies inside
        ((1.49, 1.60, 1.70), NOISE),
        ((1.60, 1.70, 1.80), DIFFERS),
    ],
)
def test_the_bound_and_the_span_of_the_repeats_decide(values, verdict):
    judged = verdict_of(growths(*values), "C01")
    assert judged.verdict == verdict
    assert judged.quantities == pytest.approx({"ratio": values[1]})  # the median
    assert judged.interval["ratio"] == pytest.approx((values[0], values[2]))
    assert bool(judged.why) == (verdict == DIFFERS)


def test_without_repeats_the_interval_is_unknown():
    assert verdict_of(frame(decode([1, 2, 32])), "C01").interval == {}
    assert verdict_of(growths(1.2), "C01").interval == {}  # one repeat spans nothing


def test_repeats_that_move_together_do_not_move_a_ratio():
    """A slow minute slows batch 1 and batch 32 alike, and another draw all popularities."""
    steps = verdict_of(repeated(frame(decode([1, 2, 32], growth=1.45)), 1.0, 1.3, 0.9), "C01")
    assert (steps.interval, steps.verdict) == ({}, REPRODUCED)
    one = frame(serving(punica=(960, 970, 980, 1000), punica_last_admitted=(985, 990, 995, 1000)))
    assert verdict_of(repeated(one, 1.0, 1.5, 0.7), "C26").interval == {}


ONCE = growths(1.499)
TWICE = growths(1.499, 1.501)


@pytest.mark.parametrize(
    ("rows", "once"),
    [
        (ONCE, True),
        (ONCE.assign(repeat=None), True),
        (TWICE, False),
        (TWICE.assign(date="2026-01-01"), True),  # passes of one command share what their day shares
        (TWICE[(TWICE["repeat"] == 0) | (TWICE["batch_size"] != 32)], True),
        (TWICE[(TWICE["repeat"] == 0) | (TWICE["batch_size"] != 2)], False),  # the ratio does not see batch 2
        (growths(1.3, 1.4, 2.0).assign(disturbed=lambda r: (r["batch_size"] == 32) & (r["repeat"] == 2)), False),
        (growths(1.3, 1.4, 2.0).assign(disturbed=lambda r: (r["batch_size"] == 32) & (r["repeat"] > 0)), True),
    ],
    ids=["one", "unnumbered", "two", "of one day", "batch 32 once", "batch 2 once", "two quiet", "one quiet"],
)
def test_a_verdict_on_points_of_one_run_says_so(rows, once):
    assert verdict_of(rows, "C01").once == once
    assert not verdict_of(rows, "C05").once  # arithmetic


def released(*repeats):
    """Figure 11 under the released rule: token/s by repeat on Distinct, Uniform, Skewed, Identical; None: no row."""
    parts = []
    for number, values in enumerate(repeats):
        one = frame(serving(punica=(950, 960, 970, 1000), punica_last_admitted=[value or 0 for value in values]))
        parts.append(one[one["value"] > 0].assign(repeat=number))
    judged, name = verdict_of(pd.concat(parts, ignore_index=True), "C26"), "released_min_over_max"
    return judged.quantities[name], judged.interval.get(name)


@pytest.mark.parametrize(
    ("repeats", "value", "interval"),
    [
        # of medians over draws the ratio would be 0.9, as no repeat is
        (((100, 100, 100, 100), (84, 90, 90, 90), (90, 110, 110, 110)), 84 / 90, (90 / 110, 1)),
        (((100, 100, 100, 100), (None, 90, 90, 90), (98, 100, 100, 100)), 0.99, (0.98, 1)),
        (((90, 100, 100, 100), (None, 200, 200, None), (None, None, None, None)), 0.9, None),
    ],
    ids=["repeat by repeat", "a repeat that one part lacks is none", "one repeat in common"],
)
def test_systems_and_popularities_are_compared_repeat_by_repeat(repeats, value, interval):
    found, span = released(*repeats)
    assert found == pytest.approx(value)
    assert interval is None or span == pytest.approx(interval)


def test_a_verdict_on_disturbed_points_is_marked():
    rows = frame(decode([1, 2, 32]))
    assert not verdict_of(rows, "C01").disturbed
    assert verdict_of(rows.assign(disturbed=rows["batch_size"] == 32), "C01").disturbed
    assert verdict_of(rows.assign(disturbed=True), "C01").disturbed  # also when all are
    assert not verdict_of(rows.assign(disturbed=rows["batch_size"] == 2), "C01").disturbed  # which the ratio ignores


def test_value_and_interval_come_from_the_same_quiet_repeats():
    rows = growths(1.30, 1.40, 2.0)
    judged = verdict_of(rows.assign(disturbed=rows["repeat"] == 2), "C01")
    assert judged.quantities == pytest.approx({"ratio": 1.35})
    assert judged.interval["ratio"] == pytest.approx((1.3, 1.4))
    assert (judged.verdict, judged.disturbed) == (REPRODUCED, False)
    loud = verdict_of(rows.assign(disturbed=True), "C01")
    assert loud.quantities == pytest.approx({"ratio": 1.4})  # none is quiet, so the median is of all ...
    assert (loud.interval, loud.disturbed) == ({}, True)  # ... and what others did to them is no interval of ours


def test_points_are_told_apart_by_repeats_not_mixed():
    """Repeats of two lengths stay two curves."""
    rows = pd.concat([growths(1.2, 1.3, 1.25), frame(decode([1, 2, 32], seq_len=2048, growth=2.0))], ignore_index=True)
    assert verdict_of(rows, "C02").quantities["ratio"] == pytest.approx(2)
    assert verdict_of(rows, "C03").interval["smallest_step"] == pytest.approx((2 / 1.3, 2 / 1.2))
