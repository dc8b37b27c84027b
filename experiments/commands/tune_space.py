"""What `tune.py` searches: the operators of a 7B model, and the configurations worth timing for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import triton

from experiments.benches.operator_pairs import Config
from experiments.benches.operator_shapes import HIDDEN, INTERMEDIATE, PROJECTIONS, Operator
from punica.ops.triton_ops.launch import block_at_least
from punica.workload.popularity import PAPER_WORKLOADS, popularity

SHRINK = ("row_wise", "block_m", "block_n", "block_k", "block_r", "split_k", "num_warps", "num_stages")
EXPAND = ("row_wise", "block_m", "block_n", "block_k", "tiles_n", "num_warps", "num_stages")


def operators(groups: str) -> list[Operator]:
    """The operators to tune: A decode, R ranks, B packed projections of one 7B layer, C prefill,
    P prefill of packed projections, D large decode batches."""
    found: dict[Operator, None] = {}
    projections = PROJECTIONS.values()

    def add(k: int, widths: tuple[int, ...], rank: int, sizes: Iterable[int]) -> None:
        found[Operator(k, widths, rank, tuple(sizes))] = None

    if "A" in groups:
        for tokens, pattern in itertools.product((1, 2, 4, 8, 16, 32, 48, 64), PAPER_WORKLOADS):
            add(HIDDEN, (INTERMEDIATE,), 16, popularity(pattern).group_sizes(tokens))
    if "R" in groups:
        for rank, pattern in itertools.product((8, 32, 64, 128), ("Distinct", "Identical")):
            add(HIDDEN, (INTERMEDIATE,), rank, popularity(pattern).group_sizes(64))
        for tokens, pattern in itertools.product((1, 8, 32), ("Distinct", "Identical")):
            add(HIDDEN, (INTERMEDIATE,), 64, popularity(pattern).group_sizes(tokens))
    if "B" in groups:
        for (k, widths), pattern in itertools.product(projections, PAPER_WORKLOADS):
            add(k, widths, 16, popularity(pattern).group_sizes(32))
    if "P" in groups:
        for (k, widths), tokens, adapters in itertools.product(projections, (512, 2048), (1, 4)):
            add(k, widths, 16, [tokens // adapters] * adapters)
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
            split_k = triton.cdiv(op.k, block_k)
            if split_k <= 16 and (op.tokens <= 16 or op.tokens * triton.cdiv(op.rank, block_r) * split_k <= 8192):
                out.append(_config(SHRINK, True, 16, 16, block_k, block_r, split_k, warps, 1))
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32) if op.tokens <= 512 else (32, 64, 128)
        for block_m, block_k, split_k, stages in itertools.product(
            tiles_m, (64, 128, 256, 512), (1, 2, 4, 8, 16), (1, 3, 4, 5)
        ):
            steps = triton.cdiv(op.k, block_k * split_k)
            programs = sum(triton.cdiv(size, block_m) for size in op.sizes) * split_k
            one_shot = steps == 1
            if one_shot != (stages == 1) or (stages > 1 and steps < stages):
                continue
            bytes_per_stage = 2 * block_k * (block_m + block_at_least(op.rank))
            if not 32 <= programs <= 400 or bytes_per_stage * stages > 200_000 or block_k * block_m > 32 * 512:
                continue
            block_n = min(64, block_at_least(op.rank))
            out.append(_config(SHRINK, False, block_m, block_n, block_k, 1, split_k, 4, stages))
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
                out.append(_config(EXPAND, True, 16, block_n, 16, 1, warps, 1))
    if op.tokens >= 4 and op.tokens > len(op.sizes):
        tiles_m = (16,) if op.tokens <= 64 else (16, 32, 64) if op.tokens <= 512 else (32, 64, 128)
        for block_m, block_n, tiles_n, warps, stages in itertools.product(
            tiles_m, (64, 128, 256), (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3, 4)
        ):
            programs = (
                sum(triton.cdiv(size, block_m) for size in op.sizes)
                * triton.cdiv(width, block_n * tiles_n)
                * len(op.widths)
            )
            if (tiles_n == 1) != (stages == 1) or block_n * tiles_n > width or (tiles_n > 1 and programs < 128):
                continue
            if (warps == 8) != (block_n * block_m >= 128 * 128) and not (block_m == 16 and warps == 2):
                continue
            if stages > tiles_n or (stages == 2 and op.tokens < 8192):
                continue
            block_k = min(128, block_at_least(op.rank))
            out.append(_config(EXPAND, False, block_m, block_n, block_k, tiles_n, warps, stages))
    return out


def _config(names: Sequence[str], *values: int) -> Config:
    return dict(zip(names, values, strict=True))
