"""Windows of a stream: a few hundred of its steps that stand for all of them. No torch.

The released stream takes 31 000 steps at batch 32 and a million at batch 1; a laptop has time for a hundred. A *draw*
is `pieces` runs of consecutive steps; it stands for the stream when its tokens per step, requests per step, context and
adapters agree with the stream's. Of many draws by chance the one that agrees best is taken, so that it has about as
many prefills, joins and departures as belong to that many steps, and nobody chose them by hand. One draw is one repeat.

Throughput of the stream is then its tokens per step over the draw's seconds per step.
"""

from dataclasses import dataclass

import numpy as np

from punica.workload.timeline import FEATURES, Timeline

AGREEMENT = 0.03
"""Tokens per step of a draw may differ from the stream's by this much, relatively."""
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
    """`count` different draws of `pieces` times `length` steps, best agreement first.

    A stream that is shorter than a draw is one piece, the whole stream, `count` times.
    """
    if timeline.steps <= pieces * length:
        return [Window((0,), timeline.steps, timeline.means)] * count
    sums = np.concatenate([np.zeros((1, len(FEATURES))), timeline.features().cumsum(axis=0)])
    last = timeline.steps - length
    starts = np.sort(np.random.Generator(np.random.PCG64(seed)).integers(0, last + 1, (DRAWS, pieces)), axis=1)
    means = (sums[starts + length] - sums[starts]).sum(axis=1) / (pieces * length)
    off = np.abs(means / np.array([timeline.means[name] for name in FEATURES]) - 1)
    overlaps = (np.diff(starts, axis=1) < length).any(axis=1)
    unfit = off[:, FEATURES.index("tokens")] > AGREEMENT
    off = off.max(axis=1) + unfit + 2 * overlaps
    return [
        Window(tuple(starts[i].tolist()), length, dict(zip(FEATURES, means[i].tolist(), strict=True)))
        for i in off.argsort(kind="stable")[:count]
    ]
