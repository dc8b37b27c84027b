"""Quantiles of samples."""

import pytest

from experiments.measure.statistics import quantiles


def test_quantiles_of_a_known_sample():
    assert quantiles(list(range(1, 102))) == {"median": 51.0, "p10": 11.0, "p90": 91.0, "count": 101.0}


def test_an_outlier_does_not_move_the_median():
    assert quantiles([1.0, 1.0, 1.0, 1.0, 1e9])["median"] == 1.0


@pytest.mark.parametrize(
    ("samples", "message"),
    [([], "empty"), ([1.0, float("nan")], "not finite"), ([float("inf")], "not finite")],
    ids=["empty", "nan", "inf"],
)
def test_bad_samples_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        quantiles(samples)
