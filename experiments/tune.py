"""Choose the kernels' block sizes on the GPU at hand, and write them as the tuned tables of `punica.ops.triton_ops`.

    make tune                                   every operator below, resumable
    python -m experiments.tune --minutes 9      stop after nine minutes; run again to go on

Every operator (decode batches of one Llama-2-7B projection by popularity, packed projections, prefill) is searched in rounds: all
shrink candidates with one expand, all expand candidates with the best shrink, then the three best of each against one another.
Kernels of a round are compiled by worker processes first. Each timing is also checked against a float32 reference, after a
single call and after a replay of the whole graph, and counts only when it passes. A measurement is one line of
``measurements.jsonl``; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.operator_sets import Operator, OperatorSets
from punica.ops.triton_ops import checks, configs
from punica.ops.triton_ops.launch import Launch, block_at_least, cdiv, supports_pdl
from punica.ops.triton_ops.lora_linear import plan_linear
from punica.workload.popularity import popularity

Config = dict[str, Any]
PATTERNS = ("Distinct", "Uniform", "Skewed", "Identical")
TOLERANCE = 1e-3
HIDDEN, INTERMEDIATE = 4096, 11008


def operators(groups: str) -> list[Operator]:
    """The operators to tune: A decode, R ranks, B packed projections of one 7B layer, C prefill, D large decode batches."""
    found: dict[Operator, None] = {}

    def add(k: int, widths: tuple[int, ...], rank: int, sizes: Iterable[int]) -> None:
        found[Operator(k, widths, rank, tuple(sizes))] = None

    if "A" in groups:
        for tokens, pattern in itertools.product((1, 2, 4, 8, 16, 32, 48, 64), PATTERNS):
            add(HIDDEN, (INTERMEDIATE,), 16, popularity(pattern).group_sizes(tokens))
    if "R" in groups:
        for rank, pattern in itertools.product((8, 32, 64, 128), ("Distinct", "Identical")):
            add(HIDDEN, (INTERMEDIATE,), rank, popularity(pattern).group_sizes(64))
    if "B" in groups:
        projections = [
            (HIDDEN, (HIDDEN,) * 3),
            (HIDDEN, (HIDDEN,)),
            (HIDDEN, (INTERMEDIATE,) * 2),
            (INTERMEDIATE, (HIDDEN,)),
        ]
        for (k, widths), pattern in itertools.product(projections, PATTERNS):
            add(k, widths, 16, popularity(pattern).group_sizes(32))
    if "C" in groups:
        for tokens, adapters, rank in itertools.product((512, 2048, 8192), (1, 4, 16), (16, 64)):
            add(HIDDEN, (HIDDEN,), rank, [tokens // adapters] * adapters)
    if "D" in groups:
        for tokens in (128, 256):
            for pattern in ("Uniform", "Identical"):
                add(HIDDEN, (HIDDEN,), 16, popularity(pattern).group_sizes(tokens))
            add(HIDDEN, (HIDDEN,), 16, [tokens // 64] * 64)
        add(HIDDEN, (HIDDEN,), 16, [8] * 64)
        add(HIDDEN, (HIDDEN,), 16, [32] * 64)
    return list(found)


def shrink_candidates(op: Operator) -> list[Config]:
    """Shrink configurations worth timing for `op`."""
    lanes = block_at_least(op.rank, 1)
    out: list[Config] = []
    if op.tokens <= 256:
        for block_k, block_r, warps in itertools.product(
            (256, 512, 1024, 2048, 4096, 16384), (1, 2, 4, 8, 16), (2, 4, 8, 16)
        ):
            per_thread = block_k * block_r // (32 * warps)
            if block_r > lanes or block_k > 2 * op.k or not 16 <= per_thread <= 128 or (per_thread > 64 and warps < 8):
                continue
            split_k = cdiv(op.k, block_k)
            if split_k <= 16 and (op.tokens <= 16 or op.tokens * cdiv(op.rank, block_r) * split_k <= 8192):
                out.append(_rows_shrink(block_r, block_k, split_k, warps))
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32) if op.tokens <= 512 else (32, 64, 128)
        for block_m, block_k, split_k, stages in itertools.product(
            tiles_m, (64, 128, 256, 512), (1, 2, 4, 8, 16), (1, 3, 4, 5)
        ):
            steps = cdiv(op.k, block_k * split_k)
            programs = sum(cdiv(size, block_m) for size in op.sizes) * split_k
            one_shot = steps == 1
            if one_shot != (stages == 1) or (stages > 1 and steps < stages):
                continue
            bytes_per_stage = 2 * block_k * (block_m + block_at_least(op.rank))
            if not 32 <= programs <= 400 or bytes_per_stage * stages > 200_000 or block_k * block_m > 32 * 512:
                continue
            out.append(_tiles_shrink(block_m, min(64, block_at_least(op.rank)), block_k, split_k, 4, stages))
    return out


def expand_candidates(op: Operator) -> list[Config]:
    """Expand configurations worth timing for `op`."""
    lanes = block_at_least(op.rank, 1)
    width = max(op.widths)
    out: list[Config] = []
    if op.tokens <= 256:
        for block_n, warps in itertools.product((32, 64, 128, 256, 512, 1024), (1, 2, 4, 8)):
            per_thread = block_n * lanes // (32 * warps)
            if 16 <= per_thread <= 128:
                out.append(
                    {
                        "row_wise": True,
                        "block_m": 16,
                        "block_n": block_n,
                        "block_k": 16,
                        "tiles_n": 1,
                        "num_warps": warps,
                        "num_stages": 1,
                    }
                )
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32, 64) if op.tokens <= 512 else (32, 64, 128)
        for block_m, block_n, tiles_n, warps, stages in itertools.product(
            tiles_m, (64, 128, 256), (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3, 4)
        ):
            programs = sum(cdiv(size, block_m) for size in op.sizes) * cdiv(width, block_n * tiles_n) * len(op.widths)
            if (tiles_n == 1) != (stages == 1) or block_n * tiles_n > width or (tiles_n > 1 and programs < 128):
                continue
            if (warps == 8) != (block_n * block_m >= 128 * 128) and not (block_m == 16 and warps == 2):
                continue
            if stages > tiles_n or (stages == 2 and op.tokens < 8192):
                continue
            out.append(
                {
                    "row_wise": False,
                    "block_m": block_m,
                    "block_n": block_n,
                    "block_k": min(128, block_at_least(op.rank)),
                    "tiles_n": tiles_n,
                    "num_warps": warps,
                    "num_stages": stages,
                }
            )
    return out


def _rows_shrink(block_r: int, block_k: int, split_k: int, warps: int) -> Config:
    return {
        "row_wise": True,
        "block_m": 16,
        "block_n": 16,
        "block_k": block_k,
        "block_r": block_r,
        "split_k": split_k,
        "num_warps": warps,
        "num_stages": 1,
    }


def _tiles_shrink(block_m: int, block_n: int, block_k: int, split_k: int, warps: int, stages: int) -> Config:
    return {
        "row_wise": False,
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "block_r": 1,
        "split_k": split_k,
        "num_warps": warps,
        "num_stages": stages,
    }


def pair_plan(
    sets: OperatorSets, shrink: Config, expand: Config, *, pdl: bool, pdl_shrink: bool | None = None
) -> Callable[[int], None]:
    """``call(i)``: the operator on set i with the given configurations, as `lora_linear` runs it, without the dispatcher."""
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


def _compile(job: tuple[Operator, Config, Config, bool]) -> str:
    op, shrink, expand, pdl = job
    Launch.compile_only = True
    try:
        pair_plan(_MetaSets(op), shrink, expand, pdl=pdl)(0)  # type: ignore[arg-type]
    except Exception as error:  # a candidate that does not fit the GPU is simply not a candidate
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(jobs: list[tuple[Operator, Config, Config, bool]], workers: int) -> None:
    """Compile the kernels of `jobs` in parallel; those that fail are met again, and skipped, when timed."""
    unique = {json.dumps([_code_form(op), s, e, pdl]): (op, s, e, pdl) for op, s, e, pdl in jobs}
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

    def search(self, found: list[Operator]) -> dict[Operator, tuple[float, Config, Config]]:
        """Best pair of every operator."""
        pdl = supports_pdl(torch.device("cuda", torch.cuda.current_device()))
        default = {op: _defaults(op) for op in found}
        shrinks = {op: [default[op][0], *shrink_candidates(op)] for op in found}
        expands = {op: [default[op][1], *expand_candidates(op)] for op in found}
        compile_all([(op, s, default[op][1], pdl) for op in found for s in shrinks[op]], self.workers)
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
        compile_all([(op, ranked_s[op][0], e, pdl) for op in found for e in expands[op]], self.workers)
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
        compile_all([(op, s, e, pdl) for op in found for s, e in finals[op]], self.workers)
        best = {}
        for op in found:
            s, e = min(finals[op], key=lambda pair, op=op: self.measure(op, *pair))  # type: ignore[misc]
            best[op] = (self.measure(op, s, e), s, e)
            print(f"{_label(op)} {best[op][0]:.2f} us", s, e, flush=True)
        return best


def _defaults(op: Operator) -> tuple[Config, Config]:
    segments, slices = len(op.sizes), len(op.widths)
    shrink = configs._default("shrink", segments, op.tokens, op.k, op.rank, slices, False)
    return shrink, configs._default("expand", segments, op.tokens, max(op.widths), op.rank, slices, False)


def _label(op: Operator) -> str:
    return f"T={op.tokens} G={len(op.sizes)} K={op.k} N={'+'.join(map(str, op.widths))} r={op.rank}"


def write_tables(best: dict[Operator, tuple[float, Config, Config]], folder: Path, gpu_name: str) -> None:
    """The best pairs as the two tables that `configs` reads (the expand table serves adding and overwriting alike)."""
    shrink: dict[str, Any] = {}
    expand: dict[str, Any] = {}
    for op, (_, s, e) in sorted(best.items(), key=lambda item: _label(item[0])):
        keys = (str(len(op.sizes)), str(len(op.widths)), str(op.tokens))
        for table, leaf, last in ((shrink, s, (op.k, op.rank)), (expand, e, (op.rank, max(op.widths)))):
            node = table
            for key in (*keys, str(last[0])):
                node = node.setdefault(key, {})
            node[str(last[1])] = leaf
    folder.mkdir(parents=True, exist_ok=True)
    names = {"shrink": shrink, "expand": expand}
    for op_type, add_inputs in (("shrink", None), ("expand", True), ("expand", False)):
        path = folder / configs.tuned_file_name(op_type, add_inputs, gpu_name)
        path.write_text(json.dumps(names[op_type], indent=1, sort_keys=False) + "\n")


def main() -> None:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="ARBCD", help="letters of the operator groups to tune (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="stop measuring after this time (run again to go on)"
    )
    parser.add_argument("--work", type=Path, default=Path("outputs/tune"), help="folder of measurements.jsonl")
    parser.add_argument("--tables", type=Path, default=configs.PACKAGED, help="folder that receives the tables")
    parser.add_argument(
        "--workers", type=int, default=multiprocessing.cpu_count(), help="processes that compile; 0: none"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tuning times kernels and needs a CUDA device; none is visible")
    arguments.work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    tuner = Tuner(arguments.work / "measurements.jsonl", deadline, arguments.workers)
    best: dict[Operator, tuple[float, Config, Config]] = {}
    try:
        for group in arguments.groups:
            best |= tuner.search(operators(group))
    except TimeoutError:
        print("time is up: run again to go on")
    write_tables(best, arguments.tables, torch.cuda.get_device_name())
    print(f"{len(best)} operators tuned; tables are in {arguments.tables}")


if __name__ == "__main__":
    main()
