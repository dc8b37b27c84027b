"""Figure 12: 70B on tensor-parallel ranks (C39, C40), and its own bounds at every number of ranks.

C38 to C40 are about the largest number of ranks. The table takes the median of repeats; the ratio that bytes allow is
arithmetic (`experiments.systems.rank_bytes`).
"""

import pandas as pd

from experiments.claims.fig11 import CONTINUOUS, PUNICA, Serving
from experiments.claims.finding import Finding, claim
from experiments.claims.rows import MET, Rows, markdown

BETTER, ALLOWED, ELSEWHERE = 0.85, 0.9, 15.0
"""Least ratios: Distinct over backbone-only Identical, under the better layout of adapters; the same of plain layers
over what bytes allow; and Punica over backbone-only, Distinct.
"""
PLAIN, SHARDED = "punica", "punica_sharded"
RATIO, OVER_BYTES, OWN, SPEEDUP = (
    "distinct_over_backbone_identical", "over_bytes_ratio", "distinct_over_own_identical", "speedup_over_best_baseline",
)  # fmt: skip


@claim("C39")
def baseline_collapses_70b(rows: Rows) -> Finding:
    """70B, continuous batching of one adapter: its Distinct over its Identical, and Punica over it on Distinct."""
    cell = Serving(rows, "70B")
    left = cell.collapse(CONTINUOUS)
    speedup = cell.ratio((PUNICA, "Distinct"), (CONTINUOUS, "Distinct"))
    text = f"Distinct / Identical {left:.3f}, Punica {speedup:.1f}x on Distinct ({cell.measured_model})"
    return Finding({"distinct_over_identical": left, "speedup": speedup}, text, models=(cell.measured_model,))


@claim("C40")
def alike_70b(rows: Rows) -> Finding:
    """70B: Punica over continuous batching of one adapter, Identical."""
    cell = Serving(rows, "70B")
    share = cell.ratio((PUNICA, "Identical"), (CONTINUOUS, "Identical"))
    return Finding({"ratio": share}, f"{share:.3f} ({cell.measured_model})", models=(cell.measured_model,))


def ranks_table(rows: pd.DataFrame) -> list[str]:
    """Build lines of Markdown, four for each panel of Figure 12 with ratios (a model and a number of ranks)."""
    chosen = rows[(rows["figure"] == "12") & rows["panel"].str.endswith(" ratios")]
    chosen = chosen[chosen["metric"].isin((RATIO, OVER_BYTES, OWN, SPEEDUP))]
    if chosen.empty:
        return []
    lines = []
    for (panel, model), part in chosen.groupby(["panel", "model"], sort=False):
        where = f"{model}, {str(panel).removesuffix(' ratios').rpartition(', ')[2]}"
        values = part.groupby(["system", "metric"])["value"]
        lines += _panel(where, {(str(system), str(metric)): one.median() for (system, metric), one in values})
    return markdown(("model, ranks", "ratio", "plain", "sharded", "asked", "met"), lines)


def _panel(where: str, values: dict[tuple[str, str], float]) -> list[list[str]]:
    def pair(metric: str) -> list[float]:
        return [values.get((system, metric), float("nan")) for system in (PLAIN, SHARDED)]

    better = max((value for value in pair(RATIO) if value == value), default=float("nan"))
    fastest = max((value for value in pair(SPEEDUP) if value == value), default=float("nan"))
    asked = (
        ("Distinct / backbone-only Identical", RATIO, f"the better >= {BETTER:g}", better, BETTER),
        ("the same / what bytes allow", OVER_BYTES, f"plain >= {ALLOWED:g}", pair(OVER_BYTES)[0], ALLOWED),
        ("Distinct / backbone-only Distinct", SPEEDUP, f"the better >= {ELSEWHERE:g}", fastest, ELSEWHERE),
        ("Distinct / own Identical", OWN, "-", None, 0.0),
    )
    return [
        [where, name, *("-" if one != one else f"{one:.3g}" for one in pair(metric)), bound, _met(value, least)]
        for name, metric, bound, value, least in asked
    ]


def _met(value: float | None, least: float) -> str:
    if value is None or value != value:  # nothing was asked, or nothing measured
        return MET[None]
    return MET[bool(value >= least)]
