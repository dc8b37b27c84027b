"""An hour served by any world, and the readings of Figure 13 that follow from it.

Names and windows are those of ``paper_results/fig13_cluster.csv``, so that the paper's rows and ours share claims and
figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.harness.points import Reading
from experiments.workload import MAX_BATCH

HOUR, SLOWED, STREAM, COSTS, WINDOWS, FIRST_TOKEN = (
    f"simulated {name}"
    for name in ("hour", "hour, slower steps", "Figure 11", "step costs", "windows", "first token")
)
"""Panels of the simulation."""
RAY, KILLED, STEADY, SIMULATED = "ray hour", "ray hour, a runner killed", "ray hour, steady at", "simulated"
SIMULATED_RAY = f"{SIMULATED} {RAY}"
"""Panels of runners on Ray, and of the simulator fitted to them."""
SHARE = "share_of_active_cells_batch_ge_31"
SIMULATED_LENGTH = "simulated_seconds"
HEAT_S, RATE_S, RATE_STEP_S, THROUGHPUT_S = 60, 200, 18, 10
"""Seconds of windows: heat map and active GPUs; request rate, and between its windows; throughput."""
PEAK_S = 600
"""Seconds around the peak."""
IDLE_S = 26
"""Seconds without a token after which a GPU is idle: the resolution of the paper's heat map."""
PIXEL_S = 6.5
"""Seconds of a pixel of the paper's heat map; the plotting library smoothed it over two."""
FULL = 31
"""Requests from which a batch counts as full."""
ACTIVE = 0.5
"""Requests from which a pixel counts as active, as where the paper's was read."""


@dataclass(frozen=True)
class ServedHour:
    """One hour (or some seconds of it) in seconds of the paper's profile; compressed time is multiplied first.

    Attributes:
        duration_s: of the arrivals.
        arrivals, first_token_s, finish_s: [n] float64, of every request.
        tokens: [seconds] int64, that came out in each second; a prompt counts with its first token (D13).
        batch: [gpus, seconds] int64, different requests that got a token on a GPU in a second; more than 32 where one
            replaces another (`heat_map` shows them as the paper does).
        seconds_by_batch: [33] float64, GPU time in steps of so many requests.
        kind: ``simulated`` or ``measured``. ``cost_model``: name of a simulation's.
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

    @property
    def active(self) -> NDArray[np.int64]:
        """[seconds], GPUs that gave a token in each second."""
        return (self.batch > 0).sum(axis=0)

    def concurrent(self) -> NDArray[np.signedinteger]:
        """[seconds], requests between arrival and last token at the middle of each second."""
        middles = np.arange(self.batch.shape[1]) + 0.5
        return np.searchsorted(np.sort(self.arrivals), middles) - np.searchsorted(np.sort(self.finish_s), middles)


def readings(served: ServedHour) -> list[Reading]:
    """Return all of `series` and `summary`, marked with the kind of their world."""
    return [*series(served), *summary(served)]


def series(served: ServedHour) -> list[Reading]:
    """Request rate (mean over the following 200 s, every 18 s), throughput per 10 s; per minute active GPUs, requests
    in the cluster and the batch of every GPU. Windows that the arrivals do not fill are left out.
    """
    arrived = np.bincount(served.arrivals.astype(int), minlength=int(served.duration_s))
    lines = [
        _line(served, "request_rate", "request/s", _following(arrived, RATE_S, RATE_STEP_S)),
        _line(served, f"throughput_{THROUGHPUT_S}s_mean", "token/s", _windows(served, served.tokens, THROUGHPUT_S)),
        _line(served, f"active_gpus_{HEAT_S}s_mean", "GPUs", _windows(served, served.active, HEAT_S)),
        _line(served, f"concurrent_requests_{HEAT_S}s_mean", "requests", _windows(served, served.concurrent(), HEAT_S)),
    ]
    for gpu, found in enumerate(_minutes(served)):
        lines.append(_line(served, f"gpu_batch_size_{HEAT_S}s_mean", "requests", found, gpu))
    return [reading for line in lines for reading in line]


def summary(served: ServedHour) -> list[Reading]:
    """Totals, peaks and shares; and each GPU's changes from idle to active."""
    seconds = min(int(served.duration_s), served.batch.shape[1])
    tokens, active, batch = served.tokens[:seconds], served.active[:seconds], served.batch[:, :seconds]
    cells, capped = (found[found >= ACTIVE] for found in (heat_map(batch), smoothed(np.minimum(batch, MAX_BATCH))))
    steps = served.seconds_by_batch
    wait = served.first_token_s - served.arrivals
    minutes = means(tokens, HEAT_S)
    found = {
        "total_requests": (len(served.arrivals), "requests"),
        "total_tokens": (int(served.tokens.sum()), "tokens"),
        "mean_throughput": (tokens.mean(), "token/s"),
        "peak_throughput_60s": (minutes.max(initial=0.0), "token/s"),
        "mean_active_gpus": (active.mean(), "GPUs"),
        "max_active_gpus": (active.max(initial=0), "GPUs"),
        "gpu_seconds": (int(served.active.sum()), "s"),
        SHARE: (_share(cells >= FULL), "fraction"),
        f"{SHARE}_capped_seconds": (_share(capped >= FULL), "fraction"),
        "share_of_step_time_batch_ge_31": (steps[FULL:].sum() / max(steps.sum(), 1e-9), "fraction"),
        "mean_batch_size_of_steps": (steps @ np.arange(len(steps)) / max(steps.sum(), 1e-9), "requests"),
        "share_of_active_cells_batch_ge_28": (_share(cells >= 28), "fraction"),
        "mean_batch_size_of_active_cells": (cells.mean() if cells.size else 0.0, "requests"),
        "median_time_to_first_token": (1e3 * float(np.median(wait)), "ms"),
        "p99_time_to_first_token": (1e3 * float(np.quantile(wait, 0.99)), "ms"),
    }
    about: dict[str, Any] = {"kind": served.kind, "cost_model": served.cost_model}
    lines = [Reading(name, float(value), unit, **about) for name, (value, unit) in found.items()]
    for gpu, one in enumerate(batch):
        lines.append(Reading("idle_to_active_transitions", float(transitions(one)), "count", gpu=gpu, **about))
    return lines


def over_simulated(measured: ServedHour, simulated: ServedHour) -> list[Reading]:
    """Divide measured throughput, batch, active runners and first tokens by those of a simulation fitted to the same
    runners.
    """
    values = [{one.metric: one.value for one in summary(served)} for served in (measured, simulated)]
    about: dict[str, Any] = {"kind": simulated.kind, "cost_model": simulated.cost_model}
    return [
        Reading(f"measured_over_simulated_{name}", values[0][name] / values[1][name], "ratio", **about)
        for name in COMPARED if values[1][name]
    ]  # fmt: skip


COMPARED = (
    "mean_throughput", "mean_batch_size_of_active_cells", "mean_active_gpus", "mean_batch_size_of_steps",
    "p99_time_to_first_token",
)  # fmt: skip


def transitions(batch: NDArray[np.int64]) -> int:
    """Count changes from idle to active, from a GPU's requests in every second [seconds]."""
    windows = means(batch, IDLE_S) > 0
    return int((windows[1:] & ~windows[:-1]).sum())


def heat_map(batch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert [gpus, seconds] to the paper's heat map, [gpus, pixels]: `smoothed`, then capped at 32, where its colours
    end.

    The plotting library shrinks numbers before it colours them. Capping seconds first gives a share that is a point
    smaller, and was the other choice when both were known; `summary` has both, and claims the paper's minute means.
    """
    return np.minimum(smoothed(batch), MAX_BATCH)


def smoothed(batch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shrink [gpus, seconds] to [gpus, pixels] as a plotting library does: `PIXEL_S` seconds to a pixel, each a mean
    with Hann's weights over two.
    """
    seconds = batch.shape[1]
    distance = (np.arange(seconds) + 0.5 - _centres(seconds)[:, None]) / PIXEL_S  # [pixels, seconds]
    weights = np.where(np.abs(distance) < 1, 0.5 + 0.5 * np.cos(np.pi * distance), 0.0)
    return batch @ (weights / weights.sum(axis=1, keepdims=True)).T


def means(values: NDArray[np.float64] | NDArray[np.int64], window: int) -> NDArray[np.float64]:
    """Return means of ``values`` [seconds] over the whole windows that they fill."""
    count = len(values) // window
    return values[: count * window].reshape(count, window).mean(axis=1)


def _centres(seconds: int) -> NDArray[np.float64]:
    """Seconds in the middle of each pixel, [pixels]."""
    return np.arange(0.5, max(1.0, seconds / PIXEL_S)) * PIXEL_S


def _minutes(served: ServedHour) -> list[list[tuple[float, float]]]:
    """Start and mean of the heat map's pixels of each minute, per GPU, as the paper's were read."""
    seconds = int(served.duration_s)
    known = served.batch[:, :seconds]
    map_ = heat_map(np.pad(known, ((0, 0), (0, seconds - known.shape[1]))))
    minute = _centres(seconds) // HEAT_S
    starts = range(seconds // HEAT_S)
    return [[(float(HEAT_S * i), float(line[minute == i].mean())) for i in starts] for line in map_]


def _windows(
    served: ServedHour, values: NDArray[np.float64] | NDArray[np.int64], window: int
) -> list[tuple[float, float]]:
    """Start and mean of each window of the arrivals' duration, zero after the last token."""
    filled = np.zeros(int(served.duration_s))
    known = values[: len(filled)]
    filled[: len(known)] = known
    return [(float(window * i), float(mean)) for i, mean in enumerate(means(filled, window))]


def _following(arrived: NDArray[np.int64], window: int, step: int) -> list[tuple[float, float]]:
    """Start and mean of windows that overlap; those at the end are as long as the hour lets them be."""
    starts = range(0, max(1, len(arrived) - step), step)
    return [(float(start), float(arrived[start : start + window].mean())) for start in starts]


def _line(
    served: ServedHour, metric: str, unit: str, points: list[tuple[float, float]], gpu: int | None = None
) -> list[Reading]:
    return [
        Reading(metric, value, unit, kind=served.kind, t_s=start, gpu=gpu, cost_model=served.cost_model)
        for start, value in points
    ]


def _share(true: NDArray[np.bool_]) -> float:
    return float(true.mean()) if true.size else 0.0


def mean_from(values: pd.Series, start: float, seconds: float) -> float:
    """Return the mean of the windows that begin in ``seconds`` from ``start`` on."""
    return float(values[(values.index >= start) & (values.index < start + seconds)].mean())


def at_the_peak(speed: pd.Series, active: pd.Series) -> tuple[float, float]:
    """Return tokens per second of an active GPU, and active GPUs, in the ten minutes with most tokens."""
    starts = [start for start in active.index if start + PEAK_S <= active.index.max() + 60]
    best = max(starts, key=lambda start: mean_from(speed, start, PEAK_S))
    gpus = mean_from(active, best, PEAK_S)
    return mean_from(speed, best, PEAK_S) / gpus, gpus
