"""Numbers of README.md, written from rows, each between ``<!-- measured:NAME -->`` and ``<!-- /measured -->``."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.claims import CLAIMS, NotMeasured, Verdict
from experiments.claims.judge import NOT_MEASURED
from experiments.claims.rows import Rows, markdown
from experiments.claims.table import marked, total
from experiments.facts.paper import paper_rows
from experiments.report.machines import Machine, columns
from experiments.report.major import MAJOR
from experiments.report.results import older_share, said
from punica.measure.records import RowsError

MARKED = re.compile(r"(<!-- measured:([\w-]+) -->).*?(<!-- /measured -->)", re.DOTALL)
Machines = Mapping[str, Machine]
GPU, CPU = "h200", "cpu"


def fill(text: str, machines: Machines, path: Path) -> str:
    """Return the ``text`` of ``path`` with every marker filled.

    `RowsError` names file and marker where no function fills it, or recorded rows that it needs are missing.
    """

    def one(match: re.Match[str]) -> str:
        marker = f"{path}: the marker measured:{match[2]}"
        if match[2] not in VALUES:
            raise RowsError(f"{marker} is filled by no function: choose one of {', '.join(sorted(VALUES))}")
        try:
            return match[1] + VALUES[match[2]](machines) + match[3]
        except KeyError as missing:
            text = f"{marker} needs recorded rows for {missing}, and there are none"
            raise RowsError(f"{text}: measure and record them (make reproduce, make record), or take it out") from None

    return MARKED.sub(one, text)


def write_readme(machines: Sequence[Machine], path: Path) -> Path:
    """Fill the markers of ``path``; `RowsError`, as `fill` raises it, before it is written."""
    filled = fill(path.read_text(encoding="utf-8"), {machine.name: machine for machine in machines}, path)
    path.write_text(filled, encoding="utf-8")
    return path


def recorded(machines: Machines) -> str:
    """Build a table of the verdicts on each machine, under each of its clocks."""
    lines = []
    for name, verdicts in columns(list(machines.values())).items():
        page = f"docs/results-{name.partition(',')[0]}.md"
        lines.append([name, total(verdicts), f"[{page}]({page})"])
    return "\n".join(["\n", *markdown(("recorded on", "verdicts", "results"), lines), "\n"])


def claims(machines: Machines) -> str:
    """Build a table of `MAJOR` on the GPU, of what only a simulation answers on the CPU; a line of a cell per claim."""
    by_id = {name: {one.id: one for one in machines[name].verdicts} for name in (GPU, CPU)}
    theirs, lines = Rows(paper_rows(machines[GPU].paper)), []
    for one in MAJOR:
        where = GPU if any(by_id[GPU][id].verdict != NOT_MEASURED for id in one.claims) else CPU
        found = [(by_id[where][id], name) for id, name in one.shown_of.items()]
        cells = [[f"{verdict.id} {name.replace('_', ' ')}", _paper(verdict.id, name, theirs), _ours(verdict, name),
                  marked(verdict)] for verdict, name in map(_shown, found)]  # fmt: skip
        page = f"[{where}](docs/results-{where}.md#claims-that-carry-the-paper)"
        lines.append([one.text, *("<br>".join(column) for column in zip(*cells, strict=True)), page])
    head = ("the paper says", "claim", "paper", "ours", "verdict", "rows, figures")
    return "\n".join(["\n", *markdown(head, lines), "\n"])


def _paper(id: str, name: str, theirs: Rows) -> str:
    try:
        return said(CLAIMS[id](theirs).quantities[name])
    except (NotMeasured, KeyError):
        return "-"


def _shown(found: tuple[Verdict, str]) -> tuple[Verdict, str]:
    """Return a verdict and the quantity that is shown, the first it has where it has not the chosen one."""
    verdict, name = found
    known = _numbers(verdict.quantities)
    return verdict, name if name in known else next(iter(known), name)


def _ours(verdict: Verdict, name: str) -> str:
    known = _numbers(verdict.quantities)
    return said(float(known[name])) if name in known else "-"


def _numbers(text: str) -> dict[str, str]:
    """Map quantities to values or intervals in the text of a verdict."""
    return dict(part.split("=", 1) for part in text.split("; ") if part)


def speedup(machines: Machines, name: str) -> str:
    """Return a speed-up of C30, its interval where that is known."""
    verdict = next(one for one in machines[GPU].verdicts if one.id == "C30")
    values, intervals = _numbers(verdict.quantities), _numbers(verdict.interval)
    return intervals.get(name) or said(float(values[name]))


def older_rows(machines: Machines) -> str:
    """Count rows that were measured by other code than is here now, by machine."""
    return ", ".join(f"{older_share(machine.rows)} on {name}" for name, machine in machines.items())


VALUES: dict[str, Callable[[Machines], str]] = {
    "machines": recorded,
    "claims": claims,
    "older-rows": older_rows,
    "speedup-7b": lambda machines: speedup(machines, "7B Distinct"),
    "speedup-13b": lambda machines: speedup(machines, "13B Distinct"),
}
