"""The rule by which times of the host's clock count on a machine with a GPU.

Host-clock rows of a figure count where each has a calibration of launches (`experiments.measure.disturbance`), and
these are steady: their 90 % quantile is at most `STEADY` times their 10 % quantile. Otherwise they stay in the file,
and rows of another clock answer instead. A figure that only the host's clock can time, as of whole steps, has no
choice. Nor has a CPU.
"""

import pandas as pd

from experiments.measure.records import TIMERS

GRAPH, HOST = TIMERS[0], TIMERS[-1]
STEADY = 1.10
"""Claims call curves flat within 10 % (C08, C14, C15, C24): a clock that wanders by more decides them by chance. That
is the spread that the audit called noise: between undisturbed repeats on an H200, 72 % of Figure 8's points differed by
more from the host, 4 % in graphs."""
NOT_STEADY = "host clock: not steady here"


def unsteady(rows: pd.DataFrame) -> pd.Series:
    """Mark rows of the host's clock beside a GPU whose figure has no steady launches at that scale."""
    host = rows[rows["timer"].eq(HOST) & rows["kind"].ne("simulated") & rows["hardware"].ne("cpu")]
    launches = pd.to_numeric(host["calib_launch_us"])
    groups = launches.groupby([host[name] for name in ("hardware", "figure", "scale")], dropna=False)
    spread = groups.transform(lambda us: us.quantile(0.9) / us.quantile(0.1) if us.notna().all() else float("inf"))
    return (spread > STEADY).reindex(rows.index, fill_value=False)


def gives_way(rows: pd.DataFrame) -> pd.Series:
    """Mark `unsteady` rows whose metric another clock has timed in the same figure; simulations have none."""
    noisy = unsteady(rows)
    alone = noisy | rows["kind"].eq("simulated")
    return noisy & ~alone.groupby([rows["figure"], rows["metric"]]).transform("all")


def clock_note(rows: pd.DataFrame) -> str:
    """Return the sentence for a figure of ``rows`` some of which give way; else an empty one."""
    return NOT_STEADY if gives_way(rows).any() else ""
