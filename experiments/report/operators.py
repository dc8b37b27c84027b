"""results/<hardware>/operator_tables.md: the operator tables of one machine, written from its rows."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from experiments import ext_expert_tables as experts
from experiments.benches.operator_lines import HOST, Line, lines
from experiments.claims.rows import markdown
from experiments.measure.records import RowsError
from experiments.plots.operator_tables import show, show_experts
from experiments.report.machines import OPERATOR_TABLES, Machine
from experiments.report.reproducing import GENERATED
from experiments.report.results import measured_on

COMMAND = "`python -m experiments.ext_operator_tables 'figure.tables=[all]'`."
PREFIXES = {"latency": "", "host_latency": HOST}
"""Metric of a row -> what its column's name begins with."""
EXPERT_TABLES = "expert tables"
TITLES = {
    "A": "A: one decode operator, 4096 -> r -> 11008, r = 16",
    "ranks": "A, ranks",
    "B": "B: packed projections of one Llama-2-7B layer, batch 32, r = 16",
    "C": "C: prefill, 4096 -> r -> 4096",
    "shapes": "Shapes of other models, to which no rule was fitted",
    "step": "The paper's step: one prompt and 31 decode rows of 31 other adapters",
    "invariant": "Price of batch invariance",
    "fp8": "FP8: adapters in e4m3 beside the same ones in 16 bits",
}
"""Table -> its heading, in the order of the page."""
LEGEND = "Microseconds per operator, medians. [Operators](../../docs/operators.md#columns) explains the columns."
EXPERTS = "`python -m experiments.ext_expert_tables`."


def write_operator_tables(machine: Machine, target: Path) -> list[Path]:
    """Write the tables that ``machine`` has rows of to the file ``target``; return it, or nothing without them."""
    ours, of_experts = machine.points(OPERATOR_TABLES), machine.points(EXPERT_TABLES)
    if ours.empty:
        return []
    parts = [GENERATED, "# The LoRA operator against public kernels", "", COMMAND, measured_on(ours), "", LEGEND, ""]
    for table, title in TITLES.items():
        found = lines(table)
        for line in found:
            _fill(line, ours, f"{table}: {line.label}")
        if any(line.us for line in found):
            parts += [f"## {title}", "", *_as_markdown(show(table, found)), ""]
    if not of_experts.empty:
        batches = experts.lines()
        for batch in batches:
            _fill(batch, of_experts, batch.label)
        head = f"{EXPERTS} {measured_on(of_experts)}"
        parts += ["## Experts: LoRA of w13 and of w2, rank 16", "", head, "", *_as_markdown(show_experts(batches)), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return [target]


def _fill(line: Line | experts.Line, rows: pd.DataFrame, panel: str) -> None:
    """Give `line` the microseconds that `panel` has in `rows`, by column."""
    mine = rows[rows["panel"].eq(panel)]
    columns = mine["metric"].map(PREFIXES) + mine["system"]
    if columns.isna().any() or columns.duplicated().any():
        raise RowsError(f"{panel}: rows of an unknown metric, or two of one column; delete those of other settings")
    line.us |= dict(zip(columns, mine["value"], strict=True))


def _as_markdown(text: str) -> Iterator[str]:
    """Turn printed lines into a table, and the sentences behind it into a list."""
    head, *rest = text.splitlines()
    yield from markdown(head.split(" | "), [line.split(" | ") for line in rest if " | " in line])
    yield ""
    yield from (f"* {line}" for line in rest if " | " not in line)

