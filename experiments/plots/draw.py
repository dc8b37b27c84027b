"""From a file of rows to `<name>.pdf`, `<name>.png` and `<name>.json` (where every number of the picture came from).

Experiments in `SHORT` have a second picture, with fewer systems.
"""

import json
import logging
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from hydra.utils import get_method
from matplotlib.figure import Figure

from experiments.harness.clocks import clock_note
from experiments.harness.counted import counted, frame_of
from experiments.harness.experiment import Experiment
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import ensure_writable, read_rows
from experiments.plots import style
from experiments.plots.floors import floors
from experiments.plots.frames import NOTE, distinct, frame_of_clocks, measured_frame, paper_frame
from experiments.plots.overlay import panels

KINDS = ("pdf", "png", "json")
LISTED = {
    "commits": "commit", "config_hashes": "config_hash", "source_hashes": "source_hash", "hardware": "hardware",
    "devices": "device", "timers": "timer", "scales": "scale", "torch": "torch", "triton": "triton",
    "drivers": "driver",
}  # fmt: skip
"""Key of the JSON -> column whose values it lists."""
SHORT = {"fig11_textgen": ("hero", "serving.draw_hero")}
"""Experiment -> name of its short figure, and the function that draws it."""
BY_CLOCK = ("7", "8", "9", "10", "README backbone-vs-sgmv", "text 6")
"""Figures with panels for each clock that has rows."""
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every font table that a PDF keeps


def draw(experiment: Experiment, rows_file: Path, folder: Path, paper_folder: Path) -> list[Path]:
    """Draw `experiment` from `rows_file` into `folder` beside the paper's rows; return the three files, and those of a
    short figure behind them. None for an experiment without a figure.
    """
    if not (experiment.overlay or experiment.drawn_by):
        return []
    read = frame_of(read_rows(rows_file))
    repeats = counted(read)
    rows = frame_of_clocks(read) if experiment.figure in BY_CLOCK else measured_frame(repeats)
    rows = pd.concat([rows, floors(rows, rows_file)], ignore_index=True)
    rows.attrs[NOTE] = clock_note(read)
    paper = paper_frame(paper_folder, experiment.figure)
    ensure_writable(folder)
    pdf, png, facts = (folder / f"{experiment.name}.{kind}" for kind in KINDS)
    shorter = []
    with style.themed():
        if experiment.overlay is None:
            figure = get_method(f"{__package__}.{experiment.drawn_by}")(rows, paper)
        else:
            figure = panels(experiment.shown(rows), experiment.shown(paper), experiment.overlay)
        about = provenance(experiment, rows, repeats["date"], rows_file)
        words = f"commit {', '.join(about['commits'])}; config {', '.join(about['config_hashes'][:4])}"
        _save(figure, experiment.name, words, pdf, png)
        if experiment.name in SHORT:
            name, function = SHORT[experiment.name]
            shorter = [folder / f"{name}.{kind}" for kind in KINDS[:2]]
            _save(get_method(f"{__package__}.{function}")(rows, paper), name, words, *shorter)
    facts.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [pdf, png, facts, *shorter]


def _save(figure: Figure, name: str, words: str, pdf: Path, png: Path) -> None:
    """Write ``figure`` with ``words`` on its source, and close it."""
    figure.savefig(pdf, metadata={"Title": name, "Keywords": words, "CreationDate": None})
    figure.savefig(png, metadata={"Title": name, "Description": words})
    plt.close(figure)


def provenance(experiment: Experiment, rows: pd.DataFrame, dates: pd.Series, rows_file: Path) -> dict[str, Any]:
    """Rows file, configuration, commits, devices, versions and dates behind a figure, as JSON values.

    ``rows`` has repeats made one; ``dates`` are those of all repeats.
    """
    config = rows_file.with_suffix(".json")
    return {
        "experiment": experiment.name,
        "figure": experiment.figure,
        "rows_file": _relative(rows_file),
        "rows": len(rows),
        "repeats": _repeats(rows),
        **{key: distinct(rows, column) for key, column in LISTED.items()},
        "measured": [min(dates), max(dates)],
        "config": json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
    }


def _repeats(rows: pd.DataFrame) -> dict[str, int]:
    """The most repeats that a point has, by model, panel, system and popularity."""
    names = rows["model"] + ", " + rows["panel"] + ", " + rows["system"] + ", " + rows["workload"]
    return {str(name): int(most) for name, most in rows.groupby(names, sort=False)["repeats"].max().dropna().items()}


def _relative(path: Path) -> str:
    return str(path.resolve().relative_to(REPOSITORY)) if path.resolve().is_relative_to(REPOSITORY) else path.name
