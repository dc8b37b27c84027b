"""Intervals come from repeats; a bound inside is within noise; disturbed points mark."""

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
    assert judged.quantities == f"ratio={values[1]:.6g}"  # the median
    assert judged.interval == f"ratio={values[0]:.4g} to {values[2]:.4g}"
    assert bool(judged.why) == (verdict == DIFFERS)


def test_without_repeats_the_interval_is_unknown():
    assert verdict_of(frame(decode([1, 2, 32])), "C01").interval == ""
    assert verdict_of(growths(1.2), "C01").interval == ""  # one repeat spans nothing


def test_repeats_of_one_run_are_one_run():
    """Passes of one command are minutes apart, and share what their day shares."""
    rows = growths(1.30, 1.40, 1.48)
    assert not verdict_of(rows, "C01").once
    together = verdict_of(rows.assign(date="2026-01-01"), "C01")
    assert together.once
    assert together.interval == verdict_of(rows, "C01").interval


def test_a_verdict_on_points_that_were_measured_once_says_so():
    """It has no interval, so it cannot be within noise, however near its bound is."""
    once, twice = growths(1.499), growths(1.499, 1.501)
    assert verdict_of(once, "C01").once
    assert verdict_of(once.assign(repeat=None), "C01").once
    assert verdict_of(once, "C01").verdict == REPRODUCED
    assert not verdict_of(twice, "C01").once
    assert verdict_of(twice, "C01").verdict == NOISE
    mixed = twice[(twice["repeat"] == 0) | (twice["batch_size"] != 32)]  # batch 32 lost its second repeat
    assert verdict_of(mixed, "C01").once
    unseen = twice[(twice["repeat"] == 0) | (twice["batch_size"] != 2)]  # the ratio does not see batch 2
    assert not verdict_of(unseen, "C01").once
    assert not verdict_of(once, "C05").once  # arithmetic


def test_repeats_that_move_together_do_not_move_a_ratio():
    """A slow minute slows batch 1 and batch 32 alike."""
    rows = repeated(frame(decode([1, 2, 32], growth=1.45)), 1.0, 1.3, 0.9)
    assert verdict_of(rows, "C01").interval == ""
    assert verdict_of(rows, "C01").verdict == REPRODUCED


def released(*repeats):
    """Figure 11 under the released rule: token/s by repeat on Distinct, Uniform, Skewed, Identical; None: no row."""
    parts = []
    for number, values in enumerate(repeats):
        one = frame(serving(punica=(950, 960, 970, 1000), punica_last_admitted=[value or 0 for value in values]))
        parts.append(one[one["value"] > 0].assign(repeat=number))
    return verdict_of(pd.concat(parts, ignore_index=True), "C26")


def test_systems_and_popularities_are_compared_repeat_by_repeat():
    """Each repeat draws other requests: of medians over draws the ratio would be 0.9, as no repeat is."""
    drawn = released((100, 100, 100, 100), (84, 90, 90, 90), (90, 110, 110, 110))
    assert "released_min_over_max=0.933333" in drawn.quantities
    assert "released_min_over_max=0.8182 to 1" in drawn.interval


def test_a_repeat_that_one_part_lacks_is_no_repeat_of_the_ratio():
    lacking = released((100, 100, 100, 100), (None, 90, 90, 90), (98, 100, 100, 100))
    assert "released_min_over_max=0.99" in lacking.quantities
    assert "released_min_over_max=0.98 to 1" in lacking.interval
    apart = released((90, 100, 100, 100), (None, 200, 200, None), (None, None, None, None))
    assert "released_min_over_max=0.9" in apart.quantities


def marked(rows, **where):
    hit = pd.concat([rows[name] == value for name, value in where.items()], axis=1).all(axis=1)
    return rows.assign(disturbed=hit)


def test_a_verdict_on_disturbed_points_is_marked():
    rows = frame(decode([1, 2, 32]))
    assert not verdict_of(rows, "C01").disturbed
    assert verdict_of(marked(rows, batch_size=32), "C01").disturbed
    assert verdict_of(rows.assign(disturbed=True), "C01").disturbed  # also when all are
    assert not verdict_of(marked(rows, batch_size=2), "C01").disturbed  # the ratio does not see batch 2


def test_value_and_interval_come_from_the_same_quiet_repeats():
    rows = growths(1.30, 1.40, 2.0)
    judged = verdict_of(marked(rows, repeat=2), "C01")
    assert judged.quantities == "ratio=1.35"
    assert judged.interval == "ratio=1.3 to 1.4"
    assert judged.verdict == REPRODUCED
    assert not judged.disturbed
    loud = verdict_of(rows.assign(disturbed=True), "C01")
    assert loud.disturbed
    assert loud.quantities == "ratio=1.4"  # none is quiet, so the median is of all ...
    assert loud.interval == ""  # ... and what others did to them is no interval of ours


def test_a_point_with_one_quiet_repeat_counts_as_measured_once():
    rows = growths(1.30, 1.40, 2.0)
    judged = verdict_of(marked(rows, batch_size=32, repeat=2), "C01")
    assert not judged.once
    loud = rows.assign(disturbed=(rows["batch_size"] == 32) & (rows["repeat"] > 0))
    judged = verdict_of(loud, "C01")
    assert judged.quantities == "ratio=1.3"
    assert judged.interval == ""
    assert judged.once


def test_points_are_told_apart_by_repeats_not_mixed():
    """Repeats of two lengths stay two curves."""
    rows = pd.concat([growths(1.2, 1.3, 1.25), frame(decode([1, 2, 32], seq_len=2048, growth=2.0))])
    judged = verdict_of(rows.reset_index(drop=True), "C02")
    assert judged.quantities.startswith("ratio=2;")
    assert verdict_of(rows.reset_index(drop=True), "C03").interval == "smallest_step=1.538 to 1.667"
