"""Extension: the LoRA operator against the best public kernels, table by table. Needs a GPU.

    python -m experiments.ext_operator_tables                             # table A
    python -m experiments.ext_operator_tables 'figure.tables=[A,ranks]'   # others, or all of them: [all]

    A          one decode operator, 4096 -> r -> 11008, four popularities.
    ranks      ranks 8 to 128, ranks 20 and 24, mixed ranks at their true ranks, and padded to the widest.
    B          the packed projections of one Llama-2-7B layer, batch 32.
    C          prefill, 4096 -> r -> 4096, 512 to 8192 tokens.
    shapes     projections of other models and ragged prefills, to which no rule was fitted.
    drawn      40 operators of newer models, drawn by a seed.
    step       the paper's step: one prompt and 31 decodes, and its parts.
    invariant  cost of the same bits in every batch, on the batches of A and C.

`paper_results/anchors.csv` and `anchors_shapes.csv` hold the public kernels' times on an H200, beside which
`results/h200/operator_tables.md` shows ours. Same shapes and method here: one CUDA graph, weights from HBM, median of
replays, the columns of a line (`benches.operator_sets`) one after the other. A time is kept only after its result
was checked against float32 references, after one call and after a whole replay. ``torch_loop`` and ``torch_gbmm`` on
table A's batches of 64 say how alike the two machines and clocks are. By the host's clock `punica` and `wrapper` are
timed in A and B, per eager call. Cost: a minute or two per table and pass on a GPU, most of it compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, cast

from experiments.benches.operator_figure import points_of_gpu
from experiments.benches.operator_lines import LOOP, TABLES, Operator, best_existing, lines
from experiments.harness import Config, Experiment, FigureConf, Overlay, Point, Reading, main

if TYPE_CHECKING:
    import pandas as pd

CALLS_PER_SET, MOST_CALLS, REPLAYS = 25, 200, 15
"""Calls of a graph (at least one per set of inputs), and replays whose median counts."""
HOST_CLOCK, EAGER = "host_clock", ("punica", "wrapper")
OPERATOR = ("punica", "wrapper", "wrapper, normal launch", "normal shrink", "no overlap")
COLUMNS: dict[str, tuple[str, ...]] = dict.fromkeys("AB", (*OPERATOR, "rank table")) | {
    "invariant": ("punica", "wrapper", "batch invariant", "wrapper, batch invariant"),
    "drawn": ("punica", "wrapper", LOOP),
}
"""Table -> its columns, where they are not `OPERATOR`."""


class TablesConf(FigureConf):
    tables: list[Literal[*TABLES, "all"]]  # type: ignore[valid-type]


class OperatorTables(Experiment):
    """Latency of every column, line by line (the panels)."""

    name, figure, order, conf = "ext_operator_tables", "operator tables", 900, TablesConf
    defaults, host_clock_too = {"scale": "paper"}, True
    overlay = Overlay(
        "One decode operator, 4096 to 11008 at rank 16: wrapper as a layer calls it, normal shrink with its expand "
        "alone early", "latency", line="system", panel="workload",
    )  # fmt: skip

    def points(self, cfg: Config) -> list[Point]:
        named = cast(TablesConf, cfg.figure).tables
        tables = TABLES if "all" in named else dict.fromkeys(named)
        return points_of_gpu(self, cfg, (point for table in tables for point in self._points(cfg, table)))

    def _points(self, cfg: Config, table: str) -> Iterator[Point]:
        for line in lines(table):
            op, columns = line.operator, COLUMNS.get(table, OPERATOR)
            if table == "A" and op.tokens == 64 and line.workload in ("Distinct", "Identical"):
                columns += (LOOP, "torch_gbmm")
            if cfg.timer.name == HOST_CLOCK:
                columns = EAGER if table in ("A", "B") else ()
            about: dict[str, Any] = {"batch_size": op.tokens, "rank": op.rank, "workload": line.workload}
            settings = {"table": table, "operator": asdict(op), "calls": [CALLS_PER_SET, MOST_CALLS, REPLAYS]}
            for column in (name for name in columns if name in cfg.system.names):
                yield Point(f"{table}: {line.label}", column, settings=settings, **about)

    def shown(self, frame: pd.DataFrame) -> pd.DataFrame:
        best = {f"A: {line.label}": kernel[1] for line in lines("A") if (kernel := best_existing(line))}
        import pandas as pd

        mine = frame[frame["panel"].isin(best) & frame["system"].isin(["wrapper", "normal shrink"])]
        layer = mine[mine["system"] == "wrapper"]
        return pd.concat([mine, layer.assign(system="fastest public kernel", value=layer["panel"].map(best))])

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches import operator_sets

        table, operator = point.settings["table"], Operator(**point.settings["operator"])
        sets = self.kept((table, operator), lambda: operator_sets.OperatorSets(operator))
        call = operator_sets.COLUMNS[point.system](sets)
        if cfg.timer.name == HOST_CLOCK:
            return [Reading("host_latency", operator_sets.eager_us(sets, point.system, call), "us", "median")]
        calls = min(MOST_CALLS, CALLS_PER_SET * sets.count)
        us = operator_sets.checked_us(sets, point.system, call, calls, REPLAYS)
        return [Reading("latency", us, "us", "median")]


EXPERIMENT = main(OperatorTables, __name__)
