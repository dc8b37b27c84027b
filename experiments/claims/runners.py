"""Figure 13's claims on the hour of runners on Ray, beside the simulation of the same hour.

The cluster is smaller than the paper's and may serve another model, so these are no verdicts. The bounds are those of
the claims' shape. C50 needs the throughput of one GPU alone at the same lengths, which is not measured.
"""

from pathlib import Path

import pandas as pd

from experiments.claims.bounds import read_bounds
from experiments.claims.fig13 import Hour
from experiments.claims.finding import MEASURED, SIMULATED
from experiments.claims.rows import MET, NotMeasured, Rows, markdown
from experiments.cluster.hour_numbers import CONSOLIDATED, EXCESS, FOLLOWS, WOKEN
from experiments.cluster.served import RAY, SHARE, SIMULATED_RAY

ASKED = {
    ("C46", "share"): SHARE, ("C47", "correlation"): FOLLOWS, ("C48", "largest_excess"): EXCESS,
    ("C48", "correlation"): CONSOLIDATED, ("C49", "median"): WOKEN,
}  # fmt: skip
"""(claim, quantity of its bound) -> number of an hour."""


def runners_table(rows: pd.DataFrame, folder: str | Path) -> list[str]:
    """Build lines of Markdown, one per rule and bound; none without a whole hour on Ray.

    ``folder``: path of ``paper_results``, which has the bounds.
    """
    try:
        frame = Rows(rows[rows["figure"] == "13"]).figure("13")
    except NotMeasured:
        return []
    lines, bounds = [], read_bounds(folder)
    for (system, model), part in frame[frame["panel"] == RAY].groupby(["system", "model"], sort=False):
        other = frame[(frame["panel"] == SIMULATED_RAY) & (frame["system"] == system) & (frame["model"] == model)]
        measured, simulated = Hour(part, MEASURED), Hour(other, SIMULATED)
        for (claim, quantity), name in ASKED.items() if measured.is_whole else ():
            value, beside = measured.one(name), f"{simulated.one(name):.3g}" if simulated.is_whole else "-"
            bound = next(one for one in bounds[claim]["shape"] if one.quantity == quantity)
            what = f"{model}, rule {system}", name.replace("_", " ")
            lines.append([claim, *what, f"{value:.3g}", beside, str(bound), MET[bound.holds(value)]])
    return markdown(("claim", "runners", "number", "measured", "simulated", "bound", "met"), lines) if lines else []
