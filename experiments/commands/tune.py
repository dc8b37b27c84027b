"""Measure schedules on the GPU at hand, and write its table for `punica.ops.triton_ops.tuned`.

    make tune                                   every operator below, resumable
    make tune ARGS="minutes=5 tables=[A,C]"     lines of some operator tables; run again to continue

An operator is searched in rounds: its shrink candidates (`schedules.shrink_schedules`) with the estimate's expand, then
its expand candidates with the best shrink. Each timing counts only when it passes a check against a float32 reference,
after a single call and after a replay of the whole graph. A measurement is one line of ``<gpu>.jsonl`` and is not
repeated. The table gets the operators whose best schedules are at least ``gain`` faster than the estimate's own, and
keeps its other entries of operators that were not timed; the regret of the estimate is printed.
"""

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.benches.operator_lines import Operator, lines
from experiments.benches.operator_pairs import compile_all, estimated, pair_plan, problem_of
from experiments.benches.operator_sets import OperatorSets
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError, Settings
from experiments.measure import environment
from punica.ops.triton_ops import tuned
from punica.ops.triton_ops.launch import supports_pdl
from punica.ops.triton_ops.schedules import Schedule, expand_schedules, shrink_schedules

Pair = tuple[Schedule, Schedule]  # shrink, expand
Times = dict[tuple[Operator, Pair], float]
Entries = dict[str, dict[str, list[Any]]]
TOLERANCE = 1e-3
MOST_GEMV_ROWS = 256
"""Rows up to which GEMV candidates are timed; beyond, one takes longer than all others together."""


def operators(tables: Iterable[str]) -> list[Operator]:
    """The operators of some operator tables, with one rank for all adapters."""
    found = [line.operator for table in tables for line in lines(table)]
    return list(dict.fromkeys(op for op in found if not op.ranks))


def candidates(op: Operator, generate: Callable[..., Iterator[Schedule]]) -> list[Schedule]:
    """Schedules worth timing for `op`."""
    found = list(generate(problem_of(op)))
    return [one for one in found if one.block_m or op.tokens <= MOST_GEMV_ROWS]


class Tuner:
    """Measurements of one run, appended to `path` as they come."""

    def __init__(self, path: Path, deadline: float, workers: int) -> None:
        self.path, self.deadline, self.workers = path, deadline, workers
        self.times = read_times(path)
        self.sets: OperatorSets | None = None

    def measure(self, op: Operator, pair: Pair) -> float:
        """Microseconds of `op` with these schedules (infinite when a check fails or a kernel does not fit)."""
        if (op, pair) not in self.times:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            if self.sets is None or self.sets.operator != op:
                self.sets = None
                self.sets = OperatorSets(op)
                self._time(self.sets, pair)  # brings the clock up
            self.times[op, pair] = self._time(self.sets, pair)
            with self.path.open("a") as file:
                file.write(json.dumps([[op.k, op.widths, op.rank, op.sizes], *pair, self.times[op, pair]]) + "\n")
        return self.times[op, pair]

    @staticmethod
    def _time(sets: OperatorSets, pair: Pair) -> float:
        call = pair_plan(sets, *pair, pdl=supports_pdl(sets.x.device))
        try:
            if sets.relative_error(call) > TOLERANCE:
                return math.inf
            us, error = sets.time_graph(call, calls=100, replays=5)
            return us if error <= TOLERANCE * 4 else math.inf
        except (OutOfResources, RuntimeError, ValueError) as error:  # does not fit: too much shared memory
            print("skipped:", str(error)[:150])
            torch.cuda.synchronize()
            return math.inf

    def search(self, found: list[Operator]) -> None:
        """Measure until the best pair of every operator is known."""
        pairs = {op: estimated(op) for op in found}
        self._time_all({op: [(one, e) for one in (s, *candidates(op, shrink_schedules))]
                        for op, (s, e) in pairs.items()})  # fmt: skip
        best = best_pairs(self.times)
        self._time_all({op: [(best[op][1][0], one) for one in (e, *candidates(op, expand_schedules))]
                        for op, (_, e) in pairs.items()})  # fmt: skip

    def _time_all(self, pairs: dict[Operator, list[Pair]]) -> None:
        """Time the pairs of each operator, compiled in parallel before."""
        pdl = supports_pdl(torch.device("cuda", torch.cuda.current_device()))
        new = [(op, *pair, pdl) for op, several in pairs.items() for pair in several if (op, pair) not in self.times]
        compile_all(new, self.workers)
        for number, (op, several) in enumerate(pairs.items(), 1):
            best = min(self.measure(op, pair) for pair in several)
            print(f"[{number} of {len(pairs)}] {tuned.key_of(problem_of(op))}: {best:.2f} us", flush=True)


def read_times(path: Path) -> Times:
    """The measurements of a file, if there is one."""
    found: Times = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        (k, widths, rank, sizes), shrink, expand, us = json.loads(line)
        found[Operator(k, tuple(widths), rank, tuple(sizes)), (Schedule(*shrink), Schedule(*expand))] = us
    return found


def best_pairs(times: Times) -> dict[Operator, tuple[float, Pair]]:
    """The least time of every operator, and its pair."""
    found: dict[Operator, tuple[float, Pair]] = {}
    for (op, pair), us in times.items():
        if us < found.get(op, (math.inf,))[0]:
            found[op] = us, pair
    return found


def regrets(times: Times) -> dict[Operator, tuple[float, Pair]]:
    """Time of the estimate's pair over the best, and the best pair, of every operator of which both are known."""
    chosen = {op: times.get((op, estimated(op)), math.inf) for op, _ in times}
    return {op: (chosen[op] / us, pair) for op, (us, pair) in best_pairs(times).items() if chosen[op] < math.inf}


def table(times: Times, gain: float) -> Entries:
    """Entries of the GPU's table: the best schedules where they are at least ``gain`` faster; of several operators
    with one key, those of the one that gains most.
    """
    found: Entries = {}
    for op, (regret, (shrink, expand)) in sorted(regrets(times).items(), key=lambda item: item[1][0]):
        if regret >= 1 + gain:
            found[tuned.key_of(problem_of(op))] = {"shrink": list(shrink), "expand": list(expand)}
    return dict(sorted(found.items()))


def merged(path: Path, entries: Entries, timed: set[str]) -> Entries:
    """New entries, and those of an earlier table at ``path`` whose keys are not among the ``timed``."""
    earlier = json.loads(path.read_text())["operators"] if path.is_file() else {}
    return dict(sorted(({key: one for key, one in earlier.items() if key not in timed} | entries).items()))


def write_table(entries: Entries, path: Path, about: dict[str, Any]) -> None:
    """Write a table as JSON, an operator a line."""
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"about": {json.dumps(about)},\n "operators": {{\n{rows}\n}}}}\n')


class Options(Settings):
    """The command line."""

    tables: Any = ("A", "ranks", "B", "C", "shapes", "step", "mixed")  # of `ext_operator_tables`
    minutes: float = 9
    gain: float = 0.03  # least gain over the estimate's schedules that an entry is worth
    work: str = "outputs/tune"  # folder of the measurements
    out: str = "outputs/tune"  # folder that receives the table; punica/ops/triton_ops/tuned is the shipped one
    workers: int = multiprocessing.cpu_count()  # processes that compile; 0: none


def tune(options: Options) -> None:
    """Search until every operator is done or the time is up, and write the table of what was found."""
    if not torch.cuda.is_available():
        raise ConfigError("tuning times kernels and needs a CUDA device; none is visible")
    name, work = tuned.table_name(torch.cuda.get_device_name()), Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(work / f"{name}l", time.monotonic() + 60 * options.minutes, options.workers)
    names = [options.tables] if isinstance(options.tables, str) else list(options.tables)
    try:
        tuner.search(operators(names))
    except TimeoutError:
        print("time is up: run again to continue")
    known = regrets(tuner.times)
    found = [regret for regret, _ in known.values()]
    if found:
        print(f"estimate / best found: geometric mean {statistics.geometric_mean(found):.3f}, worst {max(found):.3f}, "
              f"operators {len(found)}")  # fmt: skip
    path = Path(options.out) / name
    entries = merged(path, table(tuner.times, options.gain), {tuned.key_of(problem_of(op)) for op in known})
    write_table(entries, path, environment.stamp() | {"operators": len(found), "gain": options.gain})
    print(f"{len(entries)} operators in {path}")


if __name__ == "__main__":
    with_options("tune", __doc__ or "", "commands.tune", Options, tune)
