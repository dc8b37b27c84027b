"""Choose the kernels' block sizes on the GPU at hand, and write them as the tuned tables of `punica.ops.triton_ops`.

    make tune                                   every operator below, resumable
    make tune ARGS="minutes=5 groups=AB"        groups of `tune_space.operators`; run again to go on

Every operator (decode batches of one Llama-2-7B projection by popularity, packed projections, prefill) is searched in
rounds: all shrink candidates with one expand, all expand candidates with the best shrink, then the best of each against
one another. Kernels of a round are compiled by worker processes first. Each timing is also checked against a
float32 reference, after a single call and after a replay of the whole graph, and counts only when it passes. A
measurement is one line of ``measurements.jsonl``; what is there is not measured again.
"""

import itertools
import json
import math
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.benches.operator_pairs import Config, compile_all, pair_plan, tuned
from experiments.benches.operator_sets import OperatorSets
from experiments.benches.operator_shapes import HIDDEN, INTERMEDIATE, Operator
from experiments.commands.tune_space import expand_candidates, operators, shrink_candidates
from experiments.harness.command import with_options
from experiments.harness.schema import ConfigError
from punica.ops.triton_ops import configs
from punica.ops.triton_ops.launch import supports_pdl

Pair = tuple[Config, Config]  # shrink, expand
TOLERANCE = 1e-3
# Keys of the tables that are written; (slices, hidden size, output size of a slice) are those of a 7B layer.
SEGMENT_KEYS = (1, 2, 4, 8, 16, 32, 64)
ROW_KEYS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 2048, 8192)
RANK_KEYS = (8, 16, 32, 64, 128)
PROJECTION_KEYS = (
    (1, HIDDEN, HIDDEN),
    (1, HIDDEN, INTERMEDIATE),
    (1, INTERMEDIATE, HIDDEN),
    (2, HIDDEN, INTERMEDIATE),
    (3, HIDDEN, HIDDEN),
)


class Tuner:
    """Measurements of one run, appended to `path` as they come."""

    def __init__(self, path: Path, deadline: float, workers: int) -> None:
        self.path, self.deadline, self.workers = path, deadline, workers
        self.times: dict[str, float] = {}
        if path.is_file():
            rows = map(json.loads, path.read_text().splitlines())
            self.times |= {row["key"]: row["us"] for row in rows}
        self.sets: OperatorSets | None = None

    def measure(self, op: Operator, shrink: Config, expand: Config) -> float:
        """Microseconds of `op` with this pair (infinite when it fails its check or does not fit)."""
        key = _key(op, shrink, expand)
        if key not in self.times:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            if self.sets is None or self.sets.operator != op:
                self.sets = None
                self.sets = OperatorSets(op)
            self.times[key] = self._time(self.sets, shrink, expand)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "us": self.times[key]}) + "\n")
        return self.times[key]

    @staticmethod
    def _time(sets: OperatorSets, shrink: Config, expand: Config) -> float:
        call = pair_plan(sets, shrink, expand, pdl=supports_pdl(sets.x.device))
        try:
            if sets.relative_error(call) > TOLERANCE:
                return float("inf")
            us, error = sets.time_graph(call, calls=100, replays=5)
            return us if error <= TOLERANCE * 4 else float("inf")
        except (OutOfResources, RuntimeError, ValueError) as error:  # does not fit: too much shared memory
            print("skipped:", str(error)[:150])
            torch.cuda.synchronize()
            return float("inf")

    def search(self, found: list[Operator]) -> None:
        """Measure until the best pair of every operator is known."""
        default = {op: tuned(op) for op in found}
        shrinks = {op: [(s, e) for s in (first, *shrink_candidates(op))] for op, (first, e) in default.items()}
        ranked_s = self._ranked(shrinks, "shrink")
        best = {op: ranked_s[op][0][0] for op in found}
        expands = {op: [(best[op], e) for e in (first, *expand_candidates(op))] for op, (_, first) in default.items()}
        ranked_e = self._ranked(expands, "expand")
        pairs = {op: itertools.product(ranked_s[op][:4], ranked_e[op][:3]) for op in found}
        self._ranked({op: [(s, e) for (s, _), (_, e) in finals] for op, finals in pairs.items()}, "both")

    def _ranked(self, pairs: dict[Operator, list[Pair]], what: str) -> dict[Operator, list[Pair]]:
        """The pairs of each operator, fastest first: compiled in parallel, then measured."""
        pdl = supports_pdl(torch.device("cuda", torch.cuda.current_device()))
        compile_all([(op, *pair, pdl) for op, several in pairs.items() for pair in several], self.workers)
        ranked = {}
        for op, several in pairs.items():
            ranked[op] = sorted(several, key=lambda pair, op=op: self.measure(op, *pair))  # type: ignore[misc]
            print(_label(op), what, f"{self.measure(op, *ranked[op][0]):.2f} us", *ranked[op][0], flush=True)
        return ranked


def _key(op: Operator, shrink: Config, expand: Config) -> str:
    forms = [dict(sorted(config.items())) for config in (shrink, expand)]
    return json.dumps([[op.k, op.widths, op.rank, op.sizes], *forms])


def _label(op: Operator) -> str:
    return f"T={op.tokens} G={len(op.sizes)} K={op.k} N={'+'.join(map(str, op.widths))} r={op.rank}"


def best_pairs(times: dict[str, float]) -> dict[Operator, tuple[float, Config, Config]]:
    """The fastest measured pair of every operator."""
    best: dict[Operator, tuple[float, Config, Config]] = {}
    for key, us in times.items():
        (k, widths, rank, sizes), shrink, expand = json.loads(key)
        op = Operator(k, tuple(widths), rank, tuple(sizes))
        if us < best.get(op, (float("inf"),))[0]:
            best[op] = (us, shrink, expand)
    return best


def regrets(best: dict[Operator, tuple[float, Config, Config]], times: dict[str, float]) -> str:
    """How much slower the rule's own choice is than the best that was found: per operator, and over all."""
    text, ratios = [], []
    for op, (us, *_) in best.items():
        chosen = times.get(_key(op, *tuned(op)))
        if chosen is not None:
            ratios.append(chosen / us)
            text.append(f"{_label(op)}: rule {chosen:.2f} us, best found {us:.2f} us, {ratios[-1]:.3f}")
    if ratios:
        mean, worst = statistics.geometric_mean(ratios), max(ratios)
        text.append(f"rule / best found: geometric mean {mean:.3f}, worst {worst:.3f}, operators {len(ratios)}")
    return "\n".join(text)


def tables(best: dict[Operator, tuple[float, Config, Config]]) -> dict[str, dict[str, Any]]:
    """The shrink and the expand table. A look-up takes the nearest key level by level, so that every level holds the
    same keys below it: a cell that was not tuned gets the configuration of the operator most like it.
    """
    cells = itertools.product(SEGMENT_KEYS, ROW_KEYS, RANK_KEYS, PROJECTION_KEYS)
    out: dict[str, dict[str, Any]] = {"shrink": {}, "expand": {}}
    for segments, rows, rank, (slices, k, width) in cells:
        if segments > rows:
            continue
        _, shrink, expand = best[min(best, key=partial(_distance, (segments, rows, rank, slices, k, width)))]
        keys = (str(segments), str(slices), str(rows))
        for table, leaf, (first, second) in (("shrink", shrink, (k, rank)), ("expand", expand, (rank, width))):
            node = out[table]
            for key in (*keys, str(first)):
                node = node.setdefault(key, {})
            optional = configs.OPTIONAL_KEYS[table]
            node[str(second)] = {name: value for name, value in leaf.items() if optional.get(name) != value}
    return out


def _distance(cell: tuple[int, int, int, int, int, int], op: Operator) -> float:
    """How unlike `op` is to a cell, in powers of two; rank and slices weigh most, as they decide a block's bytes."""
    segments, rows, rank, slices, k, width = cell

    def powers(a: float, b: float) -> float:
        return abs(math.log2(a / b))

    shape = 0.25 * powers(op.k, k) + 0.25 * powers(max(op.widths), width) + 1.5 * abs(len(op.widths) - slices)
    batch = powers(op.tokens, rows) + powers(op.tokens / len(op.sizes), rows / segments)
    return shape + batch + 1.5 * powers(op.rank, rank)


def sparse(node: dict[str, Any], level: int = 0) -> dict[str, Any]:
    """The part of a table that every look-up of the whole is answered from: of neighbouring keys with the same below
    them stay the first and the last, at an end of the axis only the one that faces the others. So all half-way points,
    where a look-up changes from one key to the next, stay where they are.
    """
    if level == 5:
        return node
    below = {key: sparse(node[key], level + 1) for key in sorted(node, key=int)}
    if level == 1:  # the number of slices must match
        return below
    alike = [list(keys) for _, keys in itertools.groupby(below, key=below.__getitem__)]
    edges = [key for left, right in itertools.pairwise(alike) for key in (left[-1], right[0])]
    return {key: below[key] for key in edges or alike[0][:1]}


def write_tables(best: dict[Operator, tuple[float, Config, Config]], folder: Path, gpu_name: str) -> None:
    """Write the tables that `configs` reads, as sparse as they can be; adding and overwriting share the expand table,
    so that earlier tables of one of both, which would hide it, go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for op_type, table in tables(best).items():
        (folder / configs.tuned_file_name(op_type, None, gpu_name)).write_text(table_text(sparse(table)))
    for add_inputs in (True, False):
        (folder / configs.tuned_file_name("expand", add_inputs, gpu_name)).unlink(missing_ok=True)


def table_text(table: dict[str, Any]) -> str:
    """A table as a file: its configurations, one a line, then a line per number of rows with the names of these."""
    names: dict[str, str] = {}

    def named(node: dict[str, Any], level: int = 0) -> Any:
        if level < 5:
            return {key: named(below, level + 1) for key, below in node.items()}
        form = "rows" if node.get("row_wise") else "tiles"
        return names.setdefault(json.dumps(node), f"{form}_{len(names)}")

    def text(node: dict[str, Any], level: int = 0) -> str:
        if level == 3 or not isinstance(next(iter(node.values())), dict):
            return json.dumps(node)
        inner = [" " * (level + 1) + json.dumps(key) + ": " + text(below, level + 1) for key, below in node.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * level + "}"

    cells = named(table)
    return text({"configurations": {name: json.loads(leaf) for leaf, name in names.items()}} | cells) + "\n"


@dataclass
class Options:
    """The command line."""

    groups: str = "ARBCPD"  # of `tune_space.operators`
    minutes: float = 9
    work: str = "outputs/tune"  # folder of the measurements
    tables: str = "outputs/tune/tables"  # folder that receives them, for `LoRAConfig(tuned_dir=...)`
    workers: int = multiprocessing.cpu_count()  # processes that compile; 0: none


def tune(options: Options) -> None:
    """Search until every operator is done or the time is up, and write the tables of what was found."""
    if not torch.cuda.is_available():
        raise ConfigError("tuning times kernels and needs a CUDA device; none is visible")
    work, folder = Path(options.work), Path(options.tables)
    work.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(work / "measurements.jsonl", time.monotonic() + 60 * options.minutes, options.workers)
    try:
        for group in options.groups:
            tuner.search(operators(group))
    except TimeoutError:
        print("time is up: run again to go on")
    best = best_pairs(tuner.times)
    print(regrets(best, tuner.times))
    write_tables(best, folder, torch.cuda.get_device_name())
    print(f"{len(best)} operators measured; tables are in {folder}")


if __name__ == "__main__":
    with_options("tune", __doc__ or "", "commands.tune", Options, tune)
