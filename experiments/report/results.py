"""The page of one machine (docs/results-<hardware>.md, or claims.md of fresh rows), and claims.csv beside the rows.

It has every claim with value, interval, bounds and reason, the serving systems, figures, what extensions found,
simulations beside what was published, and trials of reliability. Rows that other code measured than is here now are
judged too, counted, and named in `older_source` of `claims.csv`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict, as_frame
from experiments.claims.asked import asked, asked_table
from experiments.claims.fig11 import Serving, ranks_table
from experiments.claims.fig13 import runners_table
from experiments.claims.judge import NOT_MEASURED
from experiments.claims.placement import placement_verdicts
from experiments.claims.predictions import prediction_table, predictions, remains, residual_table, sensitivity
from experiments.claims.rows import NotMeasured, Rows, markdown
from experiments.claims.table import certainty, disturbance, steadiness, total, verdict_table
from experiments.facts.models import STAND_INS
from experiments.facts.paper import as_rows, read_figure
from experiments.facts.systems import SYSTEMS, name_of
from experiments.harness.catalogue import experiments
from experiments.measure.records import Row, ensure_writable, read_rows
from experiments.plots.frames import distinct
from experiments.reliability.rows import COUNTS, command_of, rows_file
from experiments.report.findings import Found, find, public_kernels, sought
from experiments.report.machines import AUTO, OTHER_TIMER, Machine, columns, file_name
from experiments.report.major import MAJOR, in_order
from experiments.report.reproducing import GENERATED, title_of
from experiments.workload.popularity import PAPER_WORKLOADS

COMPARED = "88b0140"
"""The commit that gave steps with a prompt a constant of their own in `punica.cluster`."""
MANY = 5
"""Figures of older rows, above which they are not named where all rows are older."""
FOUND = ("what", "middle", "least", "largest", "points")
MARKS = (
    "† rests on points that other work disturbed, ‡ on points of a single run. § is judged by the "
    "other clock, as the one that decides has none that count."
)
MIDDLE = "Middle: the geometric mean of a ratio (a / b), else the median; points: how many it is taken over."
NO_TRIALS = "No trials are recorded on this machine: `make reliability`, then `make reliability ARGS=record=true`."
Table = tuple[Sequence[str], list[list[str]]]


def write_results(machine: Machine, target: Path, tables: Path) -> Path:
    """Write the page of ``machine`` to ``target`` and its verdicts, a file per clock, into the folder ``tables``."""
    for folder in (target.parent, tables):
        ensure_writable(folder)
    for timer, verdicts in machine.clocks.items():
        as_frame(list(verdicts)).to_csv(tables / f"{file_name(timer)}.csv", index=False, lineterminator="\n")
    link = {name: f"[{name}]({_relative(path, target)})"
            for name, path in (("rows", machine.folder), ("figures", machine.figures))}  # fmt: skip
    parts = [GENERATED, f"# Results: {machine.name}", "", measured_on(machine.rows), "",
             f"Where: {', '.join(link.values())}.", "", "## Claims", "", *_counts(machine), "", MARKS, ""]  # fmt: skip
    carried, verdicts = sum(len(one.claims) for one in MAJOR), in_order(machine.verdicts)
    for title, chosen in (("that carry the paper", verdicts[:carried]), ("behind them", verdicts[carried:])):
        parts += [f"### Claims {title}", "", *verdict_table(chosen, machine.figures, target.parent), ""]
    for title, table in serving_tables(machine):
        parts += [f"## {title}", "", *markdown(*table), ""]
    parts += [*_simulations(machine.rows, machine.paper), *_figures(machine, target), "## Reliability", ""]
    trials = trials_table(machine.folder)
    parts += [*(markdown(*trials) if trials else [NO_TRIALS]), ""]
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def _relative(path: Path, target: Path) -> str:
    return Path(os.path.relpath(path, target.parent)).as_posix()


def _counts(machine: Machine) -> list[str]:
    """Count verdicts under each clock, name those that the clock decides, and add the notes."""
    lines = [f"* {name}: {total(verdicts)}." for name, verdicts in columns([machine]).items()]
    if OTHER_TIMER in machine.clocks:
        both = zip(machine.clocks[AUTO], machine.clocks[OTHER_TIMER], strict=True)
        turned = [f"{one.id} ({one.verdict}, {other.verdict})" for one, other in both
                  if one.verdict != other.verdict and NOT_MEASURED not in (one.verdict, other.verdict)]  # fmt: skip
        lines.append(f"* Decided by the clock (the paper's, in CUDA graphs): {', '.join(turned) or 'none'}.")
    return [*lines, *(f"* {note}" for note in notes(machine.verdicts, machine.rows))]


def notes(verdicts: Sequence[Verdict], rows: pd.DataFrame) -> list[str]:
    """Return the notes on ``verdicts`` and the ``rows`` they rest on, a line each."""
    return [note for note in (certainty(verdicts), older_note(rows), disturbance(rows), steadiness(verdicts)) if note]


def older_note(rows: pd.DataFrame) -> str:
    """A line about the rows that were measured by other code than is here now; empty without any."""
    older = rows[rows["older"].astype(bool)]
    if older.empty:
        return ""
    unnamed = int((older["source_hash"].fillna("") == "").sum())
    silent = f", {unnamed:,} of which do not say what source they are of" if unnamed else ""
    names = list(dict.fromkeys(older["figure"]))
    figures = "all figures" if len(older) == len(rows) and len(names) > MANY else f"figure {', '.join(names)}"
    return f"Rows of older source, to be measured again (make reproduce): {older_share(rows)}{silent}; {figures}."


def older_share(rows: pd.DataFrame) -> str:
    """Return the number of rows that were measured by other code than is here now, and their share."""
    older = int(rows["older"].astype(bool).sum())
    return f"{older:,} of {len(rows):,} ({100 * older / len(rows):.1f} %)"


def measured_on(rows: pd.DataFrame) -> str:
    """Return a sentence on device, settings, versions, commits and dates of ``rows``."""
    if rows.empty:
        return "No rows were measured; only arithmetic and replays are judged."
    names = ("device", "hardware", "scale", "timer", "torch", "triton", "driver", "transformers", "peft", "commit")
    said = {name: ", ".join(distinct(rows, name)) or "-" for name in names}
    dates = distinct(rows, "date")
    parts = [f"Measured on {said['device']} (hardware `{said['hardware']}`), scale {said['scale']}"]
    parts += [", ".join(f"{name} {said[name]}" for name in ("timer", "torch", "triton", "driver"))]
    parts += [f"{name} {said[name]}" for name in ("transformers", "peft") if said[name] != "-"]
    parts += [f"commit {said['commit']}" + (f", {dates[0]} to {dates[-1]}" if dates else "")]
    plays = [f"`{model}` plays the paper's {role}" for model, role in STAND_INS.items() if model in set(rows["model"])]
    return "; ".join([*parts, *plays]) + "."


def serving_tables(machine: Machine) -> Iterator[tuple[str, Table]]:
    """Yield a title and a table for each model served: token/s by system and popularity, the paper's in brackets."""
    theirs = {figure: Rows(as_rows(read_figure(machine.paper, figure))) for figure in ("11", "12")}
    for role, figure in (("7B", "11"), ("13B", "11"), ("70B", "12")):
        try:
            cell = Serving(machine.chosen, role)
        except NotMeasured:
            continue
        published, lines = Serving(theirs[figure], role), []
        for system in filter(cell.has, SYSTEMS.names()):
            ours = cell.throughput(system)
            known = published.throughput(system) if published.has(system) else ours.iloc[:0]
            own = [said(ours[name], 4) if name in ours else "-" for name in PAPER_WORKLOADS]
            beside = [f" ({said(known[name], 4)})" if name in known else "" for name in PAPER_WORKLOADS]
            lines.append([name_of(system), *(a + b for a, b in zip(own, beside, strict=True))])
        title = f"Figure {figure}: token/s of {cell.measured_model} (in brackets: the paper's {role} on A100)"
        yield title, (("system", *PAPER_WORKLOADS), lines)


def _figures(machine: Machine, target: Path) -> Iterator[str]:
    """Yield the lines of figures, of what was found in each experiment, and of those that were not measured."""
    found = {name: table for name, _, table in findings(machine)}
    measured = set(machine.rows["figure"])
    yield from ("## Figures and findings", "", MIDDLE, "")
    for name, title in {**{one.name: title_of(one) for one in experiments()}, KERNELS: KERNELS_TITLE}.items():
        picture = machine.figures / f"{name}.png"
        if picture.exists() or name in found:
            yield from (f"### {title}", "", f"`{name}`", "")
            yield from (f"![{title}]({_relative(picture, target)})", "") if picture.exists() else ()
            yield from (*markdown(*found[name]), "") if name in found else ()
    missing = [f"`{one.name}`" for one in experiments() if one.figure not in measured]
    yield from (f"* Not measured on this machine: {', '.join(missing)}.", "") if missing else ()


KERNELS, KERNELS_TITLE = "ext_operator_tables", "Operators and the fastest public kernels"


def findings(machine: Machine) -> Iterable[tuple[str, str, Table]]:
    """Yield name, title and table of each experiment that something was found in."""
    for experiment in experiments():
        if found := find(sought().get(experiment.name, []), machine.chosen):
            yield experiment.name, title_of(experiment), (FOUND, [*map(_line, found)])
    if found := public_kernels(machine.chosen):
        yield KERNELS, KERNELS_TITLE, (FOUND, [*map(_line, found)])


def _line(found: Found) -> list[str]:
    ends = [said(found.least), said(found.most)] if found.points > 1 else ["", ""]
    unit = "" if found.unit in ("", "ratio", "share") else f" {found.unit}"
    return [found.what, f"{said(found.middle)}{unit}{found.marks}", *ends, str(found.points)]


def said(value: float, digits: int = 3) -> str:
    """Write ``value`` with so many significant digits, whole numbers of more digits in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _simulations(rows: pd.DataFrame, paper: Path) -> Iterator[str]:
    """Yield the sections on what the engine was asked, on ranks and on simulations, of those that have rows."""
    sections = {
        "Asked of an H200": (
            "Ratios of rows of the same machine; `runs` is their span over repeats, each of which is another draw of "
            "windows. Bounds are of an H200; a machine without a GPU has none.",
            asked_table(found) if (found := asked(rows)) else [],
        ),
        "Figure 12 at every number of ranks": (
            "Asked of 70B on data-centre GPUs; on a CPU, where a toy model is cut, the numbers say only that it works.",
            ranks_table(rows),
        ),
        "Predicted and published": predicted(rows, paper),
        "Figure 13 on runners": (
            "The hour compressed in time, on fewer runners than the paper's 16 GPUs, so these are no verdicts. The "
            "bounds are those of the claims' shape. C50 needs one GPU alone at these lengths, which is not measured.",
            runners_table(rows, paper),
        ),
        "Other scheduling rules, simulated": ("", [f"* {one}" for one in placement_verdicts(rows)]),
    }
    for title, (intro, lines) in sections.items():
        if lines:
            yield from (f"## {title}", "", *([intro, ""] if intro else []), *lines, "")


def predicted(rows: pd.DataFrame, paper: Path) -> tuple[str, list[str]]:
    """Return an introduction and the tables of simulated predictions and of their cost models; empty without rows."""
    found = predictions(rows, paper)
    if not found:
        return "", []
    intro = ["Simulated, not measured: a virtual clock around the cluster's scheduling policy; steps take what a cost "
             "model says."]  # fmt: skip
    if not all(one.panel for one in found):
        intro.append("Nothing was fitted to what it is compared with here, but the simulator's constant for steps with "
                     f"a prompt came in while p99 was compared (commit {COMPARED}).")  # fmt: skip
    if any(one.panel for one in found):
        intro.append("The simulator of the rows on Ray was fitted to steps of its runners in a rehearsal.")
    lines = prediction_table(found)
    lines += [line for one in (remains(found), sensitivity(rows, paper)) if one for line in ("", one)]
    if residuals := residual_table(rows):
        lines += ["", "What the cost models were fitted to, and how far they are from it:", "", *residuals]
    return " ".join(intro), lines


def trials_table(folder: Path) -> Table | None:
    """Return head and a line for each trial of reliability, size and seed in a folder of rows; None without such rows.

    RowsError names file, line and remedy where they are damaged.
    """
    if not (file := rows_file(folder)).exists():
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
        told = ["; ".join(measured) or "-", commit, f"`{command_of(first)}`"]
        lines.append([f"{first.panel}: {first.system}", *counted, *told])
    return ("trial", *COUNTS, "measured", "commit, date", "command"), lines
