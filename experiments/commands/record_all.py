"""All recorded sets of a hardware, measured in calls of a few minutes each.

    make record-all HARDWARE=h200 LIMIT=9
    python -m experiments.commands.record_all machine=h200 limit=9 list=true

`conf/recording.yaml` lists the sets. Those that decide claims are measured first, one repeat of all of them before the
next: a cut run leaves whole claims, and repeats are of different times or machines. Several GPUs measure a set each,
with a share of the cores, so that the CPU time of the others counts as no disturbance.

A call ends after `limit` minutes, and the same command continues: `outputs/<hardware>/record_all.json` says what is
done, at which commit. A set of more minutes than `limit` is not begun. Carry `outputs` to the next machine. Rows are of
one commit: a changed tree is refused, and rows of another commit are, too. `list=true` prints sets and minutes.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from time import monotonic
from typing import Any

from experiments.commands.commits import is_uncommitted
from experiments.harness.command import finish, with_options
from experiments.harness.recording import RecordedSet, sets_of
from experiments.harness.schema import REPOSITORY, ConfigError, Settings
from experiments.measure.commit import commit
from experiments.measure.environment import hardware_slug
from experiments.measure.records import RowsError, ensure_writable, read_rows

STOPPING_S = 30.0  # that an interrupted set has for writing its rows
VISIBLE = "CUDA_VISIBLE_DEVICES"
Round = tuple[RecordedSet, int]


class Options(Settings):
    """The command line."""

    machine: str  # cpu, or a GPU of conf/hardware
    limit: float = 9.0  # minutes of this call
    list: bool = False  # print the sets and what is left of them; measure nothing
    vllm_python: str | None = None  # Python of an environment with vLLM, for the set that needs one


def record_all(options: Options) -> None:
    """Measure what is left until the limit; exit code 1 where a set failed."""
    sets, revision, outputs = sets_of(options.machine), commit(), REPOSITORY / "outputs" / options.machine
    path, failed = outputs / "record_all.json", list[str]()
    kept: dict[str, Any] = {"commit": revision, "done": []}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    done = {(run, round_) for run, round_ in kept["done"] if kept["commit"] == revision}
    if options.list:
        return show(sets, done)
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

    asyncio.run(measure(left(here, done), options, max(1, len(memory)), outputs, note))
    rest = [one for one, _ in left(here, done)]
    told = {"left": len(rest), "minutes_left": round(sum(one.minutes for one in rest), 1), "failed": failed}
    finish(command="record_all", commit=revision, done=len(done), **told, not_on_this_machine=lacking)
    if failed:
        raise SystemExit(1)


def left(sets: Sequence[RecordedSet], done: Collection[tuple[str, int]]) -> list[Round]:
    """Return what is not done: rounds of what decides claims, then the others."""
    found = [(one, round_) for one in sets for round_ in range(one.rounds) if (one.run, round_) not in done]
    return sorted(found, key=lambda pair: (not pair[0].claims, pair[1]))


async def measure(
    waiting: list[Round], options: Options, places: int, logs: Path, note: Callable[[Round, int, dict[str, Any]], None]
) -> None:
    """Run the sets in their order until the limit, as many at once as there are GPUs (`places`); `note` what ended."""
    ends, free = monotonic() + 60 * options.limit, list(range(places))
    running: dict[asyncio.Task[tuple[int, dict[str, Any]]], tuple[Round, list[int]]] = {}
    try:
        async with asyncio.timeout(60 * options.limit):
            while True:
                for key in to_begin(waiting, {one.script for (one, _), _ in running.values()}, len(free), ends):
                    waiting.remove(key)
                    taken, free = free[: key[0].gpus], free[key[0].gpus :]
                    words = key[0].command(options.machine, key[1], options.vllm_python)
                    print(f"\nround {key[1] + 1}: python -m {shlex.join(words)}", file=sys.stderr, flush=True)
                    running[asyncio.create_task(run(words, taken, places, logs))] = key, taken
                if not running:
                    return
                for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                    key, taken = running.pop(task)
                    free = sorted([*free, *taken])
                    note(key, *task.result())
    except TimeoutError:
        print("the limit is reached", file=sys.stderr)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def to_begin(waiting: Sequence[Round], busy: set[str], free: int, ends: float) -> list[Round]:
    """Choose what begins now. Two sets of one script write the same file of rows, so they are not measured at once;
    a set of several GPUs is waited for, so that it is not passed over until the end.
    """
    chosen = list[Round]()
    for one, round_ in waiting:
        if one.script in busy or monotonic() + 60 * one.minutes > ends:
            continue
        if one.gpus > free:
            break
        free, busy = free - one.gpus, busy | {one.script}
        chosen.append((one, round_))
    return chosen


async def run(words: Sequence[str], gpus: Sequence[int], places: int, logs: Path) -> tuple[int, dict[str, Any]]:
    """Run `python -m words`; return its exit status, and its last line, from JSON.

    Of several `places` it sees `gpus` alone, with their share of the cores, and its progress goes to a file in `logs`.
    """
    cores, errors, environment = sorted(os.sched_getaffinity(0)), None, dict(os.environ)
    if places > 1:
        visible = os.environ.get(VISIBLE, ",".join(map(str, range(places)))).split(",")
        environment[VISIBLE] = ",".join(visible[place] for place in gpus)
        share = len(cores) // places
        cores = [cores[place * share + core] for place in gpus for core in range(share)] or cores
        errors = (logs / f"record_all_gpu{gpus[0]}.log").open("ab")
        print(f"on GPU {', '.join(map(str, gpus))}, progress in {errors.name}", file=sys.stderr, flush=True)

    def settle() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets its jobs in the background ignore it
        os.sched_setaffinity(0, cores)

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, cwd=REPOSITORY, stdout=PIPE, stderr=errors, env=environment, preexec_fn=settle
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), STOPPING_S)
        if process.returncode is None:
            process.kill()
        raise
    print(output.decode(), end="")
    last = output.decode().rstrip().rpartition("\n")[2]
    return process.returncode or 0, json.loads(last) if last.startswith("{") else {}


def gpu_memory(machine: str) -> list[float]:
    """Return the GB of each GPU. Raises `ConfigError` without a GPU, or for another than `machine`."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU: call it on the GPU machine, or choose machine=cpu")
    if (found := hardware_slug()) != machine:
        raise ConfigError(f"machine={machine}, but this GPU is {found}: choose machine={found}")
    return [torch.cuda.get_device_properties(index).total_memory / 1e9 for index in range(torch.cuda.device_count())]


def show(sets: Sequence[RecordedSet], done: Collection[tuple[str, int]]) -> None:
    """Print the sets with minutes and rounds, and what is left."""
    for one in sets:
        rounds = sum((one.run, round_) in done for round_ in range(one.rounds))
        print(f"{rounds}/{one.rounds} rounds of {one.minutes:g} min  {one.claims or '-':14} {one.run}")
    minutes = sum(one.minutes for one, _ in left(sets, done))
    print(f"{minutes / 60:.1f} hours are left; a call measures for limit= minutes")


if __name__ == "__main__":
    with_options("record_all", __doc__ or "", "commands.record_all", Options, record_all)
