"""Extension: the LoRA of experts against the best public kernels. Needs a GPU. Batches of Mixtral-8x7B and
Qwen3-30B-A3B (1 to 128 rows, 1 and 4 adapters, rank 16, bfloat16), through the wrapper at its defaults: w13 and w2
apart, added to their outputs and as a delta (outputs overwritten, as the fastest public kernel does), and the alignment
of rows by adapter and expert, once per layer. Where the assignment is naive nothing is aligned, and there is no row.
One CUDA graph per call, weights from HBM, median of replays. Results are checked against float32 references, deltas
again after a replay. `paper_results/anchors.csv` has the public kernels' times, beside which
`results/h200/operator_tables.md` shows ours. Cost: four minutes per pass on a GPU.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import cast

from experiments.benches.operator_figure import points_of_gpu
from experiments.benches.operator_lines import ANCHORS, anchors, best_of
from experiments.harness import Config, Experiment, FigureConf, Point, Reading, main

LAYERS = {"mixtral-8x7b": (4096, 14336, 8, 2), "qwen3-30b-a3b": (2048, 768, 128, 8)}
"""Hidden size, width of an expert, experts, experts of a token."""
RANK, CALLS, REPLAYS = 16, 100, 15
SITES = ("w13", "w2")


@dataclass
class Line:
    """One batch, and microseconds by column."""

    model: str
    tokens: int
    adapters: int
    us: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.model} T={self.tokens} {self.adapters} adapters"

    def total(self, ending: str) -> float | None:
        parts = [self.us[f"{site}{ending}"] for site in SITES if f"{site}{ending}" in self.us]
        return sum(parts) if len(parts) == len(SITES) else None

    def best_existing(self) -> float:
        """Sum over both products of the fastest public kernel of each."""
        wanted = {"group": "E", "T": str(self.tokens), "pattern": f"{self.adapters}ad"}
        bests = [best_of(anchors(ANCHORS, {**wanted, "case": f"{self.model}:{site}"})) for site in SITES]
        return sum(best[1] for best in bests if best)


def lines() -> list[Line]:
    return [Line(*cell) for cell in product(LAYERS, (1, 8, 32, 128), (1, 4))]


class ExpertTables(Experiment):
    """Latency of every call, batch by batch (the panels)."""

    name, figure, order, conf = "ext_expert_tables", "expert tables", 910, FigureConf
    defaults = {"scale": "paper"}

    def points(self, cfg: Config) -> list[Point]:
        grid = product(lines(), cfg.system.names)
        return points_of_gpu(self, cfg, (_point(line, system) for line, system in grid))

    def measure(self, cfg: Config, point: Point) -> list[Reading]:
        from experiments.benches.expert_sets import ExpertSets, MoELayer, checked_us

        layer, adapters = MoELayer(*point.settings["layer"]), point.settings["adapters"]
        rows, rank = cast(int, point.batch_size), cast(int, point.rank)
        sets = self.kept((layer, rows, adapters), lambda: ExpertSets(layer, rows, adapters, rank))
        if point.system not in sets.columns():
            return []
        return [Reading("latency", checked_us(sets, point.system, CALLS, REPLAYS), "us", "median")]


def _point(line: Line, system: str) -> Point:
    settings = {"layer": LAYERS[line.model], "adapters": line.adapters, "calls": [CALLS, REPLAYS]}
    return Point(line.label, system, f"{line.adapters} adapters", line.model, line.tokens, None, RANK, settings)


EXPERIMENT = main(ExpertTables, __name__)
