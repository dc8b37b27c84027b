"""Threads that read, check and pack the tensors of adapters, whose work is a copy or two of 100 KB each."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8
LEAST_ITEMS = 16
"""Items for one thread: starting a thread on fewer takes longer than their work."""


def map_in_threads(function: Callable[[T], R], items: Sequence[T], least: int = LEAST_ITEMS) -> list[R]:
    """Return `[function(item) for item in items]`, computed by threads in runs of neighbours, ``least`` or more each.

    The functions of torch and numpy release the interpreter's lock. Raises the first error in the order of the items.
    """
    runs = min(_threads(), len(items) // least)
    if runs < 2 or os.getpid() != _process:  # a forked child has no threads, and torch cannot set their number there
        return [function(item) for item in items]
    bounds = [len(items) * i // runs for i in range(runs + 1)]
    pieces = [items[start:end] for start, end in itertools.pairwise(bounds)]
    is_inference = torch.is_inference_mode_enabled()  # threads have a mode each

    def compute(piece: Sequence[T]) -> list[R]:
        with torch.inference_mode(is_inference):
            return [function(item) for item in piece]

    computing = [_pool().submit(compute, piece) for piece in pieces]
    wait(computing)  # also after an error: the caller's buffers are written to
    return [result for future in computing for result in future.result()]


@cache
def _threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "punica-pack", compute_alone)


_process = os.getpid()
_starts = threading.Lock()


def compute_alone() -> None:
    """Limit this thread to one core. By default each thread has an OpenMP team as large as the machine, for copies of
    100 KB, and the teams compete with the thread that runs the steps.

    torch applies the number to later threads too, so another thread restores theirs.
    """
    with _starts:
        common = torch.get_num_threads()  # a thread takes the common number when it first asks, and then keeps its own
        torch.set_num_threads(1)
        others = threading.Thread(target=torch.set_num_threads, args=(common,))
        others.start()
        others.join()
