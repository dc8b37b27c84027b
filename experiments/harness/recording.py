"""Recorded sets: the commands of `conf/recording.yaml` that measure what is in `results`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from experiments.harness.schema import CONF, ConfigError

THREADS = 16
"""Threads of every GPU set: rows of machines with other numbers of cores would replace each other."""


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
        """The script that it runs, which has one file of rows."""
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
