"""results/<hardware>/operator_tables.md: the operator tables of one machine, written from its rows."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from experiments import ext_expert_tables as experts
from experiments.benches.operator_lines import ADDED, HOST, Line, lines
from experiments.claims.rows import markdown
from experiments.plots.operator_tables import show
from experiments.report.machines import OPERATOR_TABLES, Machine
from experiments.report.reproducing import GENERATED
from experiments.report.results import measured_on
from punica.measure.records import RowsError

COMMAND = "`python -m experiments.ext_operator_tables table=all`."
PREFIXES = {"latency": "", "host_latency": HOST, "added_latency": ADDED}
"""Metric of a row -> what its column's name begins with."""
EXPERT_TABLES = "expert tables"
TITLES = {
    "A": "A: one decode operator, 4096 -> r -> 11008, r = 16",
    "ranks": "A, ranks",
    "B": "B: packed projections of one Llama-2-7B layer, batch 32, r = 16",
    "C": "C: prefill, 4096 -> r -> 4096",
    "shapes": "Shapes of other models, to which no rule was fitted",
    "step": "The paper's step: one prompt and 31 decode rows of 31 other adapters",
    "gemm": "What LoRA adds behind the base projection",
    "invariant": "Price of batch invariance",
    "determinism": "Price of determinism",
    "padding": "Mixed ranks: at their true ranks, and padded",
    "fp8": "FP8: adapters in e4m3 beside the same ones in 16 bits",
}
"""Table -> its heading, in the order of the page."""
LEGEND = """\
Microseconds per operator, medians. Weights come from HBM: one CUDA graph over more than 256 MB of inputs in turns.
Every result was checked against float32 references in the same run.

| column | what |
|---|---|
| `floor` | bytes that must move, over 4.25 TB/s |
| `two-kernel stream` | two kernels that only read those bytes, interpolated from the anchors' measurement on an H200 |
| `punica` | the flat operator; both kernels start early, behind one another, as in a chain of LoRA operators |
| `wrapper` | what a layer calls, at its defaults: 64 slots, the table of true ranks |
| `wrapper, normal launch` | the same with `LoRAConfig(pdl=False)` |
| `normal shrink` | as `wrapper`, only expand starts early: the like-for-like column |
| `no overlap` | the flat operator with plain launches |
| `rank table` | as `punica`, true ranks read from a table |
| `eager` | host time per call; uneven on the GPUs' hosts (`docs/limitations.md`) |
| `best existing`, `us` | the fastest public kernel of that row on an H200 (`paper_results/anchors*.csv`) |
| `ratio` | theirs over ours |
| `fp8` | A and B in FP8 with a scale for each channel, activations as they are |
| `fp8 w8a8`; `fp8 w8a8, x too` | x given as FP8 with its scales; x quantised in the call |
"""
EXPERTS = """\
`python -m experiments.ext_expert_tables`. `sum`: w13 and w2. `delta`: outputs are overwritten, as the fastest public
kernel does. `alignment`: grouping of rows by adapter and expert, once a layer; empty where nothing is launched.
"""


def write_operator_tables(machine: Machine, target: Path) -> list[Path]:
    """Write the tables that ``machine`` has rows of to the file ``target``; return it, or nothing without them."""
    ours, of_experts = machine.points(OPERATOR_TABLES), machine.points(EXPERT_TABLES)
    if ours.empty:
        return []
    parts = [GENERATED, "# The LoRA operator against public kernels", "", COMMAND, measured_on(ours), "", LEGEND]
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
        head = f"{EXPERTS}\n{measured_on(of_experts)}"
        parts += ["## Experts: LoRA of w13 and of w2, rank 16", "", head, "", *_as_markdown(experts.show(batches)), ""]
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

