"""docs/results-<hardware>.md: claims, serving systems, and what each extension found, as tables of one machine."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.claims import Verdict
from experiments.claims.disaggregated import disaggregated_verdicts
from experiments.claims.fig11 import Serving
from experiments.claims.placement import placement_verdicts
from experiments.claims.rows import NotMeasured, Rows, markdown
from experiments.claims.table import marked, total
from experiments.facts.paper import as_rows, read_figure
from experiments.facts.systems import SYSTEMS, name_of
from experiments.harness.catalogue import experiments
from experiments.harness.experiment import Experiment
from experiments.report.findings import Found, find
from experiments.report.machines import Machine, columns, file_name
from experiments.report.runs import settings
from experiments.report.sought import SOUGHT, public_kernels
from experiments.report.verdicts import measured_on, notes
from punica.workload.popularity import PAPER_WORKLOADS

GENERATED = "<!-- written by: make report ARGS=source=recorded -->"
HEAD = ("claim", "statement", "paper", "ours")
FOUND = ("what", "middle", "least", "largest", "points")
LEGEND = (
    "† rests on points that other work disturbed, ‡ on points of a single run. § is judged by the "
    "other clock, as the one that decides has none that count."
)
MIDDLE = (
    "Middle: the geometric mean of a ratio (a / b), else the median; points: how many it is taken over. † rests on "
    "disturbed points, ‡ on points of a single run."
)
Table = tuple[Sequence[str], list[list[str]]]


def write_results(machine: Machine, paper: Path, target: Path) -> Path:
    """Write the results of ``machine`` to the file ``target``; ``paper`` is ``paper_results``."""

    def link(path: Path, name: str) -> str:
        return f"[{name}]({Path(os.path.relpath(path, target.parent)).as_posix()})"

    def picture(name: str, title: str) -> list[str]:
        file = machine.figures / f"{name}.png"
        return [f"!{link(file, title)}", ""] if file.exists() else []

    tables = [link(machine.folder / f"{file_name(timer)}.md", file_name(timer)) for timer in machine.clocks]
    where = f"{link(machine.folder, 'Rows')}, {link(machine.figures, 'figures')}, with reasons: {', '.join(tables)}"
    parts = [GENERATED, f"# Results: {machine.name}", "", measured_on(machine.rows), "", where, "", "## Claims", ""]
    parts += [f"* {name}: {total(verdicts)}." for name, verdicts in columns([machine]).items()]
    parts += [f"* {note}" for note in notes(machine.verdicts, machine.rows, machine.stability)]
    parts += ["", *markdown(*claims_table(machine)), ""]
    for title, table in serving_tables(machine, paper):
        parts += [f"## {title}", "", *markdown(*table), ""]
    found = list(findings(machine))
    others = [(one.name, title_of(one)) for one in experiments() if one.name not in [name for name, *_ in found]]
    shown = [
        line
        for name, title in others
        if (image := picture(name, title))
        for line in (f"### {title}", "", f"`{name}`", "", *image)
    ]
    parts += ["## Figures", "", *shown] if shown else []
    parts += ["## What extensions and other systems found", "", MIDDLE, ""]
    for name, title, table in found:
        parts += [f"### {title}", "", f"`{name}`", "", *picture(name, title), *markdown(*table), ""]
    parts += _unmeasured(machine)
    simulated = {"Where a request goes": placement_verdicts, "LoRA servers": disaggregated_verdicts}
    for title, verdicts_of in simulated.items():
        if said := verdicts_of(machine.rows):
            parts += ["", f"### {title}, simulated", "", *(f"* {sentence}" for sentence in said)]
    parts.append("")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def claims_table(machine: Machine) -> Table:
    """Return head and lines: claim, paper, ours and the verdict under each clock."""
    clocks = columns([machine])
    verdicts = ["verdict", *(f"verdict, {name.partition(', ')[2]}" for name in list(clocks)[1:])]
    lines = []
    for same in zip(*clocks.values(), strict=True):
        first: Verdict = same[0]
        ours = first.our_value or first.reason or "-"
        lines.append([first.id, first.statement, first.paper_value, ours, *map(marked, same)])
    return [*HEAD, *verdicts], lines


def serving_tables(machine: Machine, paper: Path) -> Iterable[tuple[str, Table]]:
    """Yield a title and a table for each model served: token/s by system and popularity, the paper's in brackets."""
    theirs = {figure: Rows(as_rows(read_figure(paper, figure))) for figure in ("11", "12")}
    for role in ("7B", "13B", "70B"):
        figure = "12" if role == "70B" else "11"
        try:
            cell = Serving(machine.chosen, role)
        except NotMeasured:
            continue
        published = Serving(theirs[figure], role)
        lines = []
        for system in filter(cell.has, SYSTEMS.names()):
            values = cell.throughput(system)
            known = published.throughput(system) if published.has(system) else values.iloc[:0]
            cells = [_beside(values.get(name), known.get(name)) for name in PAPER_WORKLOADS]
            lines.append([name_of(system), *cells])
        title = f"Figure {figure}: token/s of {cell.measured_model} (in brackets: the paper's {role} on A100)"
        yield title, (("system", *PAPER_WORKLOADS), lines)


def _beside(ours: float | None, theirs: float | None) -> str:
    mine = "-" if ours is None else f"{ours:,.4g}" if ours < 1000 else f"{ours:,.0f}"
    return mine if theirs is None else f"{mine} ({theirs:,.4g})" if theirs < 1000 else f"{mine} ({theirs:,.0f})"


def findings(machine: Machine) -> Iterable[tuple[str, str, Table]]:
    """Yield name, title and table of each experiment that something was found in."""
    for experiment in experiments():
        if found := find(SOUGHT.get(experiment.name, ()), machine.chosen):
            yield experiment.name, title_of(experiment), (FOUND, [*map(_line, found)])
    if found := public_kernels(machine.chosen):
        yield "ext_operator_tables", "Operators and the fastest public kernels", (FOUND, [*map(_line, found)])


def title_of(experiment: Experiment) -> str:
    """Return the title of a figure, with its place in the paper where it has one."""
    title = str(settings(experiment.name).title)
    figure = experiment.figure
    place = f"Figure {figure}" if figure.isdigit() else figure.replace("text", "Section").replace("README", "README,")
    return title if figure.startswith("ext") else f"{place.partition(',')[0]}: {title}"


def _line(found: Found) -> list[str]:
    ends = [said(found.least), said(found.most)] if found.points > 1 else ["", ""]
    return [found.what, with_unit(found), *ends, str(found.points)]


def with_unit(found: Found) -> str:
    """Write the middle of ``found`` with its unit and marks."""
    unit = "" if found.unit in ("", "ratio", "share") else f" {found.unit}"
    return f"{said(found.middle)}{unit}{found.marks}"


def said(value: float) -> str:
    """Write ``value`` with three significant digits, whole numbers of more digits in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _unmeasured(machine: Machine) -> list[str]:
    """Name the experiments that have no rows here."""
    known = set(machine.rows["figure"])
    missing = [f"`{experiment.name}`" for experiment in experiments() if experiment.figure not in known]
    return [f"* Not measured on this machine: {', '.join(missing)}."] if missing else []
