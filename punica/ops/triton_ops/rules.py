"""Which configuration suits a step that no tuned table answers: rules over rows per adapter, bytes and programs.

Fitted on an H200 to operators of several models (`experiments/commands/tune_space.py`) and checked on others; what
they lose against a search per operator is in results/h200/operator_tables.md. The quantities they turn on belong to the
work, not to that GPU: enough programs to occupy it, blocks of about 16 KiB, weights read again from the L2 cache only
while that is cheaper than what a tile wastes.
"""

from typing import Any

from triton import cdiv

from punica.metadata import HEIGHTS, StepShape
from punica.ops.triton_ops.launch import block_at_least

Config = dict[str, Any]

MULTIPROCESSORS = 132
"""Of an H200, on which the searches were made."""
WANTED = 160
"""Programs of a shrink by tiles: about one for each multiprocessor, each with a deep pipeline."""
ROW_TRAFFIC = 24e6
"""Bytes of A that taking every row by itself may read again before tiles of rows are better."""
AT_ONCE = 8 * MULTIPROCESSORS
"""Programs of two warps that an H200 holds at the same time: one more starts a second round that takes as long."""
AHEAD = 6e6
"""Bytes of one slice's B, if its elements have 16 bits, up to which reading some of them in vain costs less than
waiting for the true ranks. Ranks above 16 gain more by it (twice as many bytes); with half as many, programs may be
small.
"""
FETCHED = 8 << 20
"""Bytes of y, with 16 bits and slices as wide as the widest, up to which bringing them to the L2 cache beside a shrink
of more than 32 ranks is a gain where they lie in memory: at rank 64 8 to 16 % for half as many on an H200 and 5 % for
these, at rank 128 1 %. With twice as many it costs 6 %: the shrink then occupies the device, and needs the memory.
"""


def rule(
    op_type: str, shape: StepShape, rows: int, hidden: int, rank: int, slices: int, invariant: bool,
    partials: int = 1, row_major: bool = True, listed: bool = True,
) -> Config:  # fmt: skip
    """The configuration of one launch; arguments as in `configs.choose`."""
    if op_type == "shrink":
        if invariant:
            return _invariant_shrink(shape, rows, hidden, rank)
        return _shrink(shape, rows, hidden, rank, slices, listed)
    if op_type == "expand":
        if invariant:
            return _invariant_expand(shape, rows, hidden, rank, slices)
        return _expand(shape, rows, hidden, rank, slices, partials, row_major)
    lanes = block_at_least(rank)
    block_n, block_k = (min(lanes, 64), 32) if op_type.endswith("shrink") else (64, min(lanes, 32))
    config = {"block_m": 64, "block_n": block_n, "block_k": block_k, "split_k": 1, "num_warps": 4, "num_stages": 3}
    return config | {"group_size_m": 8}


def is_mixed(shape: StepShape) -> bool:
    """Whether long segments stand beside so many short ones that each need the form that suits them."""
    return shape.longest > 64 and shape.short >= 8


def _shrink(shape: StepShape, rows: int, hidden: int, rank: int, slices: int, listed: bool) -> Config:
    mean, lanes = _rows_per_tiled_adapter(shape, rows), min(block_at_least(rank), 64)
    again = 2 * rows * rank * hidden * slices
    config: Config = {"row_wise": False, "block_n": lanes, "short_k": 0, "swap_ab": False, "together": False}
    if not is_mixed(shape) and (mean < 3 or rows <= 8 or again <= ROW_TRAFFIC / (1.5 if mean >= 32 else 1)):
        block_k = min(block_at_least(hidden), 8192 if 4096 < hidden <= 8192 else 4096)
        split_k = cdiv(hidden, block_k)
        most_r = 4 if rank <= 16 or ((rank >= 64 or mean >= 8) and block_k <= 4096) else 2
        if rank <= 16 and block_k <= 4096:
            most_r = 16
        block_r = _power_below(rows * slices * split_k * rank / 64, 2, most_r)
        config |= {"row_wise": True, "block_m": 16, "block_k": block_k, "block_r": block_r, "split_k": split_k}
        return config | {"num_warps": 4 if block_r * block_k <= 8192 and rank <= 16 else 8, "num_stages": 1}
    together = listed and slices > 1 and rank < 64 and rows >= 256
    if together:
        lanes = min(64, block_at_least(slices * rank))
    block_m = _height(rows, mean, (128, 300 if lanes <= 32 else 600))
    wanted = WANTED * (1.5 if rows > 4096 and lanes <= 32 else 1)
    if is_mixed(shape) and slices > 1 and (rows > 1024 or not together):
        wanted /= 2
    programs = tiles_of(shape, rows, block_m) * (cdiv(slices * rank, lanes) if together else slices * cdiv(rank, lanes))
    split_k = power_near(wanted / programs, 2 if is_mixed(shape) else 1, min(8, 512 // lanes))
    while split_k > 1 and hidden < 448 * split_k:
        split_k //= 2
    config |= {"block_m": block_m, "block_n": lanes, "together": together}
    config |= {"block_k": 128, "block_r": 1, "split_k": split_k, "num_warps": 4}
    config |= {"num_stages": 5 if block_m <= 32 and not (is_mixed(shape) and (slices == 1 or together)) else 4}
    if is_mixed(shape):
        if rows > 1024 and slices > 1:
            config["num_stages"] = 5
        short_k = min(4096, block_at_least(cdiv(hidden, split_k)))
        config |= {
            "short_k": short_k,
            "block_r": 16 if short_k <= 2048 else 8,
            "num_warps": 4 if short_k <= 1024 or together else 8,
        }
    return config


def _expand(shape: StepShape, rows: int, width: int, rank: int, slices: int, partials: int, row_major: bool) -> Config:
    mean, lanes = _rows_per_tiled_adapter(shape, rows), block_at_least(rank)
    again = 2 * rows * rank * width * slices
    config: Config = {"row_wise": False, "block_k": min(lanes, 128), "num_warps": 4, "tiles_n": 1, "short_n": 0}
    config |= {"swap_ab": False, "ahead": False, "prefetch_y": False, "in_words": False}
    if not is_mixed(shape) and (mean < 3 or rows <= 16 or (again <= 5e6 and mean < 8)):
        config |= {"row_wise": True, "block_m": 16, "num_stages": 1}
        if row_major:
            return config | {"block_n": max(32, 8192 // lanes)}
        return config | _expand_rows_by_ranks(rows, width, rank)
    block_m, block_n = _height(rows, mean, (96, 600 if lanes > 32 else 1 << 30)), 128
    tiles = tiles_of(shape, rows, block_m)
    programs = tiles * cdiv(width, block_n) * slices
    fill = programs / (450 if 1200 < rows <= 4096 and lanes <= 32 else 250 if is_mixed(shape) else 300)
    if rows <= 128 and programs <= 2000:
        fill = 1.0
    most = 16
    if is_mixed(shape) and rows <= 256:
        fill = 4.0
    elif not row_major and lanes <= 32:
        fill, most = 1.0 if programs <= 600 else fill, 16 if rows <= 4096 else 8
    summed = partials * block_m * min(lanes, 128) / (1024 if block_m <= 16 else 4096)  # in 4 or 16 KiB
    share = min(power_near(summed, 1, 8), _power_below(programs * min(lanes, 128) / 7680, 1, 16))
    tiles_n = max(power_near(fill, 1, most), share)
    config |= {"block_m": block_m, "block_n": block_n, "tiles_n": tiles_n, "num_stages": 3}
    prefill, y_bytes = mean >= 32 and not is_mixed(shape), 2 * rows * width * slices
    config["prefetch_y"] = prefill and not row_major and lanes > 32 and rows >= 256 and y_bytes <= FETCHED
    if prefill and (lanes <= 32 or rows > 2048 or (lanes > 64 and rows <= 128)):
        config["num_warps"] = 8
    elif lanes == 64 and rows <= 128:
        config["num_stages"] = 1
    if is_mixed(shape):
        ahead = rows <= 256 and _reads_ahead(shape.short, width, rank)
        config |= {"short_n": 8192 // lanes if row_major else 1024, "ahead": ahead}
        if slices == 1 and not row_major:
            if rows > 1024:
                config["short_n"] = 512
            elif lanes <= 16:
                config |= {"num_warps": 2, "tiles_n": 4}
        config["short_n"] = max(32, config["short_n"])
    return config


def _reads_ahead(rows: int, width: int, rank: int) -> bool:
    """Whether all ranks of a slot are read, of so many rows, before it is known how many the adapter has."""
    return rank <= 16 and 2 * rows * rank * width <= AHEAD


def _expand_rows_by_ranks(rows: int, width: int, rank: int) -> Config:
    """Threads that hold 8 columns, and of these 16 ranks at once. Where there is little to read, all of it is read
    ahead of the true rank, up to 64 ranks at once; where there is much, the shrink that still runs needs the memory
    more.
    """
    lanes, slice_bytes = block_at_least(rank), 2 * rows * rank * width
    if 16 < lanes <= 64 and slice_bytes <= 2 * AHEAD:
        return {"block_n": 4096 // lanes, "block_k": lanes, "num_warps": 1, "ahead": True}
    block_n = min(256 if slice_bytes <= AHEAD / 2 else 512, block_at_least(width, 32))
    ahead = _reads_ahead(rows, width, rank)
    return {"block_n": block_n, "block_k": 16, "num_warps": max(1, block_n // 256), "ahead": ahead}


def _invariant_shrink(shape: StepShape, rows: int, hidden: int, rank: int) -> Config:
    """One split and one instruction whatever the step is, so that a row has the same bits in every batch.

    Weights are the left operand of the tensor cores: a row is a column of the right one, however many there are. Up to
    32 lanes, every warp multiplies a quarter of the split by itself, with the one instruction that a warp has, so that
    the height of a tile is free; above, four warps multiply together, and the height is fixed because Hopper and
    Blackwell have instructions for several. All else that matters for the bits depends on the layer only.
    """
    lanes = min(block_at_least(rank), 64)
    config: Config = {"row_wise": False, "block_n": lanes, "block_r": 1, "short_k": 0, "together": False}
    config |= {"split_k": power_near(hidden / 1024, 1, 8), "num_warps": 4, "swap_ab": True}
    if lanes > 32:
        return config | {"block_m": 64, "block_k": 128, "num_stages": 4}
    flat = _is_flat(shape, rows)
    return config | {"block_m": 8 if flat else 16, "block_k": 512 if flat else 256, "num_stages": 3}


def _invariant_expand(shape: StepShape, rows: int, width: int, rank: int, slices: int) -> Config:
    """As `_invariant_shrink`; with fewer than four warps the instruction is the same for every block of columns."""
    lanes, flat = block_at_least(rank), _is_flat(shape, rows)
    config: Config = {"row_wise": False, "block_k": lanes if lanes <= 128 else 32, "short_n": 0, "tiles_n": 1}
    config |= {"swap_ab": True, "num_stages": 3, "num_warps": 2, "ahead": False}
    config |= {"prefetch_y": False, "in_words": False}
    if flat and _reads_ahead(shape.adapters, width, rank):
        return config | {"block_m": 8, "block_n": 128, "ahead": True}
    if flat and lanes <= 16:
        tiles_n = min(8, cdiv(shape.adapters * slices * cdiv(width, 128), AT_ONCE))
        return config | {"block_m": 8, "block_n": 128, "tiles_n": tiles_n, "num_stages": 1}
    if flat or rows <= 128:
        return config | {"block_m": 8 if flat else 16, "block_n": max(32, 8192 // lanes)}
    if rows <= 1024:
        return config | {"block_m": 32, "block_n": 128 if lanes <= 64 else 64, "num_warps": 1 if lanes <= 32 else 2}
    if lanes <= 32 and rows <= 4096:
        return config | {"block_m": 16, "block_n": 128}
    block_m, block_n = 32, 64 if lanes > 32 else 128
    if lanes > 32:
        config["num_stages"] = 1
    programs = tiles_of(shape, rows, block_m) * cdiv(width, block_n) * slices
    return config | {"block_m": block_m, "block_n": block_n, "tiles_n": power_near(programs / 250, 1, 16)}


def _is_flat(shape: StepShape, rows: int) -> bool:
    """Whether tiles of 8 rows suit the step: few rows, or few of each adapter."""
    return rows <= 64 or rows < 8 * shape.adapters


def _rows_per_tiled_adapter(shape: StepShape, rows: int) -> float:
    return shape.longest if is_mixed(shape) else rows / max(1, shape.adapters)


def _height(rows: int, mean: float, limits: tuple[int, int]) -> int:
    """Rows of a tile: more for more rows, but not more than a segment has."""
    block_m = 16 if rows <= limits[0] else 32 if rows < limits[1] else 64
    return min(block_m, power_near(mean, 16, HEIGHTS[-1]))


def tiles_of(shape: StepShape, rows: int, block_m: int) -> int:
    """About how many tiles of `block_m` rows the step makes: some are not full, unless all segments are equal (which
    their shape tells where number and length are powers of two).
    """
    long = max(0, shape.adapters - shape.short) if is_mixed(shape) else shape.adapters
    if rows <= block_m * long:
        return shape.adapters
    return cdiv(rows, block_m) + (0 if shape.adapters * shape.longest <= rows else long // 4)


def power_near(number: float, least: int, most: int) -> int:
    """The power of two in `least` to `most` that is nearest to `number` by ratio."""
    power = least
    while power < most and number > power * 1.41:
        power *= 2
    return power


def _power_below(number: float, least: int, most: int) -> int:
    """The largest power of two in `least` to `most` that is at most `number`, else `least`."""
    power = least
    while power < most and 2 * power <= number:
        power *= 2
    return power
