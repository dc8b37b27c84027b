"""Group sizes and request order, against the exact numbers of ``paper_results/workload_reference.csv``."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experiments.workload import PAPER_WORKLOADS, RELEASED_SEED, WORKLOADS, popularity, zipf

REFERENCE = Path(__file__).parents[3] / "paper_results" / "workload_reference.csv"
with REFERENCE.open(newline="") as _stream:
    GROUPS = [
        (line["workload"], int(line["num_requests"]), [int(size) for size in line["value"].split()])
        for line in csv.DictReader(_stream)
        if line["quantity"] == "group_sizes"
    ]


def test_reference_is_complete():
    assert {(name, n) for name, n, _ in GROUPS} == {
        (name, n) for name in ("Uniform", "Skewed") for n in (1, 2, 4, 8, 16, 32, 64, 100, 1000, 1024)
    }


@pytest.mark.parametrize(("name", "n", "sizes"), GROUPS, ids=[f"{name}-{n}" for name, n, _ in GROUPS])
def test_group_sizes_equal_the_reference(name, n, sizes):
    assert popularity(name).group_sizes(n) == sizes
    assert popularity(name).number_of_adapters(n) == len(sizes)


@pytest.mark.parametrize("n", [1, 3, 7, 64])
def test_distinct_and_identical(n):
    assert popularity("Distinct").group_sizes(n) == [1] * n
    assert popularity("Identical").group_sizes(n) == [n]


@pytest.mark.parametrize("name", WORKLOADS.names())
@pytest.mark.parametrize("n", [1, 2, 3, 5, 13, 37, 63, 65, 257])
def test_every_pattern_is_a_partition(name, n):
    sizes = popularity(name).group_sizes(n)
    assert sum(sizes) == n
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)
    slots = popularity(name).slots(n)
    assert slots.dtype == np.int64
    assert Counter(slots.tolist()) == dict(enumerate(sizes))
    assert (np.diff(slots) >= 0).all()


@pytest.mark.parametrize("order", ["shuffled", "grouped", "round_robin"])
@pytest.mark.parametrize("name", PAPER_WORKLOADS)
def test_orders_are_permutations(name, order):
    requests = popularity(name).requests(37, order=order)
    assert sorted(requests.tolist()) == popularity(name).slots(37).tolist()


def test_shuffle_is_the_released_one():
    expected = np.repeat(np.arange(4, dtype=np.int32), 4)
    np.random.Generator(np.random.PCG64(0xABCDABCD987)).shuffle(expected)
    assert popularity("Uniform").requests(16).tolist() == expected.tolist()
    assert RELEASED_SEED == 11806239938951
    assert popularity("Uniform").requests(16, seed=1).tolist() != expected.tolist()


def test_round_robin_deals_one_of_each_in_turn():
    assert popularity("Skewed").requests(8, order="round_robin").tolist() == [0, 1, 2, 3, 4, 0, 1, 0]


def test_zipf_follows_the_power_law():
    sizes = zipf(100_000)
    for i in (2, 3, 10):
        assert sizes[0] / sizes[i - 1] == pytest.approx(i**1.5, rel=0.02)
    assert len(zipf(1000, s=3.0)) < len(zipf(1000, s=1.1))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: popularity("skewed"), ValueError, "'skewed'.*Distinct, Uniform, Skewed, Identical"),
        (lambda: popularity("Uniform").group_sizes(0), ValueError, "n is 0, must be >= 1"),
        (lambda: popularity("Uniform").slots(2.5), TypeError, "float 2.5"),
        (lambda: popularity("Uniform").slots(True), TypeError, "bool True"),
        (lambda: popularity("Uniform").requests(4, order="sorted"), ValueError, "shuffled, grouped.*'sorted'"),
        (lambda: zipf(10, s=0), ValueError, "s of a Zipf law must be positive, got 0"),
    ],
    ids=["unknown", "zero", "float", "bool", "order", "zipf"],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
