"""Resamples of repeats turn a verdict that hangs on one of them, and no other."""

import pandas as pd
import pytest
from claim_rows import PAPER, decode, frame, growths

from experiments.claims.rows import Rows
from experiments.claims.stability import stability


def of_growth(*values):
    return stability(growths(*values), PAPER, seeds=12).get("C01")


def test_a_verdict_far_from_its_bound_is_that_of_every_resample():
    found = of_growth(1.30, 1.31, 1.32)
    assert (found.verdict, found.same, found.of, found.others) == ("reproduced", 15, 15, {})
    assert str(found) == "reproduced in 15 of 15 resamples"


def test_a_verdict_that_one_repeat_decides_is_not():
    found = of_growth(1.30, 1.40, 1.90)
    assert found.verdict == "reproduced"  # the median, 1.40; without the first repeat it is 1.65
    assert 0 < found.others["differs"] < found.of == found.same + sum(found.others.values())
    assert str(found) == f"reproduced in {found.same} of 15 resamples (differs {found.others['differs']})"


@pytest.mark.parametrize("rows", [growths(1.4), growths(1.4).assign(repeat=None)], ids=["one repeat", "none"])
def test_points_that_were_measured_once_have_no_stability(rows):
    assert stability(rows, PAPER) == {}


def test_marked_repeats_are_drawn_only_where_there_are_no_two_quiet_ones():
    rows = growths(1.30, 1.31, 9.0, 1.32)
    quiet = stability(rows.assign(disturbed=rows["repeat"] == 2), PAPER)["C01"]
    assert quiet.others == {}
    alone = stability(rows.assign(disturbed=rows["repeat"] != 0), PAPER)["C01"]
    assert alone.verdict == "reproduced"
    assert "differs" in alone.others


def test_points_of_one_cell_are_drawn_alike():
    """A repeat that slows two systems alike changes no ratio of theirs."""
    parts = [frame(decode([1, 8, 32], system=name)).assign(repeat=i, value=float(factor))
             for i, factor in enumerate((1, 2, 5, 7)) for name in ("SGMV", "Loop")]  # fmt: skip
    for resample in Rows(pd.concat(parts, ignore_index=True)).resamples(6):
        drawn = resample.figure("1")
        values = [drawn[drawn["system"] == name]["value"].tolist() for name in ("SGMV", "Loop")]
        assert values[0] == values[1]
        assert len(values[0]) == 3


def test_a_seed_draws_the_same_repeats_again():
    assert of_growth(1.30, 1.40, 1.90) == of_growth(1.30, 1.40, 1.90)
