"""claims.csv and claims.md: what the rows of one machine say about each of the paper's claims.

Rows that other code measured than is here now are judged too, counted above the table, and named in `older_source` of
`claims.csv`. Where operators were timed by two clocks each has its table, and the head of both has the counts of both.
A dagger marks verdicts that rest on points which other work on the machine disturbed, a double dagger those that rest
on points with a single undisturbed run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.claims import Verdict, as_frame
from experiments.claims.asked import asked, asked_table
from experiments.claims.disaggregated import disaggregated_verdicts
from experiments.claims.fig12 import ranks_table
from experiments.claims.judge import NOT_MEASURED
from experiments.claims.placement import placement_verdicts
from experiments.claims.predictions import (
    prediction_table,
    predictions,
    remains,
    residual_table,
    sensitivity,
)
from experiments.claims.runners import runners_table
from experiments.claims.judge import Stability
from experiments.claims.table import certainty, disturbance, machine_table, steadiness, total, verdict_table
from experiments.facts.models import STAND_INS
from experiments.plots.frames import distinct
from experiments.report.machines import AUTO, OTHER_TIMER, Machine, file_name, of_timer
from punica.measure.records import ensure_writable

COMPARED = "88b0140"
"""The commit that gave steps with a prompt a constant of their own in `punica.cluster`."""


def write_claims(machine: Machine, target: Path, paper: Path, machines: Mapping[str, Sequence[Verdict]]) -> list[Path]:
    """Write ``claims.csv`` and ``claims.md`` into ``target``, and a pair more for a second clock; return the tables.

    ``machines`` are the columns of the table of all machines (`columns`); ``paper`` is ``paper_results``.
    """
    ensure_writable(target)
    return [_write(machine, timer, target, paper, machines) for timer in machine.clocks]


def _write(
    machine: Machine, timer: str, target: Path, paper: Path, machines: Mapping[str, Sequence[Verdict]]
) -> Path:
    verdicts, frame, table = machine.clocks[timer], of_timer(machine.rows, timer), target / f"{file_name(timer)}.md"
    as_frame(list(verdicts)).to_csv(table.with_suffix(".csv"), index=False, lineterminator="\n")
    parts = ["# The paper's claims on this hardware", "", f"{total(verdicts)}.", ""]
    stable = machine.stability if timer == AUTO else {}
    parts += [*(f"* {note}" for note in notes(verdicts, frame, stable)), "", *_two_clocks(machine.clocks)]
    parts += [measured_on(frame)]
    parts += ["", *verdict_table(verdicts, machine.figures, target), "", *_asked(frame)]
    parts += [*_ranks(frame), *predicted(frame, paper), *_runners(frame, paper), *_simulated(frame)]
    if len(machines) > 1:
        sure = [f"* {name}: {certainty(found)}" for name, found in machines.items()]
        parts += ["## Every machine that was measured", "", *machine_table(machines), "", *sure, ""]
    table.write_text("\n".join(parts), encoding="utf-8")
    return table


def notes(verdicts: Sequence[Verdict], rows: pd.DataFrame, stable: Mapping[str, Stability]) -> list[str]:
    """Return the notes on ``verdicts``, the ``rows`` they rest on and their stability, a line each."""
    said = (certainty(verdicts), older_note(rows), disturbance(rows), steadiness(stable))
    return [note for note in said if note]


def _two_clocks(clocks: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Return the counts under both clocks of a machine that has both, and the verdicts on which they differ."""
    if OTHER_TIMER not in clocks:
        return []
    both = clocks[AUTO], clocks[OTHER_TIMER]
    turned = [
        f"{one.id} ({one.verdict}, {other.verdict})"
        for one, other in zip(*both, strict=True)
        if one.verdict != other.verdict and NOT_MEASURED not in (one.verdict, other.verdict)
    ]
    return [
        "Operators were timed by two clocks, so the counts are two:",
        "",
        f"* by the clock of the paper's number (`paper_results/claim_clocks.csv`; `{file_name(AUTO)}.md`): "
        f"{total(both[0])};",
        f"* inside a CUDA graph (`{file_name(OTHER_TIMER)}.md`): {total(both[1])}.",
        "",
        f"Verdicts that the clock decides (the paper's, graph): {', '.join(turned) or 'none'}.",
        "",
        "The paper times operators from the host, launch and wait included. The engine replays its steps as CUDA "
        "graphs, which launch no kernel from the host.",
        "",
    ]


def _asked(rows: pd.DataFrame) -> list[str]:
    """Ratios that the engine was asked to reach, beside the paper's claims; nothing without their rows."""
    found = asked(rows)
    intro = (
        "Ratios of rows of the same machine; `runs` is their span over repeats, each of which is another draw of "
        "windows. Bounds are of an H200; a machine without a GPU has none."
    )
    return ["## Asked of an H200", "", intro, "", *asked_table(found), ""] if found else []


def predicted(rows: pd.DataFrame, paper: Path) -> list[str]:
    """Return the section of simulated predictions and of their cost models; nothing without such rows."""
    found = predictions(rows, paper)
    if not found:
        return []
    intro = (
        "Simulated, not measured: a virtual clock around the cluster's scheduling policy, with steps that take what a "
        "cost model says."
    )
    if not all(one.panel for one in found):
        intro += (
            " Nothing was fitted to what it is compared with here, but the simulator's constant for steps with a "
            f"prompt came in while p99 was compared (commit {COMPARED})."
        )
    if any(one.panel for one in found):
        intro += " The simulator of the rows on Ray was fitted to steps of its runners in a rehearsal."
    table, residuals = prediction_table(found), residual_table(rows)
    heading = "What the cost models were fitted to, and how far they are from it:"
    fits = [heading, "", *residuals, ""] if residuals else []
    said = [line for one in (remains(found), sensitivity(rows, paper)) if one for line in (one, "")]
    return ["## Predicted and published", "", intro, "", *table, "", *said, *fits]


def _ranks(rows: pd.DataFrame) -> list[str]:
    """Figure 12's bounds at every number of ranks; nothing without such rows."""
    table = ranks_table(rows)
    intro = "Asked of 70B on data-centre GPUs; on a CPU, where a toy model is cut, the numbers say only that it works."
    return ["## Figure 12 at every number of ranks", "", intro, "", *table, ""] if table else []


def _runners(rows: pd.DataFrame, paper: Path) -> list[str]:
    """Figure 13's bounds on runners on Ray; nothing without such rows."""
    table = runners_table(rows, paper)
    intro = (
        "The hour compressed in time, on fewer runners than the paper's 16 GPUs, so these are no verdicts. The bounds "
        "are those of the claims' shape. C50 needs one GPU alone at these lengths, which is not measured."
    )
    return ["## Figure 13 on runners", "", intro, "", *table, ""] if table else []


def _simulated(rows: pd.DataFrame) -> list[str]:
    """Sentences about scheduling rules and LoRA servers, and claims of newer papers; nothing without such rows."""
    found = {"Other scheduling rules": placement_verdicts(rows), "LoRA servers": disaggregated_verdicts(rows)}
    said = {title: [f"* {sentence}" for sentence in sentences] for title, sentences in found.items() if sentences}
    return [line for title, lines in said.items() for line in (f"## {title}, simulated", "", *lines, "")]


def older_note(rows: pd.DataFrame) -> str:
    """A line about the rows that were measured by other code than is here now; empty without any."""
    older = rows[rows["older"].astype(bool)]
    if older.empty:
        return ""
    text = f"Rows of older source, to be measured again (make reproduce): {older_share(rows)}"
    if unnamed := int((older["source_hash"].fillna("") == "").sum()):
        text += f", {unnamed:,} of which do not say what source they are of"
    return f"{text}; figure {older_figures(rows)}."


def older_figures(rows: pd.DataFrame) -> str:
    """Name the figures with rows that were measured by other code than is here now."""
    return ", ".join(dict.fromkeys(rows.loc[rows["older"].astype(bool), "figure"]))


def older_share(rows: pd.DataFrame) -> str:
    """Return the number of rows that were measured by other code than is here now, and their share."""
    older = int(rows["older"].astype(bool).sum())
    return f"{older:,} of {len(rows):,} ({100 * older / len(rows):.1f} %)"


def measured_on(rows: pd.DataFrame) -> str:
    """Return a sentence on device, settings, versions, commits and dates of ``rows``."""
    if rows.empty:
        return "No rows were measured; only arithmetic and replays are judged."

    def values(name: str) -> str:
        return ", ".join(distinct(rows, name)) or "-"

    dates = distinct(rows, "date")
    parts = [f"Measured on {values('device')} (hardware `{values('hardware')}`), scale {values('scale')}"]
    parts += [f"timer {values('timer')}, torch {values('torch')}, triton {values('triton')}, driver {values('driver')}"]
    parts += [f"{name} {values(name)}" for name in ("transformers", "peft") if distinct(rows, name)]
    parts += [f"commit {values('commit')}, {dates[0]} to {dates[-1]}" if dates else f"commit {values('commit')}"]
    plays = [f"`{model}` plays the paper's {role}" for model, role in STAND_INS.items() if model in set(rows["model"])]
    return "; ".join([*parts, *plays]) + "."
