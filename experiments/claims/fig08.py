"""Figures 7, 8, 9 and the README's: SGMV's roofline, other ways to apply LoRA, and ranks (C05 to C21, C51, C52)."""

import numpy as np
import pandas as pd

from experiments.claims.rows import (
    SIMULATED,
    Finding,
    NotMeasured,
    Rows,
    at,
    claim,
    correlation,
    curve,
    numbers,
    pick,
    ratio,
    smallest_step,
)
from experiments.facts.systems import SECONDS
from experiments.measure.roofline import sgmv_intensity
from experiments.workload.popularity import PAPER_WORKLOADS, popularity

README, BACKBONE = "README", "backbone X@W"
SHARED = ("Uniform", "Skewed", "Identical")
ORDER = ("Distinct", "Skewed", "Uniform", "Identical")
"""Workloads from the most adapters to the fewest."""
H_IN, H_OUT, RANK = 16, 4096, 16


def _latency(rows: Rows, system: str, workload: str) -> pd.Series:
    return curve(rows.figure("8"), "latency", system=system, workload=workload, rank=RANK)


def _flops(rows: Rows, workload: str) -> pd.Series:
    return curve(rows.figure("7"), "achieved_flops", system="SGMV", workload=workload, rank=H_IN)


@claim("C05")
def distinct_intensity_is_constant(rows: Rows) -> Finding:
    """FLOP per byte of Distinct at every batch size, by the paper's formula (two bytes per element)."""
    models = popularity("Distinct").number_of_adapters
    intensity = [sgmv_intensity(size, models(size), H_IN, H_OUT) for size in range(1, 65)]
    text = f"{intensity[0]:.6f} FLOP/byte at batch 1, {intensity[-1]:.6f} at batch 64"
    spread = max(intensity) / min(intensity) - 1
    return Finding({"smallest": min(intensity), "largest": max(intensity), "spread": spread}, text, SIMULATED)


@claim("C06")
def distinct_gains_by_parallelism(rows: Rows) -> Finding:
    """FLOP/s at batch 64 over batch 1, Distinct."""
    flops = _flops(rows, "Distinct")
    gain = ratio(flops, 64, 1)
    return Finding({"ratio": gain}, f"{gain:.1f} ({flops.loc[1]:.3g} -> {flops.loc[64]:.3g} FLOP/s)")


@claim("C07")
def identical_climbs_with_intensity(rows: Rows) -> Finding:
    """FLOP/s and intensity at batch 64 over batch 1, Identical; monotony; flatness of the latency."""
    flops = _flops(rows, "Identical")
    gain = ratio(flops, 64, 1)
    intensity = sgmv_intensity(64, 1, H_IN, H_OUT) / sgmv_intensity(1, 1, H_IN, H_OUT)
    quantities = {"flops_ratio": gain, "intensity_ratio": intensity, "smallest_step": smallest_step(list(flops))}
    text = f"{gain:.1f} and {intensity:.1f}; latency bs64 / bs1 {64 / gain:.2f}"
    return Finding(quantities | {"latency_ratio": 64 / gain}, text)


@claim("C08")
def distinct_is_lowest(rows: Rows) -> Finding:
    """FLOP/s at batch 64: Distinct against the other three, and how far those are apart."""
    flops = {workload: at(_flops(rows, workload), 64) for workload in PAPER_WORKLOADS}
    others = [value for workload, value in flops.items() if workload != "Distinct"]
    quantities = {"distinct_over_lowest_other": flops["Distinct"] / min(others)}
    text = f"{numbers(list(flops.values()))} FLOP/s ({', '.join(flops)})"
    return Finding(quantities | {"others_spread": max(others) / min(others)}, text)


def _advantage(rows: Rows, system: str, workload: str) -> pd.Series:
    """Divide the latency of ``system`` by SGMV's, at the batch sizes that both have."""
    both = (_latency(rows, system, workload) / _latency(rows, "SGMV", workload)).dropna()
    if both.empty:
        raise NotMeasured(f"{system} and SGMV share no batch size in {workload}")
    return both


def _sgmv_growth(rows: Rows, workload: str) -> Finding:
    latency = _latency(rows, "SGMV", workload)
    growth = ratio(latency, 64, 1)
    return Finding({"ratio": growth}, f"{growth:.2f} {workload} ({latency.loc[1]:.4g} -> {latency.loc[64]:.4g} us)")


claim("C09", workload="Distinct")(_sgmv_growth)
claim("C11", workload="Identical")(_sgmv_growth)


@claim("C10")
def shared_grows_little(rows: Rows) -> Finding:
    """SGMV growth of Uniform and Skewed, and against Distinct."""
    found = {name: _sgmv_growth(rows, name) for name in ("Uniform", "Skewed", "Distinct")}
    uniform, skewed, distinct = (one.quantities["ratio"] for one in found.values())
    worst = max(uniform, skewed)
    quantities = {"uniform": uniform, "skewed": skewed, "largest": worst, "largest_over_distinct": worst / distinct}
    return Finding(quantities, "; ".join(one.text for one in found.values()))


@claim("C12")
def beats_gather_bmm(rows: Rows) -> Finding:
    """Gather-BMM over SGMV: smallest over batch sizes, by workload."""
    advantage = {workload: _advantage(rows, "Gather-BMM", workload) for workload in PAPER_WORKLOADS}
    least = {workload.lower(): float(values.min()) for workload, values in advantage.items()}
    text = ", ".join(f"{values.min():.2f} {name} (bs {values.idxmin():g})" for name, values in advantage.items())
    return Finding({**least, "smallest": min(least.values())}, text)


@claim("C13")
def beats_loop(rows: Rows) -> Finding:
    """Loop over SGMV: at batch 1, at batch 64 Identical, and smallest anywhere."""
    advantage = {workload: _advantage(rows, "Loop", workload) for workload in PAPER_WORKLOADS}
    first, last = min(at(values, 1) for values in advantage.values()), at(advantage["Identical"], 64)
    least = min(float(values.min()) for values in advantage.values())
    text = f"{first:.2f} at bs1; {last:.2f} at bs64 Identical; smallest {least:.2f}"
    return Finding({"batch_1": first, "batch_64_identical": last, "smallest": least}, text)


@claim("C14")
def loop_costs_per_adapter(rows: Rows) -> Finding:
    """Line through Loop latency over adapters, in the README's figure or in Figure 8; flatness where there is one."""
    try:
        frame, source = pick(rows.figure(README), system="Loop", metric="latency"), "README figure"
    except NotMeasured:
        frame, source = pick(rows.figure("8"), system="Loop", metric="latency"), "figure 8"
    frame = frame[frame["workload"].isin(set(PAPER_WORKLOADS) - {"Identical"})].sort_values(["workload", "batch_size"])
    cells = zip(frame["workload"], frame["batch_size"], strict=True)
    groups = [popularity(workload).number_of_adapters(int(size)) for workload, size in cells]
    if len(set(groups)) < 3:
        raise NotMeasured("a line needs Loop at three different numbers of adapters")
    latency = frame["value"] * (1e6 * SECONDS[frame["unit"].iloc[0]])
    slope, fit = float(np.polyfit(groups, latency, 1)[0]), correlation(groups, latency) ** 2
    identical = _latency(rows, "Loop", "Identical")
    flatness = float(identical.max() / identical.min())
    text = f"{slope:.1f} us per group, R2 {fit:.3f} ({source}); Identical max/min {flatness:.2f}"
    return Finding({"slope_us": slope, "r2": fit, "identical_max_over_min": flatness}, text)


def _of_workloads(rows: Rows, system: str) -> pd.DataFrame:
    """Return Figure 8's latency at the batch sizes that all workloads have, a column each."""
    table = pd.DataFrame({workload: _latency(rows, system, workload) for workload in ORDER}).dropna()
    if table.empty:
        raise NotMeasured(f"{system} has no batch size that all four workloads share")
    return table


@claim("C15")
def bmm_does_not_see_the_workload(rows: Rows) -> Finding:
    """BMM over workloads: largest max / min of any batch size."""
    table = _of_workloads(rows, "BMM")
    spread = table.max(axis=1) / table.min(axis=1)
    return Finding({"largest_spread": float(spread.max())}, f"{spread.max():.2f} (bs {spread.idxmax():g})")


@claim("C16")
def gather_bmm_gets_cheaper(rows: Rows) -> Finding:
    """Gather-BMM, Distinct, Skewed, Uniform, Identical: smallest ratio of neighbours at batch 32, and from 16 on."""
    table = _of_workloads(rows, "Gather-BMM")
    table = table[table.index >= 16]
    if 32 not in table.index:
        raise NotMeasured("Gather-BMM at batch 32 was not measured in all four workloads")
    over_next = table.shift(1, axis=1).iloc[:, 1:] / table.iloc[:, 1:]  # of the workload before over this one
    falls, clear = over_next.min(axis=1), over_next.drop(columns="Uniform").min(axis=1)  # Skewed is not above Uniform
    text = f"{numbers([at(table[name], 32) for name in ORDER], 4)} us at bs32 ({', '.join(ORDER)})"
    quantities = {"step_at_32": falls[32], "strict_step_at_32": clear[32]}
    quantities |= {"smallest_step": falls.min(), "smallest_strict_step": clear.min()}
    return Finding({name: float(value) for name, value in quantities.items()}, text)


@claim("C17")
def beats_bmm_with_one_model(rows: Rows) -> Finding:
    """BMM over SGMV, Identical: range over batch sizes."""
    advantage = _advantage(rows, "BMM", "Identical")
    text = f"{advantage.min():.2f} - {advantage.max():.2f} (smallest at bs {advantage.idxmin():g})"
    return Finding({"smallest": float(advantage.min())}, text)


@claim("C18")
def gather_bmm_moves_more(rows: Rows) -> Finding:
    """Elements that Gather-BMM, which copies weights per row, moves beyond SGMV, over s h_i h_o, at batch 64."""
    h_in, h_out, size = 16, 11008, 64
    copies = size * h_in * h_out
    weights = [popularity(workload).number_of_adapters(size) * h_in * h_out for workload in PAPER_WORKLOADS]
    extra = [(read + copies + copies - read) / copies for read in weights]
    text = f"{extra[0]:g} s h_i h_o elements in every workload"
    return Finding({"smallest": min(extra), "largest": max(extra)}, text, SIMULATED)


def _ranks(rows: Rows) -> tuple[pd.DataFrame, list[int]]:
    frame = pick(rows.figure("9"), system="SGMV", metric="latency")
    ranks = sorted(int(rank) for rank in frame["rank"].dropna().unique())
    if not {8, 64} <= set(ranks):
        raise NotMeasured(f"ranks 8 and 64 are needed, measured: {', '.join(map(str, ranks))}")
    return frame, ranks


def _by_rank(rows: Rows, size: int) -> tuple[dict[int, float], str]:
    frame, ranks = _ranks(rows)
    latency = {rank: at(curve(frame, "latency", workload="Distinct", rank=rank), size) for rank in ranks}
    return latency, f"{numbers(list(latency.values()))} us at r {', '.join(map(str, latency))}"


@claim("C19")
def one_row_does_not_see_the_rank(rows: Rows) -> Finding:
    """Latency at batch 1 by rank: distance of the extremes from the mean and from each other."""
    latency, text = _by_rank(rows, 1)
    mean = sum(latency.values()) / len(latency)
    low, high = min(latency.values()), max(latency.values())
    return Finding({"lowest_over_mean": low / mean, "highest_over_mean": high / mean, "max_over_min": high / low}, text)


@claim("C20")
def distinct_rises_with_rank(rows: Rows) -> Finding:
    """Latency at batch 64, Distinct, over that of rank 8."""
    latency, text = _by_rank(rows, 64)
    relative = {f"r{rank}_over_r8": value / latency[8] for rank, value in latency.items() if rank != 8}
    return Finding({**relative, "smallest_step": smallest_step(list(latency.values()))}, text)


@claim("C21")
def shared_is_flat_at_every_rank(rows: Rows) -> Finding:
    """Latency at batch 64 over batch 1: range over ranks and the workloads that share adapters."""
    frame, ranks = _ranks(rows)
    growth = [ratio(curve(frame, "latency", workload=name, rank=rank), 64, 1) for name in SHARED for rank in ranks]
    return Finding({"largest": max(growth)}, f"{min(growth):.2f} - {max(growth):.2f}")


@claim("C51")
def backbone_is_free_to_batch(rows: Rows) -> Finding:
    """Latency of X @ W at batch 64 over batch 1, 4096 x 11008."""
    latency = curve(rows.figure(README), "latency", system=BACKBONE)
    growth = ratio(latency, 64, 1)
    return Finding({"ratio": growth}, f"{growth:.3f} ({latency.loc[1]:.4g} -> {latency.loc[64]:.4g} us)")


@claim("C52")
def lora_stays_below_backbone(rows: Rows) -> Finding:
    """SGMV over X @ W at batch 64, and the largest over all batch sizes."""
    frame = rows.figure(README)
    sgmv = curve(frame, "latency", system="SGMV", workload="Skewed")
    share = (sgmv / curve(frame, "latency", system=BACKBONE)).dropna()
    last = at(share, 64)
    text = f"{last:.2f} at bs64; largest {share.max():.2f} (bs {share.idxmax():g})"
    return Finding({"batch_64": last, "largest": float(share.max())}, text)
