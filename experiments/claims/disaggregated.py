"""Cells in which LoRA servers win in the map of `ext_disaggregated`, and InfiniLoRA's claim, from simulated rows.

The claim is an average over mixtures of experts, so it is held against the geometric mean of those that there are, with
the popularity and link that it was made with. By summaries of the paper Mixtral's adapters had rank 64 and Qwen3's 32,
whose 6.18 GB are those of rank 64 in 16 bits. The latency is not known to us. It is held against each.
"""

import numpy as np
import pandas as pd

from experiments.claims.judge import DIFFERS, SIMULATED_TOO
from experiments.cluster.adapted_shapes import MIXTURES
from experiments.cluster.link_map import CLAIMED, COUPLED, MADE_WITH, ROUTED, ratios

DISAGGREGATED_FIGURE = "ext disaggregated"
SOURCE = "InfiniLoRA (arXiv 2604.07173; here by its abstract, and summaries of others)"
RANKS = (32, 64)
BASELINES = {COUPLED: "the same GPUs, each with LoRA", ROUTED: "the same with requests routed by adapter"}


def disaggregated_verdicts(rows: pd.DataFrame) -> list[str]:
    """Count where LoRA servers serve more, for each model, and judge the claim, in a sentence each; none without rows
    of the baseline.
    """
    rows = rows[rows["figure"] == DISAGGREGATED_FIGURE]
    tables = {name: ratios(rows, name) for name in BASELINES if (rows["system"] == name).any()}
    if COUPLED not in tables:
        return []
    models = dict.fromkeys(tables[COUPLED]["model"])
    return [*(_counted(model, tables) for model in models), *_judged(tables)]


def _counted(model: str, tables: dict[str, pd.DataFrame]) -> str:
    """Count the cells of the map in which LoRA servers serve more."""
    said = []
    for name, table in tables.items():
        cells = table.loc[table["model"] == model, "ratio"].dropna()
        most = f"at most {cells.max():.2f} times" if np.isfinite(cells.max()) else "alone within the targets in some"
        said.append(f"than {BASELINES[name]}, in {(cells > 1).sum()} of {len(cells)} cells of the map ({most})")
    return f"Simulated: LoRA servers of `{model}` serve more {'; '.join(said)}."


def _judged(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Judge the claim over the ranks and latencies that it may have been made with."""
    means = {name: _means(table) for name, table in tables.items()}
    mean = means[COUPLED]
    if mean.empty:
        return []
    met = mean[mean >= CLAIMED].index.to_frame(index=False)
    verdict = SIMULATED_TOO if len(met) == len(mean) else DIFFERS
    if 0 < len(met) < len(mean):
        longest = met.groupby("rank")["latency"].max().items()
        where = ", ".join(f"at rank {rank:g} up to {latency} us" for rank, latency in longest)
        verdict = f"{SIMULATED_TOO} {where}, {DIFFERS} elsewhere"
    latencies = mean.index.get_level_values("latency")
    text = (
        f"Simulated: {SOURCE} claims {CLAIMED} times the request rate, on average over mixtures of experts: LoRA "
        f"servers have {_span(mean)} times that of {BASELINES[COUPLED]} ({MADE_WITH['adapters']} adapters, "
        f"{MADE_WITH['bandwidth']} GB/s, {min(latencies)} to {max(latencies)} us one way; geometric mean of "
        f"{', '.join(MIXTURES)}): {verdict}."
    )
    if not means.get(ROUTED, mean[:0]).empty:
        text += f" That of {BASELINES[ROUTED]}: {_span(means[ROUTED])} times."
    return [text]


def _span(mean: pd.Series) -> str:
    """Word the largest and least of each rank."""
    by_rank = mean.groupby("rank").agg(["max", "min"])
    return ", ".join(f"{most:.2f} to {least:.2f} (rank {rank:g})" for rank, (most, least) in by_rank.iterrows())


def _means(table: pd.DataFrame) -> pd.Series:
    """Average the mixtures at what the claim was made with, by rank and latency; only where all are there."""
    chosen = table[table["model"].isin(list(MIXTURES)) & table["rank"].isin(RANKS)].dropna()
    for column, value in MADE_WITH.items():
        chosen = chosen[chosen[column] == value]
    each = np.log(chosen["ratio"]).groupby([chosen["rank"], chosen["latency"]])
    return np.exp(each.mean()[each.size() == len(MIXTURES)])
