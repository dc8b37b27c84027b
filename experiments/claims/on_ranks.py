"""Figure 12's own bounds, at every number of ranks that was measured: what the claims C38 to C40, which are about the
largest, do not say.

Of repeats the median counts. The ratio that bytes allow is arithmetic (`experiments.systems.rank_bytes`).
"""

import pandas as pd

BETTER, ALLOWED, ELSEWHERE = 0.85, 0.9, 15.0
"""Least that Distinct, under the better layout of adapters, is of backbone-only Identical; that plain layers reach of
what bytes allow; and that Punica is of backbone-only where all requests differ.
"""
PLAIN, SHARDED = "punica", "punica_sharded"
RATIO, OVER_BYTES, OWN, SPEEDUP = (
    "distinct_over_backbone_identical", "over_bytes_ratio", "distinct_over_own_identical", "speedup_over_best_baseline",
)  # fmt: skip
HEAD = ("model, ranks", "ratio", "plain", "sharded", "asked", "met")


def ranks_table(rows: pd.DataFrame) -> list[str]:
    """Lines of Markdown, four for each panel of Figure 12 with ratios (a model and a number of ranks); none without.
    """
    chosen = rows[(rows["figure"] == "12") & rows["panel"].str.endswith(" ratios")]
    chosen = chosen[chosen["metric"].isin((RATIO, OVER_BYTES, OWN, SPEEDUP))]
    if chosen.empty:
        return []
    lines = [_row(HEAD), "| --- " * len(HEAD) + "|"]
    for (panel, model), part in chosen.groupby(["panel", "model"], sort=False):
        where = f"{model}, {panel.removesuffix(' ratios').rpartition(', ')[2]}"
        lines += _panel(where, part.groupby(["system", "metric"])["value"].median().to_dict())
    return lines


def _panel(where: str, values: dict[tuple[str, str], float]) -> list[str]:
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
        _row([where, name, *(_number(one) for one in pair(metric)), bound, _met(value, least)])
        for name, metric, bound, value, least in asked
    ]


def _met(value: float | None, least: float) -> str:
    if value is None or value != value:  # nothing was asked, or nothing measured
        return "-"
    return "yes" if value >= least else "**no**"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.3g}"


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
