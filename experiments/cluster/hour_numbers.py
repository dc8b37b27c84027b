"""Numbers of a whole hour by its windows: of the paper's rows, and of every seed of a simulation."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.cluster.served import FULL, RATE_S, ServedHour, mean_from, series
from experiments.harness.points import Reading
from experiments.workload import MAX_BATCH

IDLE = 0.5
"""Mean requests of a minute below which a GPU counts as idle, as where the paper's heat map was read."""
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
class Windows:
    """Windows of an hour by their start in seconds: means of requests, tokens and active GPUs, and mean requests of a
    minute, one line per GPU.
    """

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
    """Return values of ``metric`` by the start of their window."""
    return frame[frame["metric"] == metric].set_index("t_s")["value"].sort_index().astype(float)


def windows_of(served: ServedHour) -> Windows:
    """Return the windows of a served hour."""
    return Windows.of(pd.DataFrame(map(vars, series(served))))


def number_readings(served: ServedHour) -> list[Reading]:
    """Return the numbers of ``served``; none of a part of an hour."""
    if served.duration_s < HOUR_S:
        return []
    return [served.reading(name, value, UNITS[name]) for name, value in windows_of(served).numbers().items()]
