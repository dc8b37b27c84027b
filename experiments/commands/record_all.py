"""All recorded sets of a hardware, measured in calls of a few minutes each.

    make record-all HARDWARE=h200 LIMIT=9
    python -m experiments.commands.record_all machine=h200 limit=9 list=true

`conf/recording.yaml` lists the sets, in the order of the claims. Those that decide claims are measured first, in
rounds, one repeat of all of them before the next: a cut run leaves whole claims, and repeats are of different times or
machines. Sets without claims follow. Several GPUs measure a set each, with a share of the cores. So the CPU time of the
others counts as no disturbance.

A call ends after `limit` minutes, and the same command continues: `outputs/<hardware>/record_all.json` says what is
done, at which commit. A set that the limit stopped is measured after its kin; one of more minutes than `limit` is not
begun. Carry `outputs` to the next machine. Rows are of one commit: a changed tree is refused, and rows of another
commit are, too. `list=true` prints sets and minutes, and measures nothing.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from omegaconf import MISSING

from experiments.commands.commits import is_uncommitted
from experiments.harness.command import finish, with_options
from experiments.harness.recording import RecordedSet, sets_of
from experiments.harness.schema import REPOSITORY, ConfigError
from experiments.measure.commit import commit
from experiments.measure.environment import hardware_slug
from experiments.measure.records import RowsError, ensure_writable, read_rows

POLL_S, STOPPING_S = 0.5, 30.0
"""Seconds between two looks at the sets under way, and those that an interrupted one has for writing its rows."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Options:
    """The command line."""

    machine: str = MISSING  # cpu, or a GPU of conf/hardware
    limit: float = 9.0  # minutes of this call
    list: bool = False  # print the sets and what is left of them; measure nothing
    vllm_python: str | None = None  # Python of an environment with vLLM, for the set that needs one


Round = tuple[RecordedSet, int]


class Progress:
    """Rounds of sets that are done or were stopped at a commit, kept in `path`."""

    def __init__(self, path: Path, revision: str) -> None:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.path, self.revision, self._commits = path, revision, {kept.get("commit", revision)}
        same = kept if kept.get("commit") == revision else {}
        self.done, self.stopped = ({(run, round_) for run, round_ in same.get(key, ())} for key in ("done", "stopped"))

    def refuse_others(self) -> None:
        """Raise `RowsError` where this is of another commit, or rows beside it are."""
        rows = {row.commit for path in self.path.parent.glob("rows/*.csv") for row in read_rows(path)}
        if others := sorted((self._commits | rows) - {self.revision}):
            raise RowsError(
                f"{self.path.parent} holds work of commit {', '.join(others)}, this is {self.revision}: check out that "
                "one to go on, or move the folder away to begin again"
            )

    def add(self, one: RecordedSet, round_: int, whole: bool) -> None:
        """Note a round of a set as done, or as stopped, on disk."""
        (self.done if whole else self.stopped).add((one.run, round_))
        content = {"commit": self.revision, "done": sorted(self.done), "stopped": sorted(self.stopped)}
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def left(self, sets: Sequence[RecordedSet]) -> list[Round]:
        """Return what is not done: rounds of what decides claims, then the others; of both what was stopped last."""
        found = [(one, round_) for round_ in range(max(one.rounds for one in sets)) for one in sets
                 if round_ < one.rounds and (one.run, round_) not in self.done]  # fmt: skip
        return sorted(found, key=lambda pair: (not pair[0].claims, (pair[0].run, pair[1]) in self.stopped))


class Ended(NamedTuple):
    """A set that ended: its exit status (None: interrupted), and its last line, from JSON."""

    key: Round
    status: int | None
    facts: dict[str, Any]


class Processes:
    """Sets under way on `places` GPUs; one place is the whole machine, without a change of its environment.

    With several, a set sees its GPUs alone (`CUDA_VISIBLE_DEVICES`), and its share of the cores. What it prints while
    it runs is appended to a file per GPU in `logs`.
    """

    def __init__(self, places: int, logs: Path) -> None:
        self.free, self._places, self._logs = list(range(places)), places, logs
        self._running: dict[Round, tuple[subprocess.Popen[bytes], IO[str], list[int]]] = {}

    @property
    def running(self) -> list[Round]:
        """Keys of the sets under way."""
        return list(self._running)

    def start(self, key: Round, words: Sequence[str], gpus: int) -> None:
        """Run `python -m words` on as many of the free GPUs, and their cores."""
        taken, self.free = self.free[:gpus], self.free[gpus:]
        several, outer, seen = self._places > 1, os.environ.get(VISIBLE), dict[str, str]()
        if several:
            mine = outer.split(",") if outer else [*map(str, range(self._places))]
            seen = {VISIBLE: ",".join(mine[place] for place in taken)}
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"record_all_gpu{taken[0]}.log"
            print(f"on GPU {', '.join(map(str, taken))}, progress in {log}", file=sys.stderr, flush=True)
        output = TemporaryFile("w+")  # noqa: SIM115 (closed when the set has ended)
        with log.open("ab") if several else os.fdopen(os.dup(sys.stderr.fileno()), "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=REPOSITORY, stdout=output, stderr=errors,
                env=os.environ | seen, preexec_fn=lambda: self._settle(taken),
            )  # fmt: skip
        self._running[key] = process, output, taken

    def ended(self) -> Iterator[Ended]:
        """Yield the sets that ended since the last call, and free their GPUs."""
        for key, (process, _, _) in list(self._running.items()):
            if (status := process.poll()) is not None:
                yield self._end(key, status)

    def interrupt(self) -> Iterator[Ended]:
        """Interrupt all sets, wait while they write their rows, and yield them."""
        yield from self.ended()
        for process, _, _ in self._running.values():
            process.send_signal(signal.SIGINT)
        for key, (process, _, _) in list(self._running.items()):
            try:
                process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            yield self._end(key, None)

    def _end(self, key: Round, status: int | None) -> Ended:
        _, output, places = self._running.pop(key)
        with output:
            output.seek(0)
            lines = output.read().splitlines()
        print(*lines, sep="\n")
        self.free = sorted([*self.free, *places])
        return Ended(key, status, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {})

    def _settle(self, taken: Sequence[int]) -> None:
        """Take a share of the cores, and SIGINT, which a shell lets its jobs in the background ignore."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        cores = sorted(os.sched_getaffinity(0))
        if 1 < self._places <= len(cores):
            share = len(cores) // self._places
            os.sched_setaffinity(0, {cores[place * share + core] for place in taken for core in range(share)})


def record_all(options: Options) -> None:
    """Measure what is left until the limit; exit code 1 where a set failed."""
    ends, sets, revision = time.monotonic() + 60 * options.limit, sets_of(options.machine), commit()
    if is_uncommitted(revision) and not options.list:
        raise RowsError(f"the tree is of {revision}: commit, or carry the stamp of experiments.commands.stamp")
    outputs = REPOSITORY / "outputs" / options.machine
    progress = Progress(outputs / "record_all.json", revision)
    if options.list:
        return show(progress, sets)
    progress.refuse_others()
    ensure_writable(outputs)
    memory = [] if options.machine == "cpu" else gpu_memory(options.machine)
    lacking = {one.run: why for one in sets if memory and (why := one.missing(options.vllm_python, memory))}
    waiting = [(one, round_) for one, round_ in progress.left(sets) if one.run not in lacking]
    failed = list[str]()
    for (one, round_), status, facts in measured(waiting, options, Processes(max(1, len(memory)), outputs), ends):
        if status:
            failed.append(f"round {round_ + 1}: {one.run}")
        else:
            progress.add(one, round_, whole=status == 0 and is_whole(facts))
    left = [one for one, _ in progress.left(sets) if one.run not in lacking]
    told = {"left": len(left), "minutes_left": round(sum(one.minutes for one in left), 1), "failed": failed}
    finish(command="record_all", commit=revision, done=len(progress.done), **told, not_on_this_machine=lacking)
    if failed:
        raise SystemExit(1)


def measured(waiting: Sequence[Round], options: Options, processes: Processes, ends: float) -> Iterator[Ended]:
    """Measure the sets in their order, as many at once as there are GPUs, until the clock is at `ends`.

    Yields each when it ended. Two sets of one script write the same file of rows, so they are not measured at once.
    """
    waiting = list(waiting)
    try:
        while True:
            over = time.monotonic() >= ends
            yield from processes.interrupt() if over else processes.ended()
            for one, round_ in _to_begin(waiting, processes, ends):
                waiting.remove((one, round_))
                words = one.command(options.machine, round_, options.vllm_python)
                print(f"\nround {round_ + 1}: python -m {shlex.join(words)}", file=sys.stderr, flush=True)
                processes.start((one, round_), words, one.gpus)
            if not processes.running:
                return
            time.sleep(POLL_S)
    finally:
        list(processes.interrupt())  # of a call that is interrupted


def _to_begin(waiting: Sequence[Round], processes: Processes, ends: float) -> list[Round]:
    """Choose what begins now; a set of several GPUs is waited for, so that it is not passed over until the end."""
    busy, left, chosen = {one.script for one, _ in processes.running}, len(processes.free), list[Round]()
    for one, round_ in waiting:
        if one.script in busy or time.monotonic() + 60 * one.minutes > ends:
            continue
        if one.gpus > left:
            break
        left -= one.gpus
        busy.add(one.script)
        chosen.append((one, round_))
    return chosen


def is_whole(facts: Mapping[str, Any]) -> bool:
    """Check that a set, by its last line, had points and left none out; tables say neither."""
    return facts.get("points", 1) > 0 and not facts.get("left_out")


def gpu_memory(machine: str) -> list[float]:
    """Return the GB of each GPU. Raises `ConfigError` without a GPU, or for another than `machine`."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU: call it on the GPU machine, or choose machine=cpu")
    if (found := hardware_slug()) != machine:
        raise ConfigError(f"machine={machine}, but this GPU is {found}: choose machine={found}")
    return [torch.cuda.get_device_properties(index).total_memory / 1e9 for index in range(torch.cuda.device_count())]


def show(progress: Progress, sets: Sequence[RecordedSet]) -> None:
    """Print the sets with minutes and rounds, and what is left."""
    for one in sets:
        done = sum((one.run, round_) in progress.done for round_ in range(one.rounds))
        print(f"{done}/{one.rounds} rounds of {one.minutes:g} min  {one.claims or '-':14} {one.run}")
    minutes = sum(one.minutes for one, _ in progress.left(sets))
    print(f"{minutes / 60:.1f} hours are left; a call measures for limit= minutes")


if __name__ == "__main__":
    with_options("record_all", __doc__ or "", "commands.record_all", Options, record_all)
