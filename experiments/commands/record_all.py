"""All recorded sets of a hardware, measured in calls of a few minutes each.

    make record-all HARDWARE=h200 LIMIT=9
    python -m experiments.commands.record_all machine=h200 limit=9

`conf/recording.yaml` lists the sets. Those that decide claims are measured first, one repeat of all of them before the
next: a cut run leaves whole claims, and repeats are of different times or machines.

A call ends after `limit` minutes, and the same command continues: `outputs/<hardware>/record_all.json` says what is
done, at which commit. A set of more minutes than `limit` is not begun. Carry `outputs` to the next machine. Rows are of
one commit: a changed tree is refused, and rows of another commit are, too.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from subprocess import PIPE
from typing import Any

from experiments.harness.catalogue import RecordedSet, sets_of
from experiments.harness.command import finish, with_options
from experiments.harness.schema import REPOSITORY, ConfigError, Settings
from experiments.measure.commit import commit, is_uncommitted
from experiments.measure.environment import hardware_slug
from experiments.measure.records import RowsError, ensure_writable, read_rows

STOPPING_S = 30.0  # that an interrupted set has for writing its rows


class Options(Settings):
    machine: str  # cpu, or a GPU of conf/hardware
    limit: float = 9.0  # minutes of this call
    vllm_python: str | None = None  # Python of an environment with vLLM, for the sets that need one


Round = tuple[RecordedSet, int]
Note = Callable[[Round, int, dict[str, Any]], None]
"""Receives a round that ended, its exit status, and its last line, from JSON."""


def record_all(options: Options) -> None:
    """Measure what is left until the limit; exit code 1 where a set failed."""
    sets, revision, outputs = sets_of(options.machine), commit(), REPOSITORY / "outputs" / options.machine
    path, failed = outputs / "record_all.json", list[str]()
    kept: dict[str, Any] = {"commit": revision, "done": []}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    done = {(run, round_) for run, round_ in kept["done"] if kept["commit"] == revision}
    if is_uncommitted(revision):
        raise RowsError(f"the tree is of {revision}: commit, or carry the stamp of experiments.measure.commit")
    known = {kept["commit"], *(row.commit for file in outputs.glob("rows/*.csv") for row in read_rows(file))}
    if others := ", ".join(sorted(known - {revision})):
        advice = "check out that one to go on, or move the folder away to begin again"
        raise RowsError(f"{outputs} holds work of commit {others}, this is {revision}: {advice}")
    ensure_writable(outputs)
    memory = [] if options.machine == "cpu" else gpu_memory(options.machine)
    lacking = {one.run: why for one in sets if memory and (why := one.missing(options.vllm_python, memory))}
    here = [one for one in sets if one.run not in lacking]

    def note(key: Round, status: int, facts: Mapping[str, Any]) -> None:
        if status:
            failed.append(f"round {key[1] + 1}: {key[0].run}")
        elif facts.get("points", 1) > 0 and not facts.get("left_out"):  # tables say neither
            done.add((key[0].run, key[1]))
            text = json.dumps({"commit": revision, "done": sorted(done)}, indent=1)
            path.write_text(f"{text}\n", encoding="utf-8")

    measure(left(here, done), options, note)
    rest = [one for one, _ in left(here, done)]
    told = {"left": len(rest), "minutes_left": round(sum(one.minutes for one in rest), 1), "failed": failed}
    finish(command="record_all", commit=revision, done=len(done), **told, not_on_this_machine=lacking)
    if failed:
        raise SystemExit(1)


def left(sets: Sequence[RecordedSet], done: Collection[tuple[str, int]]) -> list[Round]:
    """Return what is not done: rounds of what decides claims, then the others."""
    found = [(one, round_) for one in sets for round_ in range(one.rounds) if (one.run, round_) not in done]
    return sorted(found, key=lambda pair: (not pair[0].claims, pair[1]))


def measure(waiting: Sequence[Round], options: Options, note: Note) -> None:
    """Run the sets in their order until the limit, but none that needs more minutes than are left; `note` each."""
    ends = time.monotonic() + 60 * options.limit
    for key in waiting:
        if time.monotonic() + 60 * key[0].minutes > ends:
            continue
        words = key[0].command(options.machine, key[1], options.vllm_python)
        print(f"\nround {key[1] + 1}: python -m {shlex.join(words)}", file=sys.stderr, flush=True)
        settle = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell lets jobs in the background ignore it
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=REPOSITORY, stdout=PIPE, preexec_fn=settle)
        try:
            output = process.communicate(timeout=max(0.0, ends - time.monotonic()))[0].decode()
        except subprocess.TimeoutExpired:
            print("the limit is reached", file=sys.stderr)
            return
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=STOPPING_S)
                process.kill()
        print(output, end="")
        last = output.rstrip().rpartition("\n")[2]
        note(key, process.returncode, json.loads(last) if last.startswith("{") else {})


def gpu_memory(machine: str) -> list[float]:
    """Return the GB of each GPU. Raises `ConfigError` without a GPU, or for another than `machine`."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU: call it on the GPU machine, or choose machine=cpu")
    if (found := hardware_slug()) != machine:
        raise ConfigError(f"machine={machine}, but this GPU is {found}: choose machine={found}")
    return [torch.cuda.get_device_properties(index).total_memory / 1e9 for index in range(torch.cuda.device_count())]


if __name__ == "__main__":
    with_options("record_all", __doc__ or "", "commands.record_all", Options, record_all)
