"""The last lines of `make reproduce`, for the person who waited: what the rows show, and where to look."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims import Verdict
from experiments.claims.judge import DIFFERS, VERDICTS, counts
from experiments.claims.table import noise
from experiments.report.machines import Machine, columns

WIDTH, STATEMENT, MOST_REASONS = 118, 58, 14
"""Characters of a line, and of a claim in it; reasons that are printed, so that all fits on one screen."""


def ending(here: Machine, others: Sequence[Machine], files: Sequence[Path]) -> list[str]:
    """Return the lines; ``files`` are the tables and, last, the page."""
    page, table = files[-1], files[0]
    lines = ["", *_counts(columns([here, *others])), ""]
    lines += [*_reasons(here.verdicts, table), noise(here.verdicts, here.rows, here.stability), ""]
    return [*lines, f"Look at   {page}", f"figures   {here.figures}", f"tables    {table}"]


def _counts(sides: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Return a table of verdicts, a column per machine; verdicts that none has are left out."""
    found = {name: counts(list(verdicts)) for name, verdicts in sides.items()}
    rows = [name for name in VERDICTS if any(one[name] for one in found.values())]
    first = max(map(len, ["claims of the paper", *rows]))
    head = "  ".join([f"{'claims of the paper':<{first}}", *found])
    cells = [[f"{one[row] or '-':>{len(name)}}" for name, one in found.items()] for row in rows]
    return [head, *("  ".join([f"{row:<{first}}", *line]) for row, line in zip(rows, cells, strict=True))]


def _reasons(verdicts: Sequence[Verdict], table: Path) -> list[str]:
    """Return a line for each verdict that differs: its claim, and why."""
    differing = [verdict for verdict in verdicts if verdict.verdict == DIFFERS]
    if not differing:
        return []
    said = [_reason(verdict) for verdict in differing]
    left = len(said) - MOST_REASONS
    more = [f"  and {left} more, in {table}"] if left > 0 else []
    return [f"Differs here ({len(said)}), and why:", *(f"  {line}" for line in said[:MOST_REASONS]), *more, ""]


def _reason(verdict: Verdict) -> str:
    """Return the claim and the last clause of why it differs, which draws the conclusion, in a line."""
    clause = verdict.why.rpartition(": ")[2]
    claim = textwrap.shorten(verdict.statement, STATEMENT, placeholder="...")
    return textwrap.shorten(f"{verdict.id} {claim}: {clause}", WIDTH - 2, placeholder=" ...")
