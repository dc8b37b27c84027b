"""The claim of section 6: a fused norm takes a small part of the time of its operations (C45)."""

import pandas as pd

from experiments.claims.finding import Finding, claim
from experiments.claims.rows import NotTestable, Rows, at, curve

FIGURE = "text 6"
BATCH = 32
"""Rows of a full decode step; the paper names no shape."""


def norms(rows: Rows) -> tuple[pd.Series, pd.Series]:
    """Microseconds of the unfused and of the fused norm by number of rows."""
    frame = rows.figure(FIGURE)
    return curve(frame, "norm_latency", system="unfused"), curve(frame, "norm_latency", system="fused")


@claim("C45")
def fusing_the_norm(rows: Rows) -> Finding:
    """Operations one by one, over one kernel, at the rows of a full decode step.

    A CPU cannot tell: torch norms there by the same operations, one after the other.
    """
    unfused, fused = (at(line, BATCH) for line in norms(rows))
    text = f"{unfused:.3g} us / {fused:.3g} us = {unfused / fused:.1f} for {BATCH} rows"
    if "cpu" in set(rows.figure(FIGURE)["hardware"]):
        raise NotTestable(f"torch norms on a CPU by the same operations, none of them fused: {text}")
    return Finding({"unfused_over_fused": unfused / fused}, text)
