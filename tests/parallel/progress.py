"""What ranks say while they work: a test that ends late, or never, shows where each of them stood (`pytest -s`)."""

import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 45.0


@contextmanager
def told(rank: int, what: str, every: float = EVERY) -> Iterator[None]:
    """Say on stderr when `what` begins and ends on a rank and, every so many seconds meanwhile, where it stands."""
    started = time.perf_counter()
    print(f"rank {rank}: {what} begins", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback_later(every, repeat=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(f"rank {rank}: {what} ended after {time.perf_counter() - started:.1f} s", file=sys.__stderr__, flush=True)
