"""The map of `ext_disaggregated`: its rows, and their ratios read back."""

from typing import Any

import numpy as np
import pandas as pd

from experiments.cluster.adapted_shapes import shape_of
from experiments.cluster.disaggregated import Asked, Link, Rates, Served, coupled, disaggregated
from experiments.cluster.step_costs import model_bytes
from experiments.harness.points import Point, Reading
from experiments.harness.schema import ConfigError
from punica.cluster import LoadCost, StepCost

TIMED = "llama2-7b"
"""Model whose steps and loads were timed."""

CLAIMED = 3.05
"""InfiniLoRA's claim: serviceable request rate over that of LoRA on every GPU."""
MADE_WITH: dict[str, float] = {"exponent": 1.2, "adapters": 512, "bandwidth": 50}
"""Cells that the claim is held against: 512 adapters under a Zipf law, over 400 Gb/s InfiniBand, by summaries of the
paper.
"""
COUPLED, ROUTED, DISAGGREGATED = "coupled", "coupled_by_adapter", "disaggregated"
RATE, SERVERS, SLOTS = "request_rate", "lora_servers", "slots"


def panel_of(adapters: int, exponent: float) -> str:
    """Name the panel of so many adapters, whose popularity falls with an ``exponent``."""
    return f"{adapters} adapters, Zipf {exponent:g}"


def over_link(bandwidth: int, latency: int) -> str:
    """Name a link behind a metric: GB/s each way, us one way."""
    return f", {bandwidth} GB/s, {latency} us"


def asked_of(point: Point) -> Asked:
    """Return load, GPUs and targets of ``point``; ConfigError where a GPU does not hold its model."""
    about: dict[str, Any] = dict(point.settings)
    shape, memory = shape_of(point.model), 1e9 * about["memory_gb"]
    rates = Rates.of(StepCost(**about["cost"]), LoadCost(**about["loads"]), model_bytes(TIMED))
    asked = Asked(
        shape, rates, point.rank or 0, about["adapters"], about["exponent"], about["prompt"], about["output"],
        about["gpus"], memory, about["most"], about["token_ms"] / 1e3, about["wait_ms"] / 1e3,
    )  # fmt: skip
    if asked.exponent < 0:
        raise ConfigError(
            f"figure.exponents has {asked.exponent}, must be at least 0 (all alike): give figure.exponents=[1.2]"
        )
    if asked.left <= 0:
        least = 1 + int((memory - asked.left) / 1e9)
        raise ConfigError(f"figure.memory_gb={about['memory_gb']} does not hold {point.model}: give {least} or more")
    return asked


def readings(point: Point) -> list[Reading]:
    """Serve the system of ``point``; over every link where there is one."""
    asked, name = asked_of(point), point.settings["cost"]["name"]
    if point.system != DISAGGREGATED:
        return _said(coupled(asked, point.system == ROUTED), "", name)
    links = point.settings["links"]
    found = disaggregated(asked, [Link(1e9 * bandwidth, latency / 1e6) for bandwidth, latency in links])
    return [one for link, served in zip(links, found, strict=True) for one in _said(served, over_link(*link), name)]


def _said(served: Served, link: str, cost: str) -> list[Reading]:
    split = (SERVERS, served.servers, "GPUs") if link else (SLOTS, served.slots, "adapters")
    values = [(RATE, served.rate, "request/s"), split]
    return [
        Reading(f"{metric}{link}", value, unit, kind="simulated", cost_model=cost) for metric, value, unit in values
    ]


def ratios(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Divide request rates of LoRA servers by those of ``baseline``: a line per model, rank, popularity and link.

    Infinite where the baseline meets no target at any rate; not a number where neither does, or where it has no row.
    """
    rates = rows[rows["metric"].str.startswith(RATE)].astype({"value": float})
    keys = ["model", "rank", "panel"]
    theirs = rates.loc[rates["system"] == baseline, [*keys, "value"]]
    found = rates[rates["system"] == DISAGGREGATED].merge(theirs, on=keys, how="left", suffixes=("", "_without"))
    link = found["metric"].str.extract(r", (?P<bandwidth>\d+) GB/s, (?P<latency>\d+) us").astype(int)
    about = found["panel"].str.extract(r"(?P<adapters>\d+) adapters, Zipf (?P<exponent>.+)")
    about = about.astype({"adapters": int, "exponent": float})
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = found["value"].to_numpy() / found["value_without"].to_numpy()
    return pd.concat([found[keys].assign(ratio=ratio), about, link], axis=1)
