"""Time of the bytes alone, as rows of metric `FLOOR`, at the data sheet's bandwidth, elsewhere Figure 7's copy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.cluster.costs import datasheet, model_bytes
from experiments.facts.systems import SECONDS
from experiments.harness.schema import CONF, DType, model_conf
from experiments.measure.records import read_rows
from experiments.workload.popularity import popularity

FLOOR = "floor"


def _operator(cell: Any, figure: dict[str, Any]) -> float:
    """X, A, B, and Y read and written; of X@W its weight."""
    rows, h1, h2, size = cell.batch_size, figure["h1"], figure["h2"], DType(figure["dtype"]).bytes
    if cell.system == "backbone X@W":
        return float(size * (rows * (h1 + h2) + h1 * h2))
    adapters = popularity(cell.workload).number_of_adapters(int(rows))
    return float(size * (rows * (h1 + 2 * h2) + adapters * cell.rank * (h1 + h2)))


def _layer(cell: Any, _: dict[str, Any]) -> float:
    sizes, layers = model_bytes(cell.model), model_conf(cell.model).num_hidden_layers
    adapters = popularity(cell.workload).number_of_adapters(int(cell.batch_size))
    moved = sizes.weights - sizes.head + cell.batch_size * cell.seq_len * sizes.kv + adapters * cell.rank * sizes.lora
    return sizes.itemsize * moved / layers


def _step(cell: Any, _: dict[str, Any]) -> float:
    sizes = model_bytes(cell.model)
    cached = cell.batch_size * cell.seq_len if cell.panel == "decode" else 0
    return sizes.itemsize * (sizes.weights + cached * sizes.kv)


def _norm(cell: Any, figure: dict[str, Any]) -> float:
    return float(DType(figure["dtype"]).bytes * figure["hidden"] * (2 * cell.batch_size + 1))


BYTES: dict[str, tuple[str, Callable[[Any, dict[str, Any]], float], tuple[str, ...]]] = {
    "8": ("latency", _operator, ("SGMV",)), "9": ("latency", _operator, ("SGMV",)),
    "README backbone-vs-sgmv": ("latency", _operator, ("SGMV", "backbone X@W")),
    "10": ("layer_latency", _layer, ()), "1": ("step_latency", _step, ()),
    "text 6": ("norm_latency", _norm, ("fused",)),
}  # fmt: skip
"""Figure -> metric, bytes of a cell, systems that get a floor (none: all)."""


def floors(rows: pd.DataFrame, rows_file: Path) -> pd.DataFrame:
    """One row per timed cell of `rows` whose bytes are known; none without a configuration or a bandwidth."""
    figure, hardware, config = rows["figure"].iloc[0], rows["hardware"].iloc[0], rows_file.with_suffix(".json")
    has_sheet = hardware != "cpu" and (CONF / "hardware" / f"{hardware}.yaml").exists()
    bandwidth = datasheet(hardware)[0] if has_sheet else 1e12 * copied(rows_file.parent)
    if not bandwidth or not config.exists():
        return rows.iloc[:0]
    if (known := rows["metric"].isin(["bytes_read", "io_bytes"])).any():
        cells, unit = rows[known], rows.loc[rows["metric"] == "latency", "unit"].iloc[0]
        return cells.assign(metric=FLOOR, unit=unit, value=cells["value"].astype(float) / bandwidth / SECONDS[unit])
    if figure not in BYTES:
        return rows.iloc[:0]
    metric, function, systems = BYTES[figure]
    settings = json.loads(config.read_text(encoding="utf-8"))["figure"]
    cells = rows[(rows["metric"] == metric) & (rows["statistic"] == "median")]
    cells = cells[cells["system"].isin(systems)] if systems else cells
    seconds = [function(cell, settings) / bandwidth for cell in cells.itertuples()]
    values = [one / SECONDS[unit] for one, unit in zip(seconds, cells["unit"], strict=True)]
    return cells.assign(metric=FLOOR, statistic="value", value=values)


def copied(folder: Path) -> float:
    """TB/s of Figure 7's copy; 0 where it was not measured."""
    roofs = folder / "fig07_sgmv_roofline.csv"
    found = [row.value for row in read_rows(roofs) if row.metric == "memory_bandwidth_line"] if roofs.exists() else []
    return max(found, default=0.0)
