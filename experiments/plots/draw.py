"""From a file of rows to `<name>.pdf` and `<name>.png`, which name the commits and settings of the rows."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from hydra.utils import get_method
from matplotlib.figure import Figure

from experiments.harness.counted import clock_note, counted, frame_of
from experiments.harness.experiment import Experiment
from experiments.measure.records import ensure_writable, read_rows
from experiments.plots import style
from experiments.plots.floors import floors
from experiments.plots.frames import NOTE, distinct, frame_of_clocks, measured_frame, paper_frame
from experiments.plots.overlay import panels
from experiments.plots.serving import SHOWN

SHORT = {"fig11_textgen": ("hero", "serving.draw_hero")}
"""Experiment -> name of a second figure, with fewer systems, and the function that draws it."""
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every font table that a PDF keeps


def draw(experiment: Experiment, rows_file: Path, folder: Path, paper_folder: Path) -> list[Path]:
    """Draw `experiment` from `rows_file` into `folder`; return the files, those of a short figure last."""
    if not (experiment.overlay or experiment.drawn_by):
        return []
    read = frame_of(read_rows(rows_file))
    rows = frame_of_clocks(read) if experiment.host_clock_too else measured_frame(counted(read))
    rows = pd.concat([rows, floors(rows, rows_file)], ignore_index=True)
    rows.attrs[NOTE] = clock_note(read)
    paper = paper_frame(paper_folder, experiment.figure)
    commits, settings = distinct(rows, "commit"), distinct(rows, "config_hash")
    drawn: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Figure | None]] = {}
    if experiment.overlay:
        rows, paper = experiment.shown(rows), experiment.shown(paper)
        drawn[experiment.name] = partial(panels, spec=experiment.overlay)
    for name, path in ((experiment.name, experiment.drawn_by), SHORT.get(experiment.name, ("", ""))):
        if path and (name == experiment.name or rows["system"].isin(SHOWN).any()):
            drawn[name] = get_method(f"{__package__}.{path}")
    words = f"commit {', '.join(commits)}; config {', '.join(settings[:4])}"
    ensure_writable(folder)
    files = []
    with style.themed():
        for name, function in drawn.items():
            figure, pdf, png = function(rows, paper), folder / f"{name}.pdf", folder / f"{name}.png"
            if figure is None:  # nor is an older one left
                pdf.unlink(missing_ok=True)
                png.unlink(missing_ok=True)
            else:
                figure.savefig(pdf, metadata={"Title": name, "Keywords": words, "CreationDate": None})
                figure.savefig(png, metadata={"Title": name, "Description": words})
                plt.close(figure)
                files += [pdf, png]
    return files
