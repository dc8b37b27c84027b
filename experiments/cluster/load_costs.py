"""Cost models of adapter loads from recorded rows.

From host memory into a slot: `load_time` of section 5.2, whole model, alone by rank and beside a decode step. From disk
into host memory: median time to first token with adapters on disk, less that with adapters in host memory
(`ext_many_adapters`, undisturbed rows). It is in proportion to the rank, of which one is recorded.

Left out: the step beside a load is not slowed (`stall` of section 5.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from experiments.facts.models import SECONDS
from experiments.harness.counted import counted, frame_of, merged
from experiments.harness.schema import ConfigError
from experiments.measure.records import read_rows
from experiments.simulator import LoadCost, Residuals

LINK_FILE, DISK_FILE = "sec52_adapter_loading", "ext_many_adapters"
FROM_DISK, FROM_MEMORY = "time_to_first_token_from_disk", "time_to_first_token_from_memory"


@dataclass(frozen=True)
class TimedLoad:
    """Load of an adapter of ``rank``, and its seconds."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class FittedLoads:
    """Cost model of loads, and its residuals by kind of row."""

    cost: LoadCost
    residuals: Mapping[str, Residuals]


@cache
def recorded_load_costs(results: Path) -> dict[tuple[str, str], FittedLoads]:
    """Fit machine and model -> cost model of loads, for the folders of ``results`` that have rows of both kinds."""
    found = {}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        links, reads = (_rows(folder / f"{name}.csv") for name in (LINK_FILE, DISK_FILE))
        for model in sorted(set(links["model"]) & set(reads["model"])):
            host, disk = timed_links(links[links["model"] == model]), timed_reads(reads[reads["model"] == model])
            if host and disk:
                name = f"{folder.name} {model}, loads of own rows of section 5.2 and ext_many_adapters"
                found[folder.name, model] = fitted(name, host, disk)
    return found


def load_cost(results: Path, machine: str, model: str) -> LoadCost:
    """Return the cost model of loads of ``model`` on ``machine``; ConfigError names the machines that have one."""
    known = recorded_load_costs(results)
    if (machine, model) not in known:
        machines = ", ".join(name for name, what in known if what == model) or "none"
        raise ConfigError(f"{machine!r} has no recorded loads of {model}; machines that have: {machines}")
    return known[machine, model].cost


def timed_links(rows: pd.DataFrame) -> list[TimedLoad]:
    """Read Punica's loads of whole models from host memory."""
    whole = rows["panel"].isin(("model", "overlap")) & (rows["system"] == "punica")
    chosen = rows[whole & (rows["metric"] == "load_time") & (rows["statistic"] == "median")]
    return [_timed(row) for row in chosen.to_dict("records")]


def timed_reads(rows: pd.DataFrame) -> list[TimedLoad]:
    """Read how much later a first token is from disk than from host memory, by panel, rule and popularity."""
    waits = rows["metric"].isin((FROM_DISK, FROM_MEMORY)) & (rows["statistic"] == "median")
    found = []
    for _, part in rows[waits & ~rows["disturbed"].eq(True)].groupby(["panel", "system", "workload"], sort=False):
        one = {row["metric"]: _timed(row) for row in part.to_dict("records")}
        if len(one) == 2:
            found.append(TimedLoad(one[FROM_DISK].rank, one[FROM_DISK].seconds - one[FROM_MEMORY].seconds))
    return found


def fitted(name: str, host: Sequence[TimedLoad], disk: Sequence[TimedLoad]) -> FittedLoads:
    """Fit a line to ``host`` and a proportion to ``disk``, by least relative squares; neither falls with the rank."""
    base, per_rank = _fit([(1.0, load.rank) for load in host], host)
    (disk_rank,) = _fit([(load.rank,) for load in disk], disk)
    cost = LoadCost(name, base, per_rank, 0.0, disk_rank)
    from_host = _residuals([cost.host_seconds(load.rank) for load in host], host)
    from_disk = _residuals([cost.disk_seconds(load.rank) for load in disk], disk)
    return FittedLoads(cost, {"loads_from_host": from_host, "loads_from_disk": from_disk})


def _fit(features: Sequence[tuple[float, ...]], loads: Sequence[TimedLoad]) -> list[float]:
    seconds = np.array([load.seconds for load in loads])
    return nnls(np.array(features) / seconds[:, None], np.ones(len(loads)))[0].tolist()


def _residuals(told: Sequence[float], loads: Sequence[TimedLoad]) -> Residuals:
    return Residuals(np.array([one / load.seconds - 1 for one, load in zip(told, loads, strict=True)]))


def _timed(row: dict) -> TimedLoad:
    return TimedLoad(int(row["rank"]), float(row["value"]) * SECONDS[str(row["unit"])])


def _rows(file: Path) -> pd.DataFrame:
    return merged(counted(frame_of(read_rows(file) if file.exists() else ())))
