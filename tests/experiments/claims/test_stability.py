"""Other choices of the repeats turn a verdict that hangs on one of them, and no other."""

import pandas as pd
import pytest
from claim_rows import frame, growths, serving, verdict_of


def of_growth(*values):
    judged = verdict_of(growths(*values), "C01")
    return judged.choices, judged.others


def test_a_verdict_far_from_its_bound_is_that_of_every_choice():
    assert of_growth(1.30, 1.31, 1.32) == (6, "")


def test_a_verdict_that_one_repeat_decides_is_not():
    assert of_growth(1.30, 1.40, 1.90) == (6, "differs 3")  # 1.90 alone, and 1.60 and 1.65 with it; the median is 1.40


def test_of_two_repeats_each_alone_is_a_choice():
    assert of_growth(1.30, 1.90) == (2, "reproduced 1")  # their mean, 1.60, differs


@pytest.mark.parametrize("rows", [growths(1.4), growths(1.4).assign(repeat=None)], ids=["one repeat", "none"])
def test_points_that_were_measured_once_have_no_other_choice(rows):
    assert verdict_of(rows, "C01").choices == 0


def test_disturbed_repeats_are_no_choice():
    rows = growths(1.30, 1.31, 9.0, 1.32)
    assert verdict_of(rows.assign(disturbed=rows["repeat"] == 2), "C01").others == ""
    assert verdict_of(rows.assign(disturbed=rows["repeat"] != 0), "C01").choices == 0  # a single quiet one


def test_a_repeat_that_draws_other_requests_slows_all_popularities_alike():
    """Per repeat the ratio is the same, so neither value nor interval sees the draws."""
    one = frame(serving(punica=(960, 970, 980, 1000), punica_last_admitted=(985, 990, 995, 1000)))
    drawn = [one.assign(value=one["value"] * factor, repeat=i) for i, factor in enumerate((1.0, 1.5, 0.7))]
    judged = verdict_of(pd.concat(drawn, ignore_index=True), "C26")
    assert (judged.interval, judged.choices) == ("", 0)
