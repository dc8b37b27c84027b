"""Popularity of adapters: the paper's four patterns, as group sizes of n rows; and popularity that changes over time.

A *group* is the set of rows (or requests) that name one adapter. The paper describes the patterns in words
(section 7); the exact rules are those of the released benchmarks:

=========  ==================================================================================================
Distinct   n groups of 1: every row has its own adapter
Uniform    ceil(sqrt(n)) groups whose sizes differ by at most one
Skewed     a geometric series of ratio 1.5: sizes floor(1.5^0), floor(1.5^1), ... while their sum stays below n;
           what is left is one more group; the largest group comes first. The paper calls it "Zipf-1.5", which
           it is not (disagreement D09)
Identical  one group of n: every row has the same adapter
Zipf       not in the paper: what it calls its Skewed, a true Zipf law; the i-th adapter gets a share proportional to
           1 / i^1.5 (G. K. Zipf, Human Behavior and the Principle of Least Effort, 1949)
=========  ==================================================================================================

Adapters are numbered from 0 in group order. A batch wants its rows in group order (`Popularity.slots`); a stream of
requests arrives shuffled (`Popularity.requests`). These rules let the number of requests decide how many adapters there
are. Where that number is given, each request draws its adapter by the shares of the same patterns (`adapter_shares`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from punica.checks import check_count
from punica.registry import Registry

RELEASED_SEED = 0xABCDABCD987  # seed of every generator in the released harness
PAPER_WORKLOADS = ("Distinct", "Uniform", "Skewed", "Identical")
"""The four patterns of the paper, in the order of its figures."""
ZIPF_EXPONENT = 1.5
"""Exponent of the law that the paper names. Requests for web pages follow 0.64 to 0.83 (Breslau et al., INFOCOM 1999),
between Zipf and Uniform."""
SKEWED_RATIO = 1.5  # ratio of one adapter's requests to the next one's, under Skewed

GroupRule = Callable[[int], list[int]]
WORKLOADS: Registry[GroupRule] = Registry("workload")
"""Name -> rule; a rule takes n >= 1 and returns positive group sizes that sum to n."""


@WORKLOADS.register("Distinct")
def distinct(n: int) -> list[int]:
    return [1] * n


@WORKLOADS.register("Uniform")
def uniform(n: int) -> list[int]:
    groups = math.isqrt(n - 1) + 1  # ceil(sqrt(n)) without rounding errors
    size, larger = divmod(n, groups)
    return [size + 1] * larger + [size] * (groups - larger)


@WORKLOADS.register("Skewed")
def skewed(n: int) -> list[int]:
    """Return a geometric series of ratio 3/2 plus one group for the remainder, largest first.

    >>> skewed(64)
    [17, 17, 11, 7, 5, 3, 2, 1, 1]
    """
    sizes: list[int] = []
    power, left = Fraction(1), n
    while left > math.floor(power):
        sizes.append(math.floor(power))
        left -= sizes[-1]
        power *= Fraction(3, 2)
    return sorted([*sizes, left], reverse=True)


@WORKLOADS.register("Identical")
def identical(n: int) -> list[int]:
    return [n]


@WORKLOADS.register("Zipf")
def zipf(n: int) -> list[int]:
    """Return shares proportional to 1 / i^1.5 over n possible adapters, rounded by largest remainder, without empty
    groups.

    >>> zipf(10)
    [5, 2, 1, 1, 1]
    """
    shares = np.arange(1, n + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    sizes = rounded_shares(shares * (n / shares.sum()), n)
    return sorted((int(size) for size in sizes if size), reverse=True)


def rounded_shares(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Round ``shares``, which add up to ``total``, to integers that do: each down, then the largest remainders up."""
    sizes = np.floor(shares).astype(np.int64)
    largest_remainder_first = np.argsort(sizes - shares, kind="stable")
    sizes[largest_remainder_first[: total - int(sizes.sum())]] += 1
    return sizes


@dataclass(frozen=True)
class Popularity:
    """One pattern: a name and the rule behind it. Make one with `popularity("Skewed")`."""

    name: str
    rule: GroupRule

    def group_sizes(self, n: int) -> list[int]:
        """Return rows per adapter for n rows, in adapter order. ValueError unless n is at least 1."""
        return self.rule(check_count("n", n, 1, "row or request"))

    def number_of_adapters(self, n: int) -> int:
        return len(self.group_sizes(n))

    def slots(self, n: int) -> NDArray[np.int64]:
        """Return the adapter index of each of n rows, [n] int64, in group order: 0, 0, ..., 1, 1, ..."""
        sizes = self.group_sizes(n)
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)

    def requests(self, n: int, seed: int = RELEASED_SEED) -> NDArray[np.int64]:
        """The adapter of each of n requests, [n] int64, by arrival: shuffled as released, by PCG64 with its seed."""
        # int32, because the permutation that a shuffle makes must not depend on a choice of ours
        shuffled = self.slots(n).astype(np.int32)
        np.random.Generator(np.random.PCG64(seed)).shuffle(shuffled)
        return shuffled.astype(np.int64)


def popularity(name: str) -> Popularity:
    """Return the pattern called ``name``; ValueError lists the known names.

    >>> popularity("Uniform").group_sizes(8)
    [3, 3, 2]
    """
    return Popularity(name, WORKLOADS.get(name))


def adapter_shares(name: str, adapters: int) -> NDArray[np.float64]:
    """Return the part of the requests that each of `adapters` adapters gets, [adapters], descending, with sum 1.

    ``Uniform``: equal ones. ``Skewed``: each 1.5 times the next, so that some twenty adapters get nearly all, however
    many there are. ``Zipf``: proportional to 1 / i^1.5. Any other pattern: by its own groups (`shares_of_groups`).
    ValueError for a name that is not registered.

    >>> adapter_shares("Zipf", 3).round(3).tolist()
    [0.647, 0.229, 0.124]
    """
    places = np.arange(check_count("adapters", adapters, 1, "adapter"), dtype=np.float64)
    laws = {
        "Uniform": lambda: np.ones(adapters),
        "Skewed": lambda: SKEWED_RATIO**-places,
        "Zipf": lambda: (places + 1) ** -ZIPF_EXPONENT,
    }
    found = laws[name]() if name in laws else shares_of_groups(popularity(name), adapters)
    return found / found.sum()


def shares_of_groups(pattern: Popularity, adapters: int) -> NDArray[np.float64]:
    """The `adapters` largest groups of ``pattern``, [adapters], descending, 0 beyond the last, of the least doubled
    number of requests that has so many, or the square.
    """
    n = adapters
    while pattern.number_of_adapters(n) < adapters and n < adapters**2:
        n *= 2
    largest = sorted(pattern.group_sizes(n), reverse=True)[:adapters]
    return np.array(largest + [0] * (adapters - len(largest)), dtype=np.float64)


def drawn_adapters(name: str, adapters: int, n: int, seed: int = RELEASED_SEED) -> NDArray[np.int64]:
    """Draw the adapter index in [0, adapters) of each of n requests, [n] int64, independently by `adapter_shares`."""
    shares = adapter_shares(name, adapters)
    requests = check_count("n", n, 1, "request")
    return np.random.Generator(np.random.PCG64(seed)).choice(len(shares), size=requests, p=shares).astype(np.int64)


def drifting(
    arrivals: NDArray[np.float64], shares: NDArray[np.float64], period: float, seed: int, step: int = 1
) -> NDArray[np.int64]:
    """The adapter of each request, [n] int64, by ``shares`` that move by ``step`` adapters per ``period`` s."""
    places = np.random.Generator(np.random.PCG64(seed)).choice(len(shares), size=len(arrivals), p=shares)
    return (places + step * np.floor(arrivals / period).astype(np.int64)) % len(shares)


def flash_crowd(
    arrivals: NDArray[np.float64], shares: NDArray[np.float64], crowd: tuple[float, float, float], seed: int
) -> NDArray[np.int64]:
    """The adapter of each request by ``shares``; ``crowd``: start, end, and the share then of the last adapter."""
    start, end, share = crowd
    found = drifting(arrivals, shares, np.inf, seed)
    generator = np.random.Generator(np.random.PCG64([seed, 1]))
    joins = (arrivals >= start) & (arrivals < end) & (generator.random(len(arrivals)) < share)
    found[joins] = len(shares) - 1
    return found
