"""A trial: a function that tries something many times and counts what survived."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from punica.registry import Registry

SIZES = ("smoke", "laptop", "full")
"""Counts for tests, for a run of all trials on a laptop, and for a long run."""
MOST_NOTES = 5
"""Texts of losses that an outcome keeps."""
TRIALS: Registry["Trial"] = Registry("trial")


@dataclass(frozen=True)
class Setting:
    """Choices of one run of a trial: its count and seed, the device of engines, and an empty folder."""

    count: int
    seed: int
    device: str
    folder: Path


@dataclass
class Outcome:
    """Counts of a trial, and what it measured.

    Attributes:
        tried: operations, requests or processes with an expected result.
        injected: faults, cancellations or bad inputs among or beside them.
        survived: those of ``tried`` that had that result.
        values: further quantities, name -> value and unit.
        notes: texts of the first losses.
    """

    tried: int = 0
    injected: int = 0
    survived: int = 0
    values: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Number of tries without the expected result."""
        return self.tried - self.survived

    def expect(self, held: bool, note: str) -> None:
        """Count one try; ``note`` says what was lost where it did not hold."""
        self.tried += 1
        self.survived += held
        if not held and len(self.notes) < MOST_NOTES:
            self.notes.append(note)


@dataclass(frozen=True)
class Trial:
    """A function of a setting, its group, the count of each size, and the seconds expected of size ``laptop``.

    ``program``: what it needs on the PATH, if anything.
    """

    name: str
    group: str
    run: Callable[[Setting], Outcome]
    counts: Mapping[str, int]
    seconds: float
    needs_gpu: bool = False
    program: str = ""

    @property
    def about(self) -> str:
        """First line of the function's docstring."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]

    def limit_s(self, size: str) -> float:
        """Seconds after which a process of this trial is ended: ten times those expected, and a minute to start."""
        return 60 + 10 * self.seconds * max(1.0, self.counts[size] / self.counts["laptop"])


def trial(
    group: str, *, smoke: int, laptop: int, full: int, seconds: float, needs_gpu: bool = False,
    program: str = "",
) -> Callable[[Callable[[Setting], Outcome]], Callable[[Setting], Outcome]]:
    """Register a function as the trial of its name."""

    def store(function: Callable[[Setting], Outcome]) -> Callable[[Setting], Outcome]:
        counts = dict(zip(SIZES, (smoke, laptop, full), strict=True))
        name = function.__name__
        TRIALS.register(name)(Trial(name, group, function, counts, seconds, needs_gpu, program))
        return function

    return store
