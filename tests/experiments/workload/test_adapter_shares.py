"""Popularity over a given number of adapters: the laws, exactly, and draws that follow them."""

import numpy as np
import pytest

from experiments.workload import WORKLOADS, Popularity, adapter_shares, drawn_adapters
from experiments.workload.popularity import ZIPF_EXPONENT, shares_of_groups, uniform

PATTERNS = ["Uniform", "Skewed", "Zipf"]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("adapters", [1, 2, 37, 2000])
def test_shares_are_a_descending_distribution(name, adapters):
    shares = adapter_shares(name, adapters)
    assert shares.shape == (adapters,)
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert (shares >= 0).all()
    assert (np.diff(shares) <= 0).all()


def test_the_laws():
    assert adapter_shares("Uniform", 5).tolist() == [0.2] * 5
    skewed = adapter_shares("Skewed", 30)
    assert skewed[:-1] / skewed[1:] == pytest.approx([1.5] * 29)
    assert skewed[:20].sum() > 0.999
    zipf = adapter_shares("Zipf", 2000)
    assert zipf[0] / zipf[[1, 9, 99, 1999]] == pytest.approx([2**1.5, 10**1.5, 100**1.5, 2000**1.5])
    slope = np.polyfit(np.log(np.arange(1, 2001)), np.log(zipf), 1)[0]  # a line on logarithmic axes is Zipf's law
    assert slope == pytest.approx(-ZIPF_EXPONENT)


@pytest.mark.parametrize("name", PATTERNS)
def test_draws_follow_the_shares_and_the_seed(name):
    drawn = drawn_adapters(name, 50, 20_000, seed=3)
    assert drawn.dtype == np.int64
    counts, expected = np.bincount(drawn, minlength=50), 20_000 * adapter_shares(name, 50)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
    assert (drawn == drawn_adapters(name, 50, 20_000, seed=3)).all()
    assert (drawn != drawn_adapters(name, 50, 20_000, seed=4)).any()


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        (lambda n: [1] * n, [0.25] * 4),
        (lambda n: [n], [1, 0, 0, 0]),
        (lambda n: [n // 2, n - n // 2] if n > 1 else [1], [0.5, 0.5, 0, 0]),
        (uniform, [0.25] * 4),
        (lambda n: [1] * (n // 2) + [n - n // 2], [4 / 7, 1 / 7, 1 / 7, 1 / 7]),
    ],
    ids=["each its own", "all one", "halves", "grows with the root", "smallest first"],
)
def test_another_pattern_has_the_shares_of_its_own_groups(rule, shares):
    sizes = shares_of_groups(Popularity("mine", rule), 4)
    assert sizes / sizes.sum() == pytest.approx(shares)


def test_a_registered_pattern_is_drawn(monkeypatch):
    monkeypatch.setitem(WORKLOADS._entries, "Thirds", lambda n: [n - n // 3, n // 3] if n > 2 else [n])
    assert adapter_shares("Thirds", 99)[:3].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert set(drawn_adapters("Thirds", 99, 200).tolist()) == {0, 1}
    assert adapter_shares("Thirds", 1).tolist() == [1]


def test_an_unknown_pattern_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown workload 'nothing'; known: Distinct, Uniform"):
        adapter_shares("nothing", 8)


@pytest.mark.parametrize(("adapters", "n"), [(0, 5), (5, 0), (1.5, 5)])
def test_counts_are_checked(adapters, n):
    with pytest.raises((TypeError, ValueError)):
        drawn_adapters("Zipf", adapters, n)
