"""Popularity of adapters that changes over time: a flash crowd, and drift. The paper's patterns stay as they are.

Both draw the adapter of each request from shares ([adapters], sum 1) that depend on when it arrives.
"""

import numpy as np
from numpy.typing import NDArray

from punica.checks import check_count


def flash_crowd(
    arrivals: NDArray[np.float64], shares: NDArray[np.float64], crowd: tuple[float, float, float], seed: int
) -> NDArray[np.int64]:
    """Draw the adapter of each request, [n] int64, while one adapter is popular for a time.

    ``crowd``: start and end in seconds, and the share of the requests between them that name the last adapter of
    ``shares``, the least popular one of a descending pattern. The others divide the rest as before. ValueError for a
    share outside [0, 1] or an end before the start.
    """
    start, end, share = crowd
    if not 0 <= share <= 1 or end < start:
        raise ValueError(
            f"crowd is {crowd!r}: it needs an end that is not before its start, and a share from 0 to 1; swap the "
            "times or lower the share"
        )
    found = drifting(arrivals, shares, np.inf, seed)
    generator = np.random.Generator(np.random.PCG64([seed, 1]))
    joins = (arrivals >= start) & (arrivals < end) & (generator.random(len(arrivals)) < share)
    found[joins] = len(shares) - 1
    return found


def drifting(
    arrivals: NDArray[np.float64], shares: NDArray[np.float64], period: float, seed: int, step: int = 1
) -> NDArray[np.int64]:
    """Draw the adapter of each request, [n] int64, while popularity moves on by ``step`` adapters every ``period``
    seconds: what adapter i was, adapter i + ``step`` is, and the last ones are followed by the first. ValueError for a
    period that is not positive.
    """
    if not period > 0:
        raise ValueError(f"period is {period!r} s, must be positive; math.inf never moves")
    check_count("step", step)
    places = np.random.Generator(np.random.PCG64(seed)).choice(len(shares), size=len(arrivals), p=shares)
    moved = step * np.floor(arrivals / period).astype(np.int64)
    return (places + moved) % len(shares)
