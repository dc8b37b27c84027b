"""Arrival times: a Poisson process with a constant rate, or one that follows Figure 13's plotted points; the released
generator starts and ends at its maximum (D12 g). Requests per second, seconds from the start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

RateProfile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Times [n] in s -> rates [n] in requests per second; never negative, never above the ``peak`` given with it."""

FEWEST_FOR_P99 = 100  # fewest samples of a p99; of fewer it would be between the two longest


def independent_seeds(seed: int, count: int) -> list[int]:
    """Derive ``count`` seeds for generators that must not see each other's draws (lengths, gaps, popularity)."""
    return [int(child.generate_state(1, np.uint64)[0]) for child in np.random.SeedSequence(seed).spawn(count)]


def poisson_arrivals(rate: float, duration: float, seed: int) -> NDArray[np.float64]:
    """Draw arrival times in [0, duration), ascending, with independent exponential gaps of mean 1 / rate."""
    return profile_arrivals(lambda times: np.full_like(times, rate), rate, duration, seed)


def profile_arrivals(profile: RateProfile, peak: float, duration: float, seed: int) -> NDArray[np.float64]:
    """Arrivals in [0, duration) at the rate ``profile``, thinned from ``peak``; ValueError where it exceeds this."""
    for name, value in (("rate", peak), ("duration", duration)):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    stream = np.random.Generator(np.random.PCG64(seed))
    # given their number, the candidates of a constant-rate Poisson process are independent and uniform
    candidates = np.sort(stream.uniform(0.0, duration, stream.poisson(peak * duration)))
    rates = profile(candidates)
    if np.any(rates < 0) or np.any(rates > peak * (1 + 1e-9)):
        raise ValueError(
            f"the rate profile must stay between 0 and peak={peak!r} requests/s, got {rates.min():.4g} to "
            f"{rates.max():.4g}; pass its maximum as peak"
        )
    return candidates[stream.uniform(0.0, peak, len(candidates)) < rates]


def plotted_rate(times: Sequence[float], means: Sequence[float], window: float = 200.0) -> RateProfile:
    """The profile of Figure 13 from its plotted points: lines between them, each at the middle of the ``window``
    seconds that follow, constant beyond the ends.
    """
    if len(times) < 2 or np.any(np.diff(times) <= 0):
        raise ValueError("times must ascend, at least 2; sort the points of the figure by t_s first")
    return lambda at: np.interp(at, np.asarray(times) + window / 2, np.asarray(means))


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
    bursts: Callable[[float, float], NDArray[np.float64]] | None = None
    """Arrivals by rate and end of a trace, in place of a Poisson process."""

    def at(self, rate: float) -> "Span":
        return replace(self, seconds=max(self.seconds, min(self.least / rate, self.longest)))

    @property
    def measured(self) -> tuple[float, float]:
        return self.warm, self.warm + self.seconds

    @property
    def deadline(self) -> float:
        return self.warm + self.seconds + self.drain

    def arrivals(self, rate: float, seed: int) -> NDArray[np.float64]:
        """Seconds at which requests arrive until the deadline, at `rate` per second: a Poisson process, or `bursts`."""
        if self.bursts:
            return self.bursts(rate, self.deadline)
        return poisson_arrivals(rate, self.deadline, independent_seeds(seed, 1)[0])
