"""Other choices of the repeats turn a verdict that hangs on one of them, and no other."""

import pandas as pd
import pytest
from claim_rows import PAPER, frame, growths, serving

from experiments.claims.judge import stability


def of_growth(*values):
    return stability(growths(*values), PAPER).get("C01")


def test_a_verdict_far_from_its_bound_is_that_of_every_choice():
    found = of_growth(1.30, 1.31, 1.32)
    assert (found.verdict, found.same, found.of, found.others) == ("reproduced", 6, 6, {})


def test_a_verdict_that_one_repeat_decides_is_not():
    found = of_growth(1.30, 1.40, 1.90)
    assert found.verdict == "reproduced"  # the median, 1.40
    assert (found.same, found.of, found.others) == (3, 6, {"differs": 3})  # 1.90 alone, 1.60 and 1.65 with it


def test_of_two_repeats_each_alone_is_a_choice():
    found = of_growth(1.30, 1.90)
    assert (found.verdict, found.of, found.others) == ("differs", 2, {"reproduced": 1})  # their mean is 1.60


@pytest.mark.parametrize("rows", [growths(1.4), growths(1.4).assign(repeat=None)], ids=["one repeat", "none"])
def test_points_that_were_measured_once_have_no_stability(rows):
    assert stability(rows, PAPER) == {}


def test_disturbed_repeats_are_no_choice():
    rows = growths(1.30, 1.31, 9.0, 1.32)
    quiet = stability(rows.assign(disturbed=rows["repeat"] == 2), PAPER)["C01"]
    assert quiet.others == {}
    assert "C01" not in stability(rows.assign(disturbed=rows["repeat"] != 0), PAPER)  # a single quiet one


def test_a_repeat_that_draws_other_requests_slows_all_popularities_alike():
    """Per repeat the ratio is the same, so neither value, interval nor stability sees the draws."""
    one = frame(serving(punica=(960, 970, 980, 1000), punica_last_admitted=(985, 990, 995, 1000)))
    drawn = [one.assign(value=one["value"] * factor, repeat=i) for i, factor in enumerate((1.0, 1.5, 0.7))]
    assert "C26" not in stability(pd.concat(drawn, ignore_index=True), PAPER)
