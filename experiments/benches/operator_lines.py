"""The operator tables' lines: which operators a table has, and the public kernels' times of each. Imports no torch.

A line whose operator was timed for `paper_results/` names its rows there (`Line.anchor`).
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from pathlib import Path

from experiments.benches import operator_shapes as shapes
from experiments.benches.operator_shapes import PROJECTIONS, UP, Operator, decode, prefill
from experiments.workload.popularity import PAPER_WORKLOADS

PAPER_RESULTS = Path(__file__).resolve().parents[2] / "paper_results"
ANCHORS, SHAPES = "anchors.csv", "anchors_shapes.csv"
NOT_PUBLIC = ("proto", "floor")
"""Prefixes of the anchors' implementations that are not public kernels."""
STEP = "mixed_"
"""Prefix of the cases of the paper's step and of its parts."""
DECODES = "31decodes"
HOST, ADDED = "eager ", "added by "
"""Prefixes of columns that are no time in a graph: the host's per call, and a difference of two."""
Anchor = dict[str, str]


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


def anchors_of(line: Line) -> dict[str, float]:
    """Graph time of every implementation of this line's operator, in microseconds."""
    if not line.anchor:
        return {}
    rows = read_anchors(ANCHORS if "group" in line.anchor else SHAPES)
    same = [row for row in rows if all(row[name] == value for name, value in line.anchor.items())]
    return {row["impl"]: float(row["graph_us"]) for row in same}


def best_existing(line: Line) -> tuple[str, float] | None:
    """The fastest public implementation of this line's operator, and its time (prototypes are not public)."""
    public = {name: us for name, us in anchors_of(line).items() if not name.startswith(NOT_PUBLIC)}
    return min(public.items(), key=lambda item: item[1]) if public else None


def lines(table: str) -> list[Line]:
    """The lines of one of `TABLES`."""
    return TABLES[table]()


def _anchored(label: str, workload: str, operator: Operator, group: str, case: str) -> Line:
    named = {"group": group, "case": case, "pattern": workload.lower()}
    return Line(label, operator, workload, {**named, "T": str(operator.tokens), "r": str(operator.rank)})


def _decodes() -> list[Line]:
    grid = [(tokens, pattern) for tokens, pattern in shapes.DECODE_GRID if tokens > 1 or pattern == "Distinct"]
    return [_anchored(f"T={t} {pattern}", pattern, decode(UP, 16, pattern, t), "A", "op") for t, pattern in grid]


def _uniform_ranks() -> list[Line]:
    grid = product((8, 16, 20, 24, 32, 64, 128), ("Distinct", "Identical"))
    return [_anchored(f"T=64 {p} r={rank}", p, decode(UP, rank, p, 64), "A", "op") for rank, p in grid]


def _mixed_ranks() -> list[Line]:
    wide = decode(UP, 64, "Distinct", 64)
    narrow = {f"all {rank}": (rank,) * 64 for rank in (8, 16, 32, 64)} | {"8,16,32,64": (8, 16, 32, 64) * 16}
    found = [
        Line(f"T=64 Distinct {name} in 64", replace(wide, ranks=ranks), "Distinct") for name, ranks in narrow.items()
    ]
    return [*found, Line("T=64 Distinct padded to 64", wide, "Distinct")]


def _layer() -> list[Line]:
    return [
        _anchored(f"{pattern} {name}", pattern, decode(projection, 16, pattern, 32), "B", name)
        for pattern, (name, projection) in product(PAPER_WORKLOADS, PROJECTIONS.items())
    ]


def _prefills() -> list[Line]:
    found = []
    for tokens, adapters, rank in shapes.PREFILL_GRID:
        operator = prefill(PROJECTIONS["o"], rank, adapters, tokens)
        found.append(_anchored(f"T={tokens} {adapters} adapters r={rank}", f"{adapters}ad", operator, "C", "prefill"))
    return found


def _invariant() -> list[Line]:
    parts = {"A": _decodes(), "C": _prefills()}
    return [replace(line, anchor={}, part=part) for part, found in parts.items() for line in found]


def _fp8() -> list[Line]:
    """List lines without anchors, to be compared with our 16-bit kernels."""
    batches = product((16, 64), (32, 64), PAPER_WORKLOADS)
    found = [Line(f"T={t} {p} r={r}", decode(UP, r, p, t), p, part="decode") for r, t, p in batches]
    return found + [replace(line, anchor={}, part="prefill") for line in _prefills()]


def _behind_projection() -> list[Line]:
    """List lines without anchors: public kernels were not timed behind a projection."""
    grid = [line for line in _decodes() if line.operator.tokens in (1, 8, 16, 32, 64)]
    prompts = [line for line in _prefills() if (len(line.operator.sizes), line.operator.rank) == (4, 16)]
    return [replace(line, anchor={}) for line in (*grid, *prompts)]


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
        case, pattern, popularity = row["case"], row["pattern"], row["pattern"].capitalize()
        operator = Operator(
            int(row["K"]), tuple(map(int, row["N"].split("+"))), int(row["r"]), sizes_of(row["segment_lengths"])
        )
        anchor = {name: row[name] for name in ("case", "pattern", "T", "r")}
        if step:
            line = Line(f"{case.removeprefix(STEP)} {pattern}", operator, pattern, anchor)
        else:
            is_decode = popularity in PAPER_WORKLOADS
            workload, part = (popularity, "decode") if is_decode else (pattern, "prefill")
            line = Line(f"{case} T={row['T']} {workload} r={row['r']}", operator, workload, anchor, part)
        found[line.label] = line
    return list(found.values())


def _mixed_steps() -> list[Line]:
    """List the projections of a layer in steps with a prompt and 31 decodes, without anchors."""
    decodes = {"Distinct": (1,) * 31, "Identical": (31,)}
    grid = product((128, 256, 512, 1024), decodes.items(), PROJECTIONS.items())
    return [
        Line(f"{name} {prompt}+31 {pattern}", Operator(*projection, 16, (prompt, *sizes)), pattern)
        for prompt, (pattern, sizes), (name, projection) in grid
    ]


def parts_of_step(line: Line, found: list[Line]) -> list[Line]:
    """The prompt alone and the decodes alone of the step `line`, out of `found`; none when it is a part itself."""
    prompt, plus, _ = line.workload.partition("+")
    if not plus:
        return []
    case = line.anchor["case"]
    return [other for other in found if other.anchor["case"] == case and other.workload in (prompt, DECODES)]


TABLES: dict[str, Callable[[], list[Line]]] = {
    "A": _decodes,
    "ranks": lambda: [*_uniform_ranks(), *_mixed_ranks()],
    "B": _layer,
    "C": _prefills,
    "padding": _mixed_ranks,
    "shapes": lambda: _of_shapes(step=False),
    "step": lambda: _of_shapes(step=True),
    "mixed": _mixed_steps,
    "gemm": _behind_projection,
    "determinism": lambda: [*_decodes(), *_prefills()],
    "invariant": _invariant,
    "fp8": _fp8,
}
"""Name of a table -> its lines."""
