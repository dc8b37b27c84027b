"""Expand: rank to output size, for every adapter and every slice of the batch in one launch.

    y[t, o_i : o_i + N_i] (+)= h[i, t] @ B_i[slot(t)]^T     h [n, T, r] or fp32 partials [splits, n, T, r]
                                                            B_i [L, N_i, r]

Summing the partials of a split shrink is part of reading h, so the split costs no kernel of its own. ``y + delta`` is
formed in fp32 and rounded once.

One kernel in the modes of `lora_shrink`: **rows**, a GEMV per row (`expand_gemv`); **list**, a persistent loop over
tiles (`expand_gemm`); **search**, tiles without a list.

With PDL the kernel starts while its predecessor still runs: B is loaded first, and the old y too unless it is ``late``
(the predecessor may write it), then it waits. Unless ``late``, whatever wrote y has ended: the predecessor is the
shrink, which launches this kernel only after its own wait.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import HEIGHTS
from punica.ops.checks import Weights
from punica.ops.triton_ops.device import INDEX_POINTERS, find_tile, max_tiles, pdl_wait, read_record
from punica.ops.triton_ops.expand_gemm import expand_tile
from punica.ops.triton_ops.expand_gemv import expand_row
from punica.ops.triton_ops.fp8_device import WIDE, Quant
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, shared_memory, stages_that_fit
from punica.ops.triton_ops.plan import Batch, FixedPlan, KernelPlan, ListedPlan
from punica.ops.triton_ops.schedules import WIDE_RANKS, Schedule


class ExpandShape(NamedTuple):
    """Shape and storage of B, h and y, and options of the call: a constexpr of the kernels.

    widths, columns: columns of each slice, and the first of them in y. row_major: B_i is stored [width, rank], else
    rank after rank. vector: ranks that one load takes. partials: of h, added up. add: to y, else y is overwritten.
    """

    rank: int
    widths: tuple[int, ...]
    columns: tuple[int, ...]
    slices: int
    quant: Quant
    row_major: bool
    vector: int
    partials: int
    has_ranks: bool
    add: bool


class RowTile(NamedTuple):
    """Work of a GEMV program: block_n columns (``blocks`` of them in all slices), ``lanes`` ranks at once.

    lanes, steps: widths in ranks to choose from, and in how many steps each takes the columns.
    """

    lanes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    block_n: int = 0
    blocks: int = 1


class ExpandTile(NamedTuple):
    """Schedule of a launch: a constexpr of the kernels. Fields as in `schedules.Schedule` and `ShrinkTile`, and:

    late: y is not read before the PDL wait. blocks: runs of block_n x tiles_n columns in all slices. even_n: these
    divide every slice. at_once: blocks go through registers.
    """

    mode: str
    late: bool
    pdl: bool
    row: RowTile = RowTile()
    blocks: int = 1
    even_n: bool = False
    block_m: int = 16
    block_n: int = 16
    block_r: int = 16
    tiles_n: int = 1
    at_once: bool = False
    words: bool = False
    stages: int = 1
    swap_ab: bool = False
    height: int = 0
    segments: int = 0
    interpret: bool = INTERPRETED


@triton.jit
def _expand_list(
    tensors, operands, sorted_ptr, work, num_tiles, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A persistent loop over a step's list, as `lora_shrink._shrink_list`."""
    tiles_ptr, totals_ptr = work
    _, _, anchor = call
    pid = tl.program_id(0)
    tile = pid // TILE.blocks
    record = tl.load(tiles_ptr + tile)
    total = tl.load(totals_ptr + TILE.height)
    pdl_wait(TILE.pdl, anchor & (tile >= total))
    while tile < total:
        found = read_record(record)
        expand_tile(tensors, operands, sorted_ptr, found, pid % TILE.blocks, call, strides, SHAPE, TILE)
        tile += num_tiles
        record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_tiles", "num_segments"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_expand_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, tiles_ptr, totals_ptr, starts_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, num_segments, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Entry of all modes; arguments as of `lora_shrink._lora_shrink_kernel`.

    tensors: h and y; strides: of h along partials, slices, rows and ranks, and of rows of y.
    """
    pid = tl.program_id(0)
    call = (ranks_ptr, num_slots, pid == 0)
    if TILE.mode == "rows":
        row = (pid // TILE.row.blocks).to(tl.int64)
        slot = tl.load(mapping_ptr + row)
        expand_row(tensors, operands, (row, slot), pid % TILE.row.blocks, call, strides, SHAPE, TILE)
    elif TILE.mode == "list":
        _expand_list(tensors, operands, sorted_ptr, (tiles_ptr, totals_ptr), num_tiles, call, strides, SHAPE, TILE)
    else:
        tile = pid // TILE.blocks
        found = find_tile(tile, tiles_ptr, totals_ptr, starts_ptr, num_segments, TILE.block_m, TILE.segments)
        expand_tile(tensors, operands, sorted_ptr, found, pid % TILE.blocks, call, strides, SHAPE, TILE)


def plan_expand(
    h_shape: Sequence[int], h_strides: Sequence[int], h_dtype: torch.dtype, y: Tensor, weights: Weights,
    batch: Batch,
    schedule: Schedule,
    *,
    offset_start: int, add_inputs: bool, has_ranks: bool,
    pdl: bool = False, late: bool = False, quant: Quant = WIDE,
) -> KernelPlan:  # fmt: skip
    """The launch of a schedule. h has strides of ``[partials, n, T, r]`` (rows may be wider than r); partials are added
    up. ``late``: y is not read before the PDL wait. ``quant``: as in `plan_shrink`.
    """
    if pdl and h_strides[0] <= 0:  # kernels branch on it where they wait (`pdl_wait`)
        raise ValueError(f"partials of h have a stride of {h_strides[0]}; give a positive one, or pdl=False")
    partials, _, tokens, _ = h_shape
    columns = tuple(accumulate(weights.widths[:-1], initial=offset_start))
    vector = gcd(weights.rank, 16 // weights.dtype.itemsize if weights.row_major else 4)
    shape = ExpandShape(
        weights.rank, weights.widths, columns, len(weights.widths), quant, weights.row_major, vector, partials,
        has_ranks, add_inputs,
    )  # fmt: skip
    sizes = (tokens, weights.slots)

    def launch(tile: ExpandTile, programs: int) -> Launch:
        return Launch(
            _lora_expand_kernel, (programs, 1, 1), (h_dtype, weights.dtype, y.dtype), (*h_strides, y.stride(0)),
            {"SHAPE": shape, "TILE": tile}, num_warps=schedule.num_warps, pdl=pdl, device=weights.device,
        )  # fmt: skip

    if not schedule.block_m:
        row = _row_tile(shape, schedule, tokens)
        return FixedPlan(launch(ExpandTile("rows", late and pdl, pdl, row), tokens * row.blocks), (*sizes, 0, 0))
    tile = ExpandTile("search", late and pdl, pdl)
    itemsizes = (h_dtype.itemsize, weights.dtype.itemsize, y.element_size())
    tile = _gemm_tile(tile, schedule, shape, itemsizes, weights.device)
    if batch.listed and schedule.block_m in HEIGHTS:
        height = HEIGHTS.index(tile.block_m)
        return ListedPlan(launch(tile._replace(mode="list", height=height), 0), height, tile.blocks, 1, sizes)
    segments = batch.max_segments
    tile = tile._replace(segments=block_at_least(batch.tensors[4].numel()))
    tiles = max_tiles(tokens, segments, tile.block_m)
    return FixedPlan(launch(tile, tiles * tile.blocks), (*sizes, tiles, segments))


def _blocks(shape: ExpandShape, block_n: int) -> int:
    """Blocks of this many columns in all slices."""
    return sum([triton.cdiv(width, block_n) for width in shape.widths])


def _row_tile(shape: ExpandShape, schedule: Schedule, rows: int) -> RowTile:
    """Work of a program that takes one of ``rows`` rows."""
    block_n, lanes = schedule.block_n, schedule.block_k
    if not shape.row_major:
        lanes = min(lanes, shape.quant.group_k or lanes, block_at_least(shape.rank, 1))
        return RowTile((lanes,), (1,), block_n, _blocks(shape, block_n))
    widths, steps, block_n = _lane_blocks(
        shape.rank, block_n, shape.has_ranks, lambda columns: rows * _blocks(shape, columns)
    )
    return RowTile(widths, steps, block_n, _blocks(shape, block_n))


def _gemm_tile(
    tile: ExpandTile, schedule: Schedule, shape: ExpandShape, itemsizes: tuple[int, int, int], device: torch.device
) -> ExpandTile:
    """``tile`` with the blocks of the tensor cores, and as many stages as fit into shared memory.

    All ranks go in one pass where that fits, since more would read h again for every block of columns. The operands of
    a float32 product are held in registers, whose number per program is the limit there.
    """
    rank, quant, (of_h, of_b, of_y) = shape.rank, shape.quant, itemsizes
    wide = 2 if quant.x_format else of_y if quant.format else of_b
    most_r = min(quant.group_k or WIDE_RANKS, WIDE_RANKS if wide == 2 else 16)
    if shared_memory(device) < 227 << 10:  # tensor cores that read operands from registers, unlike Hopper's
        most_r = min(most_r, 128)
    block_m, block_r = schedule.block_m, min(block_at_least(rank), schedule.block_k, most_r)
    block_n, tiles_n = schedule.block_n, schedule.tiles_n
    while block_r > 16 and 2 * (block_n * block_r + block_m * (block_n + block_r)) > shared_memory(device):
        block_r //= 2  # B, y and h of one block must fit
    while INTERPRETED and block_m * block_n * block_r > 1 << 20:
        block_r //= 2  # Triton's tensors have no more elements, and the interpreter holds all products
    row_bytes = block_n * of_y if rank <= block_r else block_r * shape.partials * of_h
    words = quant.words and not schedule.swap_ab and wide == 2 and rank <= block_r and block_n >= 64  # 16 words or more
    held_bytes = 1 if words else wide  # else they are upcast through shared memory
    stage_bytes = block_n * block_r * held_bytes + block_m * row_bytes  # B, and old y or the partials of h
    return tile._replace(
        blocks=_blocks(shape, block_n * tiles_n), block_m=block_m, block_n=block_n, block_r=block_r, tiles_n=tiles_n,
        even_n=all([width % (block_n * tiles_n) == 0 for width in shape.widths]),
        at_once=tiles_n == 1 or schedule.num_stages == 1, words=words,
        stages=stages_that_fit(schedule.num_stages, stage_bytes, device), swap_ab=schedule.swap_ab,
    )  # fmt: skip


def _lane_blocks(
    rank: int, block_n: int, has_ranks: bool, programs: Callable[[int], int]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Block widths in ranks among which the kernel chooses for B by rows, in how many steps each takes a program's
    columns, and how many columns that is.

    ``block_n`` suits the whole width. With true ranks a program gets up to as many times more columns as 16 ranks, the
    least that memory moves, are narrower, so that its blocks stay as large; ``programs(block_n)`` must still occupy the
    device.
    """
    whole, least = block_at_least(rank, 1), 16
    if not has_ranks or whole <= least:
        return (whole,), (1,), block_n
    factor = whole // least
    while factor > 1 and programs(block_n * factor) < 512:
        factor //= 2
    lanes = (*[width for width in (16, 32) if width < whole], whole)
    return lanes, tuple(max(1, factor * width // whole) for width in lanes), block_n * factor
