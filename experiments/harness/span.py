"""Arrivals by the clock: warm-up, measured time, drain, and the Poisson process of one load."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.workload import independent_seeds, poisson_arrivals

FEWEST_FOR_P99 = 100
"""Fewest samples of a p99; of fewer it would be between the two longest."""


@dataclass(frozen=True)
class Span:
    """Seconds of warm-up, of arrivals that are measured, and of patience after them."""

    warm: float
    seconds: float
    drain: float
    least: float = 0.0
    """Expected requests in the measured time, which a low rate lengthens for them ..."""
    longest: float = math.inf
    """... up to this (or `seconds`, if more)."""

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
