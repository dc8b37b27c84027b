"""All trials, by name."""

import importlib

from experiments.reliability.trial import TRIALS, Trial
from punica.registry import Registry

MODULES = (
    "load", "server_load", "faults", "full_disk", "killed", "killed_runner", "input", "mappings", "api", "isolation",
    "determinism", "kernels",
)  # fmt: skip


def all_trials() -> Registry[Trial]:
    """Import the modules of trials; return the registry that they fill."""
    for name in MODULES:
        importlib.import_module(f"experiments.reliability.{name}")
    return TRIALS


def file_of(trial: Trial) -> str:
    """Return the script of a trial below ``experiments``, as `fingerprint` and `refuse_other_sources` name it."""
    return trial.run.__module__.removeprefix("experiments.").replace(".", "/")
