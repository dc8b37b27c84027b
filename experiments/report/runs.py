"""Runs behind a figure or claim: its command, its minutes by scale, what its script says of time and memory, and the
commits of its rows.
"""

import re
import sys
from collections.abc import Iterable, Sequence

import pandas as pd
from omegaconf import OmegaConf

from experiments.claims import Verdict
from experiments.claims.judge import MEASURED_IN, command, scripts
from experiments.facts.paper import Statement
from experiments.harness.experiment import Experiment
from experiments.harness.schema import CONF
from experiments.plots.frames import distinct

_COST = re.compile(r"^Cost(?: at scale=laptop)?(.+?)(?:\.\s|:\n|\.?\Z)", re.MULTILINE | re.DOTALL)
UNKNOWN = "-"


def figure_command(name: str) -> str:
    """Return the command that measures the experiment ``name`` and draws it, as code."""
    short = name if name.startswith("ext") else name.partition("_")[0]
    return f"`make figure FIG={short}`"


def minutes(name: str, scale: str) -> float | None:
    """Return the minutes that ``make reproduce`` gives the experiment ``name`` at ``scale``; None where it has none."""
    stated = OmegaConf.load(CONF / "figure" / f"{name}.yaml").get("minutes") or {}
    return stated.get(scale)


def all_minutes(name: str) -> str:
    """Word the minutes of an experiment by scale."""
    known = [(scale, minutes(name, scale)) for scale in ("laptop", "gpu", "paper")]
    return ", ".join(f"{value:g} ({scale})" for scale, value in known if value is not None) or UNKNOWN


def total_minutes(experiments: Iterable[Experiment], scale: str) -> float:
    """Sum the minutes of ``experiments`` at ``scale``, of those that have some."""
    return sum(minutes(experiment.name, scale) or 0.0 for experiment in experiments)


def cost(experiment: Experiment) -> str:
    """Return the sentence of the script's docstring on its time and memory, a dash without one."""
    found = _COST.search(sys.modules[type(experiment).__module__].__doc__ or "")
    return re.sub(r"\s+", " ", found[1]).strip(" :,") if found else UNKNOWN


def figures_of(verdict: Verdict) -> list[str]:
    """Return the figures whose rows answer the claim, by their names in rows."""
    return [MEASURED_IN.get(name, name) for name in verdict.figure.split(", ")]


def how(verdict: Verdict, statements: dict[str, Statement], hardware: str) -> str:
    """Return the command that measures the claim on ``hardware``, as code; a dash for one without a script."""
    measured = any(figure in scripts() for figure in figures_of(verdict))
    return f"`{command(statements[verdict.id], hardware)}`" if measured else UNKNOWN


def minutes_of(verdict: Verdict, rows: pd.DataFrame) -> str:
    """Return the minutes of the claim's figures at the scales of their ``rows``; a dash where none are stated."""
    found = []
    for figure in figures_of(verdict):
        known = [minutes(scripts()[figure], scale) for scale in scales(rows, figure) if figure in scripts()]
        found += [value for value in known if value is not None]
    return f"{sum(found):g}" if found else UNKNOWN


def scales(rows: pd.DataFrame, figure: str) -> list[str]:
    """Return the scales of the ``rows`` of a figure."""
    return distinct(rows[rows["figure"] == figure], "scale")


def commits(rows: pd.DataFrame, figures: Sequence[str]) -> str:
    """Return the commits of the ``rows`` of ``figures``, shortened; a dash without any."""
    named = distinct(rows[rows["figure"].isin(figures)], "commit")
    short = (commit[:7] + ("-dirty" if commit.endswith("-dirty") else "") for commit in named)
    return ", ".join(dict.fromkeys(short)) or UNKNOWN
