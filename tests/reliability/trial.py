"""A trial: a test that tries something many times, counts what survived, and measures what it used."""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import pytest
import torch

SIZES = ("smoke", "laptop", "full")
COUNTS = ("tried", "injected", "survived", "lost")
MOST_NOTES, PARTS, LEAST = 5, 40, 48
"""Most texts of losses that a trial keeps, most parts of a trial of load, and least requests of one."""


class Sizes(NamedTuple):
    """Counts of the `SIZES`, or the one of a tiny run in the slow suite, with the group; seconds of size ``laptop``."""

    group: str
    counts: tuple[int, ...]
    seconds: float

    def count(self, size: str) -> int:
        return self.counts[0] if len(self.counts) == 1 else self.counts[SIZES.index(size)]

    def limit_s(self, size: str) -> float:
        """Return ten times the expected seconds and two minutes to start: a trial that takes longer hangs."""
        return 120 + 10 * self.seconds * max(1.0, self.count(size) / self.count("laptop"))


@dataclass
class Trial:
    """Choices of one run of a trial, what it counted, and what it measured.

    Attributes:
        device, folder: of engines, and an empty one.
        tried, survived: operations, requests or processes with an expected result, and those that had it.
        injected: faults, cancellations or bad inputs among or beside them.
        values: further quantities, name -> value and unit.
        notes: texts of the first losses.
    """

    count: int
    seed: int
    device: str
    folder: Path
    tried: int = 0
    injected: int = 0
    survived: int = 0
    values: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)

    @property
    def lost(self) -> int:
        return self.tried - self.survived

    def expect(self, held: bool, note: str) -> None:
        """Count one try; ``note`` describes the loss where it did not hold."""
        self.tried += 1
        self.survived += held
        if not held and len(self.notes) < MOST_NOTES:
            self.notes.append(note)

    def note_growth(self, before: dict[str, float], after: dict[str, float], pool: int = 0) -> None:
        """Note what grew; threads, but for those of a pool, and handles that were left over are a loss."""
        growth = {name: after[name] - before[name] for name in before}
        self.expect(growth["thread"] <= pool and growth["handle"] <= 0, f"left over: {growth}")
        for name, value in growth.items():
            self.values[f"{name}_growth"] = (value, "MiB" if "memory" in name else "count")

    def note_rates(self, rates: Sequence[float], unit: str) -> None:
        """Note the median of rates, and by how much that of the last quarter differs from that of the first."""
        quarter = max(1, len(rates) // 4)
        drift = 100 * (median(rates[-quarter:]) / median(rates[:quarter]) - 1)
        self.values |= {"throughput": (median(rates), unit), "throughput_drift": (drift, "%")}

    def parts(self) -> tuple[list[range], list[range]]:
        """Cut the tries into two parts, or more of `LEAST`: one of five, in which threads start, and the rest."""
        parts = max(2, min(PARTS, self.count // LEAST))
        cuts = [range(*ends) for ends in pairwise(self.count * part // parts for part in range(parts + 1))]
        return cuts[: max(1, parts // 5)], cuts[max(1, parts // 5) :]

    def __str__(self) -> str:
        counts = [f"{name} {getattr(self, name):,}" for name in COUNTS]
        values = [f"{name} {value:.3g} {unit}" for name, (value, unit) in self.values.items()]
        return "; ".join([", ".join(counts), *values, *self.notes])


def use_of(pid: int | None = None) -> dict[str, float]:
    """Return memory in MiB, threads and handles of a process with its children; without ``pid`` of this one alone."""
    gc.collect()
    process = psutil.Process(pid)
    family = [process, *(process.children(recursive=True) if pid else [])]
    use = {
        "host_memory": sum(one.memory_info().rss for one in family) / 2**20,
        "thread": sum(one.num_threads() for one in family), "handle": sum(one.num_fds() for one in family),
    }  # fmt: skip
    if pid is None:
        use["device_memory"] = torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0
    return use


def sized(group: str, *counts: int, seconds: float, tiny: int = 0) -> pytest.MarkDecorator:
    """Make a test a trial with ``counts`` of the `SIZES`; with a ``tiny`` count it runs in the slow suite as well."""
    params = [pytest.param(Sizes(group, counts, seconds), id=f"{group}-sized", marks=pytest.mark.reliability)]
    if tiny:
        params.append(pytest.param(Sizes(group, (tiny,), seconds), id="tiny", marks=pytest.mark.slow))
    return pytest.mark.parametrize("trial", params, indirect=True)
