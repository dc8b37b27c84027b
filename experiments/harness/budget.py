"""Time limits of `make reproduce`: the deadline of all figures, and the budget of one.

A figure's share of the time left is its part of the minutes (`figure.minutes`) of all that are not done. Within it
samples give way first, then repeats, then points; the first measurement is taken whatever the time. Without a deadline
the first pass is whole. A measurement is estimated by its last duration, a new one by the shorter of the two before it.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Clock = Callable[[], float]
TIMED = 0.5
"""Part of a point's time that goes into samples; the rest prepares and checks."""
SLACK = 0.1
"""Largest overrun of a measurement over its share, as a part of the figure's own minutes."""
GRACE = 0.25
"""Overrun at which a measurement is stopped, likewise."""


class OutOfTime(BaseException):
    """End of a measurement by its budget; not an `Exception`, so that no handler of a library swallows it."""


class Budget:
    """Time of one figure: `seconds` from now (None: no limit), `own` of `figure.minutes`; `firm`: under a deadline."""

    def __init__(
        self, seconds: float | None, own: float | None = None, firm: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self.firm, self._clock = firm, clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._own = (seconds or 0.0) if own is None else own
        self._costs: dict[str, float] = {}
        self._latest = (0.0, 0.0)

    @property
    def left(self) -> float:
        """Seconds until the share is spent; infinite without limit."""
        return self._end - self._clock()

    def seconds_per_point(self, wanted: float, points: int) -> float:
        """Return `wanted`, or the part of the time left that each of `points` may take if that is less."""
        return min(wanted, max(0.0, TIMED * self.left / max(1, points)))

    @contextmanager
    def spending(self, key: str, whole: bool = False) -> Iterator[None]:
        """Time a measurement of `key`; `OutOfTime` stops it far beyond the share, unless it is to be taken `whole`."""
        started = self._clock()
        try:
            with stopped_after(self.left + GRACE * self._own if self.firm and not whole else math.inf):
                yield
        finally:
            self._costs[key] = self._clock() - started
            self._latest = self._latest[1], self._costs[key]

    def estimate(self, key: str) -> float:
        """Return the seconds that `key` took last, or the fewer of the latest two measurements of all."""
        return self._costs.get(key, min(self._latest))

    def fits(self, key: str, slack: float = 0.0) -> bool:
        """Check that a measurement of `key` ends within the share, or beyond it by the part `slack` of the minutes."""
        return self.left > 0 and self.left + slack * self._own >= self.estimate(key)


class Deadline:
    """Time of all figures: the sum of their `minutes` from now; figures without minutes extend it."""

    def __init__(self, minutes: Mapping[str, float], clock: Clock = time.monotonic) -> None:
        self._waiting = {name: 60.0 * share for name, share in minutes.items()}
        self._clock, self._end = clock, clock() + sum(self._waiting.values())
        self._unlimited_since: float | None = None

    @property
    def minutes_left(self) -> float:
        """Minutes until it; fewer than zero behind it."""
        now = self._clock() if self._unlimited_since is None else self._unlimited_since
        return (self._end - now) / 60

    def budget(self, name: str) -> Budget:
        """The share of `name`, from now; a figure without minutes has no limit and takes nothing from the others."""
        if self._unlimited_since is not None:
            self._end += self._clock() - self._unlimited_since
        self._unlimited_since = None if name in self._waiting else self._clock()
        if name not in self._waiting:
            return Budget(None, clock=self._clock)
        total = sum(self._waiting.values())
        own = self._waiting.pop(name)
        left = max(0.0, self._end - self._clock())
        return Budget(left * own / total, own, firm=True, clock=self._clock)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once `seconds` have passed (main thread only)."""
    if math.isinf(seconds):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
