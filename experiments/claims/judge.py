"""Verdicts: our value of every claim against its bounds."""

from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import Bound, described, holds_all, read_bounds
from experiments.claims.finding import CLAIMS, Finding
from experiments.claims.paper import Statement, read_claims
from experiments.claims.rows import NotTestable, Rows
from punica.measure.records import COLUMNS

REPRODUCED, SHAPE, DIFFERS = "reproduced", "shape holds", "differs"
NOT_TESTABLE = "not testable on this hardware"
VERDICTS = (REPRODUCED, SHAPE, DIFFERS, NOT_TESTABLE)


@dataclass(frozen=True)
class Verdict:
    """One claim, judged. ``quantities`` are the numbers that the bounds apply to; ``reason`` is what was missing;
    ``older_source`` are the claim's figures whose rows were measured by other code than is here now.
    """

    id: str
    statement: str
    figure: str
    paper_value: str
    our_value: str
    unit: str
    relation_tested: str
    shape_tested: str
    verdict: str
    reason: str
    quantities: str
    kind: str
    hardware: str
    older_source: str = ""


def judge(rows: pd.DataFrame, folder: str | Path) -> list[Verdict]:
    """A verdict for each claim in ``folder`` (``paper_results``), C01 first, from ``rows`` of one hardware.

    ``rows`` has the columns of `punica.measure.records.Row`, and perhaps ``older`` (see `Verdict.older_source`).
    ValueError when a column is missing or when rows of several machines are mixed.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise ValueError(f"rows miss the columns {', '.join(missing)}; read them with punica.measure.records.read_rows")
    machines = sorted(set(rows["hardware"]))
    if len(machines) > 1:
        raise ValueError(f"rows of {', '.join(machines)} are mixed; judge one hardware at a time")
    bounds = read_bounds(folder)
    chosen = Rows(rows)
    hardware = machines[0] if machines else ""
    return [judge_claim(statement, bounds.get(statement.id), chosen, hardware) for statement in read_claims(folder)]


def judge_claim(statement: Statement, bounds: dict[str, list[Bound]] | None, rows: Rows, hardware: str) -> Verdict:
    """The verdict on one claim; ``bounds`` are its bounds by test (`read_bounds`), None when it has none yet."""
    finding, reason = _finding(statement, rows)
    relation = shape = None
    if finding is not None and bounds is not None:
        relation, shape = (holds_all(bounds[test], finding.quantities) for test in ("relation", "shape"))
        if not relation and shape is None:
            reason = _missing(bounds["shape"], finding)
    quantities = finding.quantities if finding else {}
    return Verdict(
        id=statement.id,
        statement=statement.statement,
        figure=statement.figure,
        paper_value=statement.expected_value,
        our_value=finding.text if finding else "",
        unit=statement.unit,
        relation_tested=described(bounds["relation"]) if bounds else "",
        shape_tested=described(bounds["shape"]) if bounds else "",
        verdict=decide(relation, shape),
        reason=reason,
        quantities="; ".join(f"{name}={value:.6g}" for name, value in quantities.items()),
        kind=finding.kind if finding else "",
        hardware=hardware,
        older_source=", ".join(rows.older(statement.figure.split(", "))),
    )


def decide(relation: bool | None, shape: bool | None) -> str:
    """The verdict from its two tests; None means that a test could not be applied."""
    if relation:
        return REPRODUCED
    if shape:
        return SHAPE
    return NOT_TESTABLE if shape is None else DIFFERS


def _finding(statement: Statement, rows: Rows) -> tuple[Finding | None, str]:
    function = CLAIMS.get(statement.id)
    if function is None:
        return None, f"no rows of {_place(statement.figure)} yet"
    try:
        return function(rows), ""
    except NotTestable as reason:
        return None, str(reason)


def _place(figure: str) -> str:
    return f"section {figure.removeprefix('text ')} of the text" if figure.startswith("text") else f"figure {figure}"


def _missing(bounds: list[Bound], finding: Finding) -> str:
    absent = sorted({bound.quantity for bound in bounds if bound.quantity not in finding.quantities})
    return f"the rows do not give {', '.join(absent)}"


def as_frame(verdicts: list[Verdict]) -> pd.DataFrame:
    """One line per claim, the columns of `Verdict`."""
    return pd.DataFrame([asdict(verdict) for verdict in verdicts])


def counts(verdicts: list[Verdict]) -> dict[str, int]:
    """How many claims got each verdict, in the order of `VERDICTS`."""
    return {name: sum(verdict.verdict == name for verdict in verdicts) for name in VERDICTS}
