"""Verdicts: our value of every claim against its bounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import Bound, Interval, Outcome, described, missed_bounds, outcome_of, read_bounds
from experiments.claims.evidence import intervals, rests_on
from experiments.claims.finding import CLAIMS, SIMULATED, WHYS, Finding
from experiments.facts.paper import Statement, read_claims
from experiments.claims.rows import NotMeasured, NotTestable, NoVerdict, Rows
from experiments.claims.unjudged import command, impossible, scripts_of
from punica.measure.records import COLUMNS

REPRODUCED, SHAPE, NOISE, DIFFERS = "reproduced", "shape holds", "within noise", "differs"
ARITHMETIC = "holds by arithmetic"
SIMULATED_TOO, SIMULATED_SHAPE = "reproduced in simulation", "shape holds in simulation"
NOT_MEASURED, NOT_TESTABLE = "not measured here", "not testable on this hardware"
NOT_IMPLEMENTED = "not implemented"
DECIDED = (REPRODUCED, SHAPE, DIFFERS)
JUDGED = (*DECIDED, NOISE)
"""Verdicts on measurements."""
VERDICTS = (
    REPRODUCED, SHAPE, NOISE, DIFFERS, ARITHMETIC, SIMULATED_TOO, SIMULATED_SHAPE, NOT_MEASURED, NOT_TESTABLE,
    NOT_IMPLEMENTED,
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One claim, judged. ``quantities`` are the numbers that the bounds apply to and ``interval`` those of them whose
    interval is known; ``why`` says what makes our value differ, and what a simulation misses whose shape alone holds;
    ``disturbed`` whether it rests on disturbed points and ``once`` whether on points that were measured once, whose
    interval nobody knows; ``reason`` is what was missing and ``command`` what would measure it; ``older_source`` are
    the claim's figures whose rows were measured by other code than is here now.
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
    why: str
    reason: str
    command: str
    quantities: str
    interval: str
    disturbed: bool
    once: bool
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
    said: dict[str, str | bool] = {
        "id": statement.id,
        "statement": statement.statement,
        "figure": statement.figure,
        "paper_value": statement.expected_value,
        "unit": statement.unit,
        "relation_tested": described(bounds["relation"]) if bounds else "",
        "shape_tested": described(bounds["shape"]) if bounds else "",
        "hardware": hardware,
        "older_source": ", ".join(rows.older(statement.figure.split(", "))),
    }
    try:
        if bounds is None or statement.id not in CLAIMS:
            raise NotMeasured(f"nothing here computes {_place(statement.figure)}")
        rows.asked.clear()
        finding = CLAIMS[statement.id](rows)
    except NoVerdict as reason:
        return Verdict(**{**_EMPTY, **said, **_unjudged(statement, hardware, reason)})  # type: ignore[arg-type]
    return Verdict(**{**_EMPTY, **said, **_judged(statement, bounds, finding, rows, hardware)})  # type: ignore[arg-type]


_EMPTY: Mapping[str, str | bool] = dict.fromkeys(
    ("our_value", "why", "reason", "command", "quantities", "interval", "kind"), ""
) | {"disturbed": False, "once": False}


def _unjudged(statement: Statement, hardware: str, reason: NoVerdict) -> dict[str, str]:
    if statement.id not in CLAIMS:
        return {"verdict": NOT_IMPLEMENTED, "reason": str(reason)}
    if not scripts_of(statement):
        return {"verdict": NOT_IMPLEMENTED, "reason": f"no script measures {_place(statement.figure)}"}
    why_not = str(reason) if isinstance(reason, NotTestable) else impossible(statement, hardware)
    if why_not:
        return {"verdict": NOT_TESTABLE, "reason": why_not}
    return {"verdict": NOT_MEASURED, "reason": str(reason), "command": command(statement, hardware)}


def _judged(
    statement: Statement, bounds: Mapping[str, list[Bound]], finding: Finding, rows: Rows, hardware: str
) -> dict[str, str | bool]:
    function, figures = CLAIMS[statement.id], set(rows.asked)
    known: dict[str, Interval] = {}
    disturbed = once = False
    if finding.kind != SIMULATED:
        known = intervals(function, rows, finding, figures)
        disturbed, once = (rests_on(function, rows, finding, figures, what) for what in ("disturbed", "once"))
    relation, shape = (
        outcome_of(bounds[test], finding.quantities, known, hardware, finding.models) for test in ("relation", "shape")
    )
    verdict = decide(relation, shape)
    if finding.kind == SIMULATED and verdict in (REPRODUCED, SHAPE):
        exact = SIMULATED_TOO if verdict == REPRODUCED else SIMULATED_SHAPE
        verdict = exact if finding.cost_model else ARITHMETIC
    unmeasured = verdict == NOT_MEASURED
    return {
        "our_value": finding.text + (f" (steps: {finding.cost_model})" if finding.cost_model else ""),
        "verdict": verdict,
        "why": _said(verdict, statement, bounds, finding, rows, hardware),
        "reason": _missing(bounds["shape"], finding) if unmeasured else "",
        "command": command(statement, hardware) if unmeasured else "",
        "quantities": "; ".join(f"{name}={value:.6g}" for name, value in finding.quantities.items()),
        "interval": "; ".join(f"{name}={low:.4g} to {high:.4g}" for name, (low, high) in known.items()),
        "disturbed": disturbed,
        "once": once,
        "kind": finding.kind,
    }


def _said(
    verdict: str, statement: Statement, bounds: Mapping[str, list[Bound]], finding: Finding, rows: Rows, hardware: str
) -> str:
    """Why it differs; of a simulation whose shape alone holds also which bounds of the paper it misses."""
    if verdict == SIMULATED_SHAPE:
        missed = missed_bounds(bounds["relation"], finding.quantities, hardware, finding.models)
        return "; ".join(part for part in (missed, _why(statement, rows)) if part)
    return _why(statement, rows) if verdict == DIFFERS else ""


def _why(statement: Statement, rows: Rows) -> str:
    try:
        return WHYS[statement.id](rows) if statement.id in WHYS else "the arithmetic does not come out"
    except NoVerdict as missing:
        return f"these rows do not say ({missing})"


def decide(relation: Outcome, shape: Outcome) -> str:
    """The verdict from its two tests: both must hold to be reproduced, and a failed shape test always differs."""
    if shape is Outcome.FAILS:
        return DIFFERS
    if shape is Outcome.MISSING:
        return NOT_MEASURED
    if Outcome.NOISE in (shape, relation):
        return NOISE
    return REPRODUCED if relation is Outcome.HOLDS else SHAPE


def _place(figure: str) -> str:
    return f"section {figure.removeprefix('text ')} of the text" if figure.startswith("text") else f"figure {figure}"


def _missing(bounds: list[Bound], finding: Finding) -> str:
    absent = sorted({bound.quantity for bound in bounds if bound.quantity not in finding.quantities})
    return f"the rows do not give {', '.join(absent)}"


def as_frame(verdicts: list[Verdict]) -> pd.DataFrame:
    """One line per claim, the columns of `Verdict`."""
    return pd.DataFrame([asdict(verdict) for verdict in verdicts])


def counts(verdicts: list[Verdict]) -> dict[str, int]:
    """How many claims got each verdict, in the order of `VERDICTS`; together they are all claims."""
    return {name: sum(verdict.verdict == name for verdict in verdicts) for name in VERDICTS}
