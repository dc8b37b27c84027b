"""Cost of loading an adapter, from recorded rows of a machine.

Into a slot: a line over ranks through the loads of section 5.2 (panel `model`, system `punica`), by least relative
squares. From disk: what first tokens of adapters on disk take longer than those in host memory (`ext_many_adapters`,
undisturbed rows), which has one rank; other ranks in proportion.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.facts.frames import frame_of
from experiments.facts.models import SECONDS
from experiments.harness.schema import ConfigError
from punica.cluster import LoadCost
from punica.measure.records import read_rows

SLOTS, DISK = "sec52_adapter_loading", "ext_many_adapters"
FROM_DISK, FROM_MEMORY = "time_to_first_token_from_disk", "time_to_first_token_from_memory"


@cache
def load_cost(results: Path, machine: str, model: str) -> LoadCost:
    """Fit the loads of ``model`` on ``machine``; ConfigError names the machines of ``results`` that have the rows."""
    if not _has_rows(results / machine, model):
        known = ", ".join(path.name for path in sorted(results.glob("*")) if _has_rows(path, model))
        raise ConfigError(f"figure.loads is {machine!r}, which has no loads of {model}; it can be {known or 'none'}")
    seconds = _slot_loads(results / machine, model)
    relative = 1 / seconds.to_numpy()  # weights of the residuals
    slope, base = np.polyfit(seconds.index.to_numpy(dtype=float), seconds.to_numpy(), 1, w=relative)
    disk, rank = _disk_loads(results / machine, model)
    name = f"{machine} {model}, own rows of section 5.2 and ext many adapters"
    return LoadCost(name, max(0.0, float(base)), float(slope), 0.0, disk / rank)


def _has_rows(folder: Path, model: str) -> bool:
    return len(_slot_loads(folder, model)) > 1 and _disk_loads(folder, model)[0] > 0


def _slot_loads(folder: Path, model: str) -> pd.Series:
    """Return the median seconds of a load by rank."""
    rows = _medians(folder / f"{SLOTS}.csv", model)
    chosen = rows[(rows["panel"] == "model") & (rows["metric"] == "load_time")]
    return _seconds(chosen).groupby(chosen["rank"]).median()


def _disk_loads(folder: Path, model: str) -> tuple[float, int]:
    """Return the median seconds of a load from disk, and the rank of its adapters; zeros without rows."""
    rows = _medians(folder / f"{DISK}.csv", model)
    rows = rows[rows["disturbed"].ne(True)]
    cell = ["panel", "system", "workload", "rank", "repeat"]
    disk, memory = (
        _seconds(part).groupby([part[name] for name in cell]).median()
        for part in (rows[rows["metric"] == FROM_DISK], rows[rows["metric"] == FROM_MEMORY])
    )
    longer = (disk - memory).dropna()
    if longer.empty:
        return 0.0, 0
    rank = int(longer.index.get_level_values("rank").max())
    return float(longer.xs(rank, level="rank").median()), rank


def _medians(file: Path, model: str) -> pd.DataFrame:
    rows = read_rows(file) if file.exists() else []
    return frame_of(
        row for row in rows
        if row.statistic == "median" and row.model == model and row.system.startswith("punica")
        and row.metric in ("load_time", FROM_DISK, FROM_MEMORY)
    )  # fmt: skip


def _seconds(rows: pd.DataFrame) -> pd.Series:
    return rows["value"].astype(float) * rows["unit"].map(SECONDS).astype(float)
