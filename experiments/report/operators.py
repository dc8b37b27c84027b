"""results/<hardware>/operator_tables.md: microseconds, ratios to the best public kernel, and sums of each table."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import ext_expert_tables as experts
from experiments.benches.operator_lines import HOST, LOOP, TABLES, Line, anchors_of, best_existing
from experiments.claims.rows import markdown
from experiments.measure.records import RowsError
from experiments.report.machines import OPERATOR_TABLES, Machine
from experiments.report.reproducing import GENERATED
from experiments.report.results import measured_on

COMMAND = "`python -m experiments.ext_operator_tables 'figure.tables=[all]'`."
PREFIXES = {"latency": "", "host_latency": HOST}
"""Metric of a row -> what its column's name begins with."""
EXPERT_TABLES = "expert tables"
LEGEND = "Microseconds per operator, medians. [Operators](../../docs/operators.md#columns) explains the columns."
EXPERTS = "`python -m experiments.ext_expert_tables`."
RATIOS = ("punica", "wrapper", "normal shrink")
"""Columns that are compared with the best public kernel."""
SUMS = {"delta": ", delta", "accumulating": ""}
"""Sum of both products of experts -> end of its columns."""


def write_operator_tables(machine: Machine, target: Path) -> list[Path]:
    """Write the tables that ``machine`` has rows of to the file ``target``; return it, or nothing without them."""
    ours, of_experts = machine.points(OPERATOR_TABLES), machine.points(EXPERT_TABLES)
    if ours.empty:
        return []
    parts = [GENERATED, "# The LoRA operator against public kernels", "", COMMAND, measured_on(ours), "", LEGEND, ""]
    for table, (title, lines) in TABLES.items():
        found = lines()
        for line in found:
            _fill(line, ours, f"{table}: {line.label}")
        if any(line.us for line in found):
            parts += [f"## {title}", "", *tabulated(table, found), ""]
    if not of_experts.empty:
        batches = experts.lines()
        for batch in batches:
            _fill(batch, of_experts, batch.label)
        head = f"{EXPERTS} {measured_on(of_experts)}"
        parts += ["## Experts: LoRA of w13 and of w2, rank 16", "", head, "", *_of_experts(batches), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return [target]


def _fill(line: Line | experts.Line, rows: pd.DataFrame, panel: str) -> None:
    """Give `line` the microseconds that `panel` has in `rows`, by column."""
    mine = rows[rows["panel"].eq(panel)]
    columns = mine["metric"].map(PREFIXES) + mine["system"]
    if columns.isna().any() or columns.duplicated().any():
        raise RowsError(f"{panel}: rows of an unknown metric, or two of one column; delete those of other settings")
    line.us |= dict(zip(columns, mine["value"], strict=True))


def tabulated(table: str, found: list[Line]) -> list[str]:
    """One table as markdown: a line for each operator, then what it sums up; cells may be empty."""
    times, parts = _times(found), [line.part for line in found]
    names, best = zip(*(best_existing(line) or ("", np.nan) for line in found), strict=True)
    compared = [name for name in RATIOS if name in times] if any(names) else []
    ratios = pd.DataFrame({name: np.array(best) / times[name] for name in compared}, index=times.index)
    cells = {
        "row": [line.label for line in found],
        "floor": [f"{line.operator.floor_us():.2f}" for line in found],
        "two-kernel stream": [f"{line.operator.stream_us():.1f}" for line in found],
        **_cells(times), **({"best existing": names, "us": _digits(best, 1)} if compared else {}),
        **_cells(ratios, "ratio, "),
    }  # fmt: skip
    beside = _torch_beside_anchors(found) if table == "A" else ()
    return _table(cells, [*_summed(ratios, "best existing / {}", parts), *beside])


def _of_experts(found: list[experts.Line]) -> list[str]:
    times, best = _times(found), np.array([line.best_existing() for line in found])
    sums = pd.DataFrame({name: [line.total(ending) for line in found] for name, ending in SUMS.items()}, dtype=float)
    ratios = pd.DataFrame({name: best / sums[name] for name in sums})
    cells = {"row": [line.label for line in found], **_cells(times), **_cells(sums, "sum, ")}
    cells |= {"best existing": _digits(best, 1), **_cells(ratios, "ratio, ")}
    return _table(cells, _summed(ratios, "best existing / ours, {}", [""] * len(found)))


def _times(found: list[Line] | list[experts.Line]) -> pd.DataFrame:
    columns = list(dict.fromkeys(name for line in found for name in line.us))
    return pd.DataFrame([line.us for line in found], columns=columns)


def _digits(values: Iterable[float], digits: int = 2) -> list[str]:
    return ["" if np.isnan(value) else f"{value:.{digits}f}" for value in values]


def _cells(frame: pd.DataFrame, prefix: str = "") -> dict[str, list[str]]:
    return {f"{prefix}{name}": _digits(values) for name, values in frame.items()}


def _table(cells: Mapping[str, Iterable[str]], said: Iterable[str]) -> list[str]:
    return [*markdown([*cells], zip(*cells.values(), strict=True)), "", *(f"* {line}" for line in said)]


def _summed(ratios: pd.DataFrame, what: str, parts: list[str]) -> Iterator[str]:
    """Mean, least and largest of each column, part by part; nothing of a part without any."""
    for part in dict.fromkeys(parts):
        for name, values in ratios[np.array(parts) == part].items():
            if len(known := values.dropna()):
                mean, title = np.exp(np.log(known).mean()), what.format(name) + (f", {part}" if part else "")
                ends = f"lowest {known.min():.2f}, highest {known.max():.2f}, rows {len(known)}"
                yield f"{title}: geometric mean {mean:.2f}, {ends}"


def _torch_beside_anchors(found: list[Line]) -> Iterator[str]:
    for name in (LOOP, "torch_gbmm"):
        for line in found:
            here, there = line.us.get(name), anchors_of(line).get(name)
            if here and there:
                yield f"{name} {line.label}: {here:.1f} us here, {there:.1f} in the anchors ({here / there:.3f})"
