"""The LoRA operator against the best public kernels, table by table, on the GPU at hand.

    python -m experiments.ext_operator_tables table=A

===========  ========================================================================
A            one decode operator, 4096 -> r -> 11008, four popularities
ranks        ranks 8 to 128, mixed ranks, rank 20
B            the packed projections of one Llama-2-7B layer, batch 32
C            prefill, 4096 -> r -> 4096, 512 to 8192 tokens
padding      mixed ranks at their true ranks, and padded to the widest
determinism  planes (ours), atomic additions, batch invariance
===========  ========================================================================

`paper_results/anchors.csv` holds the public kernels' times on an H200 (best existing = the fastest of all of them, row
by row). Same shapes and method here: one CUDA graph, weights from HBM, median of replays, and a row is printed only
after its result was checked against float32 references. ``torch_loop`` and ``torch_gbmm`` are timed again on table A's
batches of 64: their ratio to the anchors' says how alike the two machines and clocks are.

Columns: ``punica`` both kernels start early, behind one another (a layer's LoRA operators in a row); ``normal shrink``
only expand does; ``no overlap`` plain launches; ``rank table`` as ``punica``, the ranks read from the layer's table, as
a server does. ``eager`` is host time per call.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.benches import operator_shapes as shapes
from experiments.benches.operator_shapes import PROJECTIONS, UP, Operator, decode
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError
from experiments.harness.source import fingerprint
from punica.measure import environment
from punica.measure.records import Row, write_rows
from punica.workload.popularity import PAPER_WORKLOADS

if TYPE_CHECKING:
    import torch

    from experiments.benches.operator_sets import OperatorSets

ANCHORS = Path(__file__).resolve().parents[1] / "paper_results" / "anchors.csv"
TABLES = ("A", "ranks", "B", "C", "padding", "determinism")
TOLERANCE = 1e-3
Call = Callable[[int], None]


@dataclass
class Line:
    """One line of a table: an operator, and microseconds by column."""

    label: str
    operator: Operator
    workload: str
    anchor: dict[str, Any] = field(default_factory=dict)
    us: dict[str, float] = field(default_factory=dict)


def lines(table: str) -> list[Line]:
    """The operators of one table, with the columns of `anchors.csv` that name the same row there."""
    out: list[Line] = []

    def add(label: str, workload: str, operator: Operator, group: str = "-", case: str = "") -> None:
        named = {"group": group, "case": case, "pattern": workload.lower()}
        out.append(Line(label, operator, workload, {**named, "T": str(operator.tokens), "r": str(operator.rank)}))

    if table in ("A", "determinism"):
        for tokens, pattern in shapes.DECODE_GRID:
            if tokens > 1 or pattern == "Distinct":
                add(f"T={tokens} {pattern}", pattern, decode(UP, 16, pattern, tokens), "A", "op")
    if table == "ranks":
        for rank, pattern in itertools.product((8, 16, 20, 32, 64, 128), ("Distinct", "Identical")):
            add(f"T=64 {pattern} r={rank}", pattern, decode(UP, rank, pattern, 64), "A", "op")
    if table in ("ranks", "padding"):
        wide = decode(UP, 64, "Distinct", 64)
        for rank in (8, 16, 32, 64):
            add(f"T=64 Distinct all {rank} in 64", "Distinct", replace(wide, ranks=(rank,) * 64))
        add("T=64 Distinct 8,16,32,64 in 64", "Distinct", replace(wide, ranks=(8, 16, 32, 64) * 16))
        add("T=64 Distinct padded to 64", "Distinct", wide)
    if table == "B":
        for pattern, (name, projection) in itertools.product(PAPER_WORKLOADS, PROJECTIONS.items()):
            add(f"{pattern} {name}", pattern, decode(projection, 16, pattern, 32), "B", name)
    if table in ("C", "determinism"):
        for tokens, adapters, rank in shapes.PREFILL_GRID:
            operator = shapes.prefill(PROJECTIONS["o"], rank, adapters, tokens)
            add(f"T={tokens} {adapters} adapters r={rank}", f"{adapters}ad", operator, "C", "prefill")
    return out


def anchors_of(line: Line, rows: list[dict[str, str]]) -> dict[str, float]:
    """Graph time of every public implementation of this line's operator."""
    same = [row for row in rows if row["graph_us"] and all(row[name] == value for name, value in line.anchor.items())]
    return {row["impl"]: float(row["graph_us"]) for row in same}


def best_existing(times: dict[str, float]) -> tuple[str, float] | None:
    """The fastest public implementation (prototypes are not public)."""
    public = {name: us for name, us in times.items() if not name.startswith(("proto", "floor"))}
    return min(public.items(), key=lambda item: item[1]) if public else None


def calls(sets: OperatorSets, table: str) -> dict[str, Call]:
    """Column -> the call on set i."""
    import torch

    from experiments.benches.operator_pairs import pair_plan, tuned
    from punica.ops.triton_ops.launch import supports_pdl
    from punica.ops.triton_ops.lora_linear import lora_linear

    op, pdl = sets.operator, supports_pdl(sets.x.device)
    *tensors, count = sets.meta_args

    def ours(ranks: torch.Tensor | None = sets.lora_ranks, **options: Any) -> Call:
        chosen = {"num_active_loras": count, "lora_ranks": ranks, **options}
        return lambda i: lora_linear(sets.y[i], sets.x[i], sets.a[i], sets.b[i], *tensors, 1.0, **chosen)

    shrink, expand = tuned(op)
    normal = pair_plan(sets, shrink, expand, pdl=pdl, pdl_shrink=False)
    if table == "determinism":
        from punica.ops.triton_ops.baseline_atomics import prepare_lora_atomics

        # what atomics are for: K split further without planes to sum; the better of ours and a finer split counts
        finer = {**shrink, "split_k": min(16, 4 * shrink["split_k"]), "block_k": max(128, shrink["block_k"] // 4)}
        columns = {"punica": ours(), "no early shrink": normal, "batch invariant": ours(batch_invariant=True)}
        first = sets.y[0], sets.x[0], sets.a[0], sets.b[0]
        for name, config in (("atomics", shrink), ("atomics, finer split", finer)):
            run = prepare_lora_atomics(*first, sets.meta_args, config, expand, overlap=pdl)
            columns[name] = lambda i, run=run: run(sets.y[i], sets.x[i], sets.a[i], sets.b[i])
        return columns
    columns = {"punica": ours(), "normal shrink": normal, "no overlap": ours(pdl=False)}
    if not op.ranks and table in ("A", "B"):
        table_of_ranks = torch.full((len(op.widths), len(op.sizes)), op.rank, dtype=torch.int32, device=sets.x.device)
        columns["rank table"] = ours(table_of_ranks)
    return columns


def compile_first(found: list[Line], table: str) -> None:
    """Compile what the table needs, in parallel: alone, one kernel takes about a second."""
    import multiprocessing

    from experiments.benches.operator_pairs import Job, compile_all, tuned

    jobs: list[Job] = []
    for op in [line.operator for line in found]:
        pair = tuned(op)
        jobs += [(op, *pair, True, None), (op, *pair, True, False), (op, *pair, False, None)]
        if table == "determinism":
            jobs.append((op, *tuned(op, batch_invariant=True), True, None))
    compile_all(jobs, multiprocessing.cpu_count())


def torch_calls(sets: OperatorSets) -> dict[str, Call]:
    """The anchors' two torch baselines: one addmm pair per adapter; gather and two bmm."""
    import torch

    sizes, slots = sets.operator.sizes, sets.slots.to(sets.x.device)

    def loop(i: int) -> None:
        start = 0
        for slot, size in enumerate(sizes):
            rows = slice(start, start + size)
            sets.y[i][rows].addmm_(sets.x[i][rows] @ sets.a[i][0][slot].T, sets.b[i][0][slot].T)
            start += size

    def gather_bmm(i: int) -> None:
        a, b = sets.a[i][0][slots], sets.b[i][0][slots]
        sets.y[i].add_(torch.bmm(torch.bmm(sets.x[i][:, None], a.transpose(1, 2)), b.transpose(1, 2))[:, 0])

    return {"torch_loop": loop, "torch_gbmm": gather_bmm}


def measure(line: Line, table: str) -> None:
    """Fill in the line's microseconds; ValueError when a result is wrong."""
    from experiments.benches.operator_sets import OperatorSets, seconds_per_eager_call

    sets = OperatorSets(line.operator)
    chosen = calls(sets, table)
    if table == "A" and line.operator.tokens == 64 and line.workload in ("Distinct", "Identical"):
        chosen |= torch_calls(sets)
    for name, call in chosen.items():
        limit = TOLERANCE * (4 if name.startswith("torch") else 1)  # fp16 between the two products
        error = sets.relative_error(call)
        if error > limit:
            raise ValueError(f"{line.label}, {name}: relative error {error:.1e} is above {limit}: not timed")
        line.us[name], error = sets.time_graph(call, calls=min(200, 25 * sets.count), replays=15)
        if error > 4 * TOLERANCE:
            raise ValueError(f"{line.label}, {name}: relative error {error:.1e} after a graph replay")
    if table in ("A", "B"):
        line.us["eager"] = 1e6 * seconds_per_eager_call(chosen["punica"], sets.count)


def show(table: str, found: list[Line], anchors: list[dict[str, str]]) -> str:
    """The table as text, with the ratios to the best public kernel."""
    columns = list(dict.fromkeys(itertools.chain.from_iterable(line.us for line in found)))
    head = ["row", "floor", "two-kernel stream", *columns, "best existing", "us", "ratio", "ratio, normal shrink"]
    text = [" | ".join(head)]
    ratios: dict[str, list[float]] = {"punica": [], "normal shrink": []}
    for line in found:
        cells = [line.label, f"{shapes.floor_us(line.operator):.2f}", f"{shapes.stream_us(line.operator):.1f}"]
        cells += [f"{line.us[name]:.2f}" if name in line.us else "" for name in columns]
        best = best_existing(anchors_of(line, anchors))
        if best is not None:
            cells += [best[0], f"{best[1]:.1f}"]
            for name, all_of in ratios.items():
                if name in line.us:
                    all_of.append(best[1] / line.us[name])
                    cells.append(f"{all_of[-1]:.2f}")
        text.append(" | ".join(cells))
    for name, all_of in ratios.items():
        if all_of:
            mean, slowest = statistics.geometric_mean(all_of), min(all_of)
            text.append(f"best existing / {name}: geometric mean {mean:.2f}, lowest {slowest:.2f}, rows {len(all_of)}")
    for name, line in itertools.product(("torch_loop", "torch_gbmm"), found):
        here, there = line.us.get(name), anchors_of(line, anchors).get(name)
        if here and there:
            text.append(f"{name} {line.label}: {here:.1f} us here, {there:.1f} in the anchors ({here / there:.3f})")
    if table == "B":
        sums = pd.DataFrame([line.us for line in found]).groupby([line.workload for line in found]).sum()
        for pattern, us in sums.loc[list(PAPER_WORKLOADS)].iterrows():
            text.append(
                f"sum of one layer, {pattern}: " + ", ".join(f"{name} {value:.1f}" for name, value in us.items())
            )
    return "\n".join(text)


def rows_of(table: str, found: list[Line]) -> list[Row]:
    """The measurements as rows of the repository's kind."""
    about = {**environment.stamp(), "source_hash": fingerprint(Path(__file__).resolve(), "cuda")}
    about |= {"figure": "operator tables", "hardware": environment.hardware_slug(), "device": environment.device_name()}
    about |= {"unit": "us", "statistic": "median", "model": "", "seq_len": None}
    by_graph = {"metric": "latency", "timer": "cuda_graph"}
    by_host = {"metric": "host_latency", "timer": "host_clock", "system": "punica"}
    out = []
    for line in found:
        operator = {"batch_size": line.operator.tokens, "rank": line.operator.rank, "workload": line.workload}
        cell = {"panel": f"{table}: {line.label}", **operator, **about}
        for name, us in line.us.items():
            out.append(Row(value=us, **cell, **(by_host if name == "eager" else {**by_graph, "system": name})))
    return out


@dataclass
class Options:
    """The command line."""

    table: str = "A"
    out: str | None = None  # folder that receives the rows; null: outputs/<hardware>/rows


def tabulate(options: Options) -> None:
    """Measure, print and write one table."""
    table = options.table
    if table not in TABLES:
        raise ConfigError(f"table={table} is unknown: choose table={' or table='.join(TABLES)}")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("the operator tables time GPU kernels; no CUDA device is visible")
    with ANCHORS.open(newline="") as file:
        anchors = list(csv.DictReader(file))
    found = lines(table)
    compile_first(found, table)
    started = time.monotonic()
    for line in found:
        measure(line, table)
        times = ", ".join(f"{name} {us:.2f}" for name, us in line.us.items())
        print(f"[{time.monotonic() - started:5.0f} s] {line.label}: {times}", flush=True)
    print(show(table, found, anchors))
    folder = Path(options.out or f"outputs/{environment.hardware_slug()}/rows")
    write_rows(folder / f"ext_operator_tables_{table}.csv", rows_of(table, found))


if __name__ == "__main__":
    with_options("ext_operator_tables", __doc__ or "", "ext_operator_tables", Options, tabulate)
