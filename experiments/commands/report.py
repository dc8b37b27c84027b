"""The verdict table: what this machine's rows say about each of the paper's claims.

`make report` reads the rows of one hardware, computes our value of every claim (`experiments.claims`), compares it
with the bounds in `paper_results/claim_bounds.csv` and writes `claims.csv` and `claims.md` beside the rows it judged:
`outputs/<hardware>/` for fresh rows of this machine, `results/<hardware>/` for recorded ones. The two are never mixed;
a second table sets the verdicts of all recorded machines side by side.

    make report                                        # fresh rows if there are any, else recorded ones
    make report ARGS="source=recorded hardware=h200"
    make report ARGS="source=recorded hardware=h200 timer=cuda_graph"   # only rows of that timer: claims_cuda_graph.md

It runs with whatever rows exist: a claim without rows is `not measured here`, with the command that measures it. Rows
that other code measured than is here now are judged too, counted above the table, and named in `older_source` of
`claims.csv`. Where operators were timed by two clocks, the head of the table has the counts of both. A dagger marks
verdicts that rest on points which other work on the machine disturbed, a double dagger those that rest on points of a
single run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from experiments.claims import Verdict, as_frame, counts, judge
from experiments.claims.asked import asked, asked_table
from experiments.claims.fig12 import ranks_table
from experiments.claims.judge import NOT_MEASURED
from experiments.claims.predictions import (
    placement_verdicts,
    prediction_table,
    predictions,
    remains,
    residual_table,
    sensitivity,
)
from experiments.claims.table import certainty, disturbance, machine_table, total, verdict_table
from experiments.commands.batch import batch_main, sides
from experiments.facts.models import STAND_INS
from experiments.harness.schema import ConfigError
from experiments.harness.settings import Folders, folders
from experiments.harness.source import fingerprint, script_of
from experiments.plots.frames import distinct
from punica.measure.records import COLUMNS, Row, ensure_writable, read_rows

NAME = "claims"
AUTO = "auto"
"""All rows, of several clocks the one that decides the claim."""
OTHER_TIMER = "cuda_graph"
"""The clock that no claim on an operator was timed with in the paper, but that our engine's steps run by."""
COMPARED = "88b0140"
"""The commit that gave steps with a prompt a constant of their own in `punica.cluster`."""


@dataclass(frozen=True)
class Report:
    """Verdicts, notes about them, and the path of the table."""

    verdicts: list[Verdict]
    notes: list[str]
    table: Path

    def summary(self, source: str) -> str:
        """Return the text of `make report`: counts per verdict, notes, the path of the table."""
        found = counts(self.verdicts)
        width = max(len(name) for name in found)
        lines = [f"  {name:<{width}}  {number:2d}" for name, number in found.items()]
        return "\n".join([f"{len(self.verdicts)} claims, {source} rows", *lines, *self.notes, f"Table: {self.table}"])


def rows_files(folder: Path) -> list[Path]:
    """Return the files of rows in ``folder``, by name, without verdict tables."""
    return [path for path in sorted(folder.glob("*.csv")) if not path.stem.startswith(NAME)]


def read_folder(folder: Path) -> pd.DataFrame:
    """All rows of all figures in ``folder``, with a column ``older``: measured by other code than is here now.

    RowsError names file, line and remedy when a file is damaged.
    """
    rows = [{**asdict(row), "older": is_older(row, path)} for path in rows_files(folder) for row in read_rows(path)]
    return pd.DataFrame(rows, columns=[*COLUMNS, "older"])


def is_older(row: Row, path: Path) -> bool:
    """Check that ``row`` of the file ``path`` was measured by other code than its script runs now."""
    script = script_of(path)
    return script is not None and row.source_hash != fingerprint(script)


def write_report(
    rows: Path, target: Path, figures: Path, paper: Path, timer: str = AUTO, recorded: Path | None = None
) -> Report:
    """Judge the rows in folder ``rows``; write ``claims.csv`` and ``claims.md`` into ``target``.

    ``figures`` is the folder whose pictures the table links to, ``paper`` is ``paper_results``. A ``timer`` by name
    judges its rows alone (and those that no clock made) and adds its name to the files. ``recorded`` is the folder with
    a folder of rows per machine, for the table of all of them.
    """
    measured, name = read_folder(rows), file_name(timer)
    frame, clocks = of_timer(measured, timer), verdicts_by_clock(measured, paper)
    verdicts = clocks.get(timer) or judge(frame, paper)
    machines = verdicts_per_machine(recorded, paper, {rows.resolve(): clocks}) if recorded else {}
    if recorded and rows.resolve().parent != recorded.resolve():
        machines = {"this machine": verdicts, **machines}
    ensure_writable(target)
    as_frame(verdicts).to_csv(target / f"{name}.csv", index=False, lineterminator="\n")
    notes = [note for note in (certainty(verdicts), older_note(frame), disturbance(frame)) if note]
    parts = [
        "# The paper's claims on this hardware",
        "",
        f"{total(verdicts)}.",
        "",
        *(f"* {note}" for note in notes),
        "",
        *_two_clocks(clocks),
        _machine(frame),
        "",
    ]
    parts += [*verdict_table(verdicts, figures, target), "", *_asked(frame)]
    parts += [*_ranks(frame), *_predicted(frame, paper), *_placed(frame)]
    if len(machines) > 1:
        sure = [f"* {name}: {certainty(found)}" for name, found in machines.items()]
        parts += ["## Every machine that was measured", "", *machine_table(machines), "", *sure, ""]
    (target / f"{name}.md").write_text("\n".join(parts), encoding="utf-8")
    return Report(verdicts, notes, target / f"{name}.md")


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


def _predicted(rows: pd.DataFrame, paper: Path) -> list[str]:
    """Return the section of simulated predictions and of their cost models; nothing without such rows."""
    found = predictions(rows, paper)
    if not found:
        return []
    intro = (
        "Simulated, not measured: a virtual clock around the cluster's scheduling policy, with steps that take what a "
        "cost model says. With two exceptions nothing in this table was fitted to what it is compared with. The "
        f"simulator's constant for steps with a prompt came in while p99 was compared (commit {COMPARED}). The "
        "simulator of the rows on Ray was fitted to steps of its runners in a rehearsal."
    )
    fits = "What the cost models were fitted to, and how far they are from it:"
    table, residuals = prediction_table(found), residual_table(rows)
    said = [line for one in (remains(found), sensitivity(rows, paper)) if one for line in (one, "")]
    return ["## Predicted and published", "", intro, "", *table, "", *said, fits, "", *residuals, ""]


def _ranks(rows: pd.DataFrame) -> list[str]:
    """Figure 12's bounds at every number of ranks; nothing without such rows."""
    table = ranks_table(rows)
    intro = "Asked of 70B on data-centre GPUs; on a CPU, where a toy model is cut, the numbers say only that it works."
    return ["## Figure 12 at every number of ranks", "", intro, "", *table, ""] if table else []


def _placed(rows: pd.DataFrame) -> list[str]:
    """A sentence about each scheduling rule beside Punica's; nothing without such rows."""
    said = placement_verdicts(rows)
    return ["## Other scheduling rules, simulated", "", *(f"* {sentence}" for sentence in said), ""] if said else []


def of_timer(frame: pd.DataFrame, timer: str) -> pd.DataFrame:
    """The rows of ``timer`` alone, and those that no clock made; all rows for ``auto``."""
    return frame if timer == AUTO else frame[frame["timer"].fillna("").isin([timer, ""])]


def verdicts_by_clock(frame: pd.DataFrame, paper: Path) -> dict[str, list[Verdict]]:
    """Timer -> verdicts: of all rows, and where operators were timed by two clocks of the graph's alone as well."""
    found = {AUTO: judge(frame, paper)}
    if len(distinct(frame[frame["figure"] == "8"], "timer")) > 1:
        found[OTHER_TIMER] = judge(of_timer(frame, OTHER_TIMER), paper)
    return found


def verdicts_per_machine(
    recorded: Path, paper: Path, known: Mapping[Path, Mapping[str, list[Verdict]]]
) -> dict[str, Sequence[Verdict]]:
    """Folder name -> verdicts on the rows in it; operators timed by two clocks are judged under the graph's as well.

    ``known`` has folders that were judged already (`verdicts_by_clock`).
    """
    found: dict[str, Sequence[Verdict]] = {}
    for folder in sorted(path for path in recorded.glob("*") if path.is_dir() and rows_files(path)):
        clocks = known.get(folder.resolve()) or verdicts_by_clock(read_folder(folder), paper)
        for timer, verdicts in clocks.items():
            found[folder.name + (f", {timer}" if timer != AUTO else "")] = verdicts
    return found


def file_name(timer: str) -> str:
    """``claims``, or ``claims_<timer>`` for the verdicts of one timer."""
    return NAME if timer == AUTO else f"{NAME}_{timer}"


def older_note(rows: pd.DataFrame) -> str:
    """A line about the rows that were measured by other code than is here now; empty without any."""
    older = rows[rows["older"].astype(bool)]
    if older.empty:
        return ""
    share = f"{len(older):,} of {len(rows):,} ({100 * len(older) / len(rows):.1f} %)"
    text = f"Rows of older source, to be measured again (make reproduce): {share}"
    if unnamed := int((older["source_hash"].fillna("") == "").sum()):
        text += f", {unnamed:,} of which do not say what source they are of"
    return f"{text}; figure {', '.join(dict.fromkeys(older['figure']))}."


def _machine(rows: pd.DataFrame) -> str:
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


def choose(places: Folders, source: str) -> tuple[str, Path, Path, Path]:
    """``source`` decided, then its folders of rows, of verdicts and of figures. ConfigError when it has no rows."""
    found = sides(places, source)
    name = next((name for name, (rows, _) in found.items() if rows_files(rows)), list(found)[-1])
    rows, figures = found[name]
    if not rows_files(rows):
        raise ConfigError(f"no {name} rows in {rows}: {_where_rows_are(places)}")
    return name, rows, rows.parent if name == "fresh" else rows, figures


def _where_rows_are(places: Folders) -> str:
    root = places.recorded_rows.parent
    recorded = [path.name for path in sorted(root.glob("*")) if path.is_dir() and rows_files(path)]
    measure = "measure them with make reproduce"
    if not recorded:
        return measure
    return f'{measure}, or judge recorded ones: make report ARGS="source=recorded hardware={recorded[0]}"' + (
        f" (recorded: {', '.join(recorded)})" if len(recorded) > 1 else ""
    )


def report(cfg: DictConfig) -> int:
    """Write and print the report that ``cfg`` asks for."""
    places = folders(cfg)
    source, rows, target, figures = choose(places, cfg.source)
    written = write_report(rows, target, figures, places.paper, cfg.timer.name, places.recorded_rows.parent)
    print(written.summary(source))
    return 0


if __name__ == "__main__":
    batch_main("report", __doc__ or "", report, "source", "timer")
