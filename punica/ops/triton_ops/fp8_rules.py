"""Which configuration suits weights in FP8 whose scales belong to whole channels: the 16-bit rule's choice (`rules`),
changed where half the bytes, and making them wide, want another (by search on an H200).

Where a row is taken by itself, bytes are what costs, and many of them must be under way in few registers, as words
(`fp8_words`). In tiles of many rows they are few beside those of the activations. Instructions that make them wide cost
nothing there (an H200 is as fast with moves in their place); their way through shared memory to the tensor cores does,
where it stalls a program: so shrink takes A as the left operand, which comes from registers, and expand of many
prefills takes B in words, with products of a warp. Choices for steps of long and short segments are left alone but for
how wide a row's block is, and so are batch-invariant ones but for this: no block of B is carried into a loop. Which
ranks an instruction adds up together follows from whether the compiler sees that they were loaded as bytes.
"""

from collections.abc import Sequence

from triton import cdiv

from punica.metadata import StepShape
from punica.ops.triton_ops.configs import Config
from punica.ops.triton_ops.launch import block_at_least
from punica.ops.triton_ops.rules import MULTIPROCESSORS, is_mixed, tiles_of


def shrink_in_fp8(config: Config, shape: StepShape, rows: int, rank: int) -> Config:
    """For ``config``, the 16-bit choice for ``rows`` rows of a step."""
    if config["row_wise"]:
        return _shrink_rows(config, shape, rows, rank)
    if config["swap_ab"] or is_mixed(shape) or rows < 256:
        return config
    if block_at_least(rank) <= 32:  # stages of half the bytes
        return config | {"num_stages": 6 if rows < (8192 if rank <= 16 else 1024) else 5}
    # As the left operand wide weights go from registers to the tensor cores, without shared memory between. Started
    # early, programs find multiprocessors unevenly free: of few adapters, whose tiles are high, so many stages leave no
    # room for two on one while another has none.
    stages = config["num_stages"] if rows >= 4096 else 6 if rows >= 1024 else 8
    return config | {"swap_ab": True, "split_k": max(2, config["split_k"]), "num_stages": stages}


def _shrink_rows(config: Config, shape: StepShape, rows: int, rank: int) -> Config:
    if rank > 16:
        block_k, block_r = min(config["block_k"], 4096), 8 if rows > 32 and rank >= 64 else 4
        return config | {"block_k": block_k, "block_r": block_r, "num_warps": max(1, min(8, block_k * block_r // 2048))}
    if rows >= 3 * shape.adapters:
        return config | {"block_r": min(config["block_r"], 4)}
    if (config["block_k"], config["split_k"]) == (4096, 1):
        return config | {"block_k": 2048, "split_k": 2, "block_r": min(8, block_at_least(rank, 1)), "num_warps": 4}
    return config


def expand_in_fp8(
    config: Config, shape: StepShape, rows: int, widths: Sequence[int], rank: int, out_bytes: int
) -> Config:  # fmt: skip
    """The same, of slices with so many columns, of outputs with so many bytes each."""
    config = config | {"prefetch_y": False}
    if config["row_wise"]:
        return _expand_rows(config, rows, widths, rank)
    if config["swap_ab"]:
        return config | {"num_stages": max(2, config["num_stages"])}
    if is_mixed(shape):
        return config | {"short_n": min(512 * config["num_warps"], block_at_least(max(widths), 32))}
    lanes = block_at_least(rank)
    if rows < 256:
        return config | ({"num_warps": 1} if lanes <= 16 else {"swap_ab": True, "tiles_n": 2})
    if out_bytes == 2 and _gains_by_words(shape, rows, len(widths), lanes):
        return config | _expand_in_words(config["block_m"], shape, rows, widths, lanes)
    if rows < 1024:
        return config | {"num_warps": 8 if lanes > 32 else 4}
    config = config | {"num_warps": 4}
    if lanes > 32:
        return config | ({"num_stages": 4} if rows >= 4096 else {})
    return config | {"tiles_n": 8, "num_stages": 4} | ({} if rows >= 4096 else {"block_n": 64})


def _gains_by_words(shape: StepShape, rows: int, slices: int, lanes: int) -> bool:
    """Where a search found them faster. More lanes leave a program too few registers; with few rows for each adapter
    most of a tile that makes B wide would be empty; of few lanes and thousands of rows, several slices take longer.
    """
    if lanes > 64 or rows < 32 * shape.adapters:
        return False
    return lanes > 16 or slices == 1 or rows < 4096


def _expand_in_words(block_m: int, shape: StepShape, rows: int, widths: Sequence[int], lanes: int) -> Config:
    """Tiles that read B in words: more words than rows, so that every warp multiplies other columns (else several make
    the same ones wide), and less than the 64 rows of Hopper's product, which wants B in shared memory. While there are
    few blocks, low tiles, of as many columns as leave registers for three programs on a multiprocessor; each takes two
    blocks (the second under way with the first), or as many more as let all programs run at once; where none does (a
    few narrow slices of many rows), two again. Else two programs fit on one, and what counts is rounds of them times
    the blocks of a program and about four more, the time it takes to start.
    """
    blocks = tiles_of(shape, rows, 16) * sum([cdiv(width, 128) for width in widths])
    low = max(widths) <= 128 or blocks <= 24 * MULTIPROCESSORS
    block_m = 16 if low else min(block_m, 32)
    block_n = 256 if low and min(widths) > 128 and lanes * len(widths) <= 48 else 8 * block_m
    tiles = tiles_of(shape, rows, block_m)

    def programs(tiles_n: int) -> int:
        return tiles * sum([cdiv(width, block_n * tiles_n) for width in widths])

    if low:
        tiles_n = next((number for number in (2, 4, 8, 16) if programs(number) <= 3 * MULTIPROCESSORS), 2)
    else:
        tiles_n = min(range(16, 0, -1), key=lambda number: cdiv(programs(number), 2 * MULTIPROCESSORS) * (number + 4))
    tiles_n = min(tiles_n, cdiv(max(widths), block_n))
    config: Config = {"block_m": block_m, "block_n": block_n, "tiles_n": tiles_n, "num_warps": 4, "in_words": True}
    return config | {"num_stages": 3 if rows < 4096 else 4}


def _expand_rows(config: Config, rows: int, widths: Sequence[int], rank: int) -> Config:
    """Single warps, each with 8 KiB of B under way: all ranks of a slot of 64, 32 at a time of others. Up to 16 ranks
    half as much, and less where that is too few programs.
    """
    lanes = block_at_least(rank)
    block_k = 64 if lanes == 64 else min(lanes, 32)
    block_n = 8192 // block_k if lanes > 16 else 256
    if lanes <= 16 and rows * sum([cdiv(width, block_n) for width in widths]) < 512:
        block_n = 128
    block_n = min(block_n, block_at_least(max(widths), 32))
    return {**config, "block_n": block_n, "block_k": block_k, "num_warps": 1}
