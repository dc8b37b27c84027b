"""Every experiment there is: scripts of `experiments/` that hold an `EXPERIMENT`, in the order of `make reproduce`; and
the recorded sets, commands that measure what is in `results` (`conf/recording.yaml`).
"""

import importlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.harness.experiment import Experiment
from experiments.harness.schema import CONF, ConfigError

PREFIXES = ("fig", "readme", "sec", "ext")
NUMBER = re.compile(r"(?:fig(?:ure)?[ ._]?)?0*(\d+)", re.IGNORECASE)
"""An entry that is the number of one of the paper's figures: 1, 08, fig1, Figure 11."""
THREADS = 16
"""Threads of every GPU set: rows of machines with other numbers of cores would replace each other."""


def experiments(chosen: Sequence[str] = ()) -> list[Experiment]:
    """All experiments, or those named in `chosen` by number or beginning; `ConfigError` for one that names none."""
    names = [path.stem for path in Path(__file__).parents[1].glob("*.py") if path.stem.startswith(PREFIXES)]
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


@dataclass(frozen=True)
class RecordedSet:
    """One command, with the minutes of a round and what a machine must have for it (`conf/recording.yaml`)."""

    run: str
    minutes: float
    claims: str = ""
    gb: float = 30.0
    gpus: int = 1
    rounds: int = 3
    vllm: bool = False

    @property
    def script(self) -> str:
        return self.run.split()[0]

    def command(self, machine: str, round_: int, vllm_python: str | None) -> list[str]:
        """Return the words after `python -m`; later rounds measure the repeats that earlier ones have not."""
        script, *words = shlex.split(self.run)
        if not script.startswith("commands."):  # those find the hardware themselves
            words += [f"hardware={machine}", *([] if machine == "cpu" else [f"hardware.threads={THREADS}"])]
        words += [f"scale.passes={round_ + 1}"] if self.rounds > 1 else []
        return [f"experiments.{script}", *words, *([f"figure.vllm_python={vllm_python}"] if self.vllm else [])]

    def missing(self, vllm_python: str | None, memory_gb: Sequence[float]) -> str:
        """Return what the machine lacks for the set, given the memory of its GPUs; empty where it lacks nothing."""
        if self.vllm and not vllm_python:
            return "needs vllm_python=/path/to/python, an environment with vLLM"
        enough = sum(memory >= self.gb for memory in memory_gb) >= self.gpus
        return "" if enough else f"needs {self.gpus} GPU(s) of {self.gb:g} GB"


@cache
def recorded_sets() -> dict[str, list[RecordedSet]]:
    """Map ``cpu`` and ``gpu`` to their sets, in the order of the claims that they decide."""
    content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "recording.yaml"))
    return {kind: [RecordedSet(**one) for one in sets] for kind, sets in content.items()}


def sets_of(machine: str) -> list[RecordedSet]:
    """Return the sets of `machine`; `ConfigError` for a name without a file in `conf/hardware`."""
    known = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "auto")
    if machine not in known:
        raise ConfigError(f"machine={machine} is unknown: choose machine={' or machine='.join(known)}")
    return recorded_sets()["cpu" if machine == "cpu" else "gpu"]
