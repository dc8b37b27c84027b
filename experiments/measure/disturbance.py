"""Disturbance of a measurement by other work on the machine, by three witnesses, as each is blind to something:

* **other work**: CPU time of all processes on our cores, and steal, minus our own;
* **calibration**: one product and one copy before and after, which see other guests of the host. On a GPU launches are
  timed, too: they tell whether times of the host's clock can be compared (`experiments.harness.counted`);
* **GPU**: clock of the multiprocessors and reasons to throttle, from ``nvidia-smi``.

A `Watch` brackets one measurement; the caller decides whether to repeat.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import psutil

from experiments.measure.environment import gpu_query, l3_mib

OTHER_CPU_LIMIT = 0.05
"""Share of the CPU time of our cores that others may take; an idle Linux machine takes less than 0.01."""
CALIBRATION_LIMIT = 1.5
"""Largest time of a calibration over that of the quiet machine (`Calibrator.quiet`)."""
SHORTEST_OTHER_S = 0.04
"""Less other work than this is rounding: the kernel counts in ticks of 10 ms, per core."""
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons to slow down that a cool GPU with enough power does not have: hardware, software thermal, hardware
thermal, power brake. The power cap (0x4) is left out: dense products reach it on a healthy GPU."""

_ATTEMPTS = 5
_BURSTS, _LAUNCHES = 25, 20
_COPY_MIB = 32
_QUIET_SHARE = 0.1
"""Quantile of a process's calibrations that counts as undisturbed. The quickest alone is too rare: on two virtual cores
it takes a third less than usual, and marked two of three points of an idle machine."""
_ENOUGH = 20
"""Calibrations from which on that may fall but not rise, so that a machine that stays slow stays marked."""


@dataclass(frozen=True)
class Disturbance:
    """Columns of a row on other work in its interval; ``None``: not known on this machine."""

    disturbed: bool
    other_cpu: float | None
    calib_gemm_us: float | None
    calib_copy_us: float | None
    sm_clock_mhz: float | None = None
    calib_launch_us: float | None = None


class CpuTimes(NamedTuple):
    """Seconds: a clock, the busy time of our cores (steal included), and the part of it that is ours."""

    wall: float
    busy: float
    own: float


def cpu_times() -> CpuTimes | None:
    """Now, or ``None`` where the system does not tell."""
    try:
        mine = os.sched_getaffinity(0)
        cores = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in mine]
    except (OSError, AttributeError):
        return None
    busy = sum(one.user + one.nice + one.system + one.irq + one.softirq + one.steal for one in cores)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for child in psutil.Process().children(recursive=True):  # alive, so not among those that were waited for
        with suppress(psutil.Error):  # it has ended meanwhile
            own += sum(child.cpu_times()[:4])
    return CpuTimes(time.monotonic(), busy, own)


def other_seconds(before: CpuTimes, after: CpuTimes) -> float:
    return max(0.0, (after.busy - before.busy) - (after.own - before.own))


def others(before: CpuTimes | None, after: CpuTimes | None) -> tuple[float | None, bool | None]:
    """Return the share of our cores that others took meanwhile, and whether it disturbs; None where unknown."""
    if before is None or after is None:
        return None, None
    seconds = other_seconds(before, after)
    share = seconds / max(1e-9, (after.wall - before.wall) * len(os.sched_getaffinity(0)))
    return share, share > OTHER_CPU_LIMIT and seconds > SHORTEST_OTHER_S


class Calibration(NamedTuple):
    """Microseconds of one product and one copy, the best of a few, and of a launch, the median; None on a CPU."""

    gemm_us: float
    copy_us: float
    launch_us: float | None = None


class Calibrator:
    """The product and the copy on one device, and all that they took in this process."""

    def __init__(self, device: str) -> None:
        import torch

        cuda = device.startswith("cuda")
        size, dtype = (2048, torch.float16) if cuda else (512, torch.float32)
        left = torch.ones(size, size, device=device, dtype=dtype)
        product = torch.empty_like(left)
        self._wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
        self._gemm = lambda: torch.mm(left, left, out=product)
        # Copied in turns, so that none is in a cache from the last time: how much of it others left there would be
        # what is measured. Few turns are not enough, since caches do not drop the oldest first.
        pairs = 1 if cuda else max(8, math.ceil(2 * (l3_mib() or 0) / _COPY_MIB))
        parts = torch.ones(2 * pairs, _COPY_MIB << 18, device=device, dtype=torch.int32)
        turns = itertools.cycle(range(pairs))
        self._copy = lambda: parts[pairs + (turn := next(turns))].copy_(parts[turn])
        tiny = torch.ones(1, device=device)
        self._launch: Callable[[], object] | None = (lambda: tiny.add_(1.0)) if cuda else None
        self._found: list[Calibration] = []
        self._lowest = Calibration(math.inf, math.inf)
        self.run()  # first calls pay for what later ones find
        self._found.clear()

    def run(self) -> Calibration:
        """Calibrate now (some 30 ms on two cores)."""
        found = Calibration(self._microseconds(self._gemm), self._microseconds(self._copy), self._per_launch())
        self._found.append(found)
        if len(self._found) >= _ENOUGH:
            self._lowest = Calibration(*map(min, self._lowest[:2], self._usual()[:2]))
        return found

    @property
    def quiet(self) -> Calibration:
        """Undisturbed calibration: the least 10 % quantile in this process; of its first few, the present one."""
        return self._usual() if len(self._found) < _ENOUGH else self._lowest

    def _usual(self) -> Calibration:
        return Calibration(*np.quantile([one[:2] for one in self._found], _QUIET_SHARE, axis=0).tolist())

    def _microseconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(_ATTEMPTS):
            self._wait()
            started = time.perf_counter()
            call()
            self._wait()
            times.append(time.perf_counter() - started)
        return 1e6 * min(times)

    def _per_launch(self) -> float | None:
        """Return the host's microseconds per launch, median of bursts that the GPU's queue holds; None on a CPU."""
        times = []
        for _ in range(_BURSTS if self._launch else 0):
            self._wait()
            started = time.perf_counter()
            for _ in range(_LAUNCHES):
                self._launch()  # type: ignore[misc]
            times.append(time.perf_counter() - started)
        return 1e6 * float(np.median(times)) / _LAUNCHES if times else None


@cache
def calibrator(device: str) -> Calibrator:
    """Return the calibrator of this process, so that all figures of a run share one reference."""
    return Calibrator(device)


class Watch:
    """Brackets a measurement on ``device``: built before it, ``stop()`` after it."""

    def __init__(self, device: str) -> None:
        self._device, self._calibrator = device, calibrator(device)
        self._calibration = self._calibrator.run()
        self._times = cpu_times()

    def stop(self) -> Disturbance:
        """Return the disturbance since. The calibration is not part of the interval whose CPU time is counted."""
        share, crowded = others(self._times, cpu_times())
        clock, throttled = _gpu_state() if self._device.startswith("cuda") else (None, False)
        runs, quiet = (self._calibration, self._calibrator.run()), self._calibrator.quiet
        gemm, copy = sum(run.gemm_us for run in runs) / 2, sum(run.copy_us for run in runs) / 2
        launches = [run.launch_us for run in runs if run.launch_us is not None]
        launch = sum(launches) / len(launches) if launches else None
        slow = max(gemm / quiet.gemm_us, copy / quiet.copy_us) > CALIBRATION_LIMIT
        return Disturbance(slow or bool(crowded) or throttled, share, gemm, copy, clock, launch)


def _gpu_state() -> tuple[float | None, bool]:
    """Clock of the first visible GPU in MHz, and whether it throttles; None and False where it does not say."""
    gpus = gpu_query("clocks.sm", "clocks_throttle_reasons.active")
    try:
        clock, reasons = gpus[0].values()
        return float(clock.split()[0]), bool(int(reasons, 16) & THROTTLED)
    except (IndexError, ValueError):
        return None, False
