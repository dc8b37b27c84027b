"""Runs behind a figure or claim: its command, its minutes by scale, what its script says of time and memory, and the
commits of its rows.
"""

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import cast

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from experiments.claims import Verdict
from experiments.claims.judge import MEASURED_IN, command, scales_of
from experiments.claims.rows import Rows
from experiments.facts.paper import Statement
from experiments.harness.counted import SCALES
from experiments.harness.experiment import Experiment
from experiments.harness.schema import CONF
from experiments.plots.frames import distinct
from experiments.report.machines import Machine

_COST = re.compile(r"^Cost(?: at scale=laptop)?(.+?)(?:\.\s|:\n|\.?\Z)", re.MULTILINE | re.DOTALL)
UNKNOWN = "-"
NOT_STATED = "not stated"


def figure_command(name: str) -> str:
    """Return the command that measures the experiment ``name`` and draws it, as code."""
    short = name if name.startswith("ext") else name.partition("_")[0]
    return f"`make figure FIG={short}`"


def minutes(name: str, scale: str) -> float | None:
    """Return the minutes that ``make reproduce`` gives the experiment ``name`` at ``scale``; None where it has none."""
    return (settings(name).get("minutes") or {}).get(scale)


@cache
def settings(name: str) -> DictConfig:
    """Return what the figure of the experiment ``name`` sets."""
    return cast(DictConfig, OmegaConf.load(CONF / "figure" / f"{name}.yaml"))


def all_minutes(name: str, recorded: Collection[str]) -> str:
    """Word the minutes of an experiment by scale, those without any, and those of no ``recorded`` run."""
    known = {scale: minutes(name, scale) for scale in reversed(SCALES)}
    said = [
        f"{value:g} ({scale}{'' if scale in recorded else ', no recorded run'})"
        for scale, value in known.items()
        if value is not None
    ]
    without = ", ".join(scale for scale, value in known.items() if value is None)
    return ", ".join([*said, f"{NOT_STATED} ({without})"] if without else said)


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


def how(statement: Statement, hardware: str, rows: Rows) -> str:
    """Return the command that measures the claim on ``hardware``, as code; a dash for one without a script."""
    found = command(statement, hardware, rows)
    return f"`{found}`" if found else UNKNOWN


def minutes_of(statement: Statement, hardware: str, rows: Rows) -> str:
    """Return the minutes of the command of `how`; of scripts without any at their scale say so by name."""
    known = {name: minutes(name, scale) for name, scale in scales_of(statement, hardware, rows).items()}
    given = [value for value in known.values() if value is not None]
    without = ", ".join(name.partition("_")[0] for name, value in known.items() if value is None)
    total = [f"{sum(given):g}"] if given else []
    missing = [f"{NOT_STATED} ({without})" if given else NOT_STATED] if without else []
    return ", ".join([*total, *missing]) or UNKNOWN


def scales(rows: pd.DataFrame, figure: str) -> list[str]:
    """Return the scales of the ``rows`` of a figure."""
    return distinct(rows[rows["figure"] == figure], "scale")


def recorded_scales(machines: Sequence[Machine], figure: str) -> set[str]:
    """Return the scales at which any of ``machines`` has rows of a figure."""
    return {scale for machine in machines for scale in scales(machine.rows, figure)}


def commits(rows: pd.DataFrame, figures: Sequence[str]) -> str:
    """Return the commits of the ``rows`` of ``figures``, shortened; a dash without any."""
    named = distinct(rows[rows["figure"].isin(figures)], "commit")
    short = (commit[:7] + ("-dirty" if commit.endswith("-dirty") else "") for commit in named)
    return ", ".join(dict.fromkeys(short)) or UNKNOWN
