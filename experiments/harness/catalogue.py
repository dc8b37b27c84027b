"""Every experiment there is: scripts of `experiments/` that hold an `EXPERIMENT`, in the order of `make reproduce`."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.experiment import Experiment
from experiments.harness.schema import ConfigError

PREFIXES = ("fig", "readme", "sec", "ext")


def experiments(chosen: Sequence[str] = ()) -> list[Experiment]:
    """All experiments, or those whose name is in `chosen` or begins with one of its entries (`fig08`).

    Raises `ConfigError` for an entry that matches none.
    """
    here = Path(__file__).parents[1]
    names = [path.stem for path in here.glob("*.py") if path.stem.startswith(PREFIXES)]
    modules = [importlib.import_module(f"experiments.{name}") for name in names]
    known = sorted((module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")), key=lambda e: e.order)
    for entry in chosen:
        if not any(experiment.name.startswith(entry) for experiment in known):
            listed = ", ".join(experiment.name for experiment in known)
            raise ConfigError(f"figures has {entry!r}, which names no experiment; known: {listed}. A prefix will do")
    return [e for e in known if not chosen or any(e.name.startswith(entry) for entry in chosen)]
