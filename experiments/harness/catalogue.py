"""Every experiment there is: scripts of `experiments/` that hold an `EXPERIMENT`, in the order of `make reproduce`."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.experiment import Experiment
from experiments.harness.schema import ConfigError

PREFIXES = ("fig", "readme", "sec", "ext")
NUMBER = re.compile(r"(?:fig(?:ure)?[ ._]?)?0*(\d+)", re.IGNORECASE)
"""An entry that is the number of one of the paper's figures: 1, 08, fig1, Figure 11."""


def experiments(chosen: Sequence[str] = ()) -> list[Experiment]:
    """All experiments, or those that one of `chosen` names: by the number of a figure, or the beginning of a name.

    Raises `ConfigError` for an entry that names none.
    """
    here = Path(__file__).parents[1]
    names = [path.stem for path in here.glob("*.py") if path.stem.startswith(PREFIXES)]
    modules = [importlib.import_module(f"experiments.{name}") for name in names]
    known = sorted((module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")), key=lambda e: e.order)
    for entry in chosen:
        if not any(_is_named(experiment.name, entry) for experiment in known):
            listed = ", ".join(experiment.name for experiment in known)
            raise ConfigError(f"figures has {entry!r}, but a figure's number or how one of these begins is: {listed}")
    return [e for e in known if not chosen or any(_is_named(e.name, entry) for entry in chosen)]


def entry_of(name: str) -> str:
    """Return the shortest entry that chooses an experiment alone: of an extension its whole name."""
    return name if name.startswith("ext") else name.partition("_")[0]


def _is_named(name: str, entry: str) -> bool:
    number = NUMBER.fullmatch(entry.strip())
    return bool(re.match(f"fig0*{number[1]}_", name)) if number else name.startswith(entry)
