"""Lines of the operator tables: operators, their bytes, and times of public kernels (`Line.anchor`). No torch."""

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise, product
from pathlib import Path

import numpy as np

from experiments.workload.popularity import PAPER_WORKLOADS, popularity

PAPER_RESULTS = Path(__file__).resolve().parents[2] / "paper_results"
ANCHORS, SHAPES = "anchors.csv", "anchors_shapes.csv"
NOT_PUBLIC = ("proto", "floor")  # prefixes of the anchors' implementations that are not public kernels
STEP = "mixed_"  # prefix of the cases of the paper's step and of its parts
HOST = "eager "  # prefix of columns that are no time in a graph, but the host's per call
HIDDEN, INTERMEDIATE = 4096, 11008
Projection = tuple[int, tuple[int, ...]]  # input width, and output widths of the slices
PROJECTIONS: dict[str, Projection] = {
    "qkv": (HIDDEN, (HIDDEN,) * 3),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INTERMEDIATE,) * 2),
    "down": (INTERMEDIATE, (HIDDEN,)),
}
"""The packed projections of one Llama-2-7B layer."""
UP: Projection = (HIDDEN, (INTERMEDIATE,))
MODELS = {
    "Llama 3.2 3B": (3072, 3072, 1024, 8192), "Gemma 3 12B": (3840, 4096, 2048, 15360),
    "Qwen3 8B": (4096, 4096, 1024, 12288), "Phi-4": (5120, 5120, 1280, 17920),
    "Mistral Small 3": (5120, 4096, 1024, 32768), "Qwen3 32B": (5120, 8192, 1024, 25600),
}  # fmt: skip
"""Name -> hidden size, columns of q, of k, and the feed-forward's, from the models' configurations."""
SEED, DRAWN, MOST_DRAWN_ROWS = 20261130, 40, 8000
LOOP = "torch_loop"
COPY_RATE = 4.25  # TB/s of a device-to-device copy on an H200
STREAM = ((1.1, 2.8), (2.2, 3.0), (8.7, 3.9), (17.3, 6.0), (34.6, 9.9))
"""MB -> us of two dependent kernels that only read that much, half each, and pass one vector, both starting early: the
practical floor of a two-kernel design, measured with the anchors on an H200 (paper_results/README.md)."""
Anchor = dict[str, str]


@dataclass(frozen=True)
class Operator:
    """One timed operator: `sizes` are the rows of each adapter (in all T), `widths` the output sizes of the slices."""

    k: int
    widths: tuple[int, ...]
    rank: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    """True rank of each adapter; empty: all of them `rank`, and the kernels get no table of ranks."""

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    def bytes(self) -> int:
        """Bytes that must move in half precision: the weights of the adapters present, x read, y read and written."""
        ranks = sum(self.ranks) if self.ranks else self.rank * len(self.sizes)
        weights = ranks * (self.k * len(self.widths) + sum(self.widths))
        return 2 * (weights + self.tokens * (self.k + 2 * sum(self.widths)))

    def floor_us(self) -> float:
        return self.bytes() / COPY_RATE / 1e6

    def stream_us(self) -> float:
        """The two-kernel stream at these bytes: interpolated, and beyond the last point at the copy rate."""
        megabytes = self.bytes() / 1e6
        sizes, times = zip(*STREAM, strict=True)
        return float(np.interp(megabytes, sizes, times)) + max(0.0, megabytes - sizes[-1]) / COPY_RATE


@dataclass
class Line:
    """One line of a table: an operator, and microseconds by column."""

    label: str
    operator: Operator
    workload: str
    anchor: Anchor = field(default_factory=dict)  # column of the anchors -> what it holds; empty: none of them
    part: str = ""  # ratios are averaged over the lines of one part
    us: dict[str, float] = field(default_factory=dict)


@cache
def read_anchors(name: str) -> list[Anchor]:
    """The rows of a file of `paper_results/` that have a time."""
    with (PAPER_RESULTS / name).open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["graph_us"]]


def anchors(name: str, anchor: Anchor) -> dict[str, float]:
    """Graph time of every implementation, in microseconds, in the rows of a file that hold ``anchor``."""
    same = [row for row in read_anchors(name) if all(row[column] == value for column, value in anchor.items())]
    return {row["impl"]: float(row["graph_us"]) for row in same}


def anchors_of(line: Line) -> dict[str, float]:
    return anchors(ANCHORS if "group" in line.anchor else SHAPES, line.anchor) if line.anchor else {}


def best_of(times: dict[str, float]) -> tuple[str, float] | None:
    """The fastest public implementation and its time (prototypes are not public)."""
    public = {name: us for name, us in times.items() if not name.startswith(NOT_PUBLIC)}
    return min(public.items(), key=lambda item: item[1]) if public else None


def best_existing(line: Line) -> tuple[str, float] | None:
    return best_of(anchors_of(line) if line.anchor else {name: us for name, us in line.us.items() if name == LOOP})


def lines(table: str) -> list[Line]:
    return TABLES[table][1]()


def _decode(rank: int, pattern: str, tokens: int, projection: Projection = UP) -> Operator:
    return Operator(*projection, rank, tuple(popularity(pattern).group_sizes(tokens)))


def _anchored(label: str, workload: str, operator: Operator, group: str, case: str) -> Line:
    named = {"group": group, "case": case, "pattern": workload.lower()}
    return Line(label, operator, workload, {**named, "T": str(operator.tokens), "r": str(operator.rank)})


def _decodes() -> list[Line]:
    grid = [("Distinct", 1), *((p, t) for t, p in product((2, 4, 8, 16, 32, 48, 64), PAPER_WORKLOADS))]
    return [_anchored(f"T={t} {pattern}", pattern, _decode(16, pattern, t), "A", "op") for pattern, t in grid]


def _ranks() -> list[Line]:
    grid = product((8, 16, 20, 24, 32, 64, 128), ("Distinct", "Identical"))
    uniform = [_anchored(f"T=64 {p} r={rank}", p, _decode(rank, p, 64), "A", "op") for rank, p in grid]
    wide = _decode(64, "Distinct", 64)
    narrow = {f"all {rank}": (rank,) * 64 for rank in (8, 16, 32, 64)} | {"8,16,32,64": (8, 16, 32, 64) * 16}
    mixed = [
        Line(f"T=64 Distinct {name} in 64", replace(wide, ranks=ranks), "Distinct") for name, ranks in narrow.items()
    ]
    return [*uniform, *mixed, Line("T=64 Distinct padded to 64", wide, "Distinct")]


def _layer() -> list[Line]:
    return [
        _anchored(f"{pattern} {name}", pattern, _decode(16, pattern, 32, projection), "B", name)
        for pattern, (name, projection) in product(PAPER_WORKLOADS, PROJECTIONS.items())
    ]


def _prefills() -> list[Line]:
    found = []
    for tokens, adapters, rank in product((512, 2048, 8192), (1, 4, 16), (16, 64)):
        operator = Operator(*PROJECTIONS["o"], rank, (tokens // adapters,) * adapters)
        found.append(_anchored(f"T={tokens} {adapters} adapters r={rank}", f"{adapters}ad", operator, "C", "prefill"))
    return found


def _invariant() -> list[Line]:
    parts = {"A": _decodes(), "C": _prefills()}
    return [replace(line, anchor={}, part=part) for part, found in parts.items() for line in found]


def _drawn() -> list[Line]:
    """Draw projections of newer models, ranks, rows and shares of adapters, before any of them was timed."""
    draw, found = random.Random(SEED), list[Line]()
    for number in range(1, DRAWN + 1):
        name, (hidden, q, kv, ff) = draw.choice([*MODELS.items()])
        k, widths = draw.choice([(hidden, (q, kv, kv)), (q, (hidden,)), (hidden, (ff, ff)), (ff, (hidden,))])
        tokens = round(MOST_DRAWN_ROWS ** draw.random())
        adapters, rank = min(tokens, draw.choice((1, 2, 3, 5, 8, 16, 48))), draw.choice((4, 8, 16, 32, 64, 128, 256))
        ends = [0, *sorted(draw.sample(range(1, tokens), adapters - 1)), tokens]
        operator = Operator(k, widths, rank, tuple(end - start for start, end in pairwise(ends)))
        label = f"{number}: {name} {k} to {sum(widths)}, T={tokens} of {adapters} r={rank}"
        found.append(Line(label, operator, "drawn", part="decode" if tokens <= 64 else "prefill"))
    return found


def sizes_of(segment_lengths: str) -> tuple[int, ...]:
    """Rows of each adapter, from the spelling of the anchors.

    >>> sizes_of("3 2 1x3")
    (3, 2, 1, 1, 1)
    """
    pairs = [entry.partition("x") for entry in segment_lengths.split()]
    return tuple(chain.from_iterable([int(rows)] * int(times or 1) for rows, _, times in pairs))


def _of_shapes(step: bool) -> list[Line]:
    """The operators of `anchors_shapes.csv`: the paper's step and its parts, or all others."""
    found: dict[str, Line] = {}
    for row in read_anchors(SHAPES):
        if row["case"].startswith(STEP) != step:
            continue
        case, pattern, workload = row["case"], row["pattern"], row["pattern"].capitalize()
        widths = tuple(map(int, row["N"].split("+")))
        operator = Operator(int(row["K"]), widths, int(row["r"]), sizes_of(row["segment_lengths"]))
        anchor = {name: row[name] for name in ("case", "pattern", "T", "r")}
        if step:
            line = Line(f"{case.removeprefix(STEP)} {pattern}", operator, pattern, anchor)
        else:
            is_decode = workload in PAPER_WORKLOADS
            workload, part = (workload, "decode") if is_decode else (pattern, "prefill")
            line = Line(f"{case} T={row['T']} {workload} r={row['r']}", operator, workload, anchor, part)
        found[line.label] = line
    return list(found.values())


TABLES: dict[str, tuple[str, Callable[[], list[Line]]]] = {
    "A": ("A: one decode operator, 4096 -> r -> 11008, r = 16", _decodes),
    "ranks": ("A, ranks", _ranks),
    "B": ("B: packed projections of one Llama-2-7B layer, batch 32, r = 16", _layer),
    "C": ("C: prefill, 4096 -> r -> 4096", _prefills),
    "shapes": ("Shapes of other models, to which no rule was fitted", lambda: _of_shapes(step=False)),
    "drawn": ("Drawn by a seed: newer models, beside two cuBLAS products for each adapter and slice", _drawn),
    "step": ("The paper's step: one prompt and 31 decode rows of 31 other adapters", lambda: _of_shapes(step=True)),
    "invariant": ("Price of batch invariance", _invariant),
}
"""Name of a table -> its heading and its lines, in the order of the page."""
