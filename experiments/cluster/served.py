"""An hour served by any world, and the readings of Figure 13, by the names of ``paper_results/fig13_cluster.csv``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.harness.points import Reading
from experiments.simulator import SimulationResult, Trace
from experiments.workload import MAX_BATCH, RELEASED_SEED

HOUR, STREAM, COSTS = (f"simulated {name}" for name in ("hour", "Figure 11", "step costs"))
"""Panels of the simulation."""
RAY, KILLED, SIMULATED = "ray hour", "ray hour, a runner killed", "simulated"
SIMULATED_RAY = f"{SIMULATED} {RAY}"  # of the simulator fitted to the runners on Ray
SHARE = "share_of_active_cells_batch_ge_31"
CAPACITY, FROM_HOST, FROM_DISK = "capacity", "loads_from_host", "loads_from_disk"
LOW, MEAN, HIGH = "_low", "_mean", "_high"
"""Suffixes of a metric: the lowest of all seeds, their mean, and the highest."""
SEEDS = "seeds"
HEAT_S, RATE_S, RATE_STEP_S, THROUGHPUT_S = 60, 200, 18, 10
"""Seconds of windows: heat map and active GPUs; request rate, and between its windows; throughput."""
PIXEL_S = 6.5  # seconds of a pixel of the paper's heat map; the plotting library smoothed it over two
FULL = 31  # requests from which a batch counts as full
ACTIVE = 0.5  # requests from which a pixel counts as active, as where the paper's was read
COMPARED = (
    "mean_throughput", "mean_batch_size_of_active_cells", "mean_active_gpus", "mean_batch_size_of_steps",
    "p99_time_to_first_token",
)  # fmt: skip
"""Metrics of runners that are set over those of a simulation."""
IDLE = 0.5  # mean requests of a minute below which a GPU counts as idle, as where the paper's heat map was read
HOUR_S, WINDOW_S, LOW_S, PEAK_S = 3600, 300, 300, 600
FOLLOWS, CONSOLIDATED = "correlation_of_throughput_and_request_rate", "correlation_of_active_gpus_and_throughput"
FIRST, LAST, EXCESS = f"active_gpus_first_{LOW_S}s", f"active_gpus_last_{LOW_S}s", "largest_excess_of_active_gpus"
LEAST_WOKEN, WOKEN, MOST_WOKEN = (f"{which}_changes_from_idle_to_active" for which in ("least", "median", "most"))
PACE, FULL_MINUTES = "throughput_of_an_active_gpu_at_the_peak", "share_of_active_minutes_batch_ge_31"
UNITS = {
    FOLLOWS: "1", CONSOLIDATED: "1", FIRST: "GPUs", LAST: "GPUs", EXCESS: "ratio", LEAST_WOKEN: "count",
    WOKEN: "count", MOST_WOKEN: "count", PACE: "token/s", FULL_MINUTES: "fraction",
}  # fmt: skip


@dataclass(frozen=True)
class ServedHour:
    """One hour (or some seconds) in the paper's seconds. Of every request ``arrivals``, ``first_token_s``, ``finish_s``
    [n]; ``tokens`` [seconds], a prompt's with its first token (D13); ``batch`` [gpus, seconds], requests that got a
    token, beyond 32 where one replaces another; ``seconds_by_batch`` [33]; ``kind``, ``cost_model``.
    """

    duration_s: float
    arrivals: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    tokens: NDArray[np.int64]
    batch: NDArray[np.int64]
    seconds_by_batch: NDArray[np.float64]
    kind: str
    cost_model: str = ""

    @classmethod
    def simulated(cls, asked: Trace, result: SimulationResult, seconds: float) -> "ServedHour":
        """Convert a simulation. GPUs are numbered from the one that the rule prefers, as in the paper."""
        return cls(
            seconds, asked.arrivals, result.first_token_s, result.finish_s, result.tokens, result.batch[::-1],
            result.seconds_by_batch, SIMULATED, result.cost_model,
        )  # fmt: skip

    @property
    def active(self) -> NDArray[np.int64]:
        return (self.batch > 0).sum(axis=0)

    def filled(self, values: NDArray) -> NDArray:
        """[..., seconds] of the arrivals' duration, zero after the last token."""
        known = values[..., : int(self.duration_s)]
        return np.pad(known, [(0, 0)] * (known.ndim - 1) + [(0, int(self.duration_s) - known.shape[-1])])

    def reading(self, metric: str, value: float, unit: str, **where: Any) -> Reading:
        return Reading(metric, float(value), unit, kind=self.kind, cost_model=self.cost_model, **where)


def readings(served: ServedHour) -> list[Reading]:
    return [*series(served), *summary(served)]


def series(served: ServedHour) -> list[Reading]:
    """Request rate (mean over the following 200 s, every 18 s), throughput per 10 s, per minute active GPUs and each
    GPU's batch. Windows that the arrivals do not fill are left out.
    """
    arrived = np.bincount(served.arrivals.astype(int), minlength=int(served.duration_s))
    starts = range(0, max(1, len(arrived) - RATE_STEP_S), RATE_STEP_S)
    found = [
        served.reading("request_rate", arrived[start : start + RATE_S].mean(), "request/s", t_s=float(start))
        for start in starts
    ]
    lines = (("throughput", "token/s", THROUGHPUT_S, served.tokens), ("active_gpus", "GPUs", HEAT_S, served.active))
    for name, unit, window, values in lines:
        for i, mean in enumerate(means(served.filled(values), window)):
            found.append(served.reading(f"{name}_{window}s_mean", mean, unit, t_s=float(window * i)))
    minute = _centres(int(served.duration_s)) // HEAT_S
    for gpu, line in enumerate(heat_map(served.filled(served.batch))):
        for i in range(int(served.duration_s) // HEAT_S):
            mean = line[minute == i].mean()
            where = {"t_s": float(HEAT_S * i), "gpu": gpu}
            found.append(served.reading(f"gpu_batch_size_{HEAT_S}s_mean", mean, "requests", **where))
    return found


def summary(served: ServedHour) -> list[Reading]:
    seconds = min(int(served.duration_s), served.batch.shape[1])
    tokens, active, batch = served.tokens[:seconds], served.active[:seconds], served.batch[:, :seconds]
    cells, capped = (found[found >= ACTIVE] for found in (heat_map(batch), smoothed(np.minimum(batch, MAX_BATCH))))
    steps = served.seconds_by_batch
    wait = served.first_token_s - served.arrivals
    found = {
        "total_requests": (len(served.arrivals), "requests"),
        "total_tokens": (served.tokens.sum(), "tokens"),
        "mean_throughput": (tokens.mean(), "token/s"),
        "peak_throughput_60s": (means(tokens, HEAT_S).max(initial=0.0), "token/s"),
        "mean_active_gpus": (active.mean(), "GPUs"),
        "max_active_gpus": (active.max(initial=0), "GPUs"),
        "gpu_seconds": (served.active.sum(), "s"),
        SHARE: (_share(cells >= FULL), "fraction"),
        f"{SHARE}_capped_seconds": (_share(capped >= FULL), "fraction"),
        "share_of_step_time_batch_ge_31": (steps[FULL:].sum() / max(steps.sum(), 1e-9), "fraction"),
        "mean_batch_size_of_steps": (steps @ np.arange(len(steps)) / max(steps.sum(), 1e-9), "requests"),
        "share_of_active_cells_batch_ge_28": (_share(cells >= 28), "fraction"),
        "mean_batch_size_of_active_cells": (cells.mean() if cells.size else 0.0, "requests"),
        "p99_time_to_first_token": (1e3 * float(np.quantile(wait, 0.99)), "ms"),
    }
    return [served.reading(name, value, unit) for name, (value, unit) in found.items()]


def over_simulated(measured: ServedHour, simulated: ServedHour) -> list[Reading]:
    """Divide what was measured by what a simulation gives that was fitted to the same runners."""
    ours, theirs = ({one.metric: one.value for one in summary(served)} for served in (measured, simulated))
    return [
        simulated.reading(f"measured_over_simulated_{name}", ours[name] / theirs[name], "ratio")
        for name in COMPARED
        if theirs[name]
    ]


def over_seeds(count: int, run: Callable[[int], Sequence[Reading]]) -> list[Reading]:
    """Return the readings of ``run`` of the released seed, the number of seeds, and over all ``count`` of them mean and
    span of what is a single number.
    """
    runs = [run(RELEASED_SEED + place) for place in range(count)]
    single = [{one.metric: one for one in run if one.t_s is None and one.gpu is None} for run in runs]
    found = list(runs[0])
    for metric, one in single[0].items():
        values = [run[metric].value for run in single]
        told = ((LOW, min(values)), (MEAN, fmean(values)), (HIGH, max(values)))
        found += [replace(one, metric=f"{metric}{suffix}", value=value, statistic="value") for suffix, value in told]
    return [*found, replace(one, metric=SEEDS, value=len(runs), unit="seeds", statistic="count")]


def heat_map(batch: NDArray[np.int64]) -> NDArray[np.float64]:
    """[gpus, seconds] as the paper's heat map [gpus, pixels]: `smoothed`, then capped at 32, where its colours end."""
    return np.minimum(smoothed(batch), MAX_BATCH)


def smoothed(batch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shrink to `PIXEL_S` seconds a pixel as a plotting library does, with Hann's weights over two."""
    seconds = batch.shape[1]
    distance = (np.arange(seconds) + 0.5 - _centres(seconds)[:, None]) / PIXEL_S  # [pixels, seconds]
    weights = np.where(np.abs(distance) < 1, 0.5 + 0.5 * np.cos(np.pi * distance), 0.0)
    return batch @ (weights / weights.sum(axis=1, keepdims=True)).T


def means(values: NDArray[np.float64] | NDArray[np.int64], window: int) -> NDArray[np.float64]:
    count = len(values) // window
    return values[: count * window].reshape(count, window).mean(axis=1)


def mean_from(values: pd.Series, start: float, seconds: float) -> float:
    return float(values[(values.index >= start) & (values.index < start + seconds)].mean())


def _centres(seconds: int) -> NDArray[np.float64]:
    """Seconds in the middle of each pixel, [pixels]."""
    return np.arange(0.5, max(1.0, seconds / PIXEL_S)) * PIXEL_S


def _share(true: NDArray[np.bool_]) -> float:
    return float(true.mean()) if true.size else 0.0


@dataclass(frozen=True)
class Windows:
    """Windows by their start in seconds: means of requests, tokens, active GPUs, and requests of a minute by GPU."""

    rate: pd.Series
    speed: pd.Series
    active: pd.Series
    batches: pd.DataFrame

    @classmethod
    def of(cls, frame: pd.DataFrame) -> "Windows":
        """Take them from rows or readings, with columns `metric`, `t_s`, `gpu` and `value`."""
        names = ("request_rate", "throughput_10s_mean", "active_gpus_60s_mean")
        held = frame[frame["metric"] == "gpu_batch_size_60s_mean"]
        rate, speed, active = (over_time(frame, name) for name in names)
        return cls(rate, speed, active, held.pivot_table(index="gpu", columns="t_s", values="value"))

    def pace(self) -> float:
        """Return tokens per second of an active GPU in the ten minutes with most tokens."""
        starts = [start for start in self.active.index if start + PEAK_S <= self.active.index.max() + 60]
        best = max(starts, key=lambda start: mean_from(self.speed, start, PEAK_S))
        return mean_from(self.speed, best, PEAK_S) / mean_from(self.active, best, PEAK_S)

    def excess(self) -> list[float]:
        """Divide active GPUs by the least that the requests need, by five minutes."""
        held = self.batches.sum()
        starts = sorted({WINDOW_S * int(t // WINDOW_S) for t in self.active.index})
        needed = [np.ceil(mean_from(held, start, WINDOW_S) / MAX_BATCH) for start in starts]
        return [mean_from(self.active, start, WINDOW_S) / least for start, least in zip(starts, needed, strict=True)]

    def numbers(self) -> dict[str, float]:
        """Return the numbers of a whole hour that follow from its windows, by the names in `UNITS`."""
        active, minutes = self.batches >= IDLE, self.batches.to_numpy()
        woken = (active & ~active.shift(1, axis=1, fill_value=True)).sum(axis=1)  # after an idle minute, by GPU
        follows = [mean_from(self.speed, start, RATE_S) for start in self.rate.index]
        speeds = [mean_from(self.speed, start, 60) for start in self.active.index]
        found = {
            FOLLOWS: np.corrcoef(self.rate, follows)[0, 1],
            CONSOLIDATED: np.corrcoef(self.active, speeds)[0, 1],
            FIRST: mean_from(self.active, 0, LOW_S),
            LAST: mean_from(self.active, self.active.index.max() + 60 - LOW_S, LOW_S),
            EXCESS: np.nanmax(self.excess()),
            LEAST_WOKEN: woken.min(), WOKEN: woken.median(), MOST_WOKEN: woken.max(),
            PACE: self.pace(),
            FULL_MINUTES: (minutes[minutes >= IDLE] >= FULL).mean(),
        }  # fmt: skip
        return {name: float(value) for name, value in found.items()}


def over_time(frame: pd.DataFrame, metric: str) -> pd.Series:
    return frame[frame["metric"] == metric].set_index("t_s")["value"].sort_index().astype(float)


def number_readings(served: ServedHour) -> list[Reading]:
    """Return the numbers of ``served``; none of a part of an hour."""
    if served.duration_s < HOUR_S:
        return []
    windows = Windows.of(pd.DataFrame(map(vars, series(served))))
    return [served.reading(name, value, UNITS[name]) for name, value in windows.numbers().items()]
