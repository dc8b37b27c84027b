"""Costs of loading an adapter (section 5.2) and of a norm (section 6)."""

from typing import Any

from experiments.claims.costs.formula import Terms, formula
from experiments.claims.costs.machine import UNFUSED, Machine, conf_of
from experiments.claims.costs.operators import LAUNCHES
from experiments.claims.text import LOADING, NORM, RANK


def _size(machine: Machine, row: Any) -> float:
    """Bytes of an adapter, or of one layer of it."""
    layers = 1 if row.panel == "layer" else None
    return machine.element * conf_of(row.model).lora_parameters(RANK, layers)


@formula((LOADING,), ("punica", "link"), "load_time")
def load(machine: Machine, row: Any) -> Terms:
    """The adapter's bytes over the link; beside a step it takes a copy engine."""
    if row.panel == "overlap":
        machine.copy_engine()
    return {"link": _size(machine, row) / machine.link}


@formula((LOADING,), ("punica", "link"), "stall")
def stall(machine: Machine, row: Any) -> Terms:
    """The bytes that a load writes, which the step beside it cannot read meanwhile."""
    machine.copy_engine()
    return {"memory": _size(machine, row) / machine.bandwidth}


@formula((NORM,), ("unfused",), "norm_latency")
def unfused(machine: Machine, row: Any) -> Terms:
    """One of the framework's operators per operation, on rows that stay in the caches."""
    machine.device()
    return {LAUNCHES: machine.operators(UNFUSED, NORM)}


@formula((NORM,), ("fused",), "norm_latency")
def fused(machine: Machine, row: Any) -> Terms:
    """One launch."""
    machine.device()
    return {LAUNCHES: machine.call(NORM)}
