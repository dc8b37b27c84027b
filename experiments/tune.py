"""Choose the kernels' block sizes on the GPU at hand, and write them as the tuned tables of `punica.ops.triton_ops`.

    make tune                                   every operator below, resumable
    make tune ARGS="minutes=5 groups=AB"        groups of `tune_space.operators`; run again to go on

Every operator (decode batches of one Llama-2-7B projection by popularity, packed projections, prefill) is searched in
rounds: all shrink candidates with one expand, all expand candidates with the best shrink, then the best of each against
one another. Kernels of a round are compiled by worker processes first. Each timing is also checked against a
float32 reference, after a single call and after a replay of the whole graph, and counts only when it passes. A
measurement is one line of ``measurements.jsonl``; what is there is not measured again.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.operator_sets import OperatorSets
from experiments.operator_shapes import Operator
from experiments.tune_space import HIDDEN, INTERMEDIATE, Config, expand_candidates, operators, shrink_candidates
from punica.ops.triton_ops import checks, configs
from punica.ops.triton_ops.launch import Launch, supports_pdl
from punica.ops.triton_ops.lora_linear import plan_linear

Job = tuple[Operator, Config, Config, bool, bool | None]  # operator, shrink, expand, pdl, pdl_shrink
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


def pair_plan(
    sets: OperatorSets, shrink: Config, expand: Config, *, pdl: bool, pdl_shrink: bool | None = None
) -> Callable[[int], None]:
    """``call(i)``: the operator on set i with the given configurations, as `lora_linear` runs it, without the
    dispatcher.
    """
    op = sets.operator
    a = checks.describe_weights("lora_a_weights", sets.a[0], -2)
    b = checks.describe_weights("lora_b_weights", sets.b[0], -1)
    *meta, _, count = sets.meta_args
    ranks = sets.lora_ranks
    plan = plan_linear(
        sets.y[0], sets.x[0], a, b, int(count), meta[4].numel(), shrink, expand,
        has_ranks=bool(op.ranks), pdl=pdl, pdl_shrink=pdl_shrink,
    )  # fmt: skip
    planes = torch.empty(plan.planes, dtype=torch.float32, device=sets.x.device)

    def call(i: int) -> None:
        plan.shrink.run(sets.x[i], sets.a[i], planes, meta, ranks, 1.0, True)
        plan.expand.run(planes, sets.b[i], sets.y[i], meta, ranks, True)

    return call


class _MetaSets:
    """Stands in for `OperatorSets` in a worker that only compiles: the same shapes and strides, no memory."""

    def __init__(self, op: Operator) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        adapters = len(op.sizes)
        self.operator = op
        self.x, self.y = empty(1, op.tokens, op.k), empty(1, op.tokens, sum(op.widths))
        self.a = [tuple(empty(adapters, op.rank, op.k) for _ in op.widths)]
        self.b = [tuple(empty(adapters, n, op.rank) for n in op.widths)]
        entries = max(64, adapters) + 1
        lengths = (op.tokens, op.tokens, entries, entries + 1, entries)
        tensors = [empty(n, dtype=torch.int32) for n in lengths]
        self.meta_args = (*tensors, None, adapters)
        self.lora_ranks = empty(len(op.widths), adapters, dtype=torch.int32) if op.ranks else None


def _compile(job: Job) -> str:
    op, shrink, expand, pdl, pdl_shrink = job
    Launch.compile_only = True
    try:
        pair_plan(_MetaSets(op), shrink, expand, pdl=pdl, pdl_shrink=pdl_shrink)(0)  # type: ignore[arg-type]
    except Exception as error:  # a candidate that does not fit the GPU is simply not a candidate
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(jobs: list[Job], workers: int) -> None:
    """Compile the kernels of `jobs` in parallel; those that fail are met again, and skipped, when timed."""
    unique = {json.dumps([_code_form(job[0]), *job[1:]]): job for job in jobs}
    if workers == 0 or not unique:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for message in pool.map(_compile, unique.values(), chunksize=4):
            if message:
                print("not compiled:", message[:200])


def _code_form(op: Operator) -> tuple:
    """What of an operator decides which code its kernels are (row counts do not)."""
    return op.k, op.widths, op.rank, bool(op.ranks), op.tokens == 1


class Tuner:
    """Measurements of one run, appended to `path` as they come."""

    def __init__(self, path: Path, deadline: float, workers: int) -> None:
        self.path, self.deadline, self.workers = path, deadline, workers
        self.times: dict[str, float] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.times[row["key"]] = row["us"]
        self.sets: OperatorSets | None = None

    def measure(self, op: Operator, shrink: Config, expand: Config) -> float:
        """Microseconds of `op` with this pair (infinite when it fails its check or does not fit)."""
        key = json.dumps([[op.k, op.widths, op.rank, op.sizes], shrink, expand])
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
        pdl = supports_pdl(torch.device("cuda", torch.cuda.current_device()))
        default = {op: _defaults(op) for op in found}
        shrinks = {op: [default[op][0], *shrink_candidates(op)] for op in found}
        expands = {op: [default[op][1], *expand_candidates(op)] for op in found}
        compile_all([(op, s, default[op][1], pdl, None) for op in found for s in shrinks[op]], self.workers)
        ranked_s = {}
        for op in found:
            ranked_s[op] = sorted(shrinks[op], key=lambda s, op=op: self.measure(op, s, default[op][1]))  # type: ignore[misc]
            print(
                _label(op),
                "shrink",
                f"{self.measure(op, ranked_s[op][0], default[op][1]):.2f}",
                ranked_s[op][0],
                flush=True,
            )
        compile_all([(op, ranked_s[op][0], e, pdl, None) for op in found for e in expands[op]], self.workers)
        ranked_e = {}
        for op in found:
            ranked_e[op] = sorted(expands[op], key=lambda e, op=op: self.measure(op, ranked_s[op][0], e))  # type: ignore[misc]
            print(
                _label(op),
                "expand",
                f"{self.measure(op, ranked_s[op][0], ranked_e[op][0]):.2f}",
                ranked_e[op][0],
                flush=True,
            )
        finals = {op: list(itertools.product(ranked_s[op][:4], ranked_e[op][:3])) for op in found}
        compile_all([(op, s, e, pdl, None) for op in found for s, e in finals[op]], self.workers)
        for op in found:
            s, e = min(finals[op], key=lambda pair, op=op: self.measure(op, *pair))  # type: ignore[misc]
            print(f"{_label(op)} {self.measure(op, s, e):.2f} us", s, e, flush=True)


def _defaults(op: Operator) -> tuple[Config, Config]:
    segments, slices = len(op.sizes), len(op.widths)
    shrink = configs._default("shrink", segments, op.tokens, op.k, op.rank, slices, False)
    return shrink, configs._default("expand", segments, op.tokens, max(op.widths), op.rank, slices, False)


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


def tables(best: dict[Operator, tuple[float, Config, Config]]) -> dict[str, dict[str, Any]]:
    """The shrink and the expand table. A look-up takes the nearest key level by level, so that every level holds the
    same keys below it: a cell that was not tuned gets the configuration of the operator most like it.
    """
    cells = itertools.product(SEGMENT_KEYS, ROW_KEYS, RANK_KEYS, PROJECTION_KEYS)
    out: dict[str, dict[str, Any]] = {"shrink": {}, "expand": {}}
    for segments, rows, rank, (slices, k, width) in cells:
        if segments > rows:
            continue

        def unlike(op: Operator, cell: tuple = (segments, rows, rank, slices, k, width)) -> float:
            return _distance(op, *cell)

        _, shrink, expand = best[min(best, key=unlike)]
        keys = (str(segments), str(slices), str(rows))
        for table, leaf, (first, second) in (("shrink", shrink, (k, rank)), ("expand", expand, (rank, width))):
            node = out[table]
            for key in (*keys, str(first)):
                node = node.setdefault(key, {})
            optional = configs.OPTIONAL_KEYS[table]
            node[str(second)] = {name: value for name, value in leaf.items() if optional.get(name) != value}
    return out


def _distance(op: Operator, segments: int, rows: int, rank: int, slices: int, k: int, width: int) -> float:
    """How unlike `op` is to a cell, in powers of two; rank and slices weigh most, as they decide a block's bytes."""

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


def main() -> None:
    """Command line: see the module's text. ``work``: folder of the measurements; ``tables``: folder that receives the
    tables; ``workers``: processes that compile (0: none)."""
    options = {"groups": "ARBCPD", "minutes": "9", "work": "outputs/tune", "tables": str(configs.PACKAGED)}
    options["workers"] = str(multiprocessing.cpu_count())
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if set(given) - set(options):
        unknown = ", ".join(sorted(set(given) - set(options)))
        raise SystemExit(f"unknown option {unknown}; known: {', '.join(f'{k}={v}' for k, v in options.items())}")
    options |= given
    if not torch.cuda.is_available():
        raise SystemExit("tuning times kernels and needs a CUDA device; none is visible")
    work, folder = Path(options["work"]), Path(options["tables"])
    work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * float(options["minutes"])
    tuner = Tuner(work / "measurements.jsonl", deadline, int(options["workers"]))
    try:
        for group in options["groups"]:
            tuner.search(operators(group))
    except TimeoutError:
        print("time is up: run again to go on")
    best = best_pairs(tuner.times)
    write_tables(best, folder, torch.cuda.get_device_name())
    print(f"{len(best)} operators measured; tables are in {folder}")


if __name__ == "__main__":
    main()
