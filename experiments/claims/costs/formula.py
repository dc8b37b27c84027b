"""The table of cost formulas, and of the systems that each claim compares."""

from collections.abc import Callable
from typing import Any

from experiments.claims.costs.machine import Machine

Seconds = Callable[[Machine, Any], float]
FORMULAS: dict[tuple[str, str, str], Seconds] = {}
"""Figure, system and metric of a row -> its seconds, per token for a throughput, on a machine."""
_BASELINES = ("continuous_batching", "static_batching", "deepspeed", "hf_peft")
COSTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("C01", "C02", "C03", "C04"), ("backbone",)),
    **dict.fromkeys(("C06", "C07", "C08", "C09", "C10", "C11", "C19", "C20", "C21"), ("SGMV",)),
    "C12": ("SGMV", "Gather-BMM"),
    "C13": ("SGMV", "Loop"),
    "C14": ("Loop",),
    "C15": ("BMM",),
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


def formula(figures: tuple[str, ...], systems: tuple[str, ...], *metrics: str) -> Callable[[Seconds], Seconds]:
    """Register a function of a machine and a row as the cost of these rows."""

    def store(function: Seconds) -> Seconds:
        FORMULAS.update({(f, s, m): function for f in figures for s in systems for m in metrics})
        return function

    return store
