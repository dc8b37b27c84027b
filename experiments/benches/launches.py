"""Launches of a step: what the host gives to a GPU, and what a launch costs it. On a CPU there are none."""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from experiments.benches.device_parts import Kernel, seconds_by_part, watched
from experiments.harness.experiment import CheckFailed

LAUNCH = re.compile(r"^(cuda|cu)(Launch|GraphLaunch|Memcpy|Memset)")
"""Names of the host's calls that give the device a kernel, a graph or a copy."""
IN_A_ROW, ROUNDS = 500, 20
"""Empty kernels in a row, fewer than the device's queue holds, and such rows."""


@dataclass(frozen=True)
class Launches:
    """Counts of one step: launches (kernels, graphs and copies) by the host, kernels and copies that the device ran;
    seconds in which the device ran any.
    """

    launches: int
    kernels: int
    busy: float


def launches_of(step: Callable[[], object]) -> Launches:
    """Profile one `step`, which must wait for the device. `CheckFailed` where the profiler sees no launch."""
    return counted(watched(step))


def counted(events: Sequence[tuple[Kernel, bool]]) -> Launches:
    """Count a profile's events; the flag is true of those on the device."""
    kernels = [event for event, on_device in events if on_device]
    calls = [event for event, on_device in events if not on_device and LAUNCH.match(event.name)]
    if not kernels or not calls:
        raise CheckFailed(f"the profiler saw {len(calls)} launches and {len(kernels)} kernels of a step")
    return Launches(len(calls), len(kernels), sum(seconds_by_part(kernels).values()))


def seconds_per_launch() -> float:
    """Median over rows of empty kernels of the host's time per launch."""

    def row() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            torch.cuda._sleep(0)  # a kernel of one thread that returns at once
        return (time.perf_counter() - start) / IN_A_ROW

    row()
    return statistics.median(row() for _ in range(ROUNDS))
