"""`make reproduce` ends in time, whatever the machine: the time of all figures, and the share of one.

A figure gets its part (`scale.minutes`) of the time that is left for it and those after it, so that what one does not
use goes to later ones, and what one takes too much is borne by all of them. Within its share samples give way first: a
point gets no more than its part of the time, down to `scale.min_repeats` samples. Then whole passes, then points: what
was measured before costs what it took then, anything else what its neighbour took, and what does not fit is left out. A
measurement that runs on far beyond the share is stopped. What was left out is said, and measured by the next run.

A figure's script by itself has no deadline: its first pass is whole, and only repeats give way.
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
"""How far beyond the share a pass may end, as a part of the figure's own minutes ..."""
GRACE = 0.25
"""... and when a measurement that runs on is stopped."""


class OutOfTime(BaseException):
    """A measurement was stopped. Like `KeyboardInterrupt` no `except Exception` on its way may take it."""


class Budget:
    """One figure's time: `seconds` (None: no limit) from now, of which it was given `own` by `scale.minutes`.

    `firm`: under a deadline, so that even first measurements are left out or stopped.
    """

    def __init__(
        self, seconds: float | None, own: float | None = None, firm: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._clock, self._firm, self._visits = clock, firm, 0
        self._end = math.inf if seconds is None else clock() + seconds
        self._own = (seconds or 0.0) if own is None else own
        self._costs: dict[str, float] = {}
        self._last = 0.0

    @property
    def left(self) -> float:
        """Seconds until the share is spent; infinite without limit."""
        return self._end - self._clock()

    def expect(self, points: int) -> None:
        """`points` are to be measured, all passes together."""
        self._visits = points

    def visited(self, points: int) -> None:
        """`points` of those expected are done."""
        self._visits -= points

    def seconds_per_point(self, wanted: float) -> float:
        """`wanted`, or what a point may take of the time left if that is less."""
        return min(wanted, max(0.0, TIMED * self.left / max(1, self._visits)))

    @contextmanager
    def spending(self, key: str) -> Iterator[None]:
        """What happens inside is a measurement of `key`, and what it takes is the estimate of its next one.

        Raises `OutOfTime` in it when it has run on beyond the share.
        """
        started = self._clock()
        try:
            with stopped_after(self.left + GRACE * self._own if self._firm else math.inf):
                yield
        finally:
            self._last = self._costs[key] = self._clock() - started

    def estimate(self, key: str) -> float:
        """Seconds that `key` will take: what it took before, or what was measured last took."""
        return self._costs.get(key, self._last)

    def fits(self, key: str) -> bool:
        """Whether one more measurement of `key` ends within the share."""
        return 0 < self.left >= self.estimate(key)

    def begins(self, key: str) -> bool:
        """Whether `key` may be measured in a pass that has begun: always without a deadline."""
        return not self._firm or (self.left > 0 and self.left + SLACK * self._own >= self.estimate(key))

    def pass_fits(self, keys: list[str]) -> bool:
        """Whether one more pass over `keys` ends in time."""
        return self.left + SLACK * self._own >= sum(map(self.estimate, keys))


class Deadline:
    """The time of all figures: the sum of their `minutes`, from now, and what those without minutes take."""

    def __init__(self, minutes: Mapping[str, float], clock: Clock = time.monotonic) -> None:
        self._waiting = {name: 60.0 * share for name, share in minutes.items()}
        self._clock, self._end = clock, clock() + sum(self._waiting.values())
        self._unlimited_since: float | None = None

    def budget(self, name: str) -> Budget:
        """The share of `name`, from now: its part of what is left for it and those that were not asked for yet.

        No limit for a figure without minutes, whose time, up to the next call, is not taken from the others.
        """
        if self._unlimited_since is not None:
            self._end += self._clock() - self._unlimited_since
        self._unlimited_since = None if name in self._waiting else self._clock()
        if name not in self._waiting:
            return Budget(None, clock=self._clock)
        everyone = sum(self._waiting.values())
        own = self._waiting.pop(name)
        left = max(0.0, self._end - self._clock())
        return Budget(left * own / everyone, own, firm=True, clock=self._clock)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in what happens inside once `seconds` have passed; main thread only."""
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
