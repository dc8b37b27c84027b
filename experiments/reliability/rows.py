"""Outcomes as rows: tried, injected, survived and lost of each trial, and what it measured."""

import hashlib
from pathlib import Path
from typing import Any

from experiments.harness.schema import REPOSITORY
from experiments.harness.source import fingerprint
from experiments.measure import environment
from experiments.measure.records import Row
from experiments.reliability.groups import file_of
from experiments.reliability.trial import Outcome, Trial

FILE = "reliability.csv"
COUNTS = ("tried", "injected", "survived", "lost")
MODEL = "tiny"
CPU = "cpu"


def hardware_of(device: str) -> str:
    """Return the name of this machine's folder of rows, by the device of the engines."""
    return CPU if device == CPU else environment.hardware_slug()


def rows_of(trial: Trial, outcome: Outcome, size: str, seed: int, device: str) -> list[Row]:
    """Build the rows of one run of a trial; its seed is their repeat."""
    values = {name: (float(getattr(outcome, name)), "count") for name in COUNTS} | outcome.values
    digest = hashlib.sha256(f"{trial.name} {trial.counts[size]} {device}".encode()).hexdigest()[:12]
    stamp: dict[str, Any] = environment.stamp()
    source = fingerprint(REPOSITORY / "experiments" / f"{file_of(trial)}.py")
    name = environment.cpu_name() if device == CPU else environment.device_name()
    return [
        Row(
            figure="reliability", panel=trial.group, system=trial.name, workload="", model=MODEL,
            hardware=hardware_of(device), batch_size=None, seq_len=None, rank=None, metric=metric, value=value,
            unit=unit, scale=size, config_hash=digest, source_hash=source, device=name, repeat=seed, **stamp,
        )
        for metric, (value, unit) in values.items()
    ]  # fmt: skip


def command_of(row: Row) -> str:
    """Return the command that repeats the run of a row."""
    device = CPU if row.hardware == CPU else "cuda"
    return f"make reliability ARGS=\"trials=[{row.system}] size={row.scale} seed={row.repeat} device={device}\""


def rows_file(folder: Path) -> Path:
    """Return the file of these rows in a folder of a machine's rows."""
    return folder / FILE
