"""Numbers of README.md, written from rows, each between ``<!-- measured:NAME -->`` and ``<!-- /measured -->``."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.claims import CLAIMS, NotMeasured
from experiments.claims.judge import NOT_MEASURED
from experiments.claims.rows import Rows, markdown
from experiments.claims.table import marked, total
from experiments.facts.paper import paper_rows
from experiments.measure.records import RowsError
from experiments.report.machines import Machine
from experiments.report.major import MAJOR
from experiments.report.results import older_share, said

MARKED = re.compile(r"(<!-- measured:([\w-]+) -->).*?(<!-- /measured -->)", re.DOTALL)
Machines = Mapping[str, Machine]
GPU, CPU = "h200", "cpu"


def write_readme(machines: Sequence[Machine], path: Path) -> Path:
    """Fill the markers of ``path``.

    `RowsError` names file and marker where no function fills it, or recorded rows that it needs are missing; the file
    is not written then.
    """
    known = {machine.name: machine for machine in machines}

    def filled(match: re.Match[str]) -> str:
        marker = f"{path}: the marker measured:{match[2]}"
        if match[2] not in VALUES:
            raise RowsError(f"{marker} is filled by no function: choose one of {', '.join(sorted(VALUES))}")
        try:
            return match[1] + VALUES[match[2]](known) + match[3]
        except KeyError as missing:
            raise RowsError(f"{marker} needs recorded rows for {missing}: measure and record them") from None

    path.write_text(MARKED.sub(filled, path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def recorded(machines: Machines) -> str:
    """Build a table of the verdicts on each machine."""
    pages = {name: f"docs/results-{name}.md" for name in machines}
    lines = [[name, total(one.verdicts), f"[{pages[name]}]({pages[name]})"] for name, one in machines.items()]
    return "\n".join(["\n", *markdown(("recorded on", "verdicts", "results"), lines), "\n"])


def claims(machines: Machines) -> str:
    """Build a table of `MAJOR` on the GPU, of what only a simulation answers on the CPU; a line of a cell per claim."""
    by_id = {name: {one.id: one for one in machines[name].verdicts} for name in (GPU, CPU)}
    theirs, lines = Rows(paper_rows(machines[GPU].paper)), []
    for one in MAJOR:
        where = GPU if any(by_id[GPU][id].verdict != NOT_MEASURED for id in one.claims) else CPU
        cells = []
        for id, chosen in one.shown_of.items():
            ours = by_id[where][id].quantities
            name = chosen if chosen in ours else next(iter(ours), chosen)
            value = said(ours[name]) if name in ours else "-"
            cells.append([f"{id} {name.replace('_', ' ')}", _paper(id, name, theirs), value, marked(by_id[where][id])])
        page = f"[{where}](docs/results-{where}.md#claims-that-carry-the-paper)"
        lines.append([one.text, *("<br>".join(column) for column in zip(*cells, strict=True)), page])
    head = ("the paper says", "claim", "paper", "ours", "verdict", "rows, figures")
    return "\n".join(["\n", *markdown(head, lines), "\n"])


def _paper(id: str, name: str, theirs: Rows) -> str:
    try:
        return said(CLAIMS[id](theirs).quantities[name])
    except (NotMeasured, KeyError):
        return "-"


def speedup(machines: Machines, name: str) -> str:
    """Return a speed-up of C30, its interval where that is known."""
    verdict = next(one for one in machines[GPU].verdicts if one.id == "C30")
    if name in verdict.interval:
        return "{:.4g} to {:.4g}".format(*verdict.interval[name])
    return said(verdict.quantities[name])


VALUES: dict[str, Callable[[Machines], str]] = {
    "machines": recorded,
    "claims": claims,
    "older-rows": lambda machines: ", ".join(f"{older_share(one.rows)} on {name}" for name, one in machines.items()),
    "speedup-7b": lambda machines: speedup(machines, "7B Distinct"),
    "speedup-13b": lambda machines: speedup(machines, "13B Distinct"),
}
