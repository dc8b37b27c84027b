"""Cost models and windows from recorded rows of every machine, and a cost model by its name (`figure.cost`)."""

from functools import cache
from pathlib import Path

from experiments.cluster.step_costs import FittedCost, a100_of_the_cluster, datasheet_cost, recorded_cost
from experiments.cluster.windows import Window, windows_of
from experiments.harness.counted import counted, frame_of, merged
from experiments.harness.schema import CONF, ConfigError
from experiments.measure.records import read_rows
from experiments.simulator import StepCost

FILES = {"1": "fig01_batching", "10": "fig10_layer", "ext breakdown": "ext_breakdown"}
"""Figure whose rows give the cost of a step -> its file."""
STREAM = "fig11_textgen"
PAPERS, ROOFLINE = "a100", "roofline:"


@cache
def recorded_costs(results: Path) -> dict[tuple[str, str], FittedCost]:
    """Fit machine and model -> cost model, for the folders of ``results`` whose rows give all of its coefficients."""
    found: dict[tuple[str, str], FittedCost] = {}
    for folder in _machines(results):
        files = {figure: folder / f"{name}.csv" for figure, name in FILES.items()}
        rows = {figure: merged(counted(frame_of(read_rows(file)))) for figure, file in files.items() if file.exists()}
        if set(rows) == set(FILES):
            shared = set.intersection(*(set(part["model"]) for part in rows.values()))
            found |= {(folder.name, model): recorded_cost(rows, folder.name, model) for model in sorted(shared)}
    return found


@cache
def recorded_windows(results: Path) -> dict[tuple[str, str], list[Window]]:
    """Read machine and model -> windows of Figure 11 that Punica ran, disturbed ones left out."""
    found: dict[tuple[str, str], list[Window]] = {}
    for folder in _machines(results):
        file = folder / f"{STREAM}.csv"
        frame = counted(frame_of(read_rows(file) if file.exists() else ()))
        for model in sorted(set(frame["model"])):
            if windows := windows_of(frame[frame["model"] == model]):
                found[folder.name, model] = windows
    return found


def _machines(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*") if path.is_dir())


def chosen_cost(name: str, model: str, paper: Path, results: Path) -> StepCost:
    """Choose the steps of ``a100`` (the paper's cards), of a machine of ``results``, or of ``roofline:<hardware>`` (its
    datasheet in `conf/hardware`). ConfigError names what there is.
    """
    if name == PAPERS:
        return a100_of_the_cluster(paper)
    cards = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if "tflop_s" in path.read_text("utf-8"))
    if name.startswith(ROOFLINE) and name.removeprefix(ROOFLINE) in cards:
        return datasheet_cost(name.removeprefix(ROOFLINE), model)
    recorded = {machine: fitted.cost for (machine, what), fitted in recorded_costs(results).items() if what == model}
    if name in recorded:
        return recorded[name]
    known = ", ".join([PAPERS, *sorted(recorded), *(f"{ROOFLINE}{card}" for card in cards)])
    raise ConfigError(f"figure.cost is {name!r}, no cost model of {model}; it can be {known}")


def panel_of(panel: str, cost: str) -> str:
    """Name ``panel`` with another cost than the paper's; no claim is held against such a panel."""
    return panel if cost == PAPERS else f"{panel}, cost {cost}"
