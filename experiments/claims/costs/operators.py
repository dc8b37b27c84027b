"""Costs of the operators of Figures 7, 8, 9 and README: launches, adapters as a product reads them, and rows.

Every operator multiplies the weights of its adapters; they differ in launches, in copies of weights per row, and in how
often they pass over the output. SGMV is two kernels of its own; the others are made of the framework's operators.
"""

from typing import Any

from experiments.claims.costs.formula import Terms, added, formula
from experiments.claims.costs.machine import COPIES, OUT, PROJECTION, README, WIDE, Machine
from punica.workload.popularity import popularity

LAUNCHES, WEIGHTS, ROWS, COPIED, WAITS = "launches", "weights", "rows", "copying weights", "waiting for the device"
GATHER = 2
"""Operators that gather two weights."""


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
def expand(machine: Machine, row: Any) -> Terms:
    """One launch, 16 -> 4096; y is read and written."""
    count = _adapters(row)
    work = machine.weights(count * row.rank * WIDE, row.batch_size / count)
    moved = machine.numbers(row.batch_size * (row.rank + 2 * WIDE))
    return {LAUNCHES: machine.call("7"), WEIGHTS: work, ROWS: moved}


@formula(("8", "9", README), ("SGMV",), "latency")
def sgmv(machine: Machine, row: Any) -> Terms:
    """Two launches; y is read and written."""
    launches = machine.sgmv_calls * machine.call(row.figure)
    return {LAUNCHES: launches, WEIGHTS: _own(machine, row), ROWS: _rows(machine, row, 2)}


@formula(("8", README), ("Loop",), "latency")
def loop(machine: Machine, row: Any) -> Terms:
    """Three operators per adapter; the product is written and read before y is.

    It reads the same weights as SGMV, so launches set them apart, and in the released code reads of segments' ends.
    """
    machine.device()
    count = _adapters(row)
    waits = count * machine.stated.get("loop_reads", 0) * machine.wait(row.figure)
    launches = machine.operators(COPIES * count, row.figure)
    return {LAUNCHES: launches, WEIGHTS: _own(machine, row), ROWS: _rows(machine, row, 4), WAITS: waits}


@formula(("8",), ("BMM",), "latency")
def bmm(machine: Machine, row: Any) -> Terms:
    """Three operators on one copy of the weights per row."""
    launches = machine.operators(COPIES, row.figure)
    return {LAUNCHES: launches, WEIGHTS: _copies(machine, row), ROWS: _rows(machine, row, 4)}


@formula(("8",), ("Gather-BMM",), "latency")
def gather_bmm(machine: Machine, row: Any) -> Terms:
    """Two operators more, which read each adapter once and write a copy per row."""
    gathered = (_adapters(row) + row.batch_size) * row.rank * (WIDE + _out(row))
    more = machine.operators(COPIES + GATHER, row.figure) - machine.operators(COPIES, row.figure)
    return added(bmm(machine, row), {LAUNCHES: more, COPIED: machine.numbers(gathered)})


@formula((README,), ("backbone X@W",), "latency")
def projection(machine: Machine, row: Any) -> Terms:
    """One operator, 4096 -> 11008; the weights' bytes or the rows' FLOP."""
    launch = machine.operators(PROJECTION, README)
    return {LAUNCHES: launch, WEIGHTS: machine.weights(WIDE * OUT, row.batch_size, README)}
