"""The page of one machine (docs/results-<hardware>.md, or claims.md of fresh rows), and claims.csv beside the rows,
with systems, figures, findings, simulations, trials; rows of other code are judged, counted and named.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from experiments.claims import as_frame
from experiments.claims.fig11 import Serving
from experiments.claims.judge import certainty, disturbance, total, verdict_table
from experiments.claims.predictions import prediction_table, predictions, rules_table
from experiments.claims.rows import NotMeasured, Rows, markdown
from experiments.facts.paper import as_rows, read_figure
from experiments.facts.systems import STAND_INS, SYSTEMS, name_of
from experiments.harness.catalogue import experiments
from experiments.measure.records import Row, ensure_writable, read_rows
from experiments.plots.frames import distinct
from experiments.report.findings import Found, find, sought
from experiments.report.machines import OPERATOR_TABLES, TRIALS, VERDICTS, Machine, older_share, said
from experiments.report.major import MAJOR, in_order
from experiments.report.reproducing import GENERATED, title_of
from experiments.workload.popularity import PAPER_WORKLOADS

SIMULATED = (
    "Simulated, not measured: a virtual clock around the cluster's scheduling policy; steps take what a cost model "
    "says. Nothing was fitted to what it is compared with here, but the simulator's constant for steps with a prompt "
    "came in while p99 was compared (commit 88b0140)."
)
MANY = 5
"""Figures of older rows, above which they are not named where all rows are older."""
FOUND = ("what", "middle", "least", "largest", "points")
MARKS = (
    "† rests on points that other work disturbed, ‡ on points of a single run. § is judged by the "
    "other clock, as the one that decides has none that count."
)
MIDDLE = "Middle: the geometric mean of a ratio (a / b), else the median; points: how many it is taken over."
NO_TRIALS = 'No trials are recorded on this machine: `make reliability ARGS="--out results"`.'
COUNTS = ("tried", "injected", "survived", "lost")
"""Metrics of each trial (`tests/reliability`)."""
Table = tuple[Sequence[str], list[list[str]]]
"""Head and lines."""


def write_results(machine: Machine, target: Path, tables: Path) -> Path:
    """Write the page of ``machine`` to ``target``, and its verdicts into the folder ``tables``."""
    for folder in (target.parent, tables):
        ensure_writable(folder)
    as_frame(machine.verdicts).to_csv(tables / VERDICTS, index=False, lineterminator="\n")
    places = {"rows": machine.folder, "figures": machine.figures}
    if OPERATOR_TABLES in set(machine.rows["figure"]):
        places["operators beside public kernels"] = machine.folder / "operator_tables.md"
    links = ", ".join(f"[{name}]({_relative(path, target)})" for name, path in places.items())
    parts = [
        GENERATED, f"# Results: {machine.name}", "", measured_on(machine.rows), "", f"Where: {links}.", "",
        "## Claims", "", f"* {machine.name}: {total(machine.verdicts)}.", *(f"* {note}" for note in notes(machine)), "",
        MARKS, "",
    ]  # fmt: skip
    carried, verdicts = sum(len(one.claims) for one in MAJOR), in_order(machine.verdicts)
    for title, chosen in (("that carry the paper", verdicts[:carried]), ("behind them", verdicts[carried:])):
        parts += [f"### Claims {title}", "", *verdict_table(chosen), ""]
    for title, table in serving_tables(machine):
        parts += [f"## {title}", "", *markdown(*table), ""]
    trials = trials_table(machine.folder)
    parts += [*_simulations(machine.rows, machine.paper), *_figures(machine, target), "## Reliability", ""]
    parts += [*(markdown(*trials) if trials else [NO_TRIALS]), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def _relative(path: Path, target: Path) -> str:
    return Path(os.path.relpath(path, target.parent)).as_posix()


def notes(machine: Machine) -> list[str]:
    said = certainty(machine.verdicts), older_note(machine.rows), disturbance(machine.rows)
    return [*([f"Measured by others: {machine.whose}"] if machine.whose else []), *filter(None, said)]


def older_note(rows: pd.DataFrame) -> str:
    """A line about the rows that were measured by other code than is here now; empty without any."""
    older = rows[rows["older"].astype(bool)]
    if older.empty:
        return ""
    unnamed = int(older["source_hash"].fillna("").eq("").sum())
    silent = f", {unnamed:,} of which do not say what source they are of" if unnamed else ""
    names = list(dict.fromkeys(older["figure"]))
    figures = "all figures" if len(older) == len(rows) and len(names) > MANY else f"figure {', '.join(names)}"
    told = "Rows of older source when this was written, to be measured again (make reproduce)"
    return f"{told}: {older_share(rows)}{silent}; {figures}."


def measured_on(rows: pd.DataFrame) -> str:
    """Return a sentence on device, settings, versions, commits and dates of ``rows``."""
    if rows.empty:
        return "No rows were measured; only arithmetic and replays are judged."
    names = ("device", "hardware", "scale", "timer", "torch", "triton", "driver", "transformers", "peft", "commit")
    told, dates = {name: ", ".join(distinct(rows, name)) or "-" for name in names}, distinct(rows, "date")
    parts = [f"Measured on {told['device']} (hardware `{told['hardware']}`), scale {told['scale']}"]
    parts += [", ".join(f"{name} {told[name]}" for name in ("timer", "torch", "triton", "driver"))]
    parts += [f"{name} {told[name]}" for name in ("transformers", "peft") if told[name] != "-"]
    parts += [f"commit {told['commit']}" + (f", {dates[0]} to {dates[-1]}" if dates else "")]
    plays = [f"`{model}` plays the paper's {role}" for model, role in STAND_INS.items() if model in set(rows["model"])]
    return "; ".join([*parts, *plays]) + "."


def serving_tables(machine: Machine) -> Iterator[tuple[str, Table]]:
    """Yield a title and a table for each model served: token/s by system and popularity, the paper's in brackets."""
    for role, figure in (("7B", "11"), ("13B", "11"), ("70B", "12")):
        try:
            cell = Serving(machine.chosen, role)
        except NotMeasured:
            continue
        published = Serving(Rows(as_rows(read_figure(machine.paper, figure))), role)
        lines = [
            [name_of(system), *(
                (said(cell.get(system, name), 4) if cell.has(system, name) else "-")
                + (f" ({said(published.get(system, name), 4)})" if published.has(system, name) else "")
                for name in PAPER_WORKLOADS
            )]
            for system in SYSTEMS.names() if cell.has(system)
        ]  # fmt: skip
        title = f"Figure {figure}: token/s of {cell.measured_model} (in brackets: the paper's {role} on A100)"
        yield title, (("system", *PAPER_WORKLOADS), lines)


def _figures(machine: Machine, target: Path) -> Iterator[str]:
    """Yield the lines of figures, of what was found in each experiment, and of those that were not measured."""
    found = {name: table for name, _, table in findings(machine)}
    measured = set(machine.rows["figure"])
    yield from ("## Figures and findings", "", MIDDLE, "")
    for name, title in {one.name: title_of(one) for one in experiments()}.items():
        picture = machine.figures / f"{name}.png"
        if picture.exists() or name in found:
            yield from (f"### {title}", "", f"`{name}`", "")
            yield from (f"![{title}]({_relative(picture, target)})", "") if picture.exists() else ()
            yield from (*markdown(*found[name]), "") if name in found else ()
    missing = [f"`{one.name}`" for one in experiments() if one.figure not in measured]
    yield from (f"* Not measured on this machine: {', '.join(missing)}.", "") if missing else ()


def findings(machine: Machine) -> Iterator[tuple[str, str, Table]]:
    for experiment in experiments():
        if found := find(sought().get(experiment.name, []), machine.chosen):
            yield experiment.name, title_of(experiment), (FOUND, [*map(_line, found)])


def _line(found: Found) -> list[str]:
    ends = [said(found.least), said(found.most)] if found.points > 1 else ["", ""]
    unit = "" if found.unit in ("", "ratio", "share", "fraction") else f" {found.unit}"
    return [found.what, f"{said(found.middle)}{unit}{found.marks}", *ends, str(found.points)]


def _simulations(rows: pd.DataFrame, paper: Path) -> Iterator[str]:
    if found := predictions(rows, paper):
        yield from ("## Predicted and published", "", SIMULATED, "", *prediction_table(found), "")
    if table := rules_table(rows):
        yield from ("## Other scheduling rules, simulated", "", *table, "")


def trials_table(folder: Path) -> Table | None:
    """Head and a line for each trial of reliability in a folder; None without; RowsError where they are damaged."""
    if not (file := folder / TRIALS).exists():
        return None
    runs: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in read_rows(file):
        runs.setdefault((*row.point, row.repeat), {})[row.metric] = row
    lines = []
    for values in runs.values():
        first = next(iter(values.values()))
        measured = [f"{name.replace('_', ' ')} {said(row.value)}{'' if row.unit == 'count' else f' {row.unit}'}"
                    for name, row in values.items() if name not in COUNTS]  # fmt: skip
        counted = [f"{values[name].value:,.0f}" for name in COUNTS]
        commit = f"{first.commit}, {first.date[:10]}"
        device = "cpu" if first.hardware == "cpu" else "cuda"
        options = f"-k test_{first.system} --size {first.scale} --seed {first.repeat} --device {device}"
        told = ["; ".join(measured) or "-", commit, f'`make reliability ARGS="{options}"`']
        lines.append([f"{first.panel}: {first.system}", *counted, *told])
    return ("trial", *COUNTS, "measured", "commit, date", "command"), lines
