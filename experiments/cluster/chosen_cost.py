"""Whose steps a simulated hour has, by `figure.cost`: those of the paper's A100, of a machine with recorded rows, or of
a roofline.
"""

from pathlib import Path

from experiments.cluster.recorded import recorded_costs
from experiments.cluster.step_costs import a100_of_the_cluster, datasheet_cost
from experiments.harness.schema import CONF, ConfigError
from punica.cluster import StepCost

PAPERS, ROOFLINE = "a100", "roofline:"


def chosen_cost(name: str, model: str, paper: Path, results: Path) -> StepCost:
    """Of ``a100`` (the paper's cards, from its figures), of a machine of ``results`` by its name, or of
    ``roofline:<hardware>`` (its datasheet in `conf/hardware`). ConfigError names what there is.
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
    """``panel`` as the paper's cards have it, or one of its own beside it, which no claim of the paper is held against.
    """
    return panel if cost == PAPERS else f"{panel}, cost {cost}"
