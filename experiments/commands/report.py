"""The verdict table: what this machine's rows say about each of the paper's claims.

`make report` reads the rows of one hardware, computes our value of every claim (`experiments.claims`), compares it
with the bounds in `paper_results/claim_bounds.csv` and writes `claims.csv` and `claims.md` beside the rows it judged:
`outputs/<hardware>/` for fresh rows of this machine, `results/<hardware>/` for recorded ones. The two are never mixed.

    make report                                        # fresh rows if there are any, else recorded ones
    make report ARGS="source=recorded hardware=h200"
    make report ARGS="source=recorded hardware=h200 timer=host_clock"   # only rows of that timer: claims_host_clock.md

It runs with whatever rows exist: a claim without rows is `not testable on this hardware`, with the reason. Rows that
other code measured than is here now are judged too, and named: a line above the table, `older_source` in `claims.csv`.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from experiments.claims import Verdict, as_frame, counts, judge
from experiments.claims.rows import STAND_INS
from experiments.commands.batch import batch_main, sides
from experiments.harness.schema import ConfigError
from experiments.harness.settings import Folders, folders
from experiments.harness.source import fingerprint, script_of
from experiments.plots.frames import distinct
from punica.measure.records import COLUMNS, Row, ensure_writable, read_rows

NAME = "claims"


def rows_files(folder: Path) -> list[Path]:
    """The files of rows in ``folder``, by name; a verdict table that lies beside them is not one."""
    return [path for path in sorted(folder.glob("*.csv")) if not path.stem.startswith(NAME)]


def read_folder(folder: Path) -> pd.DataFrame:
    """All rows of all figures in ``folder``, with a column ``older``: measured by other code than is here now.

    RowsError names file, line and remedy when a file is damaged.
    """
    rows = [{**asdict(row), "older": is_older(row, path)} for path in rows_files(folder) for row in read_rows(path)]
    return pd.DataFrame(rows, columns=[*COLUMNS, "older"])


def is_older(row: Row, path: Path) -> bool:
    """Whether other code decided ``row`` than the script of the rows file ``path`` runs now (its own or a kernel's)."""
    script = script_of(path)
    return script is not None and row.source_hash != fingerprint(script)


def write_report(rows: Path, target: Path, figures: Path, paper: Path, timer: str = "auto") -> list[Verdict]:
    """Judge the rows in folder ``rows``; write ``claims.csv`` and ``claims.md`` into ``target``; return the verdicts.

    ``figures`` is the folder whose pictures the table links to, ``paper`` is ``paper_results``. A ``timer`` by name
    judges its rows alone (and those that no clock made) and adds its name to the files.
    """
    frame, name = read_folder(rows), file_name(timer)
    if timer != "auto":
        frame = frame[frame["timer"].fillna("").isin([timer, ""])]
    verdicts = judge(frame, paper)
    ensure_writable(target)
    as_frame(verdicts).to_csv(target / f"{name}.csv", index=False, lineterminator="\n")
    text = markdown(verdicts, frame, figures, target)
    (target / f"{name}.md").write_text(text, encoding="utf-8")
    return verdicts


def file_name(timer: str) -> str:
    """``claims``, or ``claims_<timer>`` for the verdicts of one timer."""
    return NAME if timer == "auto" else f"{NAME}_{timer}"


def markdown(verdicts: Sequence[Verdict], rows: pd.DataFrame, figures: Path, target: Path) -> str:
    """The table for people, with the machine above it; links are relative to ``target``."""
    total = ", ".join(f"{number} {verdict}" for verdict, number in counts(list(verdicts)).items())
    table = ["| claim | statement | paper | ours | tested | verdict | figure |", "| --- " * 7 + "|"]
    table += [_line(verdict, figures, target) for verdict in verdicts]
    older = older_note(rows.loc[rows["older"], "figure"])
    about = [f"{total}.", "", _machine(rows), *([older] if older else []), ""]
    return "\n".join(["# The paper's claims on this hardware", "", *about, *table, ""])


def older_note(figures: Iterable[str]) -> str:
    """A line about the figures that were measured by other code than is here now; empty without any."""
    named = ", ".join(dict.fromkeys(figures))
    return f"Rows of older source, to be measured again (make reproduce): figure {named}." if named else ""


def _line(verdict: Verdict, figures: Path, target: Path) -> str:
    ours = verdict.our_value + (" *(simulated)*" if verdict.kind == "simulated" else "")
    ours = "; ".join(part for part in (ours, verdict.reason) if part)
    tests = [("paper", verdict.relation_tested), ("shape", verdict.shape_tested)]
    tested = "; ".join(f"{name}: {bounds}" for name, bounds in tests if bounds)
    cells = [verdict.id, verdict.statement, verdict.paper_value, ours, tested, f"**{verdict.verdict}**"]
    cells = [cell.replace("|", "\\|") for cell in cells]
    return "| " + " | ".join([*cells, _links(verdict.figure, figures, target)]) + " |"


def _links(figure: str, figures: Path, target: Path) -> str:
    """Links to the pictures of a claim's figures, e.g. of ``8, README`` or ``text 5.2``; a dash when there is none."""
    found = []
    for name in figure.split(", "):
        section = name.removeprefix("text ").replace(".", "")
        prefix = f"fig{int(name):02d}_" if name.isdigit() else f"sec{section}_" if section != name else name.lower()
        found += [(name, path) for path in sorted(figures.glob("*.png")) if path.name.startswith(prefix)]
    links = [f"[{name}]({Path(os.path.relpath(path, target)).as_posix()})" for name, path in found]
    return ", ".join(links) or "-"


def _machine(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "No rows were measured; only arithmetic and replays are judged."

    def values(name: str) -> str:
        return ", ".join(distinct(rows, name)) or "-"

    dates = distinct(rows, "date")
    parts = [f"Measured on {values('device')} (hardware `{values('hardware')}`), scale {values('scale')}"]
    parts += [f"timer {values('timer')}, torch {values('torch')}, triton {values('triton')}, driver {values('driver')}"]
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


def summary(verdicts: Sequence[Verdict], source: str, target: Path, name: str = NAME) -> str:
    """What `make report` prints: counts per verdict, then where the table is."""
    width = max(len(name) for name in counts(list(verdicts)))
    lines = [f"  {name:<{width}}  {number:2d}" for name, number in counts(list(verdicts)).items()]
    older = older_note(figure for verdict in verdicts for figure in verdict.older_source.split(", ") if figure)
    notes = [*([older] if older else []), f"Table: {target / f'{name}.md'}"]
    return "\n".join([f"{len(verdicts)} claims, {source} rows", *lines, *notes])


def report(cfg: DictConfig) -> int:
    """Write and print the report that ``cfg`` asks for."""
    places = folders(cfg)
    source, rows, target, figures = choose(places, cfg.source)
    verdicts = write_report(rows, target, figures, places.paper, cfg.timer.name)
    print(summary(verdicts, source, target, file_name(cfg.timer.name)))
    return 0


if __name__ == "__main__":
    batch_main("report", __doc__ or "", report, "source", "timer")
