"""What `tune.py` searches: the operators of a 7B model, and the configurations worth timing for each."""

from collections.abc import Sequence
from itertools import product

import triton

from experiments.benches.operator_lines import lines
from experiments.benches.operator_pairs import Config
from experiments.benches.operator_shapes import DECODE_GRID, PREFILL_GRID, PROJECTIONS, UP, Operator, decode, prefill
from punica.ops.triton_ops.configs import OPTIONAL_KEYS
from punica.ops.triton_ops.launch import block_at_least
from punica.workload.popularity import PAPER_WORKLOADS

SHRINK = ("row_wise", "block_m", "block_n", "block_k", "block_r", "split_k", "num_warps", "num_stages", "together")
EXPAND = ("row_wise", "block_m", "block_n", "block_k", "tiles_n", "num_warps", "num_stages", "ahead")


def operators(groups: str) -> list[Operator]:
    """The operators to tune: A decode, R ranks, B packed projections of one 7B layer, C prefill,
    P prefill of packed projections, D large decode batches, S some shapes of other models."""
    found: list[Operator] = []
    packed, square, ends = PROJECTIONS.values(), PROJECTIONS["o"], ("Distinct", "Identical")
    if "A" in groups:
        found += [decode(UP, 16, pattern, tokens) for tokens, pattern in DECODE_GRID]
    if "R" in groups:
        found += [decode(UP, rank, pattern, 64) for rank, pattern in product((8, 32, 64, 128), ends)]
        found += [decode(UP, 64, pattern, tokens) for tokens, pattern in product((1, 8, 32), ends)]
    if "B" in groups:
        found += [decode(shape, 16, pattern, 32) for shape, pattern in product(packed, PAPER_WORKLOADS)]
    if "P" in groups:
        found += [prefill(shape, 16, count, tokens) for shape, tokens, count in product(packed, (512, 2048), (1, 4))]
    if "C" in groups:
        found += [prefill(square, rank, adapters, tokens) for tokens, adapters, rank in PREFILL_GRID]
    if "D" in groups:
        for tokens in (128, 256):
            found += [decode(square, 16, pattern, tokens) for pattern in ("Uniform", "Identical")]
            found.append(prefill(square, 16, 64, tokens))
        found += [prefill(square, 16, 64, tokens) for tokens in (512, 2048)]
    if "S" in groups:
        found += [line.operator for line in lines("shapes")[2::6]]
    return list(dict.fromkeys(found))


def shrink_candidates(op: Operator) -> list[Config]:
    """Shrink configurations worth timing for `op`."""
    lanes = block_at_least(op.rank, 1)
    out: list[Config] = []
    if op.tokens <= 256:
        for block_k, block_r, warps in product((256, 512, 1024, 2048, 4096, 16384), (1, 2, 4, 8, 16), (2, 4, 8, 16)):
            per_thread = block_k * block_r // (32 * warps)
            if block_r > lanes or block_k > 2 * op.k or not 16 <= per_thread <= 128 or (per_thread > 64 and warps < 8):
                continue
            split_k = triton.cdiv(op.k, block_k)
            if split_k <= 16 and (op.tokens <= 16 or op.tokens * triton.cdiv(op.rank, block_r) * split_k <= 8192):
                out.append(_config(SHRINK, True, 16, 16, block_k, block_r, split_k, warps, 1, False))
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32) if op.tokens <= 512 else (32, 64, 128)
        slices, either = len(op.widths), (False, True) if len(op.widths) > 1 and op.rank < 64 else (False,)
        for block_m, block_k, split_k, stages, together in product(
            tiles_m, (64, 128, 256, 512), (1, 2, 4, 8, 16), (1, 3, 4, 5), either
        ):
            steps = triton.cdiv(op.k, block_k * split_k)
            programs = sum(triton.cdiv(size, block_m) for size in op.sizes) * split_k
            if (steps == 1) != (stages == 1) or (stages > 1 and steps < stages):
                continue
            bytes_per_stage = 2 * block_k * (block_m + block_at_least(op.rank))
            if not 32 <= programs <= 400 or bytes_per_stage * stages > 200_000 or block_k * block_m > 32 * 512:
                continue
            block_n = min(64, block_at_least(op.rank * slices if together else op.rank))
            out.append(_config(SHRINK, False, block_m, block_n, block_k, 1, split_k, 4, stages, together))
    return out


def expand_candidates(op: Operator) -> list[Config]:
    """Expand configurations worth timing for `op`."""
    lanes = block_at_least(op.rank, 1)
    width = max(op.widths)
    out: list[Config] = []
    if op.tokens <= 256:
        few = (False, True) if op.tokens * op.rank * width <= 6 << 20 else (False,)
        for block_n, warps, ranks, ahead in product(
            (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8), sorted({16, max(16, min(64, lanes))}), few
        ):
            if 16 <= block_n * min(lanes, ranks) // (32 * warps) <= 128:
                out.append(_config(EXPAND, True, 16, block_n, ranks, 1, warps, 1, ahead))
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32, 64) if op.tokens <= 512 else (32, 64, 128)
        for block_m, block_n, tiles_n, warps, stages in product(
            tiles_m, (64, 128, 256), (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3, 4)
        ):
            tiles = sum(triton.cdiv(size, block_m) for size in op.sizes) * triton.cdiv(width, block_n * tiles_n)
            programs = tiles * len(op.widths)
            if (tiles_n == 1) != (stages == 1) or block_n * tiles_n > width or (tiles_n > 1 and programs < 128):
                continue
            if (warps == 8) != (block_n * block_m >= 128 * 128) and not (block_m == 16 and warps == 2):
                continue
            if stages > tiles_n or (stages == 2 and op.tokens < 8192):
                continue
            block_k = min(128, block_at_least(op.rank))
            out.append(_config(EXPAND, False, block_m, block_n, block_k, tiles_n, warps, stages, False))
    return out


def _config(names: Sequence[str], *values: int) -> Config:
    return OPTIONAL_KEYS["shrink" if names is SHRINK else "expand"] | dict(zip(names, values, strict=True))
