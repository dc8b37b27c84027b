"""Which configuration suits a step that no tuned table answers."""

from typing import Any

from triton import cdiv

from punica.metadata import StepShape
from punica.ops.triton_ops.launch import block_at_least

Config = dict[str, Any]


def rule(op_type: str, shape: StepShape, rows: int, hidden: int, rank: int, slices: int, invariant: bool) -> Config:
    """Rules of thumb, for what no tuned table answers."""
    segments = shape.adapters
    if op_type == "shrink":
        return _default_shrink(segments, rows, hidden, rank, slices, invariant)
    if op_type == "expand":
        return _default_expand(segments, rows, rank, invariant)
    lanes = block_at_least(rank)
    block_n, block_k = (min(lanes, 64), 32) if op_type.endswith("shrink") else (64, min(lanes, 32))
    config = {"block_m": 64, "block_n": block_n, "block_k": block_k, "split_k": 1, "num_warps": 4, "num_stages": 3}
    return config | {"group_size_m": 8}


def _default_shrink(segments: int, rows: int, hidden: int, rank: int, slices: int, invariant: bool) -> Config:
    """Few rows or short segments: one row per program and all of K at once (up to 4096), as many ranks per program as
    leave about 64 programs. Long segments: tiles, K split only as far as it takes to occupy the multiprocessors, since
    expand sums the planes again.
    """
    block_n = min(block_at_least(rank), 64)
    config: Config = {"row_wise": False, "block_m": 16, "block_n": block_n, "block_k": 128, "block_r": 1, "short_k": 0}
    config |= {"split_k": 1, "num_warps": 4, "num_stages": 3, "weights_left": False}
    if invariant:
        split_k = max(1, min(4, hidden // 1024))
        return config | {"block_m": 16 if rows <= 128 else 32, "block_k": 256, "split_k": split_k}
    if rows <= 128 or rows < 4 * segments:
        block_k = min(4096, block_at_least(hidden))
        block_r = min(16, block_at_least(rank, 1), _power_below(rows * rank * slices // 64))
        config |= {"row_wise": True, "block_k": block_k, "block_r": block_r, "split_k": cdiv(hidden, block_k)}
        return config | {"num_warps": min(16, _power_below(block_k * block_r // 1024))}
    block_m = 32 if rows <= 1024 else 64
    programs = (cdiv(rows, block_m) + min(segments, rows) - 1) * slices * cdiv(rank, block_n)
    split_k = 1
    while split_k < 4 and programs * split_k <= 64 and hidden >= split_k * 1024:
        split_k *= 2
    return config | {"block_m": block_m, "split_k": split_k, "num_stages": 4}


def _default_expand(segments: int, rows: int, rank: int, invariant: bool) -> Config:
    """Row-wise while segments are short; tiles above, and with many rows a walk over columns."""
    lanes = block_at_least(rank)
    config: Config = {"row_wise": False, "block_m": 16, "block_n": 128, "block_k": min(lanes, 128)}
    config |= {"num_warps": 4, "num_stages": 3, "tiles_n": 1, "short_n": 0, "weights_left": False}
    if invariant:
        return config | {"block_m": 16 if rows <= 128 else 32, "tiles_n": 1 if rows <= 512 else 8}
    if rows <= 16 or rows < 6 * segments:
        return config | {"row_wise": True, "block_n": max(32, 4096 // lanes)}
    if rows <= 256:
        return config | {"block_n": 256 if lanes == 16 else 128}
    return config | {"block_m": 64 if lanes == 16 or rows > 1024 else 32, "tiles_n": 8 if rows > 1024 else 1}


def _power_below(number: int) -> int:
    """The largest power of two that is at most `number`, and at least 1."""
    return 1 << (max(1, number).bit_length() - 1)
