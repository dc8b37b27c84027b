"""Requests that come by the clock: for how long, which of them count, and when each comes."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from punica.workload import independent_seeds, poisson_arrivals

FEWEST_FOR_P99 = 100
"""Samples; of fewer the p99 would lie between the two longest."""


@dataclass(frozen=True)
class Span:
    """Seconds of warm-up, of arrivals that are measured, and of patience after them."""

    warm: float
    seconds: float
    drain: float
    least: float = 0.0
    """Requests that are to be expected in the measured time; at a low rate it is as much longer ..."""
    longest: float = math.inf
    """... but no longer than this (unless `seconds` are)."""

    def at(self, rate: float) -> "Span":
        """The span for `rate` requests per second."""
        return replace(self, seconds=max(self.seconds, min(self.least / rate, self.longest)))

    @property
    def measured(self) -> tuple[float, float]:
        """From when to when requests count that arrive."""
        return self.warm, self.warm + self.seconds

    @property
    def deadline(self) -> float:
        """When patience ends, and arrivals with it."""
        return self.warm + self.seconds + self.drain

    def arrivals(self, rate: float, seed: int) -> NDArray[np.float64]:
        """Seconds at which requests arrive, a Poisson process of `rate` per second, until the deadline."""
        return poisson_arrivals(rate, self.deadline, independent_seeds(seed, 1)[0])

    def counts(self, arrivals: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which of the arrivals are measured."""
        first, end = self.measured
        return (first <= arrivals) & (arrivals < end)
