"""All recorded sets of a hardware, measured one after the other in calls of a few minutes each.

    make record-all HARDWARE=h200 LIMIT=9
    python -m experiments.commands.record_all machine=h200 limit=9 list=true

`conf/recording.yaml` lists the sets, in the order of the claims. Every set is measured in rounds, one repeat of all of
them before the next, so that a cut run leaves whole claims and repeats are of different times or machines. A call ends
after `limit` minutes, and the same command continues: `outputs/<hardware>/record_all.json` says what is done, at which
commit. Carry `outputs` to the next machine. Rows of one commit only: it refuses a changed tree, and `make record
ARGS="commit=..."` refuses rows of another. `list=true` prints sets and minutes and measures nothing.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from experiments.commands.commits import is_uncommitted
from experiments.harness.command import finish, with_options
from experiments.harness.schema import CONF, REPOSITORY, ConfigError
from punica.measure.commit import commit
from punica.measure.records import RowsError, ensure_writable

LEAST_MINUTES = 0.5
"""Time below which no set is begun: loading and compiling take as long."""
STOPPING_S = 30.0
"""Seconds that an interrupted set has for writing its rows."""


@dataclass
class Options:
    """The command line."""

    machine: str = MISSING  # cpu, or a GPU of conf/hardware
    limit: float = 9.0  # minutes of this call
    list: bool = False  # print the sets and what is left of them; measure nothing
    more: str | None = None  # overrides for the sets that need them, as figure.vllm_python=/path/to/python


@dataclass(frozen=True)
class RecordedSet:
    """One command, with the minutes of a round and what a machine must have for it (`conf/recording.yaml`)."""

    run: str
    minutes: float
    claims: str = ""
    gb: float = 30.0
    gpus: int = 1
    rounds: int = 3
    needs: str = ""

    def command(self, hardware: str, round_: int, more: str) -> list[str]:
        """Return the words after `python -m`; later rounds measure the repeats that earlier ones have not."""
        script, *words = shlex.split(self.run)
        if not script.startswith("commands.") and not script.endswith("_tables"):  # those find the hardware themselves
            words.append(f"hardware={hardware}")
        if self.rounds > 1:
            words.append(f"scale.passes={round_ + 1}")
        return [f"experiments.{script}", *words, *(shlex.split(more) if self.needs else [])]

    def missing(self, more: str, memory_gb: Sequence[float]) -> str:
        """Return what this machine lacks for the set, given the memory of its GPUs; empty where it lacks nothing."""
        if self.needs and f"{self.needs}=" not in more:
            return f"needs more='{self.needs}=...'"
        if sum(here >= self.gb for here in memory_gb) < self.gpus:
            return f"needs {self.gpus} GPU(s) of {self.gb:g} GB"
        return ""


def sets_of(hardware: str) -> list[RecordedSet]:
    """Return the sets of `hardware`; `ConfigError` for a name without a file in `conf/hardware`."""
    known = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "auto")
    if hardware not in known:
        raise ConfigError(f"machine={hardware} is unknown: choose machine={' or machine='.join(known)}")
    content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "recording.yaml"))
    return [RecordedSet(**one) for one in content["cpu" if hardware == "cpu" else "gpu"]]


class Progress:
    """Rounds of sets that are done at a commit, kept in `path`. Raises `RowsError` where they are of another one."""

    def __init__(self, path: Path, revision: str) -> None:
        self.path, self.revision, self.done = path, revision, set[tuple[str, int]]()
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["commit"] != revision:
                raise RowsError(
                    f"{path} is of commit {kept['commit']}, this is {revision}: check out that one to go on, or move "
                    f"{path.parent} away to begin again"
                )
            self.done = {(run, round_) for run, round_ in kept["done"]}

    def add(self, one: RecordedSet, round_: int) -> None:
        """Note a round of a set as done, on disk."""
        self.done.add((one.run, round_))
        content = {"commit": self.revision, "done": sorted(self.done)}
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def left(self, sets: Sequence[RecordedSet]) -> Iterator[tuple[RecordedSet, int]]:
        """Yield what is not done: all sets of a round before the next round."""
        for round_ in range(max(one.rounds for one in sets)):
            yield from ((one, round_) for one in sets if round_ < one.rounds and (one.run, round_) not in self.done)


def record_all(options: Options) -> None:
    """Measure what is left until the limit; exit code 1 where a set failed."""
    started, sets, revision = time.monotonic(), sets_of(options.machine), commit()
    if is_uncommitted(revision) and not options.list:
        raise RowsError(f"the tree is of {revision}: commit, or carry the stamp of experiments.commands.stamp")
    outputs = REPOSITORY / "outputs" / options.machine
    progress = Progress(outputs / "record_all.json", revision)
    if options.list:
        return show(progress, sets)
    ensure_writable(outputs)
    more, memory = options.more or "", [] if options.machine == "cpu" else gpu_memory()
    lacking = {one.run: missing for one in sets if memory and (missing := one.missing(more, memory))}
    failed = list[str]()
    for one, round_ in list(progress.left(sets)):
        seconds = 60 * options.limit - (time.monotonic() - started)
        if one.run in lacking or seconds < 60 * LEAST_MINUTES:
            continue
        words = one.command(options.machine, round_, more)
        print(f"\nround {round_ + 1}: python -m {shlex.join(words)}", file=sys.stderr, flush=True)
        status = run_for(seconds, words)
        if status == 0:
            progress.add(one, round_)
        elif status is not None:
            failed.append(f"round {round_ + 1}: {one.run}")
    left = [one for one, _ in progress.left(sets) if one.run not in lacking]
    minutes = round(sum(one.minutes for one in left), 1)
    facts = {"left": len(left), "minutes_left": minutes, "failed": failed, "not_on_this_machine": lacking}
    finish(command="record_all", commit=revision, done=len(progress.done), **facts)
    if failed:
        raise SystemExit(1)


def run_for(seconds: float, words: Sequence[str]) -> int | None:
    """Run a set for at most `seconds`: its exit status, or None where it was interrupted, with its rows on disk."""
    with subprocess.Popen([sys.executable, "-m", *words], cwd=REPOSITORY) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return None


def gpu_memory() -> list[float]:
    """Return the GB of each GPU here; `ConfigError` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU: call it on the GPU machine, or choose machine=cpu")
    return [torch.cuda.get_device_properties(index).total_memory / 1e9 for index in range(torch.cuda.device_count())]


def show(progress: Progress, sets: Sequence[RecordedSet]) -> None:
    """Print the sets with minutes and rounds, and what is left."""
    for one in sets:
        done = sum((one.run, round_) in progress.done for round_ in range(one.rounds))
        print(f"{done}/{one.rounds} rounds of {one.minutes:g} min  {one.claims or '-':14} {one.run}")
    minutes = sum(one.minutes for one, _ in progress.left(sets))
    print(f"{minutes / 60:.1f} hours are left, in calls of limit= minutes")


if __name__ == "__main__":
    with_options("record_all", __doc__ or "", "commands.record_all", Options, record_all)
