"""The verdict table for people. A verdict is decided when no bound is inside an interval, and it does not rest on
disturbed points of a single run.
"""

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from experiments.claims.judge import ARITHMETIC, DECIDED, JUDGED, VERDICTS, Verdict
from experiments.claims.rows import MEASURED, SIMULATED, markdown

COLUMNS = ("claim", "statement", "paper", "ours", "tested", "verdict", "why it differs", "figure")
DISTURBED, ONCE, OTHER_CLOCK = "\u2020", "\u2021", "\u00a7"
"""Marks of verdicts on disturbed points, on points of a single run (by its date), by the clock that does not decide."""
IDLE = 0.05
"""Largest share of disturbed points on an idle machine."""
_POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "timer", "repeat"]


def total(verdicts: Sequence[Verdict]) -> str:
    """Count the verdicts that occur, e.g. ``9 reproduced, 3 shape holds, ... (52 claims)``."""
    found = Counter(one.verdict for one in verdicts)
    said = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
    return f"{said} ({len(verdicts)} claims)"


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Build lines of Markdown."""
    lines = []
    for one in verdicts:
        value = one.our_value + (" *(simulated)*" if one.kind == SIMULATED and one.verdict != ARITHMETIC else "")
        interval = f"interval {one.intervals_said}" if one.interval else ""
        how = f"`{one.command}`" if one.command else ""
        ours = "; ".join(filter(None, (value, interval, one.remark, one.reason, how)))
        tests = (("paper", one.relation_tested), ("shape", one.shape_tested))
        tested = "; ".join(f"{name}: {bounds}" for name, bounds in tests if bounds)
        about = [one.id, one.statement, one.paper_value, ours, tested, f"**{marked(one)}**", one.why or "-"]
        lines.append([*about, one.figure])
    return markdown(COLUMNS, lines)


def marked(verdict: Verdict) -> str:
    """Return the verdict with its marks."""
    marks = {DISTURBED: verdict.disturbed, ONCE: verdict.once, OTHER_CLOCK: verdict.clock_missing}
    return verdict.verdict + "".join(mark for mark, holds in marks.items() if holds)


def disturbed_points(rows: pd.DataFrame) -> tuple[int, dict[str, int]]:
    """Count points that tell whether they were disturbed, and those that were, by figure."""
    known = rows[rows["disturbed"].notna()]
    if known.empty:
        return 0, {}
    points = known["disturbed"].astype(bool).groupby([known[name] for name in _POINT], dropna=False).any()
    hit = points[points].groupby("figure").size()
    return len(points), {str(figure): int(count) for figure, count in hit.items()}


def disturbance(rows: pd.DataFrame) -> str:
    """Describe the points that other work disturbed, in a line."""
    known, disturbed = disturbed_points(rows)
    if not known:
        return "Disturbed points: not known, these rows do not say."
    hit = sum(disturbed.values())
    where = "".join(f"; figure {figure}: {count}" for figure, count in disturbed.items())
    text = f"Disturbed points: {hit} of {known} ({100 * hit / known:.1f} %){where}."
    busy = f" This machine was not idle: one that is has at most {100 * IDLE:.0f} %."
    return text + (busy if hit > IDLE * known else "")


def certainty(verdicts: Sequence[Verdict]) -> str:
    """Describe how many verdicts on measurements are decided, in a line; empty when nothing was measured."""
    measured = [one for one in verdicts if one.verdict in JUDGED and one.kind == MEASURED]
    if not measured:
        return ""
    once = sum(verdict.once for verdict in measured)
    decided = sum(verdict.verdict in DECIDED and not (verdict.disturbed and verdict.once) for verdict in measured)
    text = f"Verdicts on measurements: {decided} of {len(measured)} decided"
    if once:
        text += f"; {once} rest on points of a single run ({ONCE}): their interval is too narrow or missing"
    return f"{text}."
