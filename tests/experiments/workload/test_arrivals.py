"""Arrival times: rates, seeds, and the profile of Figure 13."""

import numpy as np
import pytest
import scipy.stats
from fakes import PAPER

from experiments.facts.paper import read_figure
from experiments.workload import independent_seeds, plotted_rate, poisson_arrivals, profile_arrivals


def test_constant_rate_has_exponential_gaps_of_a_seed():
    times = poisson_arrivals(5.0, 2000.0, seed=1)
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] < times[-1] < 2000
    assert len(times) == pytest.approx(10_000, abs=4 * 100)  # four standard deviations of a Poisson count
    assert scipy.stats.kstest(np.diff(times), scipy.stats.expon(scale=1 / 5).cdf).pvalue > 0.01
    assert times.tolist() == poisson_arrivals(5.0, 2000.0, seed=1).tolist()
    assert times.tolist() != poisson_arrivals(5.0, 2000.0, seed=2).tolist()


def test_seeds_are_independent():
    seeds = independent_seeds(0xABCDABCD987, 3)
    assert len(set(seeds)) == 3
    assert seeds == independent_seeds(0xABCDABCD987, 3)
    first, second = (poisson_arrivals(5.0, 200.0, seed) for seed in seeds[:2])
    counts = [np.histogram(times, bins=200, range=(0, 200))[0] for times in (first, second)]
    assert abs(np.corrcoef(*counts)[0, 1]) < 0.25


def test_plotted_profile_rises_and_falls_and_gives_the_paper_count():
    points = read_figure(PAPER, "13").query("metric == 'request_rate'").sort_values("t_s")
    rate = plotted_rate(points["t_s"].tolist(), points["value"].tolist())
    start, middle, end = rate(np.array([0.0, 1800.0, 3600.0]))
    assert middle > 5 * max(start, end)
    total = read_figure(PAPER, "13").query("metric == 'total_requests'")["value"].item()
    arrivals = profile_arrivals(rate, peak=points["value"].max(), duration=3600.0, seed=3)
    assert len(arrivals) == pytest.approx(total, rel=0.05)


def wave(times):
    return 20.0 * (np.cos(2 * np.pi * times / 1000) + 1.2) / 2.2


def test_thinning_follows_the_profile():
    counts = np.histogram(profile_arrivals(wave, 20.0, 1000.0, seed=5), bins=10, range=(0, 1000))[0]
    fine = wave(np.arange(1000) + 0.5).reshape(10, 100).sum(axis=1)
    assert np.abs(counts - fine).max() < 4.5 * np.sqrt(fine.max())
