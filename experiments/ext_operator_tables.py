"""The LoRA operator against the best public kernels, table by table, on the GPU at hand.

    python -m experiments.ext_operator_tables table=A              # or table=[A,ranks], or table=all

===========  ========================================================================
A            one decode operator, 4096 -> r -> 11008, four popularities.
ranks        ranks 8 to 128, ranks 20 and 24, mixed ranks.
B            the packed projections of one Llama-2-7B layer, batch 32.
C            prefill, 4096 -> r -> 4096, 512 to 8192 tokens.
padding      mixed ranks at their true ranks, and padded to the widest.
shapes       projections of other models and ragged prefills, to which no rule was fitted.
step         the paper's step: one prompt and 31 decodes, and its parts
gemm         added latency of the operator after the base projection.
determinism  partials (ours), atomic additions.
invariant    cost of the same bits in every batch, on the batches of A and C.
fp8          adapters in FP8 beside the same ones in 16 bits: decode of ranks 16 and 64, and the batches of C
===========  ========================================================================

`paper_results/anchors.csv` and `anchors_shapes.csv` hold the public kernels' times on an H200 (best existing = the
fastest of all of them, row by row). Same shapes and method here: one CUDA graph, weights from HBM, median of replays,
then of three turns through a line's columns (`gemm`: one), and a time is kept only after its result was checked against
float32 references, after one call and after a whole replay. ``torch_loop`` and ``torch_gbmm`` are timed again on table
A's batches of 64: their ratio to the anchors' says how alike the two machines and clocks are.

Columns (`benches.operator_columns`): ``punica`` both kernels start early, behind one another (a layer's LoRA operators
in a row); ``wrapper`` what a layer calls: `PunicaWrapperGPU` at its defaults, 64 slots, the table of true ranks;
``wrapper, normal launch`` the same with ``pdl=False``; ``normal shrink`` only expand starts early; ``no overlap`` plain
launches; ``rank table`` as ``punica``, the ranks read from a table. ``eager`` is host time per call. In ``gemm``,
``base`` is the projection alone and ``added by`` the difference between both in one graph and it.

Cost of table=all: minutes on a GPU, where kernels are compiled on first use (in parallel, once for all tables).
"""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import asdict
from statistics import median
from typing import Any

from experiments.benches import tables
from experiments.benches.operator_lines import ADDED, HOST, TABLES, Line, lines
from experiments.harness.command import with_options
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import ConfigError, Settings
from experiments.measure.records import Row, write_measured
from experiments.plots.operator_tables import show

CALLS_PER_SET, MOST_CALLS, REPLAYS, TURNS = 25, 200, 15, 3
"""Calls of a graph (at least one per set of inputs), replays whose median counts, and turns in which all columns of a
line are timed one after the other, whose median counts again: a clock that drifts meets all of them alike.
"""


def measure(line: Line, table: str) -> list[str]:
    """Fill in the line's microseconds; return the failed checks, whose columns are not timed."""
    from experiments.benches import operator_columns, operator_gemm
    from experiments.benches.operator_sets import seconds_per_eager_call

    sets, failed = operator_columns.sets_of(line.operator, table), []
    chosen = operator_columns.columns(sets, table)
    protocol = min(MOST_CALLS, CALLS_PER_SET * sets.count), REPLAYS

    if table == "gemm":
        try:
            line.us |= operator_gemm.microseconds_behind(sets, chosen, *protocol)
        except CheckFailed as error:
            failed.append(f"{line.label}: {error}")
        return failed
    if table == "A" and line.operator.tokens == 64 and line.workload in ("Distinct", "Identical"):
        chosen |= operator_columns.torch_calls(sets)
    turns: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(TURNS):
        for name in list(turns):
            try:
                turns[name].append(operator_columns.checked_us(sets, name, chosen[name], *protocol))
            except CheckFailed as error:
                failed.append(f"{line.label}: {error}")
                del turns[name]
    line.us |= {name: median(timed) for name, timed in turns.items()}
    for name in ("punica", "wrapper"):
        if table in ("A", "B") and name in line.us:
            line.us[f"{HOST}{name}"] = 1e6 * seconds_per_eager_call(chosen[name], sets.count)
    return failed


def rows_of(table: str, found: list[Line]) -> list[Row]:
    """Return the measurements as rows."""
    about, out = {**tables.columns_of_all("operator tables", __file__), "model": ""}, []
    protocol = [CALLS_PER_SET, MOST_CALLS, REPLAYS, TURNS]
    for line in found:
        operator = {"batch_size": line.operator.tokens, "rank": line.operator.rank, "workload": line.workload}
        content = table, line.label, asdict(line.operator), protocol, about["device"], about["torch"]
        cell: dict[str, Any] = {**operator, **about, "config_hash": tables.digest(*content)}
        out += [Row(value=us, panel=f"{table}: {line.label}", **cell | _measured(name)) for name, us in line.us.items()]
    return out


def _measured(column: str) -> dict[str, str]:
    """Return metric, clock and system of a column."""
    if column.startswith(HOST):
        return {"metric": "host_latency", "timer": "host_clock", "system": column.removeprefix(HOST)}
    metric = "added_latency" if column.startswith(ADDED) else "latency"
    return {"metric": metric, "timer": "cuda_graph", "system": column.removeprefix(ADDED)}


class Options(Settings):
    """The command line."""

    table: Any = "A"  # a name, several in brackets, or all
    out: str | None = None  # folder that receives the rows; null: outputs/<hardware>/rows


def chosen_tables(table: Any) -> list[str]:
    """Return the tables that `table=` names; `ConfigError` for an unknown name."""
    names = [table] if isinstance(table, str) else list(table)
    for name in names:
        if name not in (*TABLES, "all"):
            raise ConfigError(f"table={name} is unknown: choose table={' or table='.join(TABLES)}, several of them in "
                              "brackets, table=[A,ranks], or table=all")  # fmt: skip
    return list(TABLES) if "all" in names else list(dict.fromkeys(names))


def tabulate(options: Options) -> None:
    """Measure, print and write the chosen tables; exit code 1 when a result was wrong."""
    chosen = {table: lines(table) for table in chosen_tables(options.table)}
    tables.needs_gpu("the operator tables")
    from experiments.benches.operator_columns import call_once

    started, failed = time.monotonic(), []
    jobs = list(dict.fromkeys((line.operator, table) for table, found in chosen.items() for line in found))
    random.Random(0).shuffle(jobs)  # neighbours in a table need the same kernels
    tables.compile_in_parallel(call_once, jobs, min(multiprocessing.cpu_count(), 16))
    folder = tables.rows_folder(options.out)
    for table, found in chosen.items():
        print(f"[{time.monotonic() - started:5.0f} s] table {table}", flush=True)
        for line in found:
            failed += measure(line, table)
            times = ", ".join(f"{name} {us:.2f}" for name, us in line.us.items())
            print(f"[{time.monotonic() - started:5.0f} s] {line.label}: {times}", flush=True)
        print(show(table, found), flush=True)
        write_measured(folder / f"ext_operator_tables_{table}.csv", rows_of(table, found))
    tables.end(failed)


if __name__ == "__main__":
    with_options("ext_operator_tables", __doc__ or "", "ext_operator_tables", Options, tabulate)
