"""Claims of Figure 9: the LoRA operator at ranks 8 to 64 (C19 to C21)."""

import pandas as pd

from experiments.claims.fig08 import SHARED
from experiments.claims.finding import Finding, claim
from experiments.claims.rows import NotMeasured, Rows, at, curve, numbers, pick, ratio, smallest_step


def _frame(rows: Rows) -> tuple[pd.DataFrame, list[int]]:
    frame = pick(rows.figure("9"), system="SGMV", metric="latency")
    ranks = sorted(int(rank) for rank in frame["rank"].dropna().unique())
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
