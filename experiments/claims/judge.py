"""Verdicts: our value of every claim against its bounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.claims.bounds import Bound, Interval, Outcome, described, missed_bounds, outcome_of, read_bounds
from experiments.claims.evidence import Evidence
from experiments.claims.finding import CLAIMS, MEASURED, SIMULATED, Finding, intervals, rests_on
from experiments.claims.rows import NotMeasured, Rows
from experiments.facts.models import MODELS
from experiments.facts.paper import Statement, read_claims
from experiments.harness.catalogue import experiments
from experiments.harness.clocks import HOST, NOT_STEADY
from punica.measure.records import COLUMNS

REPRODUCED, SHAPE, NOISE, DIFFERS = "reproduced", "shape holds", "within noise", "differs"
ARITHMETIC = "holds by arithmetic"
SIMULATED_TOO, SIMULATED_SHAPE = "reproduced in simulation", "shape holds in simulation"
NOT_MEASURED, NOT_TESTABLE = "not measured here", "not testable on this hardware"
NOT_IMPLEMENTED = "not implemented"
DECIDED = (REPRODUCED, SHAPE, DIFFERS)
JUDGED = (*DECIDED, NOISE)
"""Verdicts on measurements."""
HOLDS = (REPRODUCED, SHAPE, ARITHMETIC, SIMULATED_TOO, SIMULATED_SHAPE)
"""Verdicts on claims that hold, by measurement, arithmetic or simulation."""
VERDICTS = (
    REPRODUCED, SHAPE, NOISE, DIFFERS, ARITHMETIC, SIMULATED_TOO, SIMULATED_SHAPE, NOT_MEASURED, NOT_TESTABLE,
    NOT_IMPLEMENTED,
)  # fmt: skip
EDGE = 0.02
"""Relative distance from a bound below which a verdict says that it is at the edge."""
MEASURED_IN = {"abstract": "11", "text 7.2": "11", "README": "README backbone-vs-sgmv"}
"""Place in the paper that is no figure of ours -> the figure whose rows answer it."""
LAPTOP = "laptop"
"""Scale on a CPU."""
SHOWN_WITH = {"C46": ("C48", "C50")}
"""Claims that no table shows alone: these count the same hour otherwise, and are further from the paper."""
ROLES = {"C27": "13B", "C38": "70B", "C39": "70B", "C40": "70B"}
"""Claims about a model that is not the paper's 7B."""


@dataclass(frozen=True)
class Verdict:
    """One claim, judged.

    Attributes:
        quantities: numbers that the bounds apply to. `interval`: those of them whose interval is known.
        why: the mechanism that makes our value differ, as far as known; of a simulation whose shape alone holds also
            what it misses. `remark`: bounds close by, or missed by the median of a value within noise.
        clock: clock of an operator's rows. `clock_missing`: the one that decides, where none of its rows count.
            `other_clock`: verdict and value by the other one.
        disturbed: it rests on disturbed points. `once`: on points measured once, whose interval is unknown.
        reason: what was missing. `command`: what would measure it.
        older_source: the claim's figures whose rows other code than today's measured.
    """

    id: str
    statement: str
    figure: str
    paper_value: str
    our_value: str = ""
    unit: str = ""
    relation_tested: str = ""
    shape_tested: str = ""
    verdict: str = ""
    why: str = ""
    remark: str = ""
    clock: str = ""
    clock_missing: str = ""
    other_clock: str = ""
    reason: str = ""
    command: str = ""
    quantities: str = ""
    interval: str = ""
    disturbed: bool = False
    once: bool = False
    kind: str = ""
    hardware: str = ""
    older_source: str = ""


def judge(rows: pd.DataFrame, folder: str | Path, clock: str = "") -> list[Verdict]:
    """Judge each claim in ``folder`` (``paper_results``), C01 first, from ``rows`` of one hardware.

    ``rows`` has the columns of `punica.measure.records.Row`, and perhaps ``older`` (see `Verdict.older_source`).
    ``clock`` decides all claims on operators; empty: each claim's own does.
    ValueError when a column is missing or when rows of several machines are mixed.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise ValueError(f"rows miss the columns {', '.join(missing)}; read them with punica.measure.records.read_rows")
    machines = sorted(set(rows["hardware"]))
    if len(machines) > 1:
        raise ValueError(f"rows of {', '.join(machines)} are mixed; judge one hardware at a time")
    bounds, evidence = read_bounds(folder), Evidence(rows, folder, clock)
    return [judge_claim(statement, bounds.get(statement.id), evidence) for statement in read_claims(folder)]


def judge_claim(statement: Statement, bounds: dict[str, list[Bound]] | None, evidence: Evidence) -> Verdict:
    """Judge one claim by the clock that decides it; ``bounds``: by test (`read_bounds`), None when it has none yet."""
    clock, other = evidence.clock(statement.id), evidence.other_clock(statement.id)
    verdict = _by_clock(statement, bounds, evidence, clock)
    if verdict.clock and clock not in verdict.clock and verdict.verdict != NOT_TESTABLE:
        noisy = clock == HOST and not evidence.unsteady.isdisjoint(statement.figure.split(", "))
        missing = NOT_STEADY if noisy else f"there are no rows of {clock}, which decides (measure with timer={clock})"
        remark = "; ".join(filter(None, (verdict.remark, f"judged by {verdict.clock}: {missing}")))
        verdict = replace(verdict, remark=remark, clock_missing=clock)
    if not other or verdict.kind != MEASURED or evidence.rows(other) is evidence.rows(clock):
        return verdict
    beside = _by_clock(statement, bounds, evidence, other)
    if beside.clock == verdict.clock:
        return verdict
    return replace(verdict, other_clock=f"by {beside.clock}: {beside.verdict}, {beside.our_value}")


def _by_clock(
    statement: Statement, bounds: dict[str, list[Bound]] | None, evidence: Evidence, clock: str
) -> Verdict:
    rows, hardware = evidence.rows(clock), evidence.hardware
    open_claim = Verdict(
        statement.id, statement.statement, statement.figure, statement.expected_value, unit=statement.unit,
        relation_tested=described(bounds["relation"]) if bounds else "",
        shape_tested=described(bounds["shape"]) if bounds else "", hardware=hardware,
        older_source=", ".join(rows.older(statement.figure.split(", "))),
    )  # fmt: skip
    rows.asked.clear()
    try:
        if bounds is None or statement.id not in CLAIMS:
            raise NotMeasured(f"nothing here computes {_place(statement.figure)}")
        finding = CLAIMS[statement.id](rows)
        if clock and any(HOST in rows.timers(figure) for figure in rows.asked & evidence.unsteady):
            raise NotMeasured(NOT_STEADY)
    except NotMeasured as reason:
        return replace(open_claim, **_unjudged(statement, evidence, reason, rows))
    timers = {timer for figure in rows.asked for timer in rows.timers(figure)} if clock else set()
    judged = _judged(statement, bounds, finding, evidence, rows)
    return replace(open_claim, clock=", ".join(sorted(timers)), **judged)


def _unjudged(statement: Statement, evidence: Evidence, reason: NotMeasured, rows: Rows) -> dict[str, Any]:
    if statement.id not in CLAIMS:
        return {"verdict": NOT_IMPLEMENTED, "reason": str(reason)}
    if not scales_of(statement, evidence.hardware, rows):
        return {"verdict": NOT_IMPLEMENTED, "reason": f"no script measures {_place(statement.figure)}"}
    most, why_not = evidence.best_word(statement.id)
    if most == NOT_TESTABLE:
        return {"verdict": NOT_TESTABLE, "reason": why_not}
    return {"verdict": NOT_MEASURED, "reason": str(reason), "command": command(statement, evidence.hardware, rows)}


def _judged(
    statement: Statement, bounds: Mapping[str, list[Bound]], finding: Finding, evidence: Evidence, rows: Rows
) -> dict[str, Any]:
    hardware = evidence.hardware
    most, limit = evidence.best_word(statement.id)
    if most == NOT_TESTABLE:
        return {"verdict": NOT_TESTABLE, "reason": f"{limit}; measured {finding.text}"}
    function, figures = CLAIMS[statement.id], set(rows.asked)
    known: dict[str, Interval] = {}
    disturbed = once = False
    if finding.kind != SIMULATED:
        known = intervals(function, rows, finding, figures)
        disturbed, once = (rests_on(function, rows, finding, figures, what) for what in ("disturbed", "once"))
    relation, shape = (
        outcome_of(bounds[test], finding.quantities, known, hardware, finding.models) for test in ("relation", "shape")
    )
    verdict = decide(Outcome.ELSEWHERE if most == SHAPE else relation, shape)
    if finding.kind == SIMULATED and verdict in (REPRODUCED, SHAPE):
        exact = SIMULATED_TOO if verdict == REPRODUCED else SIMULATED_SHAPE
        verdict = exact if finding.cost_model else ARITHMETIC
    counting = {test: [one for one in all_ if one.counts(hardware, finding.models)] for test, all_ in bounds.items()}
    unmeasured = verdict == NOT_MEASURED
    missed = missed_bounds(bounds["relation"], finding.quantities) if verdict == SIMULATED_SHAPE else ""
    why = evidence.mechanism(statement.id) if verdict in (DIFFERS, SIMULATED_SHAPE) else ""
    return {
        "our_value": finding.text + (f" (steps: {finding.cost_model})" if finding.cost_model else ""),
        "verdict": verdict,
        "why": ". ".join(filter(None, (missed, why))),
        "remark": _remark(verdict, counting, finding, known) or (f"at most {most}: {limit}" if most else ""),
        "reason": _missing(bounds["shape"], finding) if unmeasured else "",
        "command": command(statement, hardware, rows) if unmeasured else "",
        "quantities": "; ".join(f"{name}={value:.6g}" for name, value in finding.quantities.items()),
        "interval": "; ".join(f"{name}={low:.4g} to {high:.4g}" for name, (low, high) in known.items()),
        "disturbed": disturbed,
        "once": once,
        "kind": finding.kind,
    }


def _remark(
    verdict: str, bounds: Mapping[str, list[Bound]], finding: Finding, known: Mapping[str, Interval]
) -> str:
    """Say what the median of a value within noise misses; of a value without an interval, which bounds are close by."""
    if finding.kind == SIMULATED:
        return ""
    if verdict == NOISE:
        missed = [missed_bounds(bounds[test], finding.quantities) for test in ("shape", "relation")]
        return "; ".join(f"the median: {one}" for one in dict.fromkeys(missed) if one) or "the median meets all bounds"
    close = dict.fromkeys(
        f"{one.quantity} is {value:.4g}, {100 * gap:.1f} % from its bound {one}"
        for one in (*bounds["relation"], *bounds["shape"])
        if one.quantity not in known
        if (value := finding.quantities.get(one.quantity)) is not None and (gap := one.distance(value)) <= EDGE
    )
    return f"at the edge: {'; '.join(close)}" if close else ""


def decide(relation: Outcome, shape: Outcome) -> str:
    """Decide from the two tests: both must hold to be reproduced, and a failed shape test always differs."""
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
    """Build a frame of one line per claim, with the columns of `Verdict`."""
    return pd.DataFrame([asdict(verdict) for verdict in verdicts])


def counts(verdicts: list[Verdict]) -> dict[str, int]:
    """Count claims by verdict, in the order of `VERDICTS`."""
    return {name: sum(verdict.verdict == name for verdict in verdicts) for name in VERDICTS}


@lru_cache(maxsize=1)
def scripts() -> dict[str, str]:
    """Map figures to the scripts that measure them."""
    return {experiment.figure: experiment.name for experiment in experiments()}


def scales_of(statement: Statement, hardware: str, rows: Rows) -> dict[str, str]:
    """Map the scripts that measure what ``statement`` is about to the scale of their rows on ``hardware``.

    A script without rows has the scale of the paper, on a CPU the laptop's. Empty where nothing is implemented.
    """
    figures = [MEASURED_IN.get(name, name) for name in statement.figure.split(", ")]
    usual = LAPTOP if hardware in ("", "cpu") else "paper"
    return {scripts()[figure]: rows.scale(figure) or usual for figure in figures if figure in scripts()}


def command(statement: Statement, hardware: str, rows: Rows) -> str:
    """Return the command that measures it on ``hardware``, at the scales of its ``rows``; one part per scale."""
    found = scales_of(statement, hardware, rows)
    parts = []
    for scale in dict.fromkeys(found.values()):
        short = ",".join(dict.fromkeys(name.partition("_")[0] for name, of in found.items() if of == scale))
        options = [] if hardware in ("", "cpu") and scale == LAPTOP else [f"scale={scale}"]
        if options and (role := ROLES.get(statement.id)):
            options.append(f"model={MODELS[role][0]}")
        given = f' ARGS="{" ".join(options)}"' if options else ""
        parts.append(f"make figure FIG={short}{given}")
    return " && ".join(parts)
