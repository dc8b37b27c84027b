"""Ranges of the quantities behind claims: on the scale of each, and never a value that it cannot have."""

import math

import pandas as pd
import pytest

from experiments.claims import Verdict
from experiments.claims.bounds import read_bounds
from experiments.harness.schema import REPOSITORY
from experiments.report.expected import CPU_FLOOR, FLOOR, TIMES, Scale, claim_ranges, read_scales
from tests.experiments.report.report_rows import PAPER

RECORDED = sorted(REPOSITORY.glob("results/*/expected/claims.csv"))


def ends(claim, quantities, interval="", **columns):
    """Return the range of each quantity of a claim."""
    verdict = Verdict(claim, "", "1", "", quantities=quantities, interval=interval, **columns)
    return {line.quantity: (line.low, line.high) for line in claim_ranges([verdict], PAPER).itertuples()}


def test_a_ratio_reaches_as_many_times_up_as_down():
    found = ends("C01", "flat=10; wide=4", "wide=1 to 5")
    assert found["flat"] == pytest.approx((10 / (1 + FLOOR), 10 * (1 + FLOOR)))
    assert found["wide"] == pytest.approx((4 / 4**TIMES, 4 * 4**TIMES))


def test_what_a_cpu_measured_has_a_floor_of_its_own():
    for kind, floor in (("measured", CPU_FLOOR), ("simulated", FLOOR)):
        found = ends("C01", "ratio=10", "ratio=9.9 to 10.1", hardware="cpu", kind=kind)
        assert found["ratio"] == pytest.approx((10 / (1 + floor), 10 * (1 + floor)))
    share = ends("C46", "share=0.5", hardware="cpu", kind="measured")["share"]
    assert share == pytest.approx((0.5 * (1 - FLOOR), 0.5 * (1 + FLOOR)))


def test_a_growth_in_percent_is_a_ratio_less_one():
    (found,) = ends("C22", "largest_percent=100", "largest_percent=0 to 100").values()
    assert found == pytest.approx((100 * (2 / 2**TIMES - 1), 100 * (2 * 2**TIMES - 1)))


def test_a_difference_may_be_below_zero_and_a_count_may_be_zero():
    assert ends("C41", "extra_ms=-2", "extra_ms=-2.5 to -1.9")["extra_ms"] == pytest.approx((-3, -1))
    assert ends("C49", "median=0") == {"median": (0, 0)}


def test_shares_and_extremes_end_where_they_must():
    assert ends("C46", "share=0.95")["share"] == pytest.approx((0.95 * (1 - FLOOR), 1))
    assert ends("C46", "share=0.2", "share=0.01 to 0.2")["share"][0] == 0
    assert ends("C26", "released_min_over_max=0.98")["released_min_over_max"][1] == 1
    assert ends("C15", "largest_spread=1.02")["largest_spread"][0] == 1
    assert ends("C36", "mean_batch=31")["mean_batch"][1] == 32


@pytest.mark.parametrize(
    ("claim", "quantities", "interval"),
    [("C01", "ratio=0", ""), ("C01", "ratio=2", "ratio=-1 to 2"), ("C46", "share=1.2", ""), ("C22", "x=-1", "")],
)
def test_a_value_that_its_scale_excludes_is_refused_by_name(claim, quantities, interval):
    name = quantities.partition("=")[0]
    with pytest.raises(ValueError, match=rf"{claim}, {name}: .* not possible on the scale .*claim_quantities\.csv"):
        ends(claim, quantities, interval)


def test_a_claim_without_quantities_has_no_range():
    assert claim_ranges([Verdict("C02", "", "1", "")], PAPER).empty


def test_every_scale_is_of_a_quantity_that_has_bounds():
    bounds = read_bounds(PAPER)
    known = {(claim, one.quantity) for claim, tests in bounds.items() for found in tests.values() for one in found}
    assert set(read_scales(PAPER)) <= known
    for (claim, name), scale in read_scales(PAPER).items():
        assert scale != Scale(), f"{claim}, {name} is a plain ratio: leave it out"


def test_an_unknown_scale_is_refused_with_file_and_line(tmp_path):
    path = tmp_path / "claim_quantities.csv"
    path.write_text("claim,quantity,scale,least,most,reading\nC01,ratio,square,,,\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"claim_quantities\.csv, line 2: scale is 'square'; .*linear, ratio, growth"):
        read_scales(tmp_path)


@pytest.mark.parametrize("path", RECORDED, ids=[path.parts[-3] for path in RECORDED])
def test_recorded_ranges_hold_their_value_and_nothing_impossible(path):
    scales, table = read_scales(PAPER), pd.read_csv(path)
    for line in table.itertuples():
        scale = scales.get((line.claim, line.quantity), Scale())
        assert line.low <= line.value <= line.high, line
        assert all(math.isfinite(end) and scale.is_possible(end) for end in (line.low, line.high)), line
