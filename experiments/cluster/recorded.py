"""Cost models and windows from the rows that are recorded in the repository, of every machine that has some."""

from functools import cache
from pathlib import Path

import pandas as pd

from experiments.cluster.step_costs import FittedCost, recorded_cost
from experiments.cluster.windows import Window, windows_of
from experiments.plots.frames import frame_of, one_of_repeats
from punica.measure.records import read_rows

FILES = {"1": "fig01_batching", "10": "fig10_layer", "ext breakdown": "ext_breakdown"}
"""Figure whose rows tell what a step costs -> its file."""
STREAM = "fig11_textgen"


@cache
def recorded_costs(results: Path) -> dict[tuple[str, str], FittedCost]:
    """Machine and model -> cost model, of the folders of ``results`` whose rows tell all of its coefficients."""
    found = {}
    for folder in _machines(results):
        files = {figure: folder / f"{name}.csv" for figure, name in FILES.items()}
        rows = {figure: one_of_repeats(frame_of(read_rows(file))) for figure, file in files.items() if file.exists()}
        if set(rows) == set(FILES):
            shared = set.intersection(*(set(part["model"]) for part in rows.values()))
            found |= {(folder.name, model): recorded_cost(rows, folder.name, model) for model in sorted(shared)}
    return found


@cache
def recorded_windows(results: Path) -> dict[tuple[str, str], list[Window]]:
    """Machine and model -> the windows of Figure 11 that Punica ran, disturbed ones left out."""
    found: dict[tuple[str, str], list[Window]] = {}
    for folder in _machines(results):
        file = folder / f"{STREAM}.csv"
        frame = frame_of(read_rows(file)) if file.exists() else pd.DataFrame()
        for model in sorted(set(frame["model"])) if len(frame) else []:
            if windows := windows_of(frame[frame["model"] == model]):
                found[folder.name, model] = windows
    return found


def _machines(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*") if path.is_dir())
