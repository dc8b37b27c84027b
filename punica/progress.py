"""Progress of a long loop on standard error: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Collection, Iterator
from threading import RLock
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
BAR_S, LINE_S = 1.0, 10.0
"""Time until a bar is shown, and between two lines."""


def shown(items: Collection[T], what: str, unit: str) -> Iterator[T]:
    """Yield the items. A loop of less than ``BAR_S`` shows no bar, one of less than ``LINE_S`` no line."""
    if sys.stderr.isatty():
        tqdm.set_lock(RLock())  # its own is a semaphore too, of which the end of an engine's process would warn
        yield from tqdm(items, what, unit=unit, delay=BAR_S)
        return
    told = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - told >= LINE_S:
            print(f"{what}: {number} of {len(items)} {unit}s", file=sys.stderr, flush=True)
            told = now
