"""What the notebooks read and show: stored rows of one hardware, its figures, tables beside the paper, and verdicts.

A notebook measures nothing. `StoredRows` looks for recorded rows first (``results/<hardware>``, committed) and for
fresh ones of this machine otherwise (``outputs/<hardware>/rows``, from ``make reproduce``), and never mixes the two.
Figures are the files of ``make reproduce``, as links; verdicts are made by the functions behind ``make report``. A
figure without rows is one line that says which command measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from IPython.display import Markdown

from experiments.claims import judge
from experiments.claims.judge import total
from experiments.harness.counted import counted, frame_of
from experiments.harness.experiment import Experiment
from experiments.measure.records import read_rows
from experiments.plots.draw import draw
from experiments.plots.frames import centre, distinct, measured, measured_frame, paper_frame
from experiments.report.machines import read_folder, rows_files

ROOT = Path(__file__).resolve().parents[1]
PAPER = "paper, A100"
TableOf = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]
"""A table from the measured rows of one figure and the paper's."""
_HOURS_AT_PAPER = ("ext_latency_under_load", "ext_many_adapters")
"""Experiments whose scale=paper takes a GPU hours: scale=gpu measures them."""
_MACHINES = {"A CPU": "cpu", "An H200": "h200"}  # folders in results/ or outputs/


class StoredRows:
    """The rows of one ``hardware`` (a folder name: ``cpu``, ``h200``, ...) in the repository at ``root``."""

    def __init__(self, root: Path, hardware: str) -> None:
        recorded, fresh = root / "results" / hardware, root / "outputs" / hardware / "rows"
        self.root, self.hardware = root, hardware
        self.recorded = bool(rows_files(recorded)) or not rows_files(fresh)
        self.folder = recorded if self.recorded else fresh
        self._figures = root / "figures" / hardware if self.recorded else fresh.parent / "figures"

    def has(self, experiment: Experiment) -> bool:
        """Whether ``experiment`` has rows here."""
        return self._file(experiment).exists()

    def figure(self, experiment: Experiment) -> list[Markdown]:
        """The file that `make record` or `make reproduce` drew, as a link (drawn now if it is missing), and a line that
        says whose rows it shows; without rows, or a drawing, that line alone.
        """
        if not self.has(experiment):
            what = f"Figure {experiment.figure} has no rows of `{self.hardware}` yet"
            return [Markdown(f"*{what}: {how_to_measure(self, experiment)}*")]
        if not (experiment.overlay or experiment.drawn_by):
            return [self._source(experiment)]
        png = self._figures / f"{experiment.name}.png"
        if not png.exists():
            draw(experiment, self._file(experiment), self._figures, self.root / "paper_results")
        link = f"../{png.relative_to(self.root).as_posix()}"
        return [Markdown(f"![Figure {experiment.figure}]({link})"), self._source(experiment)]

    def table(self, experiment: Experiment, table_of: TableOf) -> Markdown:
        """``table_of(measured rows, the paper's rows)`` of a figure; a line instead when it has no rows."""
        if not self.has(experiment):
            return Markdown(f"*No rows of Figure {experiment.figure} yet, see there.*")
        rows = self._rows(experiment)
        return as_markdown(table_of(rows, paper_frame(self.root / "paper_results", experiment.figure)))

    def verdicts(self, figures: Sequence[str]) -> Markdown:
        """The claims of ``figures`` ("8"), judged as in ``make report`` from all rows of the folder."""
        judged = judge(read_folder(self.folder), self.root / "paper_results")
        chosen = [verdict for verdict in judged if set(verdict.figure.split(", ")) & set(figures)]
        lines = [
            {
                "claim": verdict.id,
                "statement": verdict.statement,
                "paper": verdict.paper_value,
                self.hardware: "; ".join(part for part in (verdict.our_value, verdict.reason) if part),
                "verdict": f"**{verdict.verdict}**" + (f": {verdict.why}" if verdict.why else ""),
            }
            for verdict in chosen
        ]
        return Markdown(f"{total(chosen)}.\n\n{as_markdown(pd.DataFrame(lines)).data}")

    def _rows(self, experiment: Experiment) -> pd.DataFrame:
        return measured_frame(counted(frame_of(read_rows(self._file(experiment)))))

    def _file(self, experiment: Experiment) -> Path:
        return self.folder / f"{experiment.name}.csv"

    def _source(self, experiment: Experiment) -> Markdown:
        rows = self._rows(experiment)
        kind = "recorded" if self.recorded else "fresh"
        commits = ", ".join(sorted(set(rows["commit"]) - {""})) or "not known"
        first, last = min(rows["date"])[:10], max(rows["date"])[:10]
        when = first if first == last else f"{first} to {last}"
        name = self._file(experiment).relative_to(self.root).as_posix()
        about, scales = measured(rows).removeprefix("Measured: ").removesuffix("."), ", ".join(distinct(rows, "scale"))
        how = "Simulated, nothing measured, on" if set(rows["kind"]) == {"simulated"} else "Measured on"
        return Markdown(f"*Read: `{name}` ({kind}). {how} {about}; scale={scales}; commit {commits}; {when}.*")


class SideBySide:
    """The stored rows of several machines, one after the other; each part is shown by ``display(*part)``."""

    def __init__(self, root: Path) -> None:
        self.machines = {name: StoredRows(root, folder) for name, folder in _MACHINES.items()}

    def figure(self, experiment: Experiment) -> list[Markdown]:
        """`StoredRows.figure` of every machine."""
        return self._each(lambda stored: stored.figure(experiment))

    def table(self, experiment: Experiment, table_of: TableOf) -> list[Markdown]:
        """`StoredRows.table` of every machine."""
        return self._each(lambda stored: [stored.table(experiment, table_of)])

    def verdicts(self, figures: Sequence[str]) -> list[Markdown]:
        """`StoredRows.verdicts` of every machine."""
        return self._each(lambda stored: [stored.verdicts(figures)])

    def _each(self, parts_of: Callable[[StoredRows], list[Markdown]]) -> list[Markdown]:
        return [part for name, stored in self.machines.items() for part in (Markdown(f"**{name}**"), *parts_of(stored))]


def how_to_measure(stored: StoredRows, *experiments: Experiment) -> str:
    """The commands that make and record the rows of ``experiments`` on a machine with that hardware."""
    names = ",".join(experiment.name for experiment in experiments)
    long = any(experiment.name in _HOURS_AT_PAPER for experiment in experiments)
    scale = "" if stored.hardware == "cpu" else " scale=gpu" if long else " scale=paper"
    measure = f'`make reproduce ARGS="figures=[{names}] hardware={stored.hardware}{scale}"`'
    return f"{measure} measures them; `make record` keeps them."


def growth(metric: str, *by: str, system: str = "SGMV") -> TableOf:
    """Table: ``metric`` of ``system`` at the largest batch over that at the smallest, for each value of columns ``by``.

    The two batch sizes are the extremes that were measured and that the paper has as well.
    """

    def table_of(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
        both = [_curves(frame, metric, [*by], system) for frame in (rows, paper)]
        sizes = sorted(set(both[0].columns) & set(both[1].columns))
        first, last = sizes[0], sizes[-1]
        ours, theirs = (curves[last] / curves[first] for curves in both)
        what = f"{metric.replace('_', ' ')}, batch {last:g} / batch {first:g}"
        return _side_by_side(ours, theirs, what)

    return table_of


def relative_to(reference: str) -> TableOf:
    """Table: latency of every system over that of ``reference`` at the largest batch of both sides, by workload."""

    def table_of(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
        size = max(set(rows["batch_size"].dropna()) & set(paper["batch_size"].dropna()))
        ours, theirs = (_ratios(frame, reference).xs(size, level="batch_size") for frame in (rows, paper))
        return _side_by_side(ours, theirs, f"latency / {reference}, batch {size:g}")

    return table_of


def contest(reference: str) -> TableOf:
    """Table: in how many (workload, batch) cells ``reference`` beats each system, and the extreme ratios."""

    def table_of(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
        ours, theirs = (_ratios(frame, reference).groupby("system", sort=False) for frame in (rows, paper))
        table = pd.DataFrame(
            {
                f"measured: {reference} is faster in": ours.agg(lambda r: f"{(r > 1).sum()} of {len(r)}"),
                "smallest ratio": ours.min(),
                "largest ratio": ours.max(),
                f"{PAPER}: smallest ratio": theirs.min(),
            }
        )
        return table.reindex(list(ours.groups)).reset_index()

    return table_of


def of_the_roof(rows: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """Table: achieved FLOP/s over what the roof allows at that intensity, per workload at its largest batch."""
    ours, theirs = (_share_of_roof(frame) for frame in (rows, paper))
    return _side_by_side(ours, theirs, "part of the roof at the largest batch")


def _share_of_roof(frame: pd.DataFrame) -> pd.Series:
    frame = _central(frame)
    roof = frame[frame["panel"] == "roof"].set_index("metric")["value"]
    bandwidth, peak = roof["memory_bandwidth_line"], roof[roof.index.str.startswith("peak_")].iloc[0]
    launches = frame.pivot_table(index=["workload", "batch_size"], columns="metric", values="value", sort=False)
    last = launches.dropna(subset=["achieved_flops"]).reset_index("batch_size").groupby("workload", sort=False).last()
    return last["achieved_flops"] / (1e12 * (bandwidth * last["arithmetic_intensity"]).clip(upper=peak))


def _curves(frame: pd.DataFrame, metric: str, by: list[str], system: str) -> pd.DataFrame:
    """One line per value of ``by``, one column per batch size."""
    chosen = _central(frame)
    chosen = chosen[(chosen["metric"] == metric) & (chosen["system"] == system)]
    return chosen.pivot_table(index=by, columns="batch_size", values="value", sort=False)


def _ratios(frame: pd.DataFrame, reference: str) -> pd.Series:
    """Latency over that of ``reference``, indexed by workload, system and batch size; only where both are known."""
    chosen = _central(frame)
    cells = chosen[chosen["metric"] == "latency"].set_index(["workload", "system", "batch_size"])["value"]
    base = cells.xs(reference, level="system")
    cell_of = cells.index.to_frame()[["workload", "batch_size"]]
    ratios = cells / base.reindex(pd.MultiIndex.from_frame(cell_of)).to_numpy()
    return ratios.drop(reference, level="system").dropna()


def _central(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians of measured rows; the paper's rows are all single values."""
    return centre(frame) if "statistic" in frame else frame


def _side_by_side(ours: pd.Series, theirs: pd.Series, what: str) -> pd.DataFrame:
    table = pd.DataFrame({f"measured: {what}": ours, PAPER: theirs}).reindex(ours.index)
    return table.reset_index()


def as_markdown(frame: pd.DataFrame, digits: int = 3) -> Markdown:
    """``frame`` as a Markdown table; numbers with ``digits`` significant digits, what is not known as a dash."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "-" if pd.isna(value) else f"{value:.{digits}g}"
        return str(value).replace("|", "\\|")

    lines = [list(map(str, frame.columns)), ["---"] * frame.shape[1]]
    lines += [[cell(value) for value in line] for line in frame.itertuples(index=False)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))
