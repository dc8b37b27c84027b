"""Two sets of rows side by side: my kernel, or my GPU, against the recorded one.

    make compare A=results/h200 B=outputs/h200/rows
    python -m experiments.commands.compare a=results/h200/fig08_lora_operator.csv b=outputs/h200/rows out=ratios.csv

`a` and `b` are files of rows, or folders of them. Rows meet when figure, panel, system, workload, model, batch_size,
seq_len, rank, metric and statistic (medians and single values) are equal, and the timer where both sides have a common
one. Every pair is printed with the ratio B / A and what it means, then the geometric mean of the ratios per figure,
system and metric. `out=` writes the pairs as CSV too.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from experiments.commands.report import rows_files
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError
from punica.measure.records import TIMERS, Row, RowsError, read_rows

KEY = ("figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "metric", "statistic")
COLUMNS = (*KEY, "unit", "timer_a", "timer_b", "a", "b", "ratio", "better")
HEADER = ",".join(COLUMNS).encode()
TIMES = ("s", "ms", "us", "ns")


@dataclass
class Options:
    """The command line."""

    a: str = MISSING  # a file of rows, or a folder of them
    b: str = MISSING  # the same
    out: str | None = None  # file.csv that receives the pairs


@dataclass(frozen=True)
class Pair:
    """The same quantity in both sets."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float | None:
        """B / A; None where it says nothing: a value that is zero, negative or not finite."""
        fine = all(math.isfinite(value) and value > 0 for value in (self.a.value, self.b.value))
        return self.b.value / self.a.value if fine else None

    @property
    def better(self) -> str:
        """`lower` for times and bytes, `higher` for rates, empty where neither is."""
        return direction(self.a.unit)


def direction(unit: str) -> str:
    """Which values of `unit` are better: `lower` (times, bytes), `higher` (anything per second), or empty."""
    if unit in TIMES or unit.startswith("byte"):
        return "lower"
    return "higher" if unit.endswith("/s") else ""


def load(argument: str, path: Path) -> list[Row]:
    """Medians and single values at `path`: a file of rows, a folder of them, or the folder above `rows/`.

    Raises `ConfigError` when there is nothing, `RowsError` (file, line, remedy) when a file is damaged.
    """
    if not path.exists():
        example = f"{argument}=results/h200"
        raise ConfigError(f"{argument}={path} does not exist: give a file of rows or a folder, for example {example}")
    files = [path]
    if path.is_file() and path.suffix != ".csv":
        raise ConfigError(f"{argument}={path} is no .csv file of rows, as in outputs/<hardware>/rows: give such a file")
    if path.is_dir():
        files = rows_files(path) or rows_files(path / "rows")
    rows = [row for file in files for row in read_rows(file) if row.statistic in ("median", "value")]
    if not rows:
        raise ConfigError(f"{argument}={path} holds no rows: measure some with make reproduce, or give another folder")
    return rows


def join(a: Sequence[Row], b: Sequence[Row]) -> list[Pair]:
    """Rows of equal `KEY`, in the order of `a`. Raises `ConfigError` when there are none or their units differ."""
    ours, theirs = by_key(a), by_key(b)
    pairs = [pair for key, timers in ours.items() if key in theirs for pair in same_timer(timers, theirs[key])]
    if not pairs:
        raise ConfigError(f"a and b have no row in common: a has {content(a)}; b has {content(b)}")
    for pair in pairs:
        if pair.a.unit != pair.b.unit:
            raise ConfigError(
                f"{pair.a.metric} of figure {pair.a.figure} is in {pair.a.unit} in a and in {pair.b.unit} in b: "
                "measure one of them again"
            )
    return pairs


def by_key(rows: Sequence[Row]) -> dict[tuple[object, ...], dict[str, Row]]:
    """Rows by `KEY`, then by timer."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in KEY), {})[row.timer] = row
    return found


def same_timer(a: dict[str, Row], b: dict[str, Row]) -> Iterator[Pair]:
    """One pair per timer that both sides have; without one, the preferred timer of each."""
    common = [timer for timer in a if timer in b]
    for timer in common:
        yield Pair(a[timer], b[timer])
    if not common:
        yield Pair(*(side[min(side, key=_preference)] for side in (a, b)))


def _preference(timer: str) -> int:
    return TIMERS.index(timer) if timer in TIMERS else len(TIMERS)


def content(rows: Sequence[Row]) -> str:
    """What a set holds, for messages: figures, systems, models."""
    parts = []
    for name in ("figure", "system", "model"):
        values = sorted({getattr(row, name) for row in rows} - {""})
        shown = ", ".join(values[:6]) + (", ..." if len(values) > 6 else "")
        parts.append(f"{name} {shown or '-'}")
    return "; ".join(parts)


def meaning(ratio: float | None, better: str) -> str:
    """What B / A says: `B 1.25x better`, `B 1.10x worse`, `same` within half a percent, or nothing."""
    if ratio is None or not better:
        return ""
    if abs(ratio - 1) < 0.005:
        return "same"
    gain = ratio if better == "higher" else 1 / ratio
    return f"B {gain:.2f}x better" if gain > 1 else f"B {1 / gain:.2f}x worse"


def table(pairs: Sequence[Pair]) -> str:
    """Every pair, grouped by figure, system and metric, each group closed by its geometric mean."""
    head = ("panel", "workload", "model", "batch", "len", "rank", "statistic", "timer", "A", "B", "B/A", "")
    lines = []
    for (figure, system, metric, unit), group in grouped(pairs).items():
        better = group[0].better
        lines += ["", f"figure {figure}, {system or '-'}, {metric} ({unit}{f', {better} is better' if better else ''})"]
        lines += ["  " + line for line in aligned([head, *(cells(pair) for pair in group)])]
        lines += [f"  geometric mean of B/A: {mean_text(group)}"]
    return "\n".join(lines[1:])


def grouped(pairs: Sequence[Pair]) -> dict[tuple[str, str, str, str], list[Pair]]:
    """Pairs by figure, system, metric and unit, in the order in which these appear."""
    groups: dict[tuple[str, str, str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.a.figure, pair.a.system, pair.a.metric, pair.a.unit), []).append(pair)
    return groups


def cells(pair: Pair) -> tuple[str, ...]:
    """One line of the table."""
    row, ratio = pair.a, pair.ratio
    numbers = ["" if value is None else str(value) for value in (row.batch_size, row.seq_len, row.rank)]
    timers = " / ".join(dict.fromkeys((pair.a.timer, pair.b.timer)))
    values = [f"{pair.a.value:.4g}", f"{pair.b.value:.4g}", "-" if ratio is None else f"{ratio:.3f}"]
    return (row.panel, row.workload, row.model, *numbers, row.statistic, timers, *values, meaning(ratio, pair.better))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to one width; a column that is empty below its head is left out."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    shown = zip(*columns, strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown]


def mean_text(pairs: Sequence[Pair]) -> str:
    """Geometric mean of the ratios, how many they are, and what it means."""
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    if not ratios:
        return "no row has a ratio"
    mean = statistics.geometric_mean(ratios)
    verdict = meaning(mean, pairs[0].better)
    return f"{mean:.3f} over {len(ratios)} of {len(pairs)} rows" + (f", {verdict}" if verdict else "")


def means(pairs: Sequence[Pair]) -> str:
    """The geometric means of all groups, one line each."""
    lines = [("figure", "system", "metric", "geometric mean of B/A")]
    for (figure, system, metric, unit), group in grouped(pairs).items():
        lines.append((figure, system or "-", f"{metric} ({unit})", mean_text(group)))
    return "\n".join(aligned(lines))


def described(letter: str, path: Path, rows: Sequence[Row]) -> str:
    """One line about a set: where it is, what it was measured on and with."""
    names = ("hardware", "device", "scale", "timer", "commit")
    values = [", ".join(sorted({getattr(row, name) for row in rows} - {""})) or "-" for name in names]
    facts = "; ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
    return f"{letter} = {path} ({len(rows)} rows; {facts})"


def write_csv(path: Path, pairs: Sequence[Pair]) -> None:
    """The pairs as CSV, one line each, with the columns `COLUMNS`.

    Raises `ConfigError` rather than write over a file that is no table of ratios, `RowsError` where it cannot write.
    """
    if path.is_dir() or (path.exists() and path.read_bytes()[: len(HEADER)] != HEADER):
        raise ConfigError(f"out={path} is there and is no table of ratios: choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for pair in pairs:
                key = [getattr(pair.a, name) for name in KEY]
                values = [pair.a.unit, pair.a.timer, pair.b.timer, pair.a.value, pair.b.value, pair.ratio, pair.better]
                writer.writerow(["" if cell is None else cell for cell in (*key, *values)])
    except OSError as error:
        raise RowsError(f"cannot write out={path} ({error.strerror}): choose another file") from None


def compare(a: str, b: str, out: str | None = None) -> None:
    """Join, print, write."""
    chosen = {"a": Path(a), "b": Path(b)}
    sides = {key: load(key, path) for key, path in chosen.items()}
    pairs = join(sides["a"], sides["b"])
    if out is not None:
        write_csv(Path(out), pairs)
    print("\n".join(described(key.upper(), chosen[key], rows) for key, rows in sides.items()))
    scales = {row.scale for rows in sides.values() for row in rows}
    if "smoke" in scales and len(scales) > 1:
        print("note: rows of scale=smoke have other shapes than the rest, their ratios mean nothing")
    matched = {key: len({id(getattr(pair, key)) for pair in pairs}) for key in sides}
    alone = ", ".join(f"{len(rows) - matched[key]} in {key}" for key, rows in sides.items())
    print(f"{len(pairs)} pairs; without a partner: {alone}\n")
    print(table(pairs), means(pairs), sep="\n\n")


if __name__ == "__main__":
    with_options("compare", __doc__ or "", "commands.compare", Options, lambda given: compare(**vars(given)))
