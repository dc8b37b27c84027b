"""The table of cost formulas, and of the systems that each claim compares."""

from collections.abc import Callable
from typing import Any

from experiments.claims.costs.machine import Machine

Terms = dict[str, float]
"""Seconds of a row, per token for a throughput, by what they are spent on."""
Cost = Callable[[Machine, Any], Terms]
FORMULAS: dict[tuple[str, str, str], Cost] = {}
"""Figure, system and metric of a row -> its terms on a machine."""
_BASELINES = ("continuous_batching", "static_batching", "deepspeed", "hf_peft")
COSTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("C01", "C02", "C03", "C04"), ("backbone",)),
    **dict.fromkeys(("C06", "C07", "C08", "C09", "C10", "C11", "C19", "C20", "C21"), ("SGMV",)),
    "C12": ("SGMV", "Gather-BMM"),
    "C13": ("SGMV", "Loop"),
    "C14": ("Loop",),
    "C16": ("Gather-BMM",),
    "C17": ("SGMV", "BMM"),
    **dict.fromkeys(("C22", "C23", "C24", "C25"), ("punica",)),
    **dict.fromkeys(("C26", "C27", "C38"), ("punica",)),
    "C28": ("punica", "punica_last_admitted"),
    **dict.fromkeys(("C29", "C30", "C32"), ("punica", *_BASELINES)),
    **dict.fromkeys(("C31", "C39", "C40", "C41"), ("punica", "continuous_batching")),
    **dict.fromkeys(("C33", "C34"), ("continuous_batching",)),
    "C37": ("continuous_batching", "static_batching", "deepspeed"),
    **dict.fromkeys(("C42", "C43"), ("punica", "link")),
    "C45": ("unfused", "fused"),
    "C51": ("backbone X@W",),
    "C52": ("backbone X@W", "SGMV"),
}
"""Claim -> systems whose rows are priced; claims on counts and on simulated hours have no cost."""


def added(*parts: Terms) -> Terms:
    """Add terms of the same name."""
    total: Terms = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def scaled(terms: Terms, factor: float) -> Terms:
    """Multiply every term."""
    return {name: factor * seconds for name, seconds in terms.items()}


def formula(figures: tuple[str, ...], systems: tuple[str, ...], *metrics: str) -> Callable[[Cost], Cost]:
    """Register a function of a machine and a row as the cost of these rows."""

    def store(function: Cost) -> Cost:
        FORMULAS.update({(f, s, m): function for f in figures for s in systems for m in metrics})
        return function

    return store
