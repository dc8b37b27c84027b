"""Shrink: hidden size to rank, for every adapter of the batch in one launch.

    out[i, t, :] = scaling * x[t] @ A_i[slot(t)]^T          x [T, K], A_i [L, r, K], out [n, T, r]  (n slices)

One kernel in three modes: **rows**, a GEMV per row, whose grid is filled by splitting the *ranks*; **list**, a
persistent loop over the tiles of a step's list; **search**, tiles of tensors without a list, whose programs search the
segments.

``SPLIT_K > 1`` cuts K among programs; each writes its fp32 partial sum ``out[split]``, and expand adds them in
ascending order: no atomic add, no zero fill, the same bits in every run. Programs of ranks beyond an adapter's own
leave at once, and lanes beyond them are not read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.device import INDEX_POINTERS, find_tile, pdl_wait, read_record
from punica.ops.triton_ops.fp8_device import Quant
from punica.ops.triton_ops.launch import Launch, block_at_least, stages_that_fit
from punica.ops.triton_ops.plan import Batch, KernelPlan, plan_tiles, shrink_quant
from punica.ops.triton_ops.schedules import Schedule
from punica.ops.triton_ops.shrink import shrink_row, shrink_tile
from punica.ops.weights import Form


class ShrinkShape(NamedTuple):
    """Shape and storage of A and of the output, and options of the call: a constexpr of the kernels.

    k, rank, slices: A_i is [slots, rank, k]; out_rank: ranks of an output row, with padding; stride_r, stride_k: of A.
    direct: the output is the result [n, T, r], not partials.
    """

    k: int
    rank: int
    out_rank: int
    stride_r: int
    stride_k: int
    slices: int
    quant: Quant
    has_ranks: bool
    direct: bool
    accumulate: bool


class RowTile(NamedTuple):
    """Work of a GEMV program: block_r ranks and block_k of K at once, ``programs`` per row and K split."""

    block_r: int = 0
    programs: int = 1
    block_k: int = 0


class ShrinkTile(NamedTuple):
    """Schedule of a launch: a constexpr. Fields as in `schedules.Schedule`, and: mode: "rows", "list" or "search". row:
    of single rows. height: index of block_m in `HEIGHTS`. segments: power of two >= segments.
    """

    mode: str
    split_k: int
    pdl: bool
    row: RowTile
    block_m: int = 16
    block_r: int = 16
    block_k: int = 16
    stages: int = 1
    swap_ab: bool = False
    height: int = 0
    segments: int = 0


@triton.jit
def _shrink_list(tensors, operands, work, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Run a persistent loop over a step's list, whose tiles programs for ``num_tiles`` stride over. work: sorted rows,
    records of the tiles, their numbers for all heights, and num_tiles.
    """
    sorted_ptr, tiles_ptr, totals_ptr, num_tiles = work
    _, _, _, _, anchor = call
    R_BLOCKS: tl.constexpr = (SHAPE.rank + TILE.block_r - 1) // TILE.block_r
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    tile, first_r = pid // (TILE.split_k * R_BLOCKS), (pid // TILE.split_k) % R_BLOCKS * TILE.block_r
    record = tl.load(tiles_ptr + tile)
    total = tl.load(totals_ptr + TILE.height)
    pdl_wait(TILE.pdl, anchor & (tile >= total))
    while tile < total:
        place = (pid % TILE.split_k, first_r, slice_id)
        found = (sorted_ptr, read_record(record))
        shrink_tile(tensors, operands, found, place, call, strides, SHAPE, TILE)
        tile += num_tiles
        record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)


@triton.jit
def _shrink_found(tensors, operands, step, counts, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the tile that this program finds among the segments, past them rows of zeros (``direct``). step: slots of
    the rows, sorted rows, and ids, counts and starts of the segments; counts: of tiles and segments.
    """
    _, out_ptr = tensors
    mapping_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr = step
    num_tiles, num_segments = counts
    _, num_tokens, _, _, _ = call
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    R_BLOCKS: tl.constexpr = (SHAPE.rank + BLOCK_R - 1) // BLOCK_R
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    first_r = (pid // TILE.split_k) % R_BLOCKS * BLOCK_R
    tile = pid // (TILE.split_k * R_BLOCKS)
    if tile < num_tiles:
        found = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, TILE.segments)
        place = (pid % TILE.split_k, first_r, slice_id)
        shrink_tile(tensors, operands, (sorted_ptr, found), place, call, strides, SHAPE, TILE)
    else:
        rows = (tile - num_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_r = first_r + tl.arange(0, BLOCK_R)
        bare = (rows < num_tokens) & (tl.load(mapping_ptr + rows, mask=rows < num_tokens, other=0) < 0)
        out_ptrs = out_ptr + (slice_id * num_tokens.to(tl.int64) + rows)[:, None] * SHAPE.rank + offs_r[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=bare[:, None] & (offs_r < SHAPE.rank)[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "num_slots", "num_tiles", "num_segments"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, tiles_ptr, totals_ptr, starts_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, num_segments, scaling, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run one mode. ``mode`` "search" has ids, counts, starts and number of the segments in place of the list (tiles,
    totals). tensors: x and the output; operands: `fp8_device.operands`; strides: of x.
    """
    pid, slice_id = tl.program_id(0), tl.program_id(1)
    call = (ranks_ptr, num_tokens, num_slots, scaling, (pid == 0) & (slice_id == 0))
    if TILE.mode == "rows":
        block = (pid % TILE.split_k, (pid // TILE.split_k) % TILE.row.programs)
        row = (pid // (TILE.split_k * TILE.row.programs)).to(tl.int64)
        slot = tl.load(mapping_ptr + row)
        shrink_row(tensors, operands, (row, slot, slice_id), block, call, strides, SHAPE, TILE)
    elif TILE.mode == "list":
        work = (sorted_ptr, tiles_ptr, totals_ptr, num_tiles)
        _shrink_list(tensors, operands, work, call, strides, SHAPE, TILE)
    else:
        step, counts = (mapping_ptr, sorted_ptr, tiles_ptr, totals_ptr, starts_ptr), (num_tiles, num_segments)
        _shrink_found(tensors, operands, step, counts, call, strides, SHAPE, TILE)


class ShrinkMode(NamedTuple):
    """Options of a launch.

    direct: it writes the result [n, T, r] in out_dtype; else float32 partials [split_k, n, T, `partial_rank`].
    accumulate: it adds to the result. overlap: its dependent starts early; early: it starts early itself.
    x_strides: of the scales of FP8 activations along rows and groups.
    """

    out_dtype: torch.dtype = torch.float32
    direct: bool = False
    accumulate: bool = False
    overlap: bool = False
    early: bool = False
    x_strides: tuple[int, int] | None = None


def plan_shrink(x: Tensor, form: Form, batch: Batch, schedule: Schedule, mode: ShrinkMode) -> KernelPlan:
    """Plan the launch of a schedule, for x's shape and strides and an A of this form."""
    weights, (out_dtype, direct, accumulate, overlap, early, _) = form.stored, mode
    tokens, rank, slices = x.shape[0], weights.rank, len(weights.widths)
    split_k, shape = 1 if direct else schedule.split_k, stored_shape(form, x.dtype, mode)

    def launch(tile: ShrinkTile, programs: int) -> Launch:
        return Launch(
            _lora_shrink_kernel, (programs, slices, 1), (x.dtype, weights.dtype, out_dtype), x.stride(),
            {"SHAPE": shape, "TILE": tile}, num_warps=schedule.num_warps, pdl=early, device=weights.device,
        )  # fmt: skip

    if not schedule.block_m:
        row = _row_tile(schedule, shape, tokens * slices * split_k)
        tile = ShrinkTile("rows", split_k, overlap, row)
        return KernelPlan(launch(tile, tokens * row.programs * split_k), (tokens, weights.slots, 0, 0))
    tile = _gemm_tile(schedule, shape, x.element_size(), weights.device)._replace(split_k=split_k, pdl=overlap)
    per_tile, sizes = triton.cdiv(rank, tile.block_r) * split_k, (tokens, weights.slots)
    fills = direct and not accumulate  # rows without adapter, which are in no list
    return plan_tiles(launch, tile, batch, sizes, per_tile, slices, triton.cdiv(tokens, tile.block_m) if fills else 0)


def _row_tile(schedule: Schedule, shape: ShrinkShape, rows: int) -> RowTile:
    block_r = min(schedule.block_n, block_at_least(shape.rank, 1))
    programs = triton.cdiv(shape.rank, block_r)
    if not (shape.direct or shape.quant.format) and shape.has_ranks:
        programs = _rank_programs(programs, block_r, rows, shape.rank)
    return RowTile(block_r, programs, min(schedule.block_k, block_at_least(shape.k)))


def _gemm_tile(schedule: Schedule, shape: ShrinkShape, itemsize: int, device: torch.device) -> ShrinkTile:
    """Return the tile of the tensor cores, with as many stages as fit into shared memory."""
    block_m, block_r = schedule.block_m, min(schedule.block_n, block_at_least(shape.rank))
    of_x, of_a = max(2, itemsize), 1 if shape.quant.format else max(2, itemsize)
    block_k = min(schedule.block_k, block_at_least(shape.k))
    if shape.quant.group_k:
        block_k = min(block_k, shape.quant.group_k, 128)  # a product per block of scales, the same in every step
    while block_k > 32 and block_k * (block_m + block_r) * of_x > 64 << 10:  # wide elements
        block_k //= 2
    if schedule.swap_ab and not shape.quant.group_k:
        block_k = max(block_k, 64)  # 16 for each of four warps
    stages = stages_that_fit(schedule.num_stages, block_k * (block_m * of_x + block_r * of_a), device)
    return ShrinkTile("search", 1, False, RowTile(), block_m, block_r, block_k, stages, schedule.swap_ab)


def stored_shape(form: Form, x_dtype: torch.dtype, mode: ShrinkMode) -> ShrinkShape:
    """Return the shape and storage of A, and of the output."""
    weights, quant = form.stored, shrink_quant(form, x_dtype, mode.x_strides)
    rank, k = weights.rank, weights.widths[0]
    strides = (k, 1) if weights.row_major else (1, rank)
    out_rank = rank if mode.direct else partial_rank(rank)
    return ShrinkShape(
        k, rank, out_rank, *strides, len(weights.widths), quant, form.has_ranks, mode.direct, mode.accumulate
    )


def partial_rank(rank: int) -> int:
    """Return the ranks of a row of a partial, with padding: odd rows would straddle the 32 bytes that memory moves."""
    return block_at_least(rank, 8)


def _rank_programs(blocks: int, block_r: int, others: int, rank: int) -> int:
    """Return the programs that share the rank blocks of one row when true ranks vary: few, so that low ranks leave few
    idle, but enough to cover rank 16, or half a wider slot, at once, and to occupy the device.
    """
    programs, cover = blocks, max(16, rank // 2)
    while programs * block_r > cover and programs % 2 == 0 and programs // 2 * others >= 256:
        programs //= 2
    return programs
