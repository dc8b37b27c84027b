"""Figure 7: the roofline of one SGMV launch, 16 -> 4096 (C05 to C08)."""

import pandas as pd

from experiments.claims.finding import SIMULATED, Finding, claim
from experiments.claims.rows import NotMeasured, Rows, at, curve, numbers, ratio, smallest_step
from experiments.facts.models import SECONDS
from punica.measure.roofline import sgmv_flop, sgmv_intensity
from punica.workload.popularity import PAPER_WORKLOADS, popularity

SHARED = ("Uniform", "Skewed", "Identical")
H_IN, H_OUT = 16, 4096


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
