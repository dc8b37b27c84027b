"""Ratios asked of the engine beyond the paper's claims, from rows of one machine.

Bounds are of a data-centre GPU; a CPU has none. A ratio's span is over repeats, each of which is another draw of
windows.
"""

from contextlib import suppress
from dataclasses import dataclass
from math import inf

import pandas as pd

from experiments.claims.bounds import Interval
from experiments.claims.fig11 import CONTINUOUS, MIXED, PUNICA, Serving
from experiments.claims.finding import spans
from experiments.claims.rows import MET, NO_BOUND, NotMeasured, Rows, markdown
from experiments.workload.popularity import PAPER_WORKLOADS

PEFT, STATIC_LORA, IDENTICAL = "hf_peft_mixed", "punica_static", "Identical"
PAIRS = {
    "Distinct / backbone-only Identical": ((PUNICA, "Distinct"), (CONTINUOUS, IDENTICAL), 0.88),
    "Identical / backbone-only Identical": ((PUNICA, IDENTICAL), (CONTINUOUS, IDENTICAL), 0.95),
    "Distinct / Identical": ((PUNICA, "Distinct"), (PUNICA, IDENTICAL), 0.91),
}
SPEEDUP = dict(zip(MIXED, (12.0, 12.0, 10.0), strict=True))
"""Punica over the best baseline: the paper has 12.1, 11.8, 10.3 on 7B and more on 13B."""
SPLIT = {
    "Punica / PEFT's mixed batches": (PUNICA, PEFT),
    "of that all but continuous batching, Punica in static batches / PEFT's": (STATIC_LORA, PEFT),
    "of that continuous batching, Punica / it in static batches": (PUNICA, STATIC_LORA),
}
"""Parts of the gain over PEFT, which has the same matrix product; each part is asked to gain."""
SERVED, ADAPTERS = "11", "ext many adapters"
"""Figures that have the rows."""
MANY, FEW, TIGHT = "1000 adapters", "32 adapters", "16 adapters, 8 slots"
STREAM = 0.97, 1.03
"""Windows over a stream served to its end."""
Ratios = dict[str, tuple[float, float, float]]
"""Name -> value, least and most."""


@dataclass(frozen=True)
class Asked:
    """A ratio: value, span over repeats (None: one repeat), ends of its bound, and whether it is met (None: no bound
    here).
    """

    what: str
    value: float
    span: Interval | None
    least: float
    most: float
    met: bool | None


def asked(rows: pd.DataFrame) -> list[Asked]:
    """Compute the ratios that ``rows`` of one machine give."""
    chosen, on_gpu = Rows(rows[rows["figure"].isin((SERVED, ADAPTERS))]), not (rows["hardware"] == "cpu").any()
    found, *repeats = [_ratios(one) for one in (chosen, *chosen.alone)]
    values, *others = [{name: value for name, (value, *_) in one.items()} for one in (found, *repeats)]
    known = spans(values, others)
    return [
        Asked(name, value, known.get(name), least, most, least <= value <= most if on_gpu else None)
        for name, (value, least, most) in found.items()
    ]


def asked_table(found: list[Asked]) -> list[str]:
    """Build lines of Markdown."""
    lines = []
    for one in found:
        ends = f"at least {one.least:g}" if one.most == inf else f"at most {one.most:g}"
        bound = ends if inf in (one.most, -one.least) else f"{one.least:g} to {one.most:g}"
        span = NO_BOUND if one.span is None else f"{one.span[0]:.3g} to {one.span[1]:.3g}"
        lines.append([one.what, f"{one.value:.3g}", span, NO_BOUND if one.met is None else bound, MET[one.met]])
    return markdown(("asked of an H200", "measured", "runs", "bound", "met"), lines)


def _ratios(rows: Rows) -> Ratios:
    found: Ratios = {}
    for role in ("7B", "13B"):
        with suppress(NotMeasured):
            found |= _serving(Serving(rows, role))
    for group in (_streams, _many):
        with suppress(NotMeasured):
            found |= group(rows)
    return found


def _serving(cell: Serving) -> Ratios:
    """Figure 11: Punica against our own backbone-only engine, itself, and the best baseline."""
    found: Ratios = {}
    for name, (upper, lower, least) in PAIRS.items():
        with suppress(NotMeasured):
            found[f"{cell.model}: Punica {name}"] = cell.ratio(upper, lower), least, inf
    for workload, least in SPEEDUP.items():
        with suppress(NotMeasured):  # Punica or some baseline is missing on this workload
            found[f"{cell.model}: Punica / best baseline, {workload}"] = cell.over_best_baseline(workload), least, inf
    for workload in filter(lambda workload: cell.has(PEFT, workload), PAPER_WORKLOADS):
        for name, (over, under) in SPLIT.items():
            with suppress(NotMeasured):
                ratio = cell.ratio((over, workload), (under, workload))
                found[f"{cell.model}, {workload}: {name}"] = ratio, 1.0, inf
    return found


def _streams(rows: Rows) -> Ratios:
    """Streams served to their end: predicted by windows over measured."""
    frame = rows.figure(SERVED)
    lines = frame[frame["metric"] == "prediction_over_stream"]
    name = "{0.model}, {0.panel}: {0.system}, {0.workload}, predicted / measured"
    names = [name.format(row) for row in lines.itertuples()]
    return {name: (float(value), *STREAM) for name, value in zip(names, lines["value"], strict=True)}


def _many(rows: Rows) -> Ratios:
    """`ext_many_adapters`: many adapters against few, and requests that wait for a load against others."""
    frame, found = rows.figure(ADAPTERS), {}
    for (model, workload), cells in frame[frame["system"] == PUNICA].groupby(["model", "workload"], sort=False):
        value = dict(zip(zip(cells["panel"], cells["metric"], strict=True), cells["value"], strict=True))
        where, many, few = f"{model}, {workload}", (MANY, "throughput"), (FEW, "throughput")
        if {many, few} <= value.keys():
            found[f"{where}: throughput, {MANY} / {FEW}"] = float(value[many] / value[few]), 0.9, inf
        if (tight := value.get((TIGHT, "loading_over_resident"))) is not None:
            found[f"{where}: first token, loading / resident, {TIGHT}"] = float(tight), -inf, 1.3
    return found
