"""Where LoRA servers win in the model of `ext_disaggregated`, and InfiniLoRA's claim for them, from simulated rows.

The claim is an average over mixtures of experts, so it is held against the geometric mean of those that there are, with
the adapters, rank and link that it was made with. Their latency is not known to us: it is held against each.
"""

import numpy as np
import pandas as pd

from experiments.claims.judge import DIFFERS, SIMULATED_TOO
from experiments.cluster.adapted_shapes import MIXTURES
from experiments.cluster.link_map import CLAIMED, COUPLED, MADE_WITH, ROUTED, ratios

DISAGGREGATED_FIGURE = "ext disaggregated"
SOURCE = "InfiniLoRA (arXiv 2604.07173; here by its abstract, and summaries of others)"
BASELINES = {COUPLED: "the same GPUs, each with LoRA", ROUTED: "these with requests routed to their adapter"}


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
        most = f"{cells.max():.2f} times" if np.isfinite(cells.max()) else "where they meet no target"
        said.append(f"than {BASELINES[name]} in {(cells > 1).sum()} of {len(cells)} cells of the map (at most {most})")
    return f"Simulated: LoRA servers of `{model}` serve more {'; '.join(said)}."


def _judged(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Judge the claim over the latencies of its link."""
    means = {name: _means(table) for name, table in tables.items()}
    if means[COUPLED].empty:
        return []
    span = {name: f"{mean.max():.2f} to {mean.min():.2f}" for name, mean in means.items()}
    link = f"{MADE_WITH['bandwidth']} GB/s, {means[COUPLED].index[0]} to {means[COUPLED].index[-1]} us one way"
    met = means[COUPLED] >= CLAIMED
    verdict = SIMULATED_TOO if met.all() else DIFFERS
    if met.any() and not met.all():
        verdict = f"{SIMULATED_TOO} up to {met.index[met][-1]} us, {DIFFERS} beyond"
    text = (
        f"Simulated: {SOURCE} claims {CLAIMED} times the request rate, on average over mixtures of experts: LoRA "
        f"servers have {span[COUPLED]} times that of {BASELINES[COUPLED]} ({MADE_WITH['adapters']} adapters of rank "
        f"{MADE_WITH['rank']}, {link}; mean of the mixtures here): {verdict}."
    )
    if ROUTED in span:
        text += f" Of {BASELINES[ROUTED]} they have {span[ROUTED]} times the rate."
    return [text]


def _means(table: pd.DataFrame) -> pd.Series:
    """Average the mixtures at what the claim was made with, by latency."""
    chosen = table[table["model"].isin(list(MIXTURES))].dropna()
    for column, value in MADE_WITH.items():
        chosen = chosen[chosen[column] == value]
    return np.exp(np.log(chosen["ratio"]).groupby(chosen["latency"]).mean())
