"""Verdicts: our value of every claim against its bounds, by the clock that decides, with marks of doubt; and the table
for people. A verdict is decided when no bound is inside an interval, and it does not rest on disturbed points of a
single run.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import pandas as pd

from experiments.claims.bounds import TESTS, Interval, Outcome, Tests, described, missed_bounds, outcome_of, read_bounds
from experiments.claims.rows import (
    CLAIMS,
    MEASURED,
    SIMULATED,
    Finding,
    NotMeasured,
    Rows,
    markdown,
    named,
    quantities,
    spans,
)
from experiments.facts.paper import Statement, claim_clocks, paper_file, read_claims
from experiments.facts.systems import MODELS
from experiments.harness.catalogue import entry_of, experiments
from experiments.harness.counted import HOST, NOT_STEADY, unsteady
from experiments.measure.records import COLUMNS, RowsError

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
MEASURED_IN = {"abstract": "11", "text 7.2": "11", "README": "README backbone-vs-sgmv"}
"""Place in the paper that is no figure of ours -> the figure whose rows answer it."""
LAPTOP = "laptop"
"""Scale on a CPU."""
ROLES = {"C27": "13B", "C38": "70B", "C39": "70B", "C40": "70B"}
"""Claims about a model that is not the paper's 7B."""


@dataclass(frozen=True)
class Verdict:
    """One claim, judged: ``quantities``, the known ``interval`` of these, ``why`` ours differs, ``remark`` (bounds
    missed); ``clock`` of an operator's rows, ``clock_missing`` that decides and has none that count; ``disturbed``, or
    ``once``: by points of a single run; ``reason`` and ``command`` of what is missing; ``older_source``: figures
    measured by other code.
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
    reason: str = ""
    command: str = ""
    quantities: Mapping[str, float] = field(default_factory=dict)
    interval: Mapping[str, Interval] = field(default_factory=dict)
    disturbed: bool = False
    once: bool = False
    kind: str = ""
    hardware: str = ""
    older_source: str = ""

    @property
    def intervals_said(self) -> str:
        return "; ".join(f"{name}={low:.4g} to {high:.4g}" for name, (low, high) in self.interval.items())


def judge(rows: pd.DataFrame, folder: str | Path) -> list[Verdict]:
    """Judge each claim in ``folder`` (``paper_results``) from ``rows`` of one hardware, with the columns of `Row` and
    perhaps ``older``; ValueError for a missing column, `RowsError` for several machines.
    """
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise ValueError(f"rows miss the columns {', '.join(missing)}; use experiments.measure.records.read_rows")
    machines = sorted(set(rows["hardware"]))
    if len(machines) > 1:
        raise RowsError(f"rows of {', '.join(machines)} are mixed in one folder: keep those of one, a folder each")
    court = Judge(rows, folder)
    return [court.verdict(statement) for statement in read_claims(folder)]


class Judge:
    """Rows of one machine under each clock, and what was decided before any row: bounds, clocks, words, mechanisms."""

    def __init__(self, frame: pd.DataFrame, folder: str | Path) -> None:
        self.hardware = str(frame["hardware"].iloc[0]) if len(frame) else ""
        self.bounds, self.clocks, self._frame = read_bounds(folder), claim_clocks(folder), frame
        self._several = len(set(frame["timer"].dropna()) - {""}) > 1
        self._unsteady = set(frame.loc[unsteady(frame), "figure"])
        self._rows: dict[str, Rows] = {}
        here = "cpu" if self.hardware == "cpu" else "gpu"
        self._sentences = _read(paper_file(folder, "claim_mechanisms.csv"), here, "sentence")
        words = paper_file(folder, "claim_words.csv")
        self._most, self._limits = (_read(words, here, name) for name in ("most", "reason"))

    def rows(self, clock: str) -> Rows:
        key = clock if self._several else ""
        if key not in self._rows:
            self._rows[key] = Rows(self._frame, key)
        return self._rows[key]

    def verdict(self, statement: Statement) -> Verdict:
        """Judge one claim by the clock that decides it, or by another one where that has no rows that count."""
        clock = self.clocks.get(statement.id, "")
        verdict = self._by_clock(statement, clock)
        if not verdict.clock or clock in verdict.clock or verdict.verdict == NOT_TESTABLE:
            return verdict
        missing = f"there are no rows of {clock}, which decides (measure with timer={clock})"
        if clock == HOST and self._timed_unsteadily(statement):
            missing = NOT_STEADY
        remark = "; ".join(filter(None, (verdict.remark, f"judged by {verdict.clock}: {missing}")))
        return replace(verdict, remark=remark, clock_missing=clock)

    def word(self, id: str, finding: Finding, known: Mapping[str, Interval]) -> str:
        relation, shape = (
            outcome_of(self.bounds[id][test], finding.quantities, known, self.hardware, finding.models)
            for test in TESTS
        )
        most = self._most.get(id, "")
        word = most if most == NOT_TESTABLE else decide(Outcome.ELSEWHERE if most == SHAPE else relation, shape)
        if finding.kind == SIMULATED and word in (REPRODUCED, SHAPE):
            simulated = SIMULATED_TOO if word == REPRODUCED else SIMULATED_SHAPE
            return simulated if finding.cost_model else ARITHMETIC
        return word

    def _by_clock(self, statement: Statement, clock: str) -> Verdict:
        id, rows, figures = statement.id, self.rows(clock), statement.figure.split(", ")
        function, bounds = CLAIMS.get(id), self.bounds.get(id, dict.fromkeys(TESTS, ()))
        verdict = Verdict(
            id, statement.statement, statement.figure, statement.expected_value, unit=statement.unit,
            relation_tested=described(bounds["relation"]), shape_tested=described(bounds["shape"]),
            hardware=self.hardware, older_source=", ".join(rows.older(figures)),
        )  # fmt: skip
        if function is None or id not in self.bounds:
            return replace(verdict, verdict=NOT_IMPLEMENTED, reason="no function here computes it")
        try:
            finding = function(rows)
            if clock and HOST in rows.timers(figures) and self._timed_unsteadily(statement):
                raise NotMeasured(NOT_STEADY)
        except NotMeasured as reason:
            return self._without_value(verdict, statement, rows, str(reason))
        measured = finding.kind != SIMULATED
        known = spans(finding.quantities, [quantities(function, one) for one in rows.alone] if measured else [])
        word, most, limit = self.word(id, finding, known), self._most.get(id, ""), self._limits.get(id, "")
        verdict = replace(verdict, verdict=word, clock=", ".join(rows.timers(figures) if clock else []))
        if word == NOT_TESTABLE:
            return replace(verdict, reason=f"{limit}; measured {finding.text}")
        if word == NOT_MEASURED:
            absent = ", ".join(sorted({bound.quantity for bound in bounds["shape"]} - set(finding.quantities)))
            how = command(statement, self.hardware, rows)
            verdict = replace(verdict, reason=f"the rows do not give {absent}", command=how)
        counting = {
            test: [one for one in found if one.counts(self.hardware, finding.models)] for test, found in bounds.items()
        }
        missed = missed_bounds(counting["relation"], finding.quantities) if word == SIMULATED_SHAPE else ""
        why = self._sentences.get(id, "not known") if word == DIFFERS or missed else ""
        marks = {"disturbed": False, "once": False}
        for mark in marks if measured else ():
            marks[mark] = any(quantities(function, one) != finding.quantities for one in rows.stirred(mark))
        remark = _remark(word, counting, finding.quantities) if measured else ""
        return replace(
            verdict, kind=finding.kind, quantities=finding.quantities, interval=known, disturbed=marks["disturbed"],
            once=marks["once"],
            our_value=finding.text + (f" (steps: {finding.cost_model})" if finding.cost_model else ""),
            why=". ".join(filter(None, (missed, why))), remark=remark or (f"at most {most}: {limit}" if most else ""),
        )  # fmt: skip

    def _without_value(self, verdict: Verdict, statement: Statement, rows: Rows, reason: str) -> Verdict:
        if not scales_of(statement, self.hardware, rows):
            return replace(verdict, verdict=NOT_IMPLEMENTED, reason="no script measures it")
        if self._most.get(statement.id) == NOT_TESTABLE:
            return replace(verdict, verdict=NOT_TESTABLE, reason=self._limits[statement.id])
        return replace(verdict, verdict=NOT_MEASURED, reason=reason, command=command(statement, self.hardware, rows))

    def _timed_unsteadily(self, statement: Statement) -> bool:
        return bool(named(self._unsteady, statement.figure.split(", ")))


def _read(path: Path, here: str, column: str) -> dict[str, str]:
    """Map claims to a column of their line for the class of hardware ``here``, else for any."""
    with path.open(newline="", encoding="utf-8") as stream:
        lines = sorted(csv.DictReader(stream), key=lambda line: line["where"] != "any")
    return {line["claim"]: line[column] for line in lines if line["where"] in ("any", here)}


def _remark(word: str, bounds: Tests, found: Mapping[str, float]) -> str:
    missed = [missed_bounds(bounds[test], found) for test in ("shape", "relation")]
    if word == DIFFERS:
        return f"misses: {missed[0]}"
    if word == NOISE:
        return "; ".join(f"the median: {one}" for one in dict.fromkeys(missed) if one) or "the median meets all bounds"
    return ""


def decide(relation: Outcome, shape: Outcome) -> str:
    """Decide from the two tests: both must hold to be reproduced, and a failed shape test always differs."""
    if shape is Outcome.FAILS:
        return DIFFERS
    if shape is Outcome.MISSING:
        return NOT_MEASURED
    if Outcome.NOISE in (shape, relation):
        return NOISE
    return REPRODUCED if relation is Outcome.HOLDS else SHAPE


def as_frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Build a frame of one line per claim, with the columns of `Verdict`; numbers as text."""
    said = [
        {"quantities": "; ".join(f"{name}={value:.6g}" for name, value in verdict.quantities.items()),
         "interval": verdict.intervals_said}
        for verdict in verdicts
    ]  # fmt: skip
    return pd.DataFrame([asdict(verdict) | texts for verdict, texts in zip(verdicts, said, strict=True)])


@lru_cache(maxsize=1)
def scripts() -> dict[str, str]:
    return {experiment.figure: experiment.name for experiment in experiments()}


def scales_of(statement: Statement, hardware: str, rows: Rows) -> dict[str, str]:
    """Map scripts that measure ``statement`` to the scale of their rows, or the paper's (laptop's on a CPU)."""
    usual = LAPTOP if hardware in ("", "cpu") else "paper"
    return {scripts()[name]: rows.scale(name) or usual for name in figures_of(statement.figure) if name in scripts()}


def figures_of(figure: str) -> list[str]:
    """Return the figures whose rows answer what a claim is about, by their names in rows."""
    return [MEASURED_IN.get(name, name) for name in figure.split(", ")]


def command(statement: Statement, hardware: str, rows: Rows) -> str:
    """Return the command that measures it on ``hardware``, at the scales of its ``rows``; one part per scale."""
    found = scales_of(statement, hardware, rows)
    parts = []
    for scale in dict.fromkeys(found.values()):
        short = ",".join(dict.fromkeys(entry_of(name) for name, of in found.items() if of == scale))
        options = [] if hardware in ("", "cpu") and scale == LAPTOP else [f"scale={scale}"]
        if options and (role := ROLES.get(statement.id)):
            options.append(f"model={MODELS[role][0]}")
        given = f' ARGS="{" ".join(options)}"' if options else ""
        parts.append(f"make figure FIG={short}{given}")
    return " && ".join(parts)


HEAD = ("claim", "statement", "paper", "ours", "tested", "verdict", "why it differs", "figure")
DISTURBED, ONCE, OTHER_CLOCK = "\u2020", "\u2021", "\u00a7"
"""Marks of verdicts on disturbed points, on points of a single run (by its date), by the clock that does not decide."""
IDLE = 0.05
"""Largest share of disturbed points on an idle machine."""
_POINT = ["figure", "panel", "system", "workload", "model", "batch_size", "seq_len", "rank", "timer", "repeat"]


def total(verdicts: Sequence[Verdict]) -> str:
    """Count the verdicts that occur, e.g. ``9 reproduced, 3 shape holds, ... (52 claims)``."""
    found = Counter(one.verdict for one in verdicts)
    said = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
    return f"{said} ({len(verdicts)} claims)"


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = []
    for one in verdicts:
        value = one.our_value + (" *(simulated)*" if one.kind == SIMULATED and one.verdict != ARITHMETIC else "")
        interval = f"interval {one.intervals_said}" if one.interval else ""
        how = f"`{one.command}`" if one.command else ""
        ours = "; ".join(filter(None, (value, interval, one.remark, one.reason, how)))
        tests = (("paper", one.relation_tested), ("shape", one.shape_tested))
        tested = "; ".join(f"{name}: {bounds}" for name, bounds in tests if bounds)
        about = [one.id, one.statement, one.paper_value, ours, tested, f"**{marked(one)}**", one.why or "-"]
        lines.append([*about, one.figure])
    return markdown(HEAD, lines)


def marked(verdict: Verdict) -> str:
    marks = {DISTURBED: verdict.disturbed, ONCE: verdict.once, OTHER_CLOCK: verdict.clock_missing}
    return verdict.verdict + "".join(mark for mark, holds in marks.items() if holds)


def disturbed_points(rows: pd.DataFrame) -> tuple[int, dict[str, int]]:
    """Count points that tell whether they were disturbed, and those that were, by figure."""
    known = rows[rows["disturbed"].notna()]
    if known.empty:
        return 0, {}
    points = known["disturbed"].astype(bool).groupby([known[name] for name in _POINT], dropna=False).any()
    hit = points[points].groupby("figure").size()
    return len(points), {str(figure): int(count) for figure, count in hit.items()}


def disturbance(rows: pd.DataFrame) -> str:
    """Describe the points that other work disturbed, in a line."""
    known, disturbed = disturbed_points(rows)
    if not known:
        return "Disturbed points: not known, these rows do not say."
    hit = sum(disturbed.values())
    where = "".join(f"; figure {figure}: {count}" for figure, count in disturbed.items())
    text = f"Disturbed points: {hit} of {known} ({100 * hit / known:.1f} %){where}."
    busy = f" This machine was not idle: one that is has at most {100 * IDLE:.0f} %."
    return text + (busy if hit > IDLE * known else "")


def certainty(verdicts: Sequence[Verdict]) -> str:
    """Describe how many verdicts on measurements are decided, in a line; empty when nothing was measured."""
    measured = [one for one in verdicts if one.verdict in JUDGED and one.kind == MEASURED]
    if not measured:
        return ""
    once = sum(verdict.once for verdict in measured)
    decided = sum(verdict.verdict in DECIDED and not (verdict.disturbed and verdict.once) for verdict in measured)
    text = f"Verdicts on measurements: {decided} of {len(measured)} decided"
    if once:
        text += f"; {once} rest on points of a single run ({ONCE}): their interval is too narrow or missing"
    return f"{text}."
