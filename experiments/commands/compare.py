"""Two sets of rows side by side: my kernel, or my GPU, against the recorded one.

    make compare A=results/h200 B=outputs/h200/rows
    python -m experiments.commands.compare a=results/h200/fig08_lora_operator.csv b=outputs/h200/rows out=ratios.csv

`a` and `b` are files of rows, or folders of them. Of each point the repeats that count are merged, as in figures and
claims (`experiments.harness.counted`). Points meet when figure, panel, system, workload, model, batch_size, seq_len,
rank, metric and statistic (medians and single values) are equal, and the timer where both sides have a common one.
Every pair is printed with the ratio B / A and what it means, then the geometric mean of the ratios per figure, system
and metric. `out=` writes the pairs as CSV too.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.harness.command import with_options
from experiments.harness.counted import POINT, counted, frame_of, merged
from experiments.harness.schema import ConfigError, Settings
from experiments.measure.records import TIMERS, RowsError, read_rows
from experiments.plots.frames import distinct
from experiments.report.machines import rows_files

KEY = [*POINT, "statistic"]
COLUMNS = [*KEY, "unit", "timer_a", "timer_b", "a", "b", "ratio", "better"]
GROUP = ["figure", "system", "metric", "unit", "better"]
SHOWN = {
    "panel": "panel", "workload": "workload", "model": "model", "batch_size": "batch", "seq_len": "len", "rank": "rank",
    "statistic": "statistic", "timer": "timer", "a": "A", "b": "B", "ratio": "B/A", "verdict": "",
}  # fmt: skip
"""Column -> its head in the printed table."""


class Options(Settings):
    """The command line."""

    a: str  # a file of rows, or a folder of them
    b: str  # the same
    out: str | None = None  # file.csv that receives the pairs


def direction(unit: str) -> str:
    """Which values of `unit` are better: `lower` (times, bytes), `higher` (anything per second), or empty."""
    if unit in ("s", "ms", "us", "ns") or unit.startswith("byte"):
        return "lower"
    return "higher" if unit.endswith("/s") else ""


def load(argument: str, path: Path) -> pd.DataFrame:
    """Points at `path`, repeats merged: a file of rows, a folder of them, or the folder above `rows/`.

    Raises `ConfigError` when there is nothing, `RowsError` (file, line, remedy) when a file is damaged.
    """
    if not path.exists():
        example = f"{argument}=results/h200"
        raise ConfigError(f"{argument}={path} does not exist: give a file of rows or a folder, for example {example}")
    if path.is_file() and path.suffix != ".csv":
        raise ConfigError(f"{argument}={path} is no .csv file of rows, as in outputs/<hardware>/rows: give such a file")
    files = (rows_files(path) or rows_files(path / "rows")) if path.is_dir() else [path]
    rows = frame_of(row for file in files for row in read_rows(file) if row.statistic in ("median", "value"))
    rows = merged(counted(rows, clock=None))
    if rows.empty:
        raise ConfigError(f"{argument}={path} holds no rows: measure some with make reproduce, or give another folder")
    return rows


def join(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Points of equal `KEY`, in the order of `a`: columns `COLUMNS`, and the row numbers `row_a` and `row_b`.

    One pair per timer that both sides have; without one, the preferred timer of each. `ratio` is B / A, missing where
    it says nothing: a value that is zero, negative or not finite. Raises `ConfigError` when there are no pairs or their
    units differ.
    """
    whole = dict.fromkeys(("batch_size", "seq_len", "rank", "gpu"), "Int64") | {"t_s": "Float64"}
    ours, theirs = (side[[*KEY, "unit", "timer", "value"]].astype(whole).assign(row=side.index) for side in (a, b))
    both = ours.merge(theirs, on=KEY, suffixes=("_a", "_b")).rename(columns={"value_a": "a", "value_b": "b"})
    if both.empty:
        raise ConfigError(f"a and b have no row in common: a has {content(a)}; b has {content(b)}")
    both["place"] = both.groupby(KEY, sort=False, dropna=False).ngroup()
    same = both["timer_a"] == both["timer_b"]
    order = {timer: place for place, timer in enumerate(TIMERS)}
    apart = both[~same.groupby(both["place"]).transform("any")]
    apart = apart.sort_values(["timer_a", "timer_b"], key=lambda timers: timers.map(order), kind="stable")
    pairs = pd.concat([both[same], apart.drop_duplicates("place")]).sort_values("place", kind="stable")
    for pair in pairs[pairs["unit_a"] != pairs["unit_b"]].itertuples():
        units = f"is in {pair.unit_a} in a and in {pair.unit_b} in b"
        raise ConfigError(f"{pair.metric} of figure {pair.figure} {units}: measure one of them again")
    fine = (pairs[["a", "b"]].gt(0) & pairs[["a", "b"]].lt(np.inf)).all(axis=1)
    ratio, better = (pairs["b"] / pairs["a"]).where(fine), pairs["unit_a"].map(direction)
    return pairs.assign(unit=pairs["unit_a"], ratio=ratio, better=better)[[*COLUMNS, "row_a", "row_b"]]


def content(rows: pd.DataFrame) -> str:
    """List figures, systems and models of a set, for messages."""
    found = {name: distinct(rows, name) for name in ("figure", "system", "model")}
    shown = {name: ", ".join(values[:6]) + (", ..." if len(values) > 6 else "") for name, values in found.items()}
    return "; ".join(f"{name} {text or '-'}" for name, text in shown.items())


def meaning(ratio: float, better: str) -> str:
    """Word the ratio B / A: `B 1.25x better`, `B 1.10x worse`, `same` within half a percent, or nothing."""
    if np.isnan(ratio) or not better:
        return ""
    if abs(ratio - 1) < 0.005:
        return "same"
    gain = ratio if better == "higher" else 1 / ratio
    return f"B {gain:.2f}x better" if gain > 1 else f"B {1 / gain:.2f}x worse"


def lines(pairs: pd.DataFrame) -> Iterator[str]:
    """Yield every pair, grouped by figure, system and metric, each group closed by its mean; then all means."""
    group: tuple[Any, ...]
    means = []
    for group, part in pairs.groupby(GROUP, sort=False):
        figure, system, metric, unit, better = group
        yield f"\nfigure {figure}, {system or '-'}, {metric} ({unit}{f', {better} is better' if better else ''})"
        yield from (f"  {line}" for line in cells(part).splitlines())
        yield f"  geometric mean of B/A: {mean_text(part)}"
        means.append((figure, system or "-", f"{metric} ({unit})", mean_text(part)))
    head = ["figure", "system", "metric", "geometric mean of B/A"]
    yield "\n" + pd.DataFrame(means, columns=head).to_string(index=False)


def cells(pairs: pd.DataFrame) -> str:
    """Return the columns `SHOWN` as an aligned table; one without any text is left out."""
    timer = pairs["timer_a"].where(pairs["timer_a"] == pairs["timer_b"], pairs["timer_a"] + " / " + pairs["timer_b"])
    verdicts = [meaning(ratio, better) for ratio, better in zip(pairs["ratio"], pairs["better"], strict=True)]
    text = pairs.assign(timer=timer, verdict=verdicts)
    text[["a", "b"]] = text[["a", "b"]].map("{:.4g}".format)
    text["ratio"] = text["ratio"].map("{:.3f}".format).replace("nan", "-")
    text = text[list(SHOWN)].astype("string").fillna("")
    shown = {name: head for name, head in SHOWN.items() if any(text[name])}
    return text[list(shown)].rename(columns=shown).to_string(index=False)


def mean_text(pairs: pd.DataFrame) -> str:
    """Geometric mean of the ratios, how many they are, and what it means."""
    ratios = pairs["ratio"].dropna()
    if ratios.empty:
        return "no row has a ratio"
    mean = statistics.geometric_mean(ratios)
    verdict = meaning(mean, pairs["better"].iloc[0])
    return f"{mean:.3f} over {len(ratios)} of {len(pairs)} rows" + (f", {verdict}" if verdict else "")


def write_csv(path: Path, pairs: pd.DataFrame) -> None:
    """The pairs as CSV, one line each, with the columns `COLUMNS`.

    Raises `ConfigError` rather than write over a file that is no table of ratios, `RowsError` where it cannot write.
    """
    header = ",".join(COLUMNS).encode()
    if path.is_dir() or (path.exists() and path.read_bytes()[: len(header)] != header):
        raise ConfigError(f"out={path} is there and is no table of ratios: choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs[COLUMNS].to_csv(path, index=False, lineterminator="\n")
    except OSError as error:
        raise RowsError(f"cannot write out={path} ({error.strerror}): choose another file") from None


def compare(a: str, b: str, out: str | None = None) -> None:
    """Join, print, write."""
    sets = {"a": load("a", Path(a)), "b": load("b", Path(b))}
    pairs = join(*sets.values())
    if out is not None:
        write_csv(Path(out), pairs)
    for (letter, rows), path in zip(sets.items(), (a, b), strict=True):
        names = ("hardware", "device", "scale", "timer", "commit")
        facts = "; ".join(f"{name} {', '.join(distinct(rows, name)) or '-'}" for name in names)
        print(f"{letter.upper()} = {Path(path)} ({len(rows)} points; {facts})")
    scales = {scale for rows in sets.values() for scale in rows["scale"]}
    if "smoke" in scales and len(scales) > 1:
        print("note: rows of scale=smoke have other shapes than the rest, their ratios mean nothing")
    alone = [f"{len(rows) - pairs[f'row_{letter}'].nunique()} in {letter}" for letter, rows in sets.items()]
    print(f"{len(pairs)} pairs; without a partner: {', '.join(alone)}", *lines(pairs), sep="\n")


if __name__ == "__main__":
    with_options("compare", __doc__ or "", "commands.compare", Options, lambda given: compare(**vars(given)))
