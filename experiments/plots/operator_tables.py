"""The operator tables as text: microseconds, their ratios to the best public kernel, and what each table sums up."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import pandas as pd

from experiments.benches.operator_lines import PROJECTIONS, Line, anchors_of, best_existing, parts_of_step
from experiments.ext_expert_tables import Line as Batch
from experiments.workload.popularity import PAPER_WORKLOADS

RATIOS = ("punica", "wrapper", "normal shrink")
"""Columns that are compared with the best public kernel."""
STEP = ("punica", "wrapper")
INVARIANT = ("wrapper, batch invariant", "wrapper")
FP8 = ("fp8", "fp8 w8a8", "fp8 w8a8, x too")


def show(table: str, found: list[Line]) -> str:
    """One measured table: a line for each operator, then what it sums up."""
    return "\n".join([*_body(found), *_ratios(found), *(_SUMS[table](found) if table in _SUMS else ())])


def _body(found: list[Line]) -> Iterator[str]:
    """Cells are left empty where nothing was measured, and where no public kernel was."""
    columns = list(dict.fromkeys(name for line in found for name in line.us))
    compared = [name for name in RATIOS if name in columns] if any(map(best_existing, found)) else []
    public = ["best existing", "us", *(f"ratio, {name}" for name in compared)] if compared else []
    yield " | ".join(["row", "floor", "two-kernel stream", *columns, *public])
    for line in found:
        cells = [line.label, f"{line.operator.floor_us():.2f}", f"{line.operator.stream_us():.1f}"]
        cells += [_number(line.us.get(name)) for name in columns]
        best = best_existing(line)
        if compared:
            cells += [best[0], f"{best[1]:.1f}"] if best else ["", ""]
            cells += [_number(best[1] / line.us[name] if best and name in line.us else None) for name in compared]
        yield " | ".join(cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratios(found: list[Line]) -> Iterator[str]:
    """Best public kernel over each column, part by part."""
    for part in dict.fromkeys(line.part for line in found):
        for name in RATIOS:
            mine = [line for line in found if line.part == part and name in line.us]
            bests = [(best_existing(line), line.us[name]) for line in mine]
            ratios = [best[1] / us for best, us in bests if best is not None]
            yield from _summed(f"best existing / {name}", part, ratios)


def _summed(what: str, part: str, ratios: Sequence[float]) -> Iterator[str]:
    """Yield a line with mean, least and largest of `ratios`; none without any."""
    if ratios:
        mean = f"geometric mean {statistics.geometric_mean(ratios):.2f}"
        what = f"{what}, {part}" if part else what
        yield f"{what}: {mean}, lowest {min(ratios):.2f}, highest {max(ratios):.2f}, rows {len(ratios)}"


def _torch_beside_anchors(found: list[Line]) -> Iterator[str]:
    """Compare torch's times on this machine with the anchors'."""
    for name in ("torch_loop", "torch_gbmm"):
        for line in found:
            here, there = line.us.get(name), anchors_of(line).get(name)
            if here and there:
                yield f"{name} {line.label}: {here:.1f} us here, {there:.1f} in the anchors ({here / there:.3f})"


def _sums_of_a_layer(found: list[Line]) -> Iterator[str]:
    """Sums of a column that was measured for all projections of the layer."""
    frame = pd.DataFrame([line.us for line in found])
    sums = frame.groupby([line.workload for line in found]).sum(min_count=len(PROJECTIONS))
    for pattern in PAPER_WORKLOADS:
        cells = [f"{name} {us:.1f}" for name, us in sums.loc[pattern].dropna().items()]
        yield f"sum of one layer, {pattern}: {', '.join(cells)}"


def _beside_parts(found: list[Line]) -> Iterator[str]:
    """One prompt and its decodes in one call, and in two: both parts measured in this run."""
    for line in found:
        parts = parts_of_step(line, found)
        for name in STEP:
            apart = [part.us[name] for part in parts if name in part.us]
            if len(apart) == 2 and name in line.us:
                together, total = line.us[name], sum(apart)
                words = " + ".join(f"{us:.2f}" for us in apart)
                yield f"{line.label}, {name}: {together:.2f} us, apart {words} = {total:.2f} ({together / total:.2f})"


def _one_over_other(found: list[Line], over: str, under: str) -> Iterator[str]:
    for part in dict.fromkeys(line.part for line in found):
        mine = [line.us for line in found if line.part == part and over in line.us and under in line.us]
        yield from _summed(f"{over} / {under}", part, [us[over] / us[under] for us in mine])


_SUMS: dict[str, Callable[[list[Line]], Iterable[str]]] = {
    "A": _torch_beside_anchors,
    "B": _sums_of_a_layer,
    "step": _beside_parts,
    "invariant": lambda found: _one_over_other(found, *INVARIANT),
    "fp8": lambda found: (text for column in FP8 for text in _one_over_other(found, column, "wrapper")),
}

SUMS = {"delta": ", delta", "accumulating": ""}


def show_experts(found: list[Batch]) -> str:
    """The table of experts, and best public kernel over ours."""
    columns = list(dict.fromkeys(name for line in found for name in line.us))
    sums, ratios = ([f"{what}, {name}" for name in SUMS] for what in ("sum", "ratio"))
    text = [" | ".join(["row", *columns, *sums, "best existing", *ratios])]
    over: dict[str, list[float]] = {name: [] for name in SUMS}
    for line in found:
        best, totals = line.best_existing(), [line.total(ending) for ending in SUMS.values()]
        cells = [_number(line.us.get(name)) for name in columns]
        cells += [*map(_number, totals), f"{best:.1f}", *(_number(us and best / us) for us in totals)]
        text.append(" | ".join([line.label, *cells]))
        for name, us in zip(SUMS, totals, strict=True):
            over[name] += [best / us] if us else []
    return "\n".join([*text, *(one for name in SUMS for one in _summed("best existing / ours", name, over[name]))])
