"""Figure 7: the roofline of one SGMV launch, 16 -> 4096 (C05 to C08).

Why-sentences of Figures 7 to 9 set the bytes of an operator at the measured roof beside its time; what is left at batch
1 is the floor of a launch.
"""

from dataclasses import dataclass

import pandas as pd

from experiments.claims.finding import SIMULATED, Finding, claim, why
from experiments.claims.rows import NotMeasured, Rows, at, curve, numbers, pick, ratio, smallest_step
from experiments.facts.models import SECONDS
from punica.measure.roofline import sgmv_flop, sgmv_intensity, sgmv_io_bytes
from punica.workload.popularity import PAPER_WORKLOADS, popularity

SHARED = ("Uniform", "Skewed", "Identical")
H_IN, H_OUT = 16, 4096


@dataclass(frozen=True)
class Roof:
    """Bandwidth in byte/s, peak in FLOP/s and bytes per element, from the rows of Figure 7."""

    bandwidth: float
    peak: float
    element: int

    def side(self, flop: float, moved: float) -> str:
        """Name the roof that bounds ``flop`` and ``moved`` bytes, and the time at it."""
        memory, compute = 1e6 * moved / self.bandwidth, 1e6 * flop / self.peak
        if memory >= compute:
            return f"memory-bound ({memory:.3g} us for {moved / 1e6:.3g} MB)"
        return f"compute-bound ({compute:.3g} us for {flop / 1e9:.3g} GFLOP)"


def roof_of(rows: Rows) -> Roof:
    """Read this machine's roof."""
    lines = pick(rows.figure("7"), panel="roof").set_index("metric")["value"]
    peak = lines[lines.index.str.startswith("peak_")]
    element = 4 if "fp32" in peak.index[0] else 2
    return Roof(1e12 * float(lines["memory_bandwidth_line"]), 1e12 * float(peak.iloc[0]), element)


def latency_of(rows: Rows, system: str, workload: str, figure: str = "8", rank: int = H_IN) -> pd.Series:
    """Return the latency of an operator by batch size."""
    return curve(rows.figure(figure), "latency", system=system, workload=workload, rank=rank)


def _flops(frame: pd.DataFrame, workload: str) -> pd.Series:
    """Return achieved FLOP/s by batch size: the row itself, or from its latency."""
    try:
        return curve(frame, "achieved_flops", system="SGMV", workload=workload, rank=H_IN)
    except NotMeasured:
        latency = curve(frame, "latency", system="SGMV", workload=workload, rank=H_IN)
        unit = SECONDS[frame.loc[frame["metric"] == "latency", "unit"].iloc[0]]
        flop = [sgmv_flop(int(size), H_IN, H_OUT) for size in latency.index]
        return flop / (latency * unit)


@claim("C05")
def distinct_intensity_is_constant(rows: Rows) -> Finding:
    """FLOP per byte of Distinct at every batch size, by the paper's formula (two bytes per element)."""
    models = popularity("Distinct").number_of_adapters
    intensity = [sgmv_intensity(rows_, models(rows_), H_IN, H_OUT) for rows_ in range(1, 65)]
    text = f"{intensity[0]:.6f} FLOP/byte at batch 1, {intensity[-1]:.6f} at batch 64"
    spread = max(intensity) / min(intensity) - 1
    return Finding({"smallest": min(intensity), "largest": max(intensity), "spread": spread}, text, SIMULATED)


@claim("C06")
def distinct_gains_by_parallelism(rows: Rows) -> Finding:
    """FLOP/s at batch 64 over batch 1, Distinct."""
    flops = _flops(rows.figure("7"), "Distinct")
    gain = ratio(flops, 64, 1)
    return Finding({"ratio": gain}, f"{gain:.1f} ({flops.loc[1]:.3g} -> {flops.loc[64]:.3g} FLOP/s)")


@claim("C07")
def identical_climbs_with_intensity(rows: Rows) -> Finding:
    """FLOP/s and intensity at batch 64 over batch 1, Identical; monotony; flatness of the latency."""
    flops = _flops(rows.figure("7"), "Identical")
    gain = ratio(flops, 64, 1)
    intensity = sgmv_intensity(64, 1, H_IN, H_OUT) / sgmv_intensity(1, 1, H_IN, H_OUT)
    step, growth = smallest_step(list(flops)), 64 / gain
    quantities = {"flops_ratio": gain, "intensity_ratio": intensity, "smallest_step": step, "latency_ratio": growth}
    return Finding(quantities, f"{gain:.1f} and {intensity:.1f}; latency bs64 / bs1 {growth:.2f}")


@claim("C08")
def distinct_is_lowest(rows: Rows) -> Finding:
    """FLOP/s at batch 64: Distinct against the other three, and how far those are apart."""
    frame = rows.figure("7")
    flops = {workload: at(_flops(frame, workload), 64) for workload in PAPER_WORKLOADS}
    others = [flops[workload] for workload in PAPER_WORKLOADS if workload != "Distinct"]
    distinct, spread = flops["Distinct"] / min(others), max(others) / min(others)
    quantities = {"distinct_over_lowest_other": distinct, "others_spread": spread}
    return Finding(quantities, f"{numbers(list(flops.values()))} FLOP/s ({', '.join(flops)})")


@why("C06")
def no_room_for_parallelism(rows: Rows) -> str:
    roof, latency = roof_of(rows), latency_of(rows, "SGMV", "Distinct", "7")
    achieved = [sgmv_io_bytes(n, n, 16, 4096, roof.element) / at(latency, n) * 1e6 for n in (1, 64)]
    return (
        f"batch 1 moves {achieved[0] / 1e9:.3g} of {roof.bandwidth / 1e9:.4g} GB/s already, which leaves parallelism "
        f"at most {roof.bandwidth / achieved[0]:.3g}x; batch 64 reaches {achieved[1] / 1e9:.3g} GB/s"
    )


@why("C07")
def identical_is_not_flat(rows: Rows) -> str:
    roof, latency = roof_of(rows), latency_of(rows, "SGMV", "Identical", "7")
    side = roof.side(2.0 * 64 * 16 * 4096, sgmv_io_bytes(64, 1, 16, 4096, roof.element))
    per_row = (at(latency, 64) - at(latency, 1)) / 63
    return (
        f"64 rows are {side} at the roof and take {at(latency, 64):.3g} us; batch 1 takes {at(latency, 1):.3g} us, and "
        f"each further row adds {per_row:.2g} us, which a launch floor of that size does not hide"
    )


@why("C08")
def popularity_shows(rows: Rows) -> str:
    roof = roof_of(rows)
    latency = {name: at(latency_of(rows, "SGMV", name, "7"), 64) for name in PAPER_WORKLOADS}
    counts = {name: popularity(name).number_of_adapters(64) for name in PAPER_WORKLOADS}
    moved = {name: sgmv_io_bytes(64, counts[name], 16, 4096, roof.element) for name in PAPER_WORKLOADS}
    slow, fast = max(SHARED, key=lambda name: latency[name]), min(SHARED, key=lambda name: latency[name])
    return (
        f"at batch 64 {slow} reads {counts[slow]} adapters and {fast} {counts[fast]}: {moved[slow] / moved[fast]:.2f}x "
        f"the bytes and {latency[slow] / latency[fast]:.2f}x the time ({latency[slow]:.3g} and {latency[fast]:.3g} "
        f"us), Distinct {moved['Distinct'] / moved[fast]:.2f}x and {latency['Distinct'] / latency[fast]:.2f}x; no "
        "launch floor evens them out"
    )
