"""Popularity: group sizes against the exact numbers of the paper's code, laws of shares, and change over time."""

import csv
from collections import Counter

import numpy as np
import pytest
from fakes import PAPER

from experiments.workload import WORKLOADS, adapter_shares, drawn_adapters, drifting, flash_crowd, popularity
from experiments.workload.popularity import Popularity, shares_of_groups, uniform

with (PAPER / "workload_reference.csv").open(newline="") as _stream:
    GROUPS = [
        (line["workload"], int(line["num_requests"]), [int(size) for size in line["value"].split()])
        for line in csv.DictReader(_stream)
        if line["quantity"] == "group_sizes"
    ]


def test_group_sizes_equal_the_reference():
    assert len(GROUPS) == 20
    assert [popularity(name).group_sizes(n) for name, n, _ in GROUPS] == [sizes for *_, sizes in GROUPS]
    assert popularity("Distinct").group_sizes(3) == [1, 1, 1]
    assert popularity("Identical").group_sizes(3) == [3]


@pytest.mark.parametrize("name", WORKLOADS.names())
def test_every_pattern_is_a_partition_whose_requests_are_its_rows_shuffled(name):
    for n in (1, 2, 3, 13, 63, 65, 257):
        sizes, slots = popularity(name).group_sizes(n), popularity(name).slots(n)
        assert (sum(sizes), min(sizes) >= 1) == (n, True)
        assert sizes == sorted(sizes, reverse=True)
        assert Counter(slots.tolist()) == dict(enumerate(sizes))
        assert (np.diff(slots) >= 0).all()
        assert sorted(popularity(name).requests(n).tolist()) == slots.tolist()


def test_zipf_is_rounded_by_largest_remainder():
    assert popularity("Zipf").group_sizes(8) == [4, 2, 1, 1]
    assert popularity("Zipf").group_sizes(10) == [5, 2, 1, 1, 1]


def test_shuffle_is_the_released_one():
    expected = np.repeat(np.arange(4, dtype=np.int32), 4)
    np.random.Generator(np.random.PCG64(0xABCDABCD987)).shuffle(expected)
    assert popularity("Uniform").requests(16).tolist() == expected.tolist()
    assert popularity("Uniform").requests(16, seed=1).tolist() != expected.tolist()


@pytest.mark.parametrize("name", ["Uniform", "Skewed", "Zipf"])
def test_shares_are_a_descending_distribution_that_draws_follow(name):
    for adapters in (1, 2, 37, 2000):
        shares = adapter_shares(name, adapters)
        assert (shares.shape, shares.sum()) == ((adapters,), pytest.approx(1, abs=1e-12))
        assert (shares >= 0).all()
        assert (np.diff(shares) <= 0).all()
    drawn = drawn_adapters(name, 50, 20_000, seed=3)
    counts, expected = np.bincount(drawn, minlength=50), 20_000 * adapter_shares(name, 50)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()
    assert (drawn == drawn_adapters(name, 50, 20_000, seed=3)).all()
    assert (drawn != drawn_adapters(name, 50, 20_000, seed=4)).any()


def test_the_laws():
    assert adapter_shares("Uniform", 5).tolist() == [0.2] * 5
    skewed = adapter_shares("Skewed", 30)
    assert skewed[:-1] / skewed[1:] == pytest.approx([1.5] * 29)
    zipf = adapter_shares("Zipf", 2000)
    assert zipf[0] / zipf[[1, 9, 99, 1999]] == pytest.approx([2**1.5, 10**1.5, 100**1.5, 2000**1.5])


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
def test_another_pattern_has_the_shares_of_its_own_groups(monkeypatch, rule, shares):
    sizes = shares_of_groups(Popularity("mine", rule), 4)
    assert sizes / sizes.sum() == pytest.approx(shares)
    monkeypatch.setitem(WORKLOADS._entries, "Mine", rule)
    assert adapter_shares("Mine", 4) == pytest.approx(shares)


ARRIVALS = np.linspace(0.0, 90.0, 30_000, endpoint=False)
SHARES = adapter_shares("Zipf", 50)


def measured(adapters, begin: float):
    """Return the share of each adapter among the requests of 30 seconds."""
    chosen = adapters[(begin <= ARRIVALS) & (begin + 30.0 > ARRIVALS)]
    return np.bincount(chosen, minlength=len(SHARES)) / len(chosen)


def test_a_crowd_takes_its_share_while_it_lasts_and_the_others_divide_the_rest_as_before() -> None:
    adapters, calm = (flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, share), seed=3) for share in (0.6, 0.0))
    before, during, after = (measured(adapters, begin) for begin in (0.0, 30.0, 60.0))
    assert during[-1] == pytest.approx(0.6 + 0.4 * SHARES[-1], abs=0.02)
    assert during[:-1] == pytest.approx(0.4 * SHARES[:-1], abs=0.015)
    assert before == pytest.approx(SHARES, abs=0.02)
    assert after == pytest.approx(SHARES, abs=0.02)
    outside = (ARRIVALS < 30.0) | (ARRIVALS >= 60.0)
    assert (adapters == calm)[outside].all()
    assert calm.tolist() != flash_crowd(ARRIVALS, SHARES, (30.0, 60.0, 0.0), seed=4).tolist()


def test_drift_hands_each_share_to_the_next_adapter_and_starts_again_after_the_last() -> None:
    adapters = drifting(ARRIVALS, SHARES, 30.0, seed=4, step=49)
    for turn in range(3):
        assert measured(adapters, 30.0 * turn) == pytest.approx(np.roll(SHARES, 49 * turn), abs=0.02)
