"""Windows of a stream: a few hundred steps that represent all of them. No torch.

A *draw* is `pieces` runs of consecutive steps, one around a prefill; its steps with a prefill weigh as much as their
share of the stream. It is accepted when its tokens per step agree with the stream's within 3 %, and requests, contexts,
adapters and prompt tokens within 10 %; the first accepted ones are kept, not the best: their spread is the sampling
error. One draw is one repeat. Streams that differ in adapters alone have the same draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.harness.experiment import CheckFailed
from experiments.systems.stream import FEATURES, Timeline

AGREEMENT = 0.03  # largest relative difference of a draw's tokens per step from the stream's ...
AGREEMENT_OF_OTHERS = 0.1  # ... and of its other features
DRAWS, ROUNDS = 100000, 20
"""Draws at a time, and most such rounds: of some streams one draw in twenty thousand agrees."""
_TOKENS, _PREFILLS = (FEATURES.index(name) for name in ("tokens", "prefills"))


@dataclass(frozen=True)
class Window:
    """A draw: first step of each piece; steps per piece; weight of each step; tokens; weighted `FEATURES` per step."""

    starts: tuple[int, ...]
    length: int
    weights: tuple[float, ...]
    tokens: int
    means: dict[str, float]

    @property
    def steps(self) -> int:
        return len(self.starts) * self.length

    def mean(self, values: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True))


def draw_windows(
    timeline: Timeline, count: int, pieces: int, length: int, seed: int = 0, compared: Sequence[Timeline] = ()
) -> list[Window]:
    """Draw `count` windows of `pieces` times `length` steps that agree with the stream and those `compared`
    (`with_adapters`). A short stream is its own window. `CheckFailed` when too few agree.
    """
    features = timeline.features()
    if timeline.steps <= pieces * length:
        return [_window(features, (0,), timeline.steps)] * count
    chance = np.random.Generator(np.random.PCG64(seed))
    streams = [_Stream(each, length) for each in (features, *(other.features() for other in compared))]
    accepted: list[list[int]] = []
    for _ in range(ROUNDS):
        starts = _candidates(features[:, _PREFILLS], pieces, length, chance)
        for stream in streams:
            starts = starts[stream.accepts(starts)]
        accepted += starts.tolist()
        if len(accepted) >= count:
            return [_window(features, tuple(starts), length) for starts in accepted[:count]]
    raise CheckFailed(
        f"{len(accepted)} of {ROUNDS * DRAWS} draws of {pieces} times {length} steps agree with the stream's "
        f"{timeline.steps} steps within {100 * AGREEMENT:g} % of their tokens and {100 * AGREEMENT_OF_OTHERS:g} % of "
        f"requests, contexts, adapters and prompts, and {count} are needed: make them longer (figure.steps)"
    )


def _candidates(
    prefills: NDArray[np.float64], pieces: int, length: int, chance: np.random.Generator
) -> NDArray[np.int64]:
    """Draw up to `DRAWS` starts of pieces `[draws, pieces]`, ascending, not overlapping, one around a prefill."""
    last = len(prefills) - length
    starts = chance.integers(0, last + 1, (DRAWS, pieces))
    starts[:, 0] = chance.choice(np.flatnonzero(prefills), DRAWS) - chance.integers(0, length, DRAWS)
    starts = np.sort(starts.clip(0, last), axis=1)
    return starts[(np.diff(starts, axis=1) >= length).all(axis=1)]


class _Stream:
    """Prefix sums of a stream's `features [steps, FEATURES]`, for draws of pieces of `length` steps."""

    def __init__(self, features: NDArray[np.float64], length: int) -> None:
        self._length, self._means = length, features.mean(axis=0)
        self._begins = np.flatnonzero(features[:, _PREFILLS])
        self._sums, self._sums_of_prefills = (
            np.concatenate([np.zeros((1, len(FEATURES))), rows.cumsum(axis=0)])
            for rows in (features, features[self._begins])
        )
        self._limits = AGREEMENT_OF_OTHERS * self._means
        self._limits[_TOKENS] = AGREEMENT * self._means[_TOKENS]

    def accepts(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        share, size, ends = self._means[_PREFILLS], starts.shape[1] * self._length, starts + self._length
        whole = (self._sums[ends] - self._sums[starts]).sum(axis=1)
        first, end = (np.searchsorted(self._begins, steps) for steps in (starts, ends))
        prompts = (self._sums_of_prefills[end] - self._sums_of_prefills[first]).sum(axis=1)
        count = prompts[:, _PREFILLS, None]
        means = share * prompts / np.maximum(count, 1) + (1 - share) * (whole - prompts) / np.maximum(size - count, 1)
        agree: NDArray[np.bool_] = (np.abs(means - self._means) <= self._limits).all(axis=1)
        return agree & (count[:, 0] > 0) & ((count[:, 0] < size) | (share == 1))


def _window(features: NDArray[np.float64], starts: tuple[int, ...], length: int) -> Window:
    steps = np.concatenate([features[start : start + length] for start in starts])
    share, begins = features[:, _PREFILLS].mean(), steps[:, _PREFILLS] > 0
    weights = np.where(begins, share / max(begins.sum(), 1), (1 - share) / max((~begins).sum(), 1))
    means = dict(zip(FEATURES, (weights @ steps).tolist(), strict=True))
    return Window(starts, length, tuple(weights.tolist()), int(steps[:, _TOKENS].sum()), means)
