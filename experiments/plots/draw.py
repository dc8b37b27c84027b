"""From a file of rows to `<name>.pdf`, `<name>.png` and `<name>.json` (where every number of the picture came from)."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from hydra.utils import get_method
from matplotlib.figure import Figure

from experiments.harness.counted import clock_note, counted, frame_of
from experiments.harness.experiment import Experiment
from experiments.harness.schema import REPOSITORY
from experiments.measure.records import ensure_writable, read_rows
from experiments.plots import style
from experiments.plots.floors import floors
from experiments.plots.frames import NOTE, distinct, frame_of_clocks, measured_frame, paper_frame
from experiments.plots.overlay import panels
from experiments.plots.serving import SHOWN

LISTED = {
    "commits": "commit", "config_hashes": "config_hash", "source_hashes": "source_hash", "hardware": "hardware",
    "devices": "device", "timers": "timer", "scales": "scale", "torch": "torch", "triton": "triton",
    "drivers": "driver",
}  # fmt: skip
"""Key of the JSON -> column whose values it lists."""
SHORT = {"fig11_textgen": ("hero", "serving.draw_hero")}
"""Experiment -> name of a second figure, with fewer systems, and the function that draws it."""
BY_CLOCK = ("7", "8", "9", "10", "README backbone-vs-sgmv", "text 6")
"""Figures with panels for each clock that has rows."""
logging.getLogger("fontTools").setLevel(logging.WARNING)  # it reports every font table that a PDF keeps


def draw(experiment: Experiment, rows_file: Path, folder: Path, paper_folder: Path) -> list[Path]:
    """Draw `experiment` from `rows_file` into `folder`; return the three files, and those of a short figure behind
    them.
    """
    if not (experiment.overlay or experiment.drawn_by):
        return []
    read = frame_of(read_rows(rows_file))
    rows = frame_of_clocks(read) if experiment.figure in BY_CLOCK else measured_frame(counted(read))
    rows = pd.concat([rows, floors(rows, rows_file)], ignore_index=True)
    rows.attrs[NOTE] = clock_note(read)
    paper = paper_frame(paper_folder, experiment.figure)
    about = provenance(experiment, rows, counted(read)["date"], rows_file)
    drawn: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Figure]] = {}
    if experiment.overlay:
        rows, paper = experiment.shown(rows), experiment.shown(paper)
        drawn[experiment.name] = partial(panels, spec=experiment.overlay)
    for name, path in ((experiment.name, experiment.drawn_by), SHORT.get(experiment.name, ("", ""))):
        if path and (name == experiment.name or rows["system"].isin(SHOWN).any()):
            drawn[name] = get_method(f"{__package__}.{path}")
    words = f"commit {', '.join(about['commits'])}; config {', '.join(about['config_hashes'][:4])}"
    ensure_writable(folder)
    files = []
    with style.themed():
        for name, function in drawn.items():
            figure, pdf, png = function(rows, paper), folder / f"{name}.pdf", folder / f"{name}.png"
            figure.savefig(pdf, metadata={"Title": name, "Keywords": words, "CreationDate": None})
            figure.savefig(png, metadata={"Title": name, "Description": words})
            plt.close(figure)
            files += [pdf, png]
    facts = folder / f"{experiment.name}.json"
    facts.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [*files[:2], facts, *files[2:]]


def provenance(experiment: Experiment, rows: pd.DataFrame, dates: pd.Series, rows_file: Path) -> dict[str, Any]:
    """Facts behind a figure, as JSON values: file, configuration, commits, devices, versions, dates; number of
    repeats.
    """
    config, path = rows_file.with_suffix(".json"), rows_file.resolve()
    names = rows["model"] + ", " + rows["panel"] + ", " + rows["system"] + ", " + rows["workload"]
    repeats = rows.groupby(names, sort=False)["repeats"].max().dropna()
    return {
        "experiment": experiment.name,
        "figure": experiment.figure,
        "rows_file": str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name,
        "rows": len(rows),
        "repeats": {str(name): int(most) for name, most in repeats.items()},
        **{key: distinct(rows, column) for key, column in LISTED.items()},
        "measured": [min(dates), max(dates)],
        "config": json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
    }
