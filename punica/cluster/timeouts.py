"""Longest waits for a runner."""

from dataclasses import dataclass

from punica.checks import check_number


@dataclass(frozen=True)
class Timeouts:
    """Longest waits for a runner, in seconds: ``place_s`` for its resources, ``step_s`` for the end of a step.

    ``step_s`` also covers what a runner's first steps compile. A start after its reservation has no limit: checkpoints
    take minutes to load. TypeError, ValueError: not a positive number.
    """

    place_s: float = 60.0
    step_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("place_s", "step_s"):
            if check_number(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0 seconds")
