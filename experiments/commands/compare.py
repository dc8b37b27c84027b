"""Two sets of rows side by side: my kernel, or my GPU, against the recorded one.

    make compare A=results/h200 B=outputs/h200/rows
    python -m experiments.commands.compare a=results/h200/fig08_lora_operator.csv b=outputs/h200/rows

`a` and `b` are files of rows, or folders of them. Of each point the repeats that count are merged, as in figures and
claims (`experiments.harness.counted`). Points meet when figure, panel, system, workload, model, batch_size, seq_len,
rank, metric, timer and statistic (medians and single values) are equal. Every pair is printed with the ratio B / A and
what it means, then the geometric mean of the ratios per figure, system and metric.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.facts.systems import SECONDS
from experiments.harness.command import with_options
from experiments.harness.counted import POINT, counted, frame_of, merged
from experiments.harness.schema import ConfigError, Settings
from experiments.measure.records import read_rows
from experiments.plots.frames import distinct
from experiments.report.machines import rows_files

KEY = [*POINT, "statistic", "timer"]
COLUMNS = [*KEY, "unit", "a", "b", "ratio"]
GROUP = ["figure", "system", "metric", "unit"]


class Options(Settings):
    a: str  # a file of rows, or a folder of them
    b: str  # the same


def compare(a: str, b: str) -> None:
    sets = {"a": load("a", Path(a)), "b": load("b", Path(b))}
    pairs = join(*sets.values())
    for (letter, rows), path in zip(sets.items(), (a, b), strict=True):
        names = ("hardware", "device", "scale", "timer", "commit")
        facts = "; ".join(f"{name} {', '.join(distinct(rows, name)) or '-'}" for name in names)
        print(f"{letter.upper()} = {Path(path)} ({len(rows)} points; {facts})")
    scales = {scale for rows in sets.values() for scale in rows["scale"]}
    if "smoke" in scales and len(scales) > 1:
        print("note: rows of scale=smoke have other shapes than the rest, their ratios mean nothing")
    alone = [f"{len(rows) - len(pairs)} in {letter}" for letter, rows in sets.items()]
    print(f"{len(pairs)} pairs; without a partner: {', '.join(alone)}", *lines(pairs), sep="\n")


def load(argument: str, path: Path) -> pd.DataFrame:
    """Points at `path`, repeats merged: a file of rows, a folder, or the folder above `rows/`; errors name the file."""
    if not path.exists() or (path.is_file() and path.suffix != ".csv"):
        problem = "is no .csv file of rows" if path.exists() else "does not exist"
        raise ConfigError(f"{argument}={path} {problem}: give one, or a folder, for example {argument}=results/h200")
    files = (rows_files(path) or rows_files(path / "rows")) if path.is_dir() else [path]
    rows = frame_of(row for file in files for row in read_rows(file) if row.statistic in ("median", "value"))
    if rows.empty:
        raise ConfigError(f"{argument}={path} holds no rows: measure some with make reproduce, or give another folder")
    return merged(counted(rows, clock=None))


def join(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Points of equal `KEY`, in the order of `a`; `ratio` is B / A, missing where it says nothing.
    `ConfigError` without pairs, or where units differ.
    """
    whole = dict.fromkeys(("batch_size", "seq_len", "rank", "gpu"), "Int64") | {"t_s": "Float64"}
    pairs = a.astype(whole).merge(b.astype(whole)[[*KEY, "unit", "value"]], on=KEY, suffixes=("", "_b"))
    pairs = pairs.rename(columns={"value": "a", "value_b": "b"})
    if pairs.empty:
        raise ConfigError(f"a and b have no row in common: a has {content(a)}; b has {content(b)}")
    for pair in pairs[pairs["unit"] != pairs["unit_b"]].itertuples():
        units = f"is in {pair.unit} in a and in {pair.unit_b} in b"
        raise ConfigError(f"{pair.metric} of figure {pair.figure} {units}: measure one of them again")
    fine = (pairs[["a", "b"]].gt(0) & pairs[["a", "b"]].lt(np.inf)).all(axis=1)
    return pairs.assign(ratio=(pairs["b"] / pairs["a"]).where(fine))[COLUMNS]


def content(rows: pd.DataFrame) -> str:
    found = {name: distinct(rows, name)[:6] for name in ("figure", "system", "model", "timer")}
    return "; ".join(f"{name} {', '.join(values) or '-'}" for name, values in found.items())


def meaning(ratio: float, unit: str) -> str:
    """Word the ratio B / A of times, bytes and rates: `B 1.25x better`, `same` within half a percent; else nothing."""
    is_rate = unit.endswith("/s")
    if np.isnan(ratio) or not (is_rate or unit in SECONDS or unit.startswith("byte")):
        return ""
    if abs(ratio - 1) < 0.005:
        return "same"
    gain = ratio if is_rate else 1 / ratio
    return f"B {gain:.2f}x better" if gain > 1 else f"B {1 / gain:.2f}x worse"


def lines(pairs: pd.DataFrame) -> Iterator[str]:
    """Yield every pair, grouped by figure, system and metric; then the means of all groups."""
    meanings = [meaning(*one) for one in zip(pairs["ratio"], pairs["unit"], strict=True)]
    shown, means = pairs.assign(meaning=meanings).replace("", None), []
    for group, part in pairs.groupby(GROUP, sort=False):
        table = shown.loc[part.index].drop(columns=GROUP).dropna(axis=1, how="all")
        yield f"\nfigure {', '.join(map(str, group))}"
        yield table.to_string(index=False, na_rep="-", float_format="{:.4g}".format)
        means.append((*group, mean_text(part)))
    yield "\n" + pd.DataFrame(means, columns=[*GROUP, "geometric mean of B/A"]).to_string(index=False)


def mean_text(pairs: pd.DataFrame) -> str:
    """Geometric mean of the ratios, how many they are, and what it means."""
    ratios = pairs["ratio"].dropna()
    if ratios.empty:
        return "no row has a ratio"
    mean = statistics.geometric_mean(ratios)
    verdict = meaning(mean, pairs["unit"].iloc[0])
    return f"{mean:.3f} over {len(ratios)} of {len(pairs)} rows" + (f", {verdict}" if verdict else "")


if __name__ == "__main__":
    with_options("compare", __doc__ or "", "commands.compare", Options, lambda given: compare(**vars(given)))
