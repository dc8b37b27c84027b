"""The verdict table for people: one claim per line, and where several machines were measured one column for each."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims.judge import VERDICTS, Verdict, counts

COLUMNS = ("claim", "statement", "paper", "ours", "tested", "verdict", "why it differs", "figure")
DISTURBED, ONCE = "\u2020", "\u2021"
"""After a verdict that rests on disturbed points, and on points of a single run."""


def total(verdicts: Sequence[Verdict]) -> str:
    """How many claims got each verdict that occurs, e.g. ``9 reproduced, 3 shape holds, ... (52 claims)``."""
    found = counts(list(verdicts))
    said = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
    return f"{said} ({sum(found.values())} claims)"


def verdict_table(verdicts: Sequence[Verdict], figures: Path, target: Path) -> list[str]:
    """Lines of Markdown; links to pictures in ``figures`` are relative to ``target``."""
    return [*_head(COLUMNS), *(_line(verdict, figures, target) for verdict in verdicts)]


def machine_table(machines: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Lines of Markdown: each claim's verdict on each of ``machines`` (name -> verdicts on the same claims)."""
    lines = _head(("claim", "statement", *machines))
    for same in zip(*machines.values(), strict=True):
        lines.append(_row([same[0].id, same[0].statement, *(_marked(verdict) for verdict in same)]))
    found = [counts(list(verdicts)) for verdicts in machines.values()]
    for name in VERDICTS:
        if any(one[name] for one in found):
            lines.append(_row(["", f"**{name}**", *(str(one[name]) for one in found)]))
    return lines


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), "| --- " * len(names) + "|"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _marked(verdict: Verdict) -> str:
    return verdict.verdict + (DISTURBED if verdict.disturbed else "") + (ONCE if verdict.once else "")


def _line(verdict: Verdict, figures: Path, target: Path) -> str:
    ours = verdict.our_value + (" *(simulated)*" if verdict.kind == "simulated" else "")
    interval = f"interval {verdict.interval}" if verdict.interval else ""
    how = f"`{verdict.command}`" if verdict.command else ""
    ours = "; ".join(part for part in (ours, interval, verdict.reason, how) if part)
    tests = [("paper", verdict.relation_tested), ("shape", verdict.shape_tested)]
    tested = "; ".join(f"{name}: {bounds}" for name, bounds in tests if bounds)
    judged = f"**{_marked(verdict)}**"
    about = [verdict.id, verdict.statement, verdict.paper_value, ours, tested, judged, verdict.why or "-"]
    return _row([*about, _links(verdict.figure, figures, target)])


def _links(figure: str, figures: Path, target: Path) -> str:
    """Links to the pictures of a claim's figures, e.g. of ``8, README`` or ``text 5.2``; a dash when there is none."""
    found = []
    for name in figure.split(", "):
        section = name.removeprefix("text ").replace(".", "")
        prefix = f"fig{int(name):02d}_" if name.isdigit() else f"sec{section}_" if section != name else name.lower()
        found += [(name, path) for path in sorted(figures.glob("*.png")) if path.name.startswith(prefix)]
    links = [f"[{name}]({Path(os.path.relpath(path, target)).as_posix()})" for name, path in found]
    return ", ".join(links) or "-"
