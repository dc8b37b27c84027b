"""Figures 8, 9 and the README's: SGMV against the other ways to apply LoRA, and over ranks (C09 to C21, C51, C52).

The shapes are the paper's, at every scale that is judged.
"""

import numpy as np
import pandas as pd

from experiments.claims.fig07 import SHARED, latency_of
from experiments.claims.finding import SIMULATED, Finding, claim
from experiments.claims.rows import NotMeasured, Rows, at, correlation, curve, numbers, pick, ratio, smallest_step
from experiments.facts.models import SECONDS
from punica.workload.popularity import PAPER_WORKLOADS, popularity

README = "README"
BACKBONE = "backbone X@W"
RANK = 16
ORDER = ("Distinct", "Skewed", "Uniform", "Identical")
"""Workloads from the most adapters to the fewest."""


def _advantage(rows: Rows, system: str, workload: str) -> pd.Series:
    """Divide the latency of ``system`` by SGMV's, at the batch sizes that both have."""
    both = (latency_of(rows, system, workload) / latency_of(rows, "SGMV", workload)).dropna()
    if both.empty:
        raise NotMeasured(f"{system} and SGMV share no batch size in {workload}")
    return both


def _sgmv_growth(rows: Rows, workload: str) -> tuple[float, str]:
    latency = latency_of(rows, "SGMV", workload)
    growth = ratio(latency, 64, 1)
    return growth, f"{growth:.2f} {workload} ({latency.loc[1]:.4g} -> {latency.loc[64]:.4g} us)"


@claim("C09", workload="Distinct")
@claim("C11", workload="Identical")
def sgmv_growth(rows: Rows, workload: str) -> Finding:
    """SGMV latency at batch 64 over batch 1: Distinct grows, Identical is flat."""
    growth, text = _sgmv_growth(rows, workload)
    return Finding({"ratio": growth}, text)


@claim("C10")
def shared_grows_little(rows: Rows) -> Finding:
    """SGMV growth of Uniform and Skewed, and against Distinct."""
    (uniform, text_u), (skewed, text_s) = _sgmv_growth(rows, "Uniform"), _sgmv_growth(rows, "Skewed")
    distinct, _ = _sgmv_growth(rows, "Distinct")
    worst = max(uniform, skewed)
    quantities = {"uniform": uniform, "skewed": skewed, "largest": worst, "largest_over_distinct": worst / distinct}
    return Finding(quantities, f"{text_u}; {text_s}; Distinct {distinct:.2f}")


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
    first = min(at(values, 1) for values in advantage.values())
    last = at(advantage["Identical"], 64)
    least = min(float(values.min()) for values in advantage.values())
    text = f"{first:.2f} at bs1; {last:.2f} at bs64 Identical; smallest {least:.2f}"
    return Finding({"batch_1": first, "batch_64_identical": last, "smallest": least}, text)


@claim("C14")
def loop_costs_per_adapter(rows: Rows) -> Finding:
    """Line through Loop latency against the number of adapters; flatness where that number is one."""
    frame, source = _loop_rows(rows)
    groups, latency = [], []
    for workload in sorted(set(frame["workload"]) & set(PAPER_WORKLOADS) - {"Identical"}):
        values = curve(frame, "latency", workload=workload) * (1e6 * SECONDS[frame["unit"].iloc[0]])
        groups += [popularity(workload).number_of_adapters(int(size)) for size in values.index]
        latency += list(values)
    if len(set(groups)) < 3:
        raise NotMeasured("a line needs Loop at three different numbers of adapters")
    slope = float(np.polyfit(groups, latency, 1)[0])
    fit = correlation(groups, latency) ** 2
    identical = latency_of(rows, "Loop", "Identical")
    flatness = float(identical.max() / identical.min())
    text = f"{slope:.1f} us per group, R2 {fit:.3f} ({source}); Identical max/min {flatness:.2f}"
    return Finding({"slope_us": slope, "r2": fit, "identical_max_over_min": flatness}, text)


def _loop_rows(rows: Rows) -> tuple[pd.DataFrame, str]:
    """Return Loop in the README figure, where the paper's slope was read; otherwise in Figure 8."""
    try:
        return pick(rows.figure(README), system="Loop", metric="latency"), "README figure"
    except NotMeasured:
        return pick(rows.figure("8"), system="Loop", metric="latency"), "figure 8"


@claim("C15")
def bmm_does_not_see_the_workload(rows: Rows) -> Finding:
    """BMM over workloads: largest max / min of any batch size."""
    table = pd.DataFrame({workload: latency_of(rows, "BMM", workload) for workload in PAPER_WORKLOADS}).dropna()
    if table.empty:
        raise NotMeasured("BMM has no batch size that all four workloads share")
    spread = table.max(axis=1) / table.min(axis=1)
    return Finding({"largest_spread": float(spread.max())}, f"{spread.max():.2f} (bs {spread.idxmax():g})")


def _gather_bmm(rows: Rows) -> pd.DataFrame:
    """Latencies from batch 16 on, a column per workload in `ORDER`."""
    table = pd.DataFrame({workload: latency_of(rows, "Gather-BMM", workload) for workload in ORDER}).dropna()
    return table[table.index >= 16]


@claim("C16")
def gather_bmm_gets_cheaper(rows: Rows) -> Finding:
    """Gather-BMM, Distinct, Skewed, Uniform, Identical: smallest ratio of neighbours at batch 32, and from 16 on."""
    table = _gather_bmm(rows)
    if 32 not in table.index:
        raise NotMeasured("Gather-BMM at batch 32 was not measured in all four workloads")
    falls = {size: smallest_step(row[::-1]) for size, *row in table.itertuples()}
    clear = {size: min(row[0] / row[1], row[2] / row[3]) for size, *row in table.itertuples()}  # not Skewed >= Uniform
    text = f"{numbers([at(table[name], 32) for name in ORDER], 4)} us at bs32 ({', '.join(ORDER)})"
    quantities = {"step_at_32": falls[32], "strict_step_at_32": clear[32]}
    quantities |= {"smallest_step": min(falls.values()), "smallest_strict_step": min(clear.values())}
    return Finding(quantities, text)


@claim("C17")
def beats_bmm_with_one_model(rows: Rows) -> Finding:
    """BMM over SGMV, Identical: range over batch sizes."""
    advantage = _advantage(rows, "BMM", "Identical")
    text = f"{advantage.min():.2f} - {advantage.max():.2f} (smallest at bs {advantage.idxmin():g})"
    return Finding({"smallest": float(advantage.min())}, text)


@claim("C18")
def gather_bmm_moves_more(rows: Rows) -> Finding:
    """Elements that Gather-BMM moves beyond SGMV, over s h_i h_o: counted for every workload at batch 64.

    SGMV reads each of the n weights once. Gather reads them once, writes one copy per row, and BMM reads those copies.
    """
    h_in, h_out, size = 16, 11008, 64
    copies, extra = size * h_in * h_out, []
    for workload in PAPER_WORKLOADS:
        weights = popularity(workload).number_of_adapters(size) * h_in * h_out
        gather_bmm, sgmv = weights + copies + copies, weights
        extra.append((gather_bmm - sgmv) / copies)
    text = f"{extra[0]:g} s h_i h_o elements in every workload"
    return Finding({"smallest": min(extra), "largest": max(extra)}, text, SIMULATED)


def _ranks(frame: pd.DataFrame) -> list[int]:
    return sorted(int(rank) for rank in frame["rank"].dropna().unique())


def _frame(rows: Rows) -> tuple[pd.DataFrame, list[int]]:
    frame = pick(rows.figure("9"), system="SGMV", metric="latency")
    ranks = _ranks(frame)
    if not {8, 64} <= set(ranks):
        raise NotMeasured(f"ranks 8 and 64 are needed, measured: {', '.join(map(str, ranks))}")
    return frame, ranks


def _by_rank(rows: Rows, size: int) -> tuple[dict[int, float], str]:
    frame, ranks = _frame(rows)
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
    frame, ranks = _frame(rows)
    curves = [curve(frame, "latency", workload=workload, rank=rank) for workload in SHARED for rank in ranks]
    growth = [ratio(latency, 64, 1) for latency in curves]
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
