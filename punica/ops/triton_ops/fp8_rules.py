"""Which configuration suits weights in FP8 whose scales belong to whole channels: the 16-bit rule's choice (`rules`),
changed where half the bytes, and making them wide, want another (by search on an H200).

Where a row is taken by itself, bytes are what costs: threads read as many of them at once, that is twice the values. In
tiles of many rows they are few beside those of the activations, and what costs is making weights wide once for every
tile: between shared memory and the tensor cores, where it stalls a program. Choices for steps of long and short
segments are left alone, and so are batch-invariant ones but for this: no block of B is carried into a loop. Which ranks
an instruction adds up together follows from whether the compiler sees that they were loaded as bytes.
"""

from collections.abc import Sequence

from triton import cdiv

from punica.metadata import StepShape
from punica.ops.triton_ops.configs import Config
from punica.ops.triton_ops.launch import block_at_least
from punica.ops.triton_ops.rules import is_mixed


def shrink_in_fp8(config: Config, shape: StepShape, rows: int, rank: int) -> Config:
    """For ``config``, the 16-bit choice for ``rows`` rows of a step."""
    if config["row_wise"]:
        return _shrink_rows(config, shape, rows, rank)
    if config["weights_left"] or is_mixed(shape) or rows < 256:
        return config
    if block_at_least(rank) <= 32:
        return config | ({"num_stages": 5} if rows >= 1024 else {"block_k": 256, "num_warps": 8})
    if 1024 <= rows < 4096:
        return config | {"num_stages": 5}
    # as the left operand wide weights go from registers to the tensor cores, without shared memory between
    return config | {"weights_left": True, "split_k": max(2, config["split_k"])}


def _shrink_rows(config: Config, shape: StepShape, rows: int, rank: int) -> Config:
    if rank > 16:
        at_once = 8 if rows <= 32 and config["split_k"] == 1 else 4
        return config | {"block_r": at_once, "num_warps": at_once, "block_k": min(config["block_k"], 2048)}
    return config | {"block_r": min(config["block_r"], 4)} if rows >= 3 * shape.adapters else config


def expand_in_fp8(config: Config, shape: StepShape, rows: int, widths: Sequence[int], rank: int) -> Config:
    """The same, of slices with so many columns."""
    if config["row_wise"]:
        return _expand_rows(config, rows, widths, rank)
    if config["weights_left"]:
        return config | {"num_stages": max(2, config["num_stages"])}
    if is_mixed(shape):
        return config
    lanes = block_at_least(rank)
    if rows < 256:
        return config | ({"num_warps": 1} if lanes <= 16 else {"weights_left": True, "tiles_n": 2})
    if rows < 1024:
        return config | {"num_warps": 4 if lanes <= 32 else 8}
    config = config | {"num_warps": 4}
    if lanes > 32:
        return config | ({"num_stages": 4} if rows >= 4096 else {})
    return config | ({"tiles_n": 16} if rows >= 4096 else {"tiles_n": 8, "block_n": 64, "num_stages": 4})


def _expand_rows(config: Config, rows: int, widths: Sequence[int], rank: int) -> Config:
    """Twice the columns, but threads hold as many wide values, so that they take fewer ranks at once, and fewer still
    where that lets all programs run at the same time. Much to read is read best by single warps.
    """
    if rank > 32 and not config["ahead"]:
        block_n = min(512 if rows > 32 else 256, block_at_least(max(widths), 32))
        return config | {"block_n": block_n, "num_warps": 1, "block_k": 4 if rows > 32 else 8}
    block_n = min(2 * config["block_n"], block_at_least(max(widths), 32))
    config = {**config, "block_n": block_n}
    if rank <= 16 or config["ahead"]:
        return config
    programs = rows * sum([cdiv(width, block_n) for width in widths])
    return {**config, "block_k": 8 if programs <= 600 else 4}
