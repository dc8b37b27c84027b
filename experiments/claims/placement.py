"""What newer papers claim of other placements, up to twice the throughput and half the GPUs, judged from the rows of
`ext_placement`: one sentence for each rule, all its numbers computed.
"""

import pandas as pd

FIGURE, OURS, LENGTH = "ext placement", "punica", "simulated_seconds"
UNCLAIMED = {
    "released": "nobody claims more of it",
    "adapter_affinity": "adapter loads, which it is made to save, are not simulated: it is not judged",
}
"""Rules that are not held against what newer papers claim, and why."""
WHOLE_HOUR = 3600
TWICE, HALF = 2.0, 0.5
"""Throughput over Punica's, and GPU time over Punica's, that were claimed."""


def placement_verdicts(rows: pd.DataFrame) -> list[str]:
    """A sentence per rule other than Punica's; none without rows of `ext_placement`."""
    mine = rows[(rows["figure"] == FIGURE) & rows["metric"].isin(("capacity", "gpu_seconds"))]
    if mine.empty or OURS not in set(mine["system"]):
        return []
    cells = mine.drop_duplicates(["panel", "system", "metric"], keep="last")
    table = cells.pivot_table(index=["system", "panel"], columns="metric", values="value", sort=False)
    rules = [rule for rule in dict.fromkeys(cells["system"]) if rule != OURS]
    over = _length(rows)
    return [_sentence(rule, table.loc[rule] / table.loc[OURS], over) for rule in rules]


def _length(rows: pd.DataFrame) -> str:
    """How much of the hour was simulated."""
    known = rows.loc[(rows["figure"] == FIGURE) & (rows["metric"] == LENGTH), "value"]
    if known.empty:
        return "the part of the hour that was simulated"
    seconds = float(known.iloc[-1])
    return "the whole hour" if seconds >= WHOLE_HOUR else f"the first {seconds:g} s of the hour"


def _sentence(rule: str, ratios: pd.DataFrame, over: str) -> str:
    """``ratios``: capacity and GPU seconds over Punica's, by panel; ``over`` how much of the hour."""
    fastest, fewest = ratios["capacity"].idxmax(), ratios["gpu_seconds"].idxmin()
    speed, gpus = float(ratios["capacity"].max()), float(ratios["gpu_seconds"].min())
    most = float(ratios["gpu_seconds"].max())
    twice, half = (
        "" if rule in UNCLAIMED else ", as claimed" if met else f", and not the {claimed:g} that are claimed"
        for met, claimed in ((speed >= TWICE, TWICE), (gpus <= HALF, HALF))
    )
    end = f"; {UNCLAIMED[rule]}" if rule in UNCLAIMED else ""
    return (
        f"`{rule}` serves at best {speed:.2f} times Punica's throughput where all GPUs are full ({fastest}){twice}, "
        f"and over {over} takes at least {gpus:.2f} times its GPU time ({fewest}; at most {most:.2f}){half}{end}."
    )
