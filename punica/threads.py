"""Threads for the few large operations of reading and copying adapters, each of which frees the interpreter's lock."""

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
SMALL = 64 << 20
"""Parameters below which one thread computes the steps. On two idle cores a second made 14 million 16 % faster and 100
million 70 to 90 %; beside two busy loops it was slower by a factor of four and more.
"""


def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `[function(item) for item in items]`, computed by threads; raises the first error in order.

    An item should take a millisecond or more: of shorter ones, passing the interpreter's lock around costs most. Calls
    at the same time share the threads, first come, first served.
    """
    if os.getpid() != _process:
        return [function(item) for item in items]  # torch cannot set the threads of a forked child
    is_inference = torch.is_inference_mode_enabled()  # threads have a mode each

    def compute(item: T) -> R:
        with torch.inference_mode(is_inference):
            return function(item)

    computing = [_pool().submit(compute, item) for item in items]
    wait(computing)  # also after an error: the caller's buffers are written to
    return [future.result() for future in computing]


def limit_threads(model: torch.nn.Module) -> None:
    """Have this process compute a small model's steps on a CPU by one thread, unless ``OMP_NUM_THREADS`` is set: two
    wait for each other after each small operation, and where other processes run, for their time slices.
    """
    parameters = [*model.parameters()]
    is_small = sum(parameter.numel() for parameter in parameters) < SMALL
    if is_small and not any(parameter.is_cuda for parameter in parameters) and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


@cache
def thread_count() -> int:
    """Return how many threads compute: half of the cores are left to the steps."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_count(), "punica-copies", compute_alone)


_process = os.getpid()
_starts = threading.Lock()


def compute_alone() -> None:
    """Limit this thread to one core: each thread's OpenMP team is as large as the machine, and competes with the steps.
    torch applies the number to later threads too, so another thread restores theirs.
    """
    with _starts:
        common = torch.get_num_threads()  # a thread takes the common number when it first asks, and then keeps its own
        torch.set_num_threads(1)
        others = threading.Thread(target=torch.set_num_threads, args=(common,))
        others.start()
        others.join()
