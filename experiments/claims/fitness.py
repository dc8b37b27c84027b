"""Whether the machine was quiet enough: which points other work disturbed, and how many verdicts noise leaves open.

A verdict is decided when no bound lies inside an interval. One that rests on disturbed points and on points of a single
run is not: it has no interval that could tell what the disturbance did.
"""

from collections.abc import Sequence

import pandas as pd

from experiments.claims.judge import DECIDED, JUDGED, NOISE, Verdict
from experiments.claims.table import ONCE

FIT = 0.8
"""Share of the verdicts on measurements that must be decided."""
IDLE = 0.05
"""Share of the points that is disturbed, at most, on a machine that does nothing else."""
_POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "timer", "repeat"]


def disturbed_points(rows: pd.DataFrame) -> tuple[int, dict[str, int]]:
    """How many points say whether they were disturbed, and how many were, by figure."""
    known = rows[rows["disturbed"].notna()]
    if known.empty:
        return 0, {}
    points = known.assign(disturbed=known["disturbed"].astype(bool)).groupby(_POINT, dropna=False)["disturbed"].any()
    hit = points[points].reset_index()["figure"].astype(str).value_counts(sort=False)
    return len(points), {str(figure): int(count) for figure, count in hit.items()}


def disturbance(rows: pd.DataFrame) -> str:
    """One line about the points that other work disturbed."""
    known, disturbed = disturbed_points(rows)
    if not known:
        return "Disturbed points: not known, these rows do not say."
    total = sum(disturbed.values())
    where = "".join(f"; figure {figure}: {count}" for figure, count in disturbed.items())
    text = f"Disturbed points: {total} of {known} ({100 * total / known:.1f} %){where}."
    busy = f" This machine was not idle: one that is has at most {100 * IDLE:.0f} %."
    return text + (busy if total > IDLE * known else "")


def certainty(verdicts: Sequence[Verdict]) -> str:
    """One line about intervals, and whether the machine is fit to decide; empty when nothing was measured."""
    measured = [verdict for verdict in verdicts if verdict.verdict in JUDGED and verdict.kind == "measured"]
    if not measured:
        return ""
    once = sum(verdict.once for verdict in measured)
    decided = sum(verdict.verdict in DECIDED and not (verdict.disturbed and verdict.once) for verdict in measured)
    text = f"Verdicts on measurements: {decided} of {len(measured)} decided"
    if once:
        text += f"; {once} rest on points of a single run ({ONCE}), so they have no interval and cannot be {NOISE}"
    if decided < FIT * len(measured):
        text += f". Below {100 * FIT:.0f} %: this machine, as it was, is unfit; leave it idle and measure again"
    return f"{text}."
