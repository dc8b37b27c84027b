"""A figure keeps its share of the time of `make reproduce` (`scale.minutes`).

What gives way first are samples: a point gets no more than its part of the time that is left, down to
`scale.min_repeats` samples. Then passes: the first always ends, a further one starts only if, at the pace of the last,
it ends in time. What was left out is said, and measured by the next run.
"""

import time
from collections.abc import Callable

TIMED = 0.5
"""Part of a point's time that goes into samples; the rest prepares and checks."""
SLACK = 1.1
"""How far beyond its share the last pass may end."""


class Budget:
    """`seconds` (None: no limit) for `visits` points of all passes together; the clock runs from now."""

    def __init__(self, seconds: float | None, visits: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._visits = clock, seconds, visits
        self._started = self._pass_started = clock()

    @property
    def left(self) -> float:
        """Seconds until the share is spent; infinite without limit."""
        return float("inf") if self._seconds is None else self._seconds - (self._clock() - self._started)

    def seconds_per_point(self, wanted: float) -> float:
        """`wanted`, or what a point may take of the time left if that is less."""
        return min(wanted, max(0.0, TIMED * self.left / max(1, self._visits)))

    def visited(self, points: int) -> None:
        """`points` of those left are done."""
        self._visits -= points

    def next_pass(self) -> bool:
        """Whether one more pass as long as the one that ends now fits; called between passes."""
        now = self._clock()
        last, self._pass_started = now - self._pass_started, now
        if self._seconds is None:
            return True
        return now - self._started + last <= SLACK * self._seconds
