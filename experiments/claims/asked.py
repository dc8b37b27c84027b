"""Ratios asked of the engine beyond the paper's claims, from rows of one machine.

Bounds are of a data-centre GPU; a CPU has none. A ratio's interval is its span over repeats, each of which is another
draw of windows.
"""

from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from experiments.claims.bounds import Interval
from experiments.claims.fig11 import CONTINUOUS, MIXED, PUNICA, Serving
from experiments.claims.finding import spans
from experiments.claims.rows import MET, NO_BOUND, NotMeasured, Rows, markdown
from punica.workload.popularity import PAPER_WORKLOADS

AT_LEAST, AT_MOST, WITHIN = "at least", "at most", "within"
SPEEDUP = dict(zip(MIXED, (12.0, 12.0, 10.0), strict=True))
"""Punica over the best baseline: the paper has 12.1, 11.8, 10.3 on 7B and more on 13B."""
PEFT_MIXED, STATIC_LORA = "hf_peft_mixed", "punica_static"
SPLIT = {
    "Punica / PEFT's mixed batches": (PUNICA, PEFT_MIXED),
    "of that all but continuous batching, Punica in static batches / PEFT's": (STATIC_LORA, PEFT_MIXED),
    "of that continuous batching, Punica / it in static batches": (PUNICA, STATIC_LORA),
}
"""Parts of the gain over PEFT, which has the same matrix product; each part is asked to gain."""
SERVED, ADAPTERS = "11", "ext many adapters"
"""Figures that have the rows."""
MANY, FEW = "1000 adapters", "32 adapters"
TIGHT = "16 adapters, 8 slots"
STREAM = 0.03
"""Largest relative difference of windows from a stream served to its end."""
Bound = tuple[str, float]
Quantities = dict[str, tuple[float, Bound]]


@dataclass(frozen=True)
class Asked:
    """A ratio: value, span over repeats (None: one repeat), bound, and whether it is met (None: no bound here)."""

    what: str
    value: float
    span: Interval | None
    bound: Bound
    met: bool | None


def asked(rows: pd.DataFrame) -> list[Asked]:
    """Compute the ratios that ``rows`` of one machine give."""
    chosen, on_gpu = Rows(rows[rows["figure"].isin((SERVED, ADAPTERS))]), not (rows["hardware"] == "cpu").any()
    found = _all(chosen)
    values = [{name: value for name, (value, _) in _all(one).items()} for one in (chosen, *chosen.alone())]
    known = spans(values[0], values[1:])
    return [
        Asked(name, value, known.get(name), bound, meets(value, bound) if on_gpu else None)
        for name, (value, bound) in found.items()
    ]


def meets(value: float, bound: Bound) -> bool:
    """Check ``value`` against ``bound``."""
    kind, limit = bound
    if kind == WITHIN:
        return abs(value - 1) <= limit
    return value >= limit if kind == AT_LEAST else value <= limit


def asked_table(found: list[Asked]) -> list[str]:
    """Build lines of Markdown."""
    lines = []
    for one in found:
        kind, limit = one.bound
        bound = f"1 {WITHIN} {100 * limit:g} %" if kind == WITHIN else f"{kind} {limit:g}"
        span = NO_BOUND if one.span is None else f"{one.span[0]:.3g} to {one.span[1]:.3g}"
        lines.append([one.what, f"{one.value:.3g}", span, NO_BOUND if one.met is None else bound, MET[one.met]])
    return markdown(("asked of an H200", "measured", "runs", "bound", "met"), lines)


def _all(rows: Rows) -> Quantities:
    found: Quantities = {}
    for group in (_serving, _streams, _many):
        with suppress(NotMeasured):
            found |= group(rows)
    return found


def _serving(rows: Rows) -> Quantities:
    """Figure 11: Punica against our own backbone-only engine, itself, and the best baseline."""
    found: Quantities = {}
    for role in ("7B", "13B"):
        try:
            cell = Serving(rows, role)
        except NotMeasured:
            continue
        pairs = {
            "Distinct / backbone-only Identical": ((PUNICA, "Distinct"), (CONTINUOUS, "Identical"), 0.88),
            "Identical / backbone-only Identical": ((PUNICA, "Identical"), (CONTINUOUS, "Identical"), 0.95),
            "Distinct / Identical": ((PUNICA, "Distinct"), (PUNICA, "Identical"), 0.91),
        }
        for name, (upper, lower, limit) in pairs.items():
            with suppress(NotMeasured):
                found[f"{cell.model}: Punica {name}"] = cell.ratio(upper, lower), (AT_LEAST, limit)
        for workload, limit in SPEEDUP.items():
            with suppress(NotMeasured):  # Punica or some baseline is missing on this workload
                speedup = cell.over_best_baseline(workload)
                found[f"{cell.model}: Punica / best baseline, {workload}"] = speedup, (AT_LEAST, limit)
        for workload in PAPER_WORKLOADS:
            for name, (over, under) in SPLIT.items():
                if cell.has(PEFT_MIXED, workload):
                    with suppress(NotMeasured):
                        ratio = cell.ratio((over, workload), (under, workload))
                        found[f"{cell.model}, {workload}: {name}"] = ratio, (AT_LEAST, 1.0)
    return found


def _streams(rows: Rows) -> Quantities:
    """Streams served to their end: predicted by windows over measured."""
    frame = rows.figure(SERVED)
    lines = frame[frame["metric"] == "prediction_over_stream"]
    name = "{0.model}, {0.panel}: {0.system}, {0.workload}, predicted / measured"
    names = [name.format(row) for row in lines.itertuples()]
    return {name: (float(value), (WITHIN, STREAM)) for name, value in zip(names, lines["value"], strict=True)}


def _many(rows: Rows) -> Quantities:
    """`ext_many_adapters`: many adapters against few, and requests that wait for a load against others."""
    frame = rows.figure(ADAPTERS)
    frame = frame[frame["system"] == PUNICA]
    found: Quantities = {}
    for (model, workload), cells in frame.groupby(["model", "workload"], sort=False):
        value = cells.drop_duplicates(["panel", "metric"], keep="last").set_index(["panel", "metric"])["value"]
        where = f"{model}, {workload}"
        if {(MANY, "throughput"), (FEW, "throughput")} <= set(value.index):
            ratio = float(value[MANY, "throughput"] / value[FEW, "throughput"])
            found[f"{where}: throughput, {MANY} / {FEW}"] = ratio, (AT_LEAST, 0.9)
        if (TIGHT, "loading_over_resident") in value.index:
            ratio = float(value[TIGHT, "loading_over_resident"])
            found[f"{where}: first token, loading / resident, {TIGHT}"] = ratio, (AT_MOST, 1.3)
    return found
