"""Why the claims about operators differ where they do: a sentence each, computed from the rows of Figures 7 to 9.

What an operator must move at the roof that Figure 7 measured is set beside what it takes; what is left at batch 1 is
the floor of a launch. The shapes are the paper's, at every scale that is judged.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.claims.fig08 import BACKBONE, RANK, README, SHARED
from experiments.claims.finding import why
from experiments.claims.rows import Rows, at, curve, pick, ratio
from experiments.claims.sec6 import BATCH, norms
from punica.measure.roofline import sgmv_io_bytes
from punica.workload.popularity import PAPER_WORKLOADS, popularity

SHAPES = {"8": (4096, 11008), "9": (4096, 4096), README: (4096, 11008)}
"""Figure -> input and output width of the projection that the operator is added to."""
BOUND_BY_BYTES = 0.4
"""Share of a latency from which its bytes are what sets it."""


@dataclass(frozen=True)
class Roof:
    """Bandwidth in byte/s, peak in FLOP/s and bytes per element, from the rows of Figure 7."""

    bandwidth: float
    peak: float
    element: int

    def side(self, flop: float, moved: float) -> str:
        """Which side of the ridge work of ``flop`` and ``moved`` bytes lies on, and its time there."""
        memory, compute = 1e6 * moved / self.bandwidth, 1e6 * flop / self.peak
        if memory >= compute:
            return f"memory-bound ({memory:.3g} us for {moved / 1e6:.3g} MB)"
        return f"compute-bound ({compute:.3g} us for {flop / 1e9:.3g} GFLOP)"


def roof_of(rows: Rows) -> Roof:
    """The roof of this machine."""
    lines = pick(rows.figure("7"), panel="roof").set_index("metric")["value"]
    peak = lines[lines.index.str.startswith("peak_")]
    element = 4 if "fp32" in peak.index[0] else 2
    return Roof(1e12 * float(lines["memory_bandwidth_line"]), 1e12 * float(peak.iloc[0]), element)


def moved_bytes(figure: str, workload: str, size: int, rank: int, element: int) -> float:
    """Bytes that shrink and expand must move for ``size`` rows: adapters once, x and y once."""
    h1, h2 = SHAPES[figure]
    adapters = popularity(workload).number_of_adapters(size)
    return element * (adapters * rank * (h1 + h2) + size * (h1 + 2 * h2))


def _latency(rows: Rows, system: str, workload: str, figure: str = "8", rank: int = RANK) -> pd.Series:
    return curve(rows.figure(figure), "latency", system=system, workload=workload, rank=rank)


@why("C09", workload="Distinct")
@why("C11", workload="Identical")
def growth(rows: Rows, workload: str, figure: str = "8", rank: int = RANK) -> str:
    """Launch floor at batch 1, and the share of the bytes at batch 64."""
    roof, latency = roof_of(rows), _latency(rows, "SGMV", workload, figure, rank)
    first, last = at(latency, 1), at(latency, 64)
    streams = [1e6 * moved_bytes(figure, workload, n, rank, roof.element) / roof.bandwidth for n in (1, 64)]
    share = streams[1] / last
    cause = "bytes set the growth" if share >= BOUND_BY_BYTES else "work per row sets it, not bytes"
    return (
        f"{workload}, rank {rank}: beyond its bytes batch 1 takes {max(0.0, first - streams[0]):.3g} of {first:.3g} "
        f"us, the floor under which growth would hide; the bytes of batch 64 take {streams[1]:.3g} of {last:.3g} us at "
        f"{roof.bandwidth / 1e9:.4g} GB/s ({100 * share:.0f} %): {cause}"
    )


@why("C10")
def shared_growth(rows: Rows) -> str:
    """The same for the one of Uniform and Skewed that grows more."""
    return growth(rows, max(("Uniform", "Skewed"), key=lambda name: ratio(_latency(rows, "SGMV", name), 64, 1)))


@why("C21")
def growth_at_a_rank(rows: Rows) -> str:
    """The same for the shared workload and rank of Figure 9 that grow most."""
    ranks = sorted(int(rank) for rank in pick(rows.figure("9"), system="SGMV")["rank"].dropna().unique())
    cells = [(workload, rank) for workload in SHARED for rank in ranks]
    workload, rank = max(cells, key=lambda cell: ratio(_latency(rows, "SGMV", cell[0], "9", cell[1]), 64, 1))
    return growth(rows, workload, "9", rank)


@why("C06")
def no_room_for_parallelism(rows: Rows) -> str:
    """How much of the bandwidth batch 1 takes already."""
    roof, latency = roof_of(rows), _latency(rows, "SGMV", "Distinct", "7")
    achieved = [sgmv_io_bytes(n, n, 16, 4096, roof.element) / at(latency, n) * 1e6 for n in (1, 64)]
    return (
        f"batch 1 moves {achieved[0] / 1e9:.3g} of {roof.bandwidth / 1e9:.4g} GB/s already, which leaves parallelism "
        f"at most {roof.bandwidth / achieved[0]:.3g}x; batch 64 reaches {achieved[1] / 1e9:.3g} GB/s"
    )


@why("C07")
def identical_is_not_flat(rows: Rows) -> str:
    """What the roof allows for 64 rows of one adapter, beside what they take."""
    roof, latency = roof_of(rows), _latency(rows, "SGMV", "Identical", "7")
    side = roof.side(2.0 * 64 * 16 * 4096, sgmv_io_bytes(64, 1, 16, 4096, roof.element))
    per_row = (at(latency, 64) - at(latency, 1)) / 63
    return (
        f"64 rows are {side} at the roof and take {at(latency, 64):.3g} us; batch 1 takes {at(latency, 1):.3g} us, and "
        f"each further row adds {per_row:.2g} us, which a launch floor of that size does not hide"
    )


@why("C08")
def popularity_shows(rows: Rows) -> str:
    """Bytes per FLOP of the workload that is furthest from the others."""
    roof = roof_of(rows)
    latency = {name: at(_latency(rows, "SGMV", name, "7"), 64) for name in PAPER_WORKLOADS}
    counts = {name: popularity(name).number_of_adapters(64) for name in PAPER_WORKLOADS}
    moved = {name: sgmv_io_bytes(64, counts[name], 16, 4096, roof.element) for name in PAPER_WORKLOADS}
    slow, fast = max(SHARED, key=lambda name: latency[name]), min(SHARED, key=lambda name: latency[name])
    return (
        f"at batch 64 {slow} reads {counts[slow]} adapters and {fast} {counts[fast]}: {moved[slow] / moved[fast]:.2f}x "
        f"the bytes and {latency[slow] / latency[fast]:.2f}x the time ({latency[slow]:.3g} and {latency[fast]:.3g} "
        f"us), Distinct {moved['Distinct'] / moved[fast]:.2f}x and {latency['Distinct'] / latency[fast]:.2f}x; no "
        "launch floor evens them out"
    )


def _closest(rows: Rows, system: str, workloads: tuple[str, ...]) -> tuple[str, int]:
    """Workload and batch size at which ``system`` comes closest to SGMV."""
    cells = {name: (_latency(rows, system, name) / _latency(rows, "SGMV", name)).dropna() for name in workloads}
    workload = min(cells, key=lambda name: cells[name].min())
    return workload, int(cells[workload].idxmin())


@why("C12")
def gathering_is_cheap(rows: Rows) -> str:
    """The parts of Gather-BMM where it comes closest."""
    workload, size = _closest(rows, "Gather-BMM", PAPER_WORKLOADS)
    whole, bmm, sgmv = (at(_latency(rows, name, workload), size) for name in ("Gather-BMM", "BMM", "SGMV"))
    gathering = max(0.0, 1 - bmm / whole)
    return (
        f"{workload}, batch {size}: gathering is {100 * gathering:.0f} % of Gather-BMM's {whole:.3g} us, and "
        f"BMM without it takes {bmm / sgmv:.2f}x SGMV's {sgmv:.3g} us; with no launches to save, that copy is what is "
        "saved"
    )


@why("C13")
def looping_is_cheap(rows: Rows) -> str:
    """What a turn of the loop costs beyond SGMV, where it comes closest."""
    workload, size = _closest(rows, "Loop", PAPER_WORKLOADS)
    loop, sgmv = (at(_latency(rows, name, workload), size) for name in ("Loop", "SGMV"))
    adapters = popularity(workload).number_of_adapters(size)
    roof = roof_of(rows)
    stream = 1e6 * moved_bytes("8", workload, size, RANK, roof.element) / roof.bandwidth
    turns = f"its {adapters} turns each cost" if adapters > 1 else "its one turn costs"
    than = "more" if loop >= sgmv else "less"
    return (
        f"{workload}, batch {size}: Loop takes {loop:.3g} us, {loop / sgmv:.3g} times SGMV's {sgmv:.3g} us, so {turns} "
        f"{abs(loop - sgmv) / adapters:.3g} us {than} than with SGMV; the bytes alone take {stream:.3g} us, which both "
        "pay"
    )


@why("C14")
def loop_sees_rows(rows: Rows) -> str:
    """How the loop over one adapter grows with the rows."""
    roof, latency = roof_of(rows), _latency(rows, "Loop", "Identical")
    last = int(latency.idxmax())
    stream = [1e6 * moved_bytes("8", "Identical", n, RANK, roof.element) / roof.bandwidth for n in (1, last)]
    return (
        f"with one adapter Loop grows from {at(latency, 1):.3g} us (batch 1; {stream[0]:.3g} us of bytes) to "
        f"{at(latency, last):.3g} us (batch {last}; {stream[1]:.3g} us of bytes): its turns cost their rows, not only "
        "a fixed launch"
    )


@why("C15")
def bmm_sees_the_workload(rows: Rows) -> str:
    """The batch size at which BMM spreads most."""
    table = pd.DataFrame({name: _latency(rows, "BMM", name) for name in PAPER_WORKLOADS}).dropna()
    size = (table.max(axis=1) / table.min(axis=1)).idxmax()
    slow, fast = table.loc[size].idxmax(), table.loc[size].idxmin()
    return (
        f"batch {size:g}: {slow} takes {table.loc[size, slow]:.3g} us and {fast} {table.loc[size, fast]:.3g} us for "
        f"the same {int(size)} copies and FLOP, so the {table.loc[size, slow] / table.loc[size, fast] - 1:.0%} are of "
        "the measurement or of caches that hold copies of fewer adapters"
    )


@why("C16")
def copies_are_most_bytes(rows: Rows) -> str:
    """What the adapters' own bytes are of what Gather-BMM moves, beside the order that fails."""
    order = ("Distinct", "Skewed", "Uniform", "Identical")
    table = pd.DataFrame({name: _latency(rows, "Gather-BMM", name) for name in order}).dropna()
    table = table[table.index >= 16]
    falls = {(size, a, b): row[a] / row[b] for size, row in table.iterrows() for a, b in itertools.pairwise(order)}
    size, before, after = min(falls, key=lambda key: falls[key])
    counts = [popularity(name).number_of_adapters(int(size)) for name in (before, after)]
    moved = [number + 2 * int(size) for number in counts]  # weights once; a copy per row, written and read
    return (
        f"batch {size:g}: {before} reads {counts[0]} adapters and {after} {counts[1]}, but copies for {size:g} rows "
        f"are written and read in both, so the bytes differ by {100 * abs(moved[0] / moved[1] - 1):.0f} %; measured "
        f"{table.loc[size, before]:.4g} and {table.loc[size, after]:.4g} us: {after} takes "
        f"{1 / falls[size, before, after]:.3g} times as long as {before}"
    )


@why("C17")
def bmm_is_as_fast(rows: Rows) -> str:
    """Where torch.bmm comes closest, and what the bytes need there."""
    _, size = _closest(rows, "BMM", ("Identical",))
    bmm, sgmv = (at(_latency(rows, name, "Identical"), size) for name in ("BMM", "SGMV"))
    roof = roof_of(rows)
    stream = 1e6 * moved_bytes("8", "Identical", size, RANK, roof.element) / roof.bandwidth
    return (
        f"batch {size}: BMM takes {bmm:.4g} us and SGMV {sgmv:.4g} us, of which {stream:.3g} us are bytes; {size} "
        "copies of one adapter cost BMM little, and SGMV has no launch to save"
    )


def _by_rank(rows: Rows, size: int) -> str:
    frame = pick(rows.figure("9"), system="SGMV", workload="Distinct")
    ranks = sorted(int(rank) for rank in frame["rank"].dropna().unique())
    latency = [at(_latency(rows, "SGMV", "Distinct", "9", rank), size) for rank in ranks]
    slope, fixed = np.polyfit(ranks, latency, 1)
    roof = roof_of(rows)
    stream = 1e6 * moved_bytes("9", "Distinct", size, ranks[-1], roof.element) / roof.bandwidth
    return (
        f"at batch {size} a line through the ranks is {max(0.0, fixed):.3g} us + {slope:.3g} us per rank: what does "
        f"not depend on the rank is {100 * max(0.0, min(1.0, fixed / latency[0])):.0f} % of rank {ranks[0]}; at rank "
        f"{ranks[-1]} bytes take {stream:.3g} of {latency[-1]:.3g} us ({100 * stream / latency[-1]:.0f} %)"
    )


@why("C19")
def one_row_sees_the_rank(rows: Rows) -> str:
    """Fixed cost and cost per rank at batch 1."""
    return _by_rank(rows, 1)


@why("C20")
def distinct_sees_the_rank(rows: Rows) -> str:
    """Fixed cost and cost per rank at batch 64."""
    return _by_rank(rows, 64)


@why("C51")
def projection_is_not_free_to_batch(rows: Rows) -> str:
    """Which side of the roofline X @ W lies on at batch 64."""
    latency, roof = curve(rows.figure(README), "latency", system=BACKBONE), roof_of(rows)
    h1, h2 = SHAPES[README]
    sides = [roof.side(2.0 * n * h1 * h2, roof.element * (h1 * h2 + n * (h1 + h2))) for n in (1, 64)]
    ridge = roof.peak / roof.bandwidth
    return (
        f"the ridge of this machine is at {ridge:.3g} FLOP/byte: X@W at batch 1 is {sides[0]}, at batch 64 {sides[1]}, "
        f"and takes {at(latency, 1):.4g} and {at(latency, 64):.4g} us"
    )


@why("C52")
def add_on_is_not_small(rows: Rows) -> str:
    """Bytes of the add-on and of the projection, where the add-on is largest."""
    frame, roof = rows.figure(README), roof_of(rows)
    sgmv, base = curve(frame, "latency", system="SGMV", workload="Skewed"), curve(frame, "latency", system=BACKBONE)
    size = int((sgmv / base).dropna().idxmax())
    h1, h2 = SHAPES[README]
    moved = moved_bytes(README, "Skewed", size, RANK, roof.element) / (roof.element * h1 * h2)
    return (
        f"batch {size}: the add-on moves {100 * moved:.0f} % of the projection's bytes and takes {at(sgmv, size):.3g} "
        f"us beside {at(base, size):.3g} us"
    )


@why("C45")
def norm_is_not_all_launches(rows: Rows) -> str:
    """What each form takes for one row, where it is launches alone, and for a full step."""
    unfused, fused = norms(rows)
    first = int(min(unfused.index))
    return (
        f"{first} row: {at(unfused, first):.3g} us unfused and {at(fused, first):.3g} fused; {BATCH} rows: "
        f"{at(unfused, BATCH):.3g} and {at(fused, BATCH):.3g}: launches of single operations are not most of the time "
        "here, or the fused one costs as much as several of them"
    )
