"""Reliability: trials of load, faults, bad input, isolation and determinism, each in a process of its own.

    python -m experiments.commands.reliability trials=[engine_soak,faults] size=full seed=1

Trials are chosen by name or group, and `record=true` copies the rows to `results/` without running any.

Rows of tried, injected, survived and lost go to `outputs/<hardware>/reliability.csv` as each trial ends, and the exit
code is 1 where something was lost. `device=auto` takes the GPU where there is one.
"""

import shutil
import time
from pathlib import Path

from experiments.commands.commits import source_hashes
from experiments.commands.record import promote, refuse, refuse_other_sources
from experiments.harness.command import finish, with_options
from experiments.harness.schema import REPOSITORY, ConfigError, Settings
from experiments.measure import environment
from experiments.measure.records import RowFile, RowsError, ensure_writable, read_rows
from experiments.reliability.groups import all_trials, file_of
from experiments.reliability.process import run_apart
from experiments.reliability.rows import COUNTS, CPU, hardware_of, rows_file, rows_of
from experiments.reliability.trial import SIZES, Outcome, Trial

CUDA = "cuda"
START_S = 8.0
"""Seconds expected until a trial's process has imported what it needs."""


class Options(Settings):
    """The command line."""

    trials: list[str] = []  # names and groups; none: all
    size: str = "laptop"  # smoke, laptop or full: counts of each trial
    seed: int = 0  # of all that is drawn
    device: str = "auto"  # of engines: auto, cpu or cuda
    outputs: str = "outputs"  # folder of fresh rows
    results: str = "results"  # folder of recorded rows
    record: bool = False  # copy fresh rows to the recorded ones, and run nothing


def reliability(options: Options) -> None:
    """Run the chosen trials and write their rows, or record those that are there. Exits with 1 where one lost."""
    device = device_of(options)
    hardware = hardware_of(device)
    fresh = rows_file(REPOSITORY / options.outputs / hardware / ("smoke" if options.size == SIZES[0] else ""))
    if options.record:
        target = rows_file(REPOSITORY / options.results / hardware)
        record(fresh, target)
        finish(command="reliability", recorded=str(target))
        return
    chosen = chosen_trials(options.trials, device)
    ensure_writable(fresh.parent)
    lost = run_all(chosen, options, device, fresh)
    finish(command="reliability", rows=str(fresh), trials=len(chosen), lost=lost)
    if lost:
        raise SystemExit(1)


def device_of(options: Options) -> str:
    """Decide the device. `ConfigError` for a size, a seed or a device that does not exist."""
    for key, known in (("size", SIZES), ("device", ("auto", CPU, CUDA))):
        if getattr(options, key) not in known:
            raise ConfigError(f"{key}={getattr(options, key)} is unknown: choose one of {', '.join(known)}")
    if options.seed < 0:
        raise ConfigError(f"seed={options.seed} must be 0 or more")
    has_gpu = environment.hardware_slug() != CPU
    if options.device == CUDA and not has_gpu:
        raise ConfigError("device=cuda needs an NVIDIA GPU, and there is none: leave it out, or give device=cpu")
    return CUDA if options.device != CPU and has_gpu else CPU


def chosen_trials(names: list[str], device: str) -> list[Trial]:
    """Return trials by name or group, all without names. `ConfigError` for an unknown name, or one that needs a GPU."""
    trials = [all_trials().get(name) for name in all_trials().names()]
    known = {name for trial in trials for name in (trial.name, trial.group)}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"trials={unknown} are unknown: choose from {', '.join(sorted(known))}")
    found = []
    for trial in trials:
        if names and not {trial.name, trial.group} & set(names):
            continue
        lacks = "an NVIDIA GPU" if trial.needs_gpu and device == CPU else ""
        if trial.program and shutil.which(trial.program) is None:
            lacks = lacks or f"{trial.program} on the PATH"
        if lacks and trial.name in names:
            raise ConfigError(f"trials=[{trial.name}] needs {lacks}: leave it out, or run it on a machine with one")
        if lacks:
            print(f"left out: {trial.name} needs {lacks}")
        else:
            found.append(trial)
    return found


def run_all(chosen: list[Trial], options: Options, device: str, file: Path) -> int:
    """Run trials one after the other and write the rows of each; return how much was lost in all."""
    lost, begun, rows = 0, time.monotonic(), RowFile(file)
    expected = [START_S + trial.seconds * trial.counts[options.size] / trial.counts["laptop"] for trial in chosen]
    for number, trial in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {trial.name}: {trial.about}", flush=True)
        outcome = run_apart(trial, options.size, options.seed, device)
        rows.replace(rows_of(trial, outcome, options.size, options.seed, device))
        lost += outcome.lost
        spent = time.monotonic() - begun
        left = spent * sum(expected[number:]) / sum(expected[:number])
        print(f"    {said(outcome)}; {spent:.0f} s so far, about {left:.0f} s left", flush=True)
    return lost


def said(outcome: Outcome) -> str:
    """Return counts and values of an outcome as a line, and a line for each of the first losses."""
    counts = ", ".join(f"{name} {getattr(outcome, name):,}" for name in COUNTS)
    values = [f"{name} {value:.3g} {unit}" for name, (value, unit) in outcome.values.items()]
    return "; ".join([counts, *values]) + "".join(f"\n    lost: {note}" for note in outcome.notes)


def record(source: Path, target: Path) -> None:
    """Promote fresh rows. `RowsError` where there are none, or they are not of the commit that they name."""
    rows, registry = read_rows(source), all_trials()
    refuse(rows, allow_dirty=False)
    with source_hashes() as source_hash:
        for name in dict.fromkeys(row.system for row in rows):
            if name not in registry.names():
                raise RowsError(f"{source} has rows of a trial {name} that is no more: take them out")
            of_trial = [row for row in rows if row.system == name]
            refuse_other_sources(of_trial, file_of(registry.get(name)), source_hash)
    promote(source, target, rows)


if __name__ == "__main__":
    with_options("reliability", __doc__ or "", "commands.reliability", Options, reliability)
