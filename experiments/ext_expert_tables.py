"""The LoRA of experts against the best public kernels, on the GPU at hand.

    python -m experiments.ext_expert_tables

Batches of Mixtral-8x7B and Qwen3-30B-A3B (1 to 128 rows, 1 and 4 adapters, rank 16, bfloat16), through the wrapper at
its defaults: w13 and w2 apart, added to their outputs and as a delta (outputs overwritten, as the fastest public kernel
does), and the alignment of rows by adapter and expert, once per layer. Where the assignment is naive nothing is
aligned, and there is no cell and no row. One CUDA graph per cell, weights from HBM, median of replays. Results are
checked against float32 references, deltas again after a replay. `paper_results/anchors.csv` has the public kernels'
times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import cpu_count

from experiments.benches import tables
from experiments.benches.operator_lines import ANCHORS, NOT_PUBLIC, read_anchors
from experiments.harness.command import with_options
from experiments.harness.experiment import CheckFailed
from experiments.harness.schema import Settings
from experiments.measure.records import Row, write_measured

LAYERS = {"mixtral-8x7b": (4096, 14336, 8, 2), "qwen3-30b-a3b": (2048, 768, 128, 8)}
"""Hidden size, width of an expert, experts, experts of a token."""
RANK, CALLS, REPLAYS = 16, 100, 15
TOLERANCE = 8e-3
"""Largest relative error in bfloat16."""
SITES = ("w13", "w2")
SUMS = {"delta": ", delta", "accumulating": ""}


@dataclass
class Line:
    """One batch, and microseconds by column."""

    model: str
    tokens: int
    adapters: int
    us: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.model} T={self.tokens} {self.adapters} adapters"

    def total(self, ending: str) -> float | None:
        """Both products, without the alignment."""
        parts = [self.us.get(f"{site}{ending}") for site in SITES]
        return None if None in parts else sum(parts)  # type: ignore[arg-type]

    def best_existing(self) -> float:
        """Sum over both products of the fastest public kernel of each."""
        return sum(min(self._public(site).values()) for site in SITES)

    def _public(self, site: str) -> dict[str, float]:
        wanted = {"case": f"{self.model}:{site}", "T": str(self.tokens), "pattern": f"{self.adapters}ad"}
        rows = [row for row in read_anchors(ANCHORS) if row["group"] == "E"]
        same = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        return {row["impl"]: float(row["graph_us"]) for row in same if not row["impl"].startswith(NOT_PUBLIC)}


def lines() -> list[Line]:
    """The batches of the anchors."""
    return [Line(*cell) for cell in product(LAYERS, (1, 8, 32, 128), (1, 4))]


def measure(line: Line) -> list[str]:
    """Fill in the line's microseconds; return the failed checks, whose calls are not timed."""
    from experiments.benches.expert_sets import ExpertSets, MoELayer
    from experiments.benches.operator_sets import captured
    from experiments.measure.timing import seconds_between_events

    sets, failed = ExpertSets(MoELayer(*LAYERS[line.model]), line.tokens, line.adapters, RANK), []
    for name, call in sets.calls.items():
        try:
            error = sets.error(name)
            if not error <= TOLERANCE:
                raise CheckFailed(f"relative error {error:.1e} is above {TOLERANCE:.0e}: not timed")
            graph, rounds = captured(call, sets.count, CALLS)
            if name.endswith("delta"):
                graph.replay()
                error = sets.error_now(name)
                if not error <= TOLERANCE:
                    raise CheckFailed(f"after a graph replay the relative error is {error:.1e}: not timed")
            replays = [seconds_between_events(graph.replay) for _ in range(REPLAYS)]
            line.us[name] = statistics.median(replays) * 1e6 / (rounds * sets.count)
        except CheckFailed as wrong:
            failed.append(f"{line.label} {name}: {wrong}")
    return failed


def _call_once(line: Line) -> str:
    """Call everything on `line` once; return the error, if any."""
    from experiments.benches.expert_sets import ExpertSets, MoELayer

    try:
        sets = ExpertSets(MoELayer(*LAYERS[line.model]), line.tokens, line.adapters, RANK, rotating_bytes=0)
        for call in sets.calls.values():
            call(0)
    except Exception as error:
        return f"{line.label}: {type(error).__name__}: {error}"
    return ""


def show(found: list[Line]) -> str:
    """The table, and best public kernel over ours."""
    return "\n".join([*_body(found), *_ratios(found)])


def _body(found: list[Line]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for line in found for name in line.us))
    sums, ratios = ([f"{what}, {name}" for name in SUMS] for what in ("sum", "ratio"))
    yield " | ".join(["row", *columns, *sums, "best existing", *ratios])
    for line in found:
        totals = [line.total(ending) for ending in SUMS.values()]
        best = line.best_existing()
        cells = [f"{line.us[name]:.2f}" if name in line.us else "" for name in columns]
        cells += ["" if us is None else f"{us:.2f}" for us in totals] + [f"{best:.1f}"]
        yield " | ".join([line.label, *cells, *("" if us is None else f"{best / us:.2f}" for us in totals)])


def _ratios(found: list[Line]) -> Iterator[str]:
    for name, ending in SUMS.items():
        ratios = [line.best_existing() / us for line in found if (us := line.total(ending)) is not None]
        yield from tables.summary(f"best existing / ours, {name}", ratios)


def rows_of(found: list[Line]) -> list[Row]:
    """Return the measurements as rows."""
    about = {**tables.columns_of_all("expert tables", __file__), "metric": "latency", "timer": "cuda_graph"}
    protocol = RANK, CALLS, REPLAYS, about["device"], about["torch"]
    return [
        Row(value=us, config_hash=tables.digest(line.label, LAYERS[line.model], *protocol), panel=line.label,
            batch_size=line.tokens, rank=RANK, model=line.model, system=name, workload=f"{line.adapters} adapters",
            **about)
        for line in found for name, us in line.us.items()
    ]  # fmt: skip


class Options(Settings):
    """The command line."""

    out: str | None = None  # folder that receives the rows; null: outputs/<hardware>/rows


def tabulate(options: Options) -> None:
    """Measure, print and write the table; exit code 1 when a result was wrong."""
    tables.needs_gpu("the expert tables")
    import torch

    found, failed = lines(), []
    tables.compile_in_parallel(_call_once, found, min(cpu_count(), 16), chunk=1)
    for line in found:
        failed += measure(line)
        print(line.label + ": " + ", ".join(f"{name} {us:.2f}" for name, us in line.us.items()), flush=True)
        torch.cuda.empty_cache()
    print(show(found), flush=True)
    write_measured(tables.rows_folder(options.out) / "ext_expert_tables.csv", rows_of(found))
    tables.end(failed)


if __name__ == "__main__":
    with_options("ext_expert_tables", __doc__ or "", "ext_expert_tables", Options, tabulate)
