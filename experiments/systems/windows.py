"""Windows of a stream: a few hundred of its steps that stand for all of them. No torch.

The released stream takes 31 000 steps at batch 32 and a million at batch 1; a laptop has time for a hundred. A *draw*
is `pieces` runs of consecutive steps; it may stand for the stream when its tokens per step agree with the stream's
within 3 %, and its requests per step, contexts and adapters within 10 %. Draws are taken by chance, and the first ones
that agree are kept, not the best: nobody chose them by hand, and how far they differ from each other is the sampling
error. One draw is one repeat, so that the span of repeats holds this error as it holds the machine's noise.

Throughput of the stream is then its tokens per step over the draw's seconds per step.
"""

from dataclasses import dataclass

import numpy as np

from experiments.harness.experiment import CheckFailed
from punica.workload.timeline import FEATURES, Timeline

AGREEMENT = 0.03
"""Tokens per step of a draw may differ from the stream's by this much, relatively ..."""
AGREEMENT_OF_OTHERS = 0.1
"""... and its other features by this much."""
DRAWS = 100000
_SEED = 0


@dataclass(frozen=True)
class Window:
    """A draw: the first step of each piece, ascending; steps per piece; and `FEATURES` per step, as in `Timeline`."""

    starts: tuple[int, ...]
    length: int
    means: dict[str, float]

    @property
    def steps(self) -> int:
        return len(self.starts) * self.length


def draw_windows(timeline: Timeline, count: int, pieces: int, length: int, seed: int = _SEED) -> list[Window]:
    """`count` draws at random among those of `pieces` times `length` steps that agree with the stream.

    A stream that is shorter than a draw is one piece, the whole stream, `count` times. `CheckFailed` when fewer than
    `count` of `DRAWS` draws agree.
    """
    if timeline.steps <= pieces * length:
        return [Window((0,), timeline.steps, timeline.means)] * count
    sums = np.concatenate([np.zeros((1, len(FEATURES))), timeline.features().cumsum(axis=0)])
    last = timeline.steps - length
    starts = np.sort(np.random.Generator(np.random.PCG64(seed)).integers(0, last + 1, (DRAWS, pieces)), axis=1)
    starts = starts[(np.diff(starts, axis=1) >= length).all(axis=1)]
    means = (sums[starts + length] - sums[starts]).sum(axis=1) / (pieces * length)
    off = np.abs(means / np.array([timeline.means[name] for name in FEATURES]) - 1)
    limits = [AGREEMENT if name == "tokens" else AGREEMENT_OF_OTHERS for name in FEATURES]
    fit = np.flatnonzero((off <= limits).all(axis=1))
    if len(fit) < count:
        raise CheckFailed(
            f"{len(fit)} of {DRAWS} draws of {pieces} times {length} steps agree with the stream's {timeline.steps} "
            f"steps within {100 * AGREEMENT:g} % of their tokens and {100 * AGREEMENT_OF_OTHERS:g} % of requests, "
            f"contexts and adapters, and {count} are needed: make them longer (scale.window_steps)"
        )
    return [
        Window(tuple(starts[i].tolist()), length, dict(zip(FEATURES, means[i].tolist(), strict=True)))
        for i in fit[:count]
    ]
