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
MADE_WITH = {"workload": "Zipf", "adapters": 512, "rank": 64, "bandwidth": 50}
"""Cells that the claim is held against: by summaries of the paper, 512 adapters of rank 64 under a Zipf law, 400 Gb/s.
Qwen3's adapters had rank 32 there, and the law an exponent of 1.2.
"""
COUPLED, ROUTED, DISAGGREGATED = "coupled", "coupled_by_adapter", "disaggregated"
RATE, STEP, SERVERS, SLOTS = "request_rate", "time_per_output_token", "lora_servers", "slots"


def panel_of(adapters: int) -> str:
    """Name the panel of so many adapters."""
    return f"{adapters} adapters"


def over_link(bandwidth: int, latency: int) -> str:
    """Name a link behind a metric: GB/s each way, us one way."""
    return f", {bandwidth} GB/s, {latency} us"


def asked_of(point: Point) -> Asked:
    """Return load, GPUs and targets of ``point``; ConfigError where a GPU does not hold its model."""
    about: dict[str, Any] = dict(point.settings)
    shape, memory = shape_of(point.model), 1e9 * about["memory_gb"]
    rates = Rates.of(StepCost(**about["cost"]), LoadCost(**about["loads"]), model_bytes(TIMED))
    asked = Asked(
        shape, rates, point.rank or 0, about["adapters"], point.workload, about["prompt"], about["output"],
        about["gpus"], memory, about["most"], about["token_ms"] / 1e3, about["wait_ms"] / 1e3,
    )  # fmt: skip
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
    values = {RATE: (served.rate, "request/s"), STEP: (1e3 * served.step, "ms"), SLOTS: (served.slots, "adapters")}
    if link:
        values[SERVERS] = (served.servers, "GPUs")
    marks = {"kind": "simulated", "cost_model": cost}
    return [Reading(f"{metric}{link}", value, unit, **marks) for metric, (value, unit) in values.items()]


def ratios(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Divide request rates of LoRA servers by those of ``baseline``: a line per model, rank, adapters and link.

    Infinite where the baseline meets no target at any rate; not a number where neither does.
    """
    rates = rows[rows["metric"].str.startswith(RATE)].astype({"value": float})
    keys = ["workload", "model", "rank", "panel"]
    theirs = rates.loc[rates["system"] == baseline, [*keys, "value"]]
    found = rates[rates["system"] == DISAGGREGATED].merge(theirs, on=keys, suffixes=("", "_without"))
    link = found["metric"].str.extract(r", (?P<bandwidth>\d+) GB/s, (?P<latency>\d+) us").astype(int)
    adapters = found["panel"].str.extract(r"(\d+)", expand=False).astype(int)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = found["value"].to_numpy() / found["value_without"].to_numpy()
    return pd.concat([found[keys].assign(adapters=adapters, ratio=ratio), link], axis=1)
