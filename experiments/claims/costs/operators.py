"""Costs of the operators of Figures 7, 8, 9 and README: launches, adapters as a product reads them, and rows.

Every operator multiplies the weights of its adapters; they differ in launches, in copies of weights per row, and in how
often they pass over the output.
"""

from typing import Any

from experiments.claims.costs.formula import formula
from experiments.claims.costs.machine import OUT, README, WIDE, Machine
from punica.workload.popularity import popularity


def _adapters(row: Any) -> int:
    return popularity(row.workload).number_of_adapters(int(row.batch_size))


def _out(row: Any) -> int:
    return WIDE if row.figure == "9" else OUT


def _own(machine: Machine, row: Any) -> float:
    """Seconds of the products of each adapter's rows with its own weights."""
    count = _adapters(row)
    return machine.weights(count * row.rank * (WIDE + _out(row)), row.batch_size / count, row.figure)


def _copies(machine: Machine, row: Any) -> float:
    """Seconds to multiply one copy of the weights per row."""
    return machine.weights(row.batch_size * row.rank * (WIDE + _out(row)), 1, row.figure)


def _rows(machine: Machine, row: Any, passes: int) -> float:
    """Seconds to read x once and to pass ``passes`` times over y."""
    return machine.numbers(row.batch_size * (WIDE + passes * _out(row)))


@formula(("7",), ("SGMV",), "latency", "achieved_flops")
def expand(machine: Machine, row: Any) -> float:
    """One launch, 16 -> 4096; y is read and written."""
    count = _adapters(row)
    work = machine.weights(count * row.rank * WIDE, row.batch_size / count)
    return machine.call("7") + work + machine.numbers(row.batch_size * (row.rank + 2 * WIDE))


@formula(("8", "9", README), ("SGMV",), "latency")
def sgmv(machine: Machine, row: Any) -> float:
    """Two launches; y is read and written."""
    return 2 * machine.call(row.figure) + _own(machine, row) + _rows(machine, row, 2)


@formula(("8", README), ("Loop",), "latency")
def loop(machine: Machine, row: Any) -> float:
    """Three launches per adapter; the product is written and read before y is.

    It reads the same weights as SGMV, so launches alone set them apart.
    """
    launches = 3 * _adapters(row) * machine.kernel(row.figure)
    return launches + _own(machine, row) + _rows(machine, row, 4)


@formula(("8",), ("BMM",), "latency")
def bmm(machine: Machine, row: Any) -> float:
    """Three launches on one copy of the weights per row."""
    return 3 * machine.call(row.figure) + _copies(machine, row) + _rows(machine, row, 4)


@formula(("8",), ("Gather-BMM",), "latency")
def gather_bmm(machine: Machine, row: Any) -> float:
    """Two launches more, which read each adapter once and write a copy per row."""
    gathered = (_adapters(row) + row.batch_size) * row.rank * (WIDE + _out(row))
    return 2 * machine.call(row.figure) + machine.numbers(gathered) + bmm(machine, row)


@formula((README,), ("backbone X@W",), "latency")
def projection(machine: Machine, row: Any) -> float:
    """One launch, 4096 -> 11008; the weights' bytes or the rows' FLOP."""
    return machine.call(README) + machine.weights(WIDE * OUT, row.batch_size, README)
