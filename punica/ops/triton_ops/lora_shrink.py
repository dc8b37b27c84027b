"""Shrink: hidden size to rank, for every adapter of the batch in one launch.

    out[i, t, :] = scaling * x[t] @ A_i[slot(t)]^T          x [T, K], A_i [L, r, K], out [n, T, r]  (n slices)

Two kernels, one meaning:

* **rows**: a program multiplies one row with ``BLOCK_R`` ranks and sums over K, no tensor core: where segments are
  single rows a 16-row tensor-core tile would be 15/16 padding, and the time is that of reading A (paper, section 4).
  The grid is filled by splitting the *ranks*, which needs no second summation.
* **tiles**: ``BLOCK_M`` rows of one segment through the tensor cores, for long segments.

``SPLIT_K > 1`` cuts K among programs; each writes its own fp32 partial sum ``out[split]`` and expand adds
them in ascending order. So there is no atomic add and no zero fill, and the bits repeat from run to run. The
public op writes its result directly (one split); `lora_linear` uses partials.

Ranks are true ranks: programs of ranks beyond the adapter's own leave at once, and lanes beyond it are not read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import HEIGHTS
from punica.metadata.work import LONG, TOTALS
from punica.ops.checks import Weights
from punica.ops.triton_ops.device import (
    INDEX_POINTERS,
    accumulator,
    dot,
    find_tile,
    max_tiles,
    pdl_launch_dependents,
    pdl_wait,
    pdl_wait_or_barrier,
    pick,
    rank_of,
    read_record,
    result,
)
from punica.ops.triton_ops.fp8_device import (
    WIDE,
    Quant,
    activation_scale_ptrs,
    block_scale_ptrs,
    block_scaled,
    channel_scales,
    row_scaled,
    upcast,
)
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, stages_that_fit
from punica.ops.triton_ops.plan import Batch, KernelPlan, ListedPlan, RowsPlan, SearchPlan


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
    """Work of a program on a single row: block_r ranks and block_k of K at once, ``programs`` per row and K split."""

    block_r: int = 0
    programs: int = 1
    block_k: int = 0


class ShrinkTile(NamedTuple):
    """Schedule of a launch: a constexpr of the kernels. Fields as in `configs`, and:

    row: for single rows. swap_ab: weights are the left operand. together: all slices' ranks side by side.
    tiles_at, rows_at: entries of a step's totals that count its tiles and rows. segments: power of two >= segments.
    """

    split_k: int
    pdl: bool
    row: RowTile
    block_m: int = 16
    block_r: int = 16
    block_k: int = 16
    stages: int = 1
    swap_ab: bool = False
    together: bool = False
    tiles_at: int = 0
    rows_at: int = 0
    segments: int = 0
    interpret: bool = INTERPRETED


@triton.jit
def _store_shrunk(out_ptrs, value, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, value.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def shrink_row(
    tensors, operands, ranks_ptr, place, pdl_anchor, num_tokens, num_slots, scaling, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row x ``block_r`` ranks x one K split, then ``programs`` blocks further on up to the true rank (with fewer
    programs than blocks; FP8 has all). ``place``: row, slot, K split, block of ranks and slice.

    ``direct``: `out` is the result (absent lanes and rows are zeros), not partials; all blocks at once. ``pdl_anchor``:
    this program waits for the kernel in front even without work. Slots of up to 16 ranks are read whole, so that
    reading them does not wait for the table.
    """
    x_ptr, out_ptr = tensors
    row, slot, pid_k, pid_r, pid_slice = place
    stride_xt, stride_xk = strides
    ROW: tl.constexpr = TILE.row
    BLOCK_R: tl.constexpr = ROW.block_r
    QUANT: tl.constexpr = SHAPE.quant
    R_BLOCKS: tl.constexpr = (SHAPE.rank + BLOCK_R - 1) // BLOCK_R
    WHOLE: tl.constexpr = SHAPE.has_ranks and SHAPE.rank <= 16
    STEPS: tl.constexpr = (SHAPE.k + ROW.block_k * TILE.split_k - 1) // (ROW.block_k * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (ROW.block_k * TILE.split_k) == 0
    rank = rank_of(ranks_ptr, pid_slice, slot, num_slots, SHAPE.rank, SHAPE.has_ranks)
    lanes = tl.where(slot >= 0, SHAPE.rank, 0) if WHOLE else rank
    offs_r = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    out_ptrs = out_ptr + ((pid_k * SHAPE.slices + pid_slice) * num_tokens.to(tl.int64) + row) * SHAPE.out_rank + offs_r

    if pid_r * BLOCK_R < lanes:
        offs_k = pid_k * ROW.block_k + tl.arange(0, ROW.block_k)
        a_ptr = pick(operands, pid_slice, SHAPE.slices) + slot.to(tl.int64) * (SHAPE.rank * SHAPE.k)
        a_block = a_ptr + offs_r[:, None] * SHAPE.stride_r + offs_k[None, :] * SHAPE.stride_k
        x_ptrs = x_ptr + row * stride_xt + offs_k * stride_xk
        mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k)
        a = tl.load(a_block, mask=(offs_r < lanes)[:, None] & mask_k[None, :], other=0.0)
        if QUANT.format > 0 and QUANT.group_k == 0:
            scale = channel_scales(operands, pid_slice, slot, offs_r, offs_r < lanes, SHAPE.rank, SHAPE.slices, QUANT)
        pdl_wait_or_barrier(TILE.pdl)  # A was written long before; x may come from the kernel in front of this one
        pdl_launch_dependents(
            TILE.pdl
        )  # behind the wait: expand reads early what the kernel in front of this one writes, y
        x = upcast(tl.load(x_ptrs, mask=mask_k, other=0.0), QUANT.x_format, tl.float32)
        if QUANT.has_a:
            x = row_scaled(x, operands, row, offs_k, mask_k, SHAPE.slices, QUANT)
        first_r = pid_r * BLOCK_R
        for _ in tl.range(first_r, lanes if ROW.programs < R_BLOCKS else first_r + 1, ROW.programs * BLOCK_R):
            mask_r = (offs_r < lanes)[:, None]
            weights = upcast(a, QUANT.format, tl.float32)
            if QUANT.group_k > 0:
                mask_a = mask_r & mask_k[None, :]
                weights = block_scaled(weights, operands, pid_slice, slot, offs_r, offs_k, mask_a, SHAPE.slices, QUANT)
            product = weights * x[None, :]
            for step in tl.range(1, STEPS):
                jump = step * (ROW.block_k * TILE.split_k)
                mask_step = offs_k < SHAPE.k - jump
                a_step = tl.load(a_block + jump * SHAPE.stride_k, mask=mask_r & mask_step[None, :], other=0.0)
                x_step = tl.load(x_ptrs + jump * stride_xk, mask=mask_step, other=0.0)
                x_step = upcast(x_step, QUANT.x_format, tl.float32)
                weights = upcast(a_step, QUANT.format, tl.float32)
                if QUANT.has_a:
                    x_step = row_scaled(x_step, operands, row, offs_k + jump, mask_step, SHAPE.slices, QUANT)
                if QUANT.group_k > 0:
                    mask_a = mask_r & mask_step[None, :]
                    weights = block_scaled(
                        weights, operands, pid_slice, slot, offs_r, offs_k + jump, mask_a, SHAPE.slices, QUANT
                    )
                product += weights * x_step[None, :]
            mask_out = offs_r < (SHAPE.rank if SHAPE.direct else rank)
            factor = scaling
            if QUANT.format > 0 and QUANT.group_k == 0:
                factor = scale * scaling
            if ROW.programs < R_BLOCKS:  # fetch the next ranks before this block's sum is formed
                a_block += ROW.programs * BLOCK_R * SHAPE.stride_r
                offs_r += ROW.programs * BLOCK_R
                a = tl.load(a_block, mask=(offs_r < lanes)[:, None] & mask_k[None, :], other=0.0)
            total = tl.sum(product, 1) * factor
            if WHOLE and SHAPE.direct:
                total = tl.where(offs_r < rank, total, 0.0)
            _store_shrunk(out_ptrs, total, mask_out, SHAPE.accumulate)
            out_ptrs += ROW.programs * BLOCK_R
    else:
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if pdl_anchor:
                tl.extra.cuda.gdc_wait()
        if SHAPE.direct and not SHAPE.accumulate:
            tl.store(out_ptrs, tl.zeros([BLOCK_R], out_ptr.dtype.element_ty), mask=offs_r < SHAPE.rank)


@triton.jit
def _shrink_by_warps(
    x_ptr, a_lanes, rows, mask_m, mask_lanes, pid_k, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """[block_m, block_r] of one K split: a batch of WARPS products, one for each warp and of its own quarter of the
    split, added up at the end. Neither instruction nor order of the sums depends on block_m or block_k.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    stride_xt, stride_xk = strides
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = tl.float16 if QUANT.x_format > 0 else x_ptr.dtype.element_ty
    WARPS: tl.constexpr = 4
    PART: tl.constexpr = TILE.block_k // WARPS
    QUARTER: tl.constexpr = (SHAPE.k + 64 * TILE.split_k * WARPS - 1) // (64 * TILE.split_k * WARPS) * 64
    STEPS: tl.constexpr = (QUARTER + PART - 1) // PART
    first_k = (pid_k * WARPS + tl.arange(0, WARPS)[:, None, None]) * QUARTER
    offs_ak = tl.arange(0, PART)[None, None, :]
    offs_xk = tl.arange(0, PART)[None, :, None]
    a_ptrs = a_lanes[None, :, None] + (first_k + offs_ak) * SHAPE.stride_k
    x_ptrs = x_ptr + rows[None, None, :] * stride_xt + (first_k + offs_xk) * stride_xk
    mask_r = mask_lanes[None, :, None]
    mask_rows = mask_m[None, None, :]
    acc = tl.zeros([WARPS, BLOCK_R, BLOCK_M], tl.float32)
    if STEPS == 1:
        a = tl.load(a_ptrs, mask=mask_r & (offs_ak < QUARTER) & (first_k + offs_ak < SHAPE.k), other=0.0)
        if TILE.pdl:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(x_ptrs, mask=mask_rows & (offs_xk < QUARTER) & (first_k + offs_xk < SHAPE.k), other=0.0)
        x = upcast(x, QUANT.x_format, DTYPE)
        acc = _batched_dot(upcast(a, QUANT.format, DTYPE), x, acc, TILE.interpret)
    else:
        if TILE.pdl:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        for step in tl.range(0, STEPS, num_stages=TILE.stages):
            left = QUARTER - step * PART
            end = SHAPE.k - step * PART
            a = tl.load(a_ptrs, mask=mask_r & (offs_ak < left) & (first_k + offs_ak < end), other=0.0)
            x = tl.load(x_ptrs, mask=mask_rows & (offs_xk < left) & (first_k + offs_xk < end), other=0.0)
            x = upcast(x, QUANT.x_format, DTYPE)
            acc = _batched_dot(upcast(a, QUANT.format, DTYPE), x, acc, TILE.interpret)
            a_ptrs += PART * SHAPE.stride_k
            x_ptrs += PART * stride_xk
    return tl.trans(tl.sum(acc, 0))


@triton.jit
def _shrink_blocks(
    x_ptrs, a_ptrs, operands, place, slot, lane, rows, mask_m, mask_lanes, stride_xk,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """[block_m, block_r] of one K split with a scale per block of K: a product per block_k, which divides a block."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    BLOCK_K: tl.constexpr = TILE.block_k
    slice_id, pid_k = place
    QUANT: tl.constexpr = SHAPE.quant
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    DTYPE: tl.constexpr = tl.float16 if QUANT.x_format > 0 else x_ptrs.dtype.element_ty
    scale_ptrs, scale_stride = block_scale_ptrs(operands, slice_id, slot, lane, SHAPE.slices, QUANT)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    pdl_wait(TILE.pdl, True)
    pdl_launch_dependents(TILE.pdl)
    for step in tl.range(0, STEPS, num_stages=TILE.stages):
        mask_k = offs_k < SHAPE.k - step * (BLOCK_K * TILE.split_k)
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        a = tl.load(a_ptrs, mask=mask_lanes[None, :] & mask_k[:, None], other=0.0)  # [BLOCK_K, BLOCK_R]
        x, a = upcast(x, QUANT.x_format, DTYPE), upcast(a, QUANT.format, DTYPE)
        part = result(
            dot(x, a, accumulator(BLOCK_M, BLOCK_R, TILE.swap_ab), TILE.swap_ab, TILE.interpret), TILE.swap_ab
        )
        block = (pid_k + step * TILE.split_k) * BLOCK_K // QUANT.group_k
        inside = block * QUANT.group_k < SHAPE.k
        part *= tl.load(scale_ptrs + block * scale_stride, mask=mask_lanes & inside, other=0.0)[None, :]
        if QUANT.has_a:
            a_scale_ptrs = activation_scale_ptrs(operands, rows, SHAPE.slices, QUANT)
            part *= tl.load(a_scale_ptrs + block * QUANT.a_group, mask=mask_m & inside, other=0.0)[:, None]
        total += part
        x_ptrs += BLOCK_K * TILE.split_k * stride_xk
        a_ptrs += BLOCK_K * TILE.split_k * SHAPE.stride_k
    return total


@triton.jit
def _batched_dot(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b for a batch of matrices, in float32."""
    if INTERPRET:
        acc += tl.sum(a.to(tl.float32)[:, :, :, None] * b.to(tl.float32)[:, None, :, :], 2)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _lanes_of_tile(ranks_ptr, offs_r, pid_slice, slot, num_slots, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Slice, rank inside it and true rank of a tile's lanes: those of one slice (slice and true rank are then numbers),
    or ``together`` of all slices side by side.
    """
    if TILE.together:
        slice_id = tl.minimum(offs_r // SHAPE.rank, SHAPE.slices - 1)
        if SHAPE.has_ranks:
            rank = tl.load(ranks_ptr + slice_id * num_slots + slot, mask=slice_id * 0 + slot >= 0, other=0)
            rank = tl.minimum(rank, SHAPE.rank)
        else:
            rank = tl.where(slice_id * 0 + slot >= 0, SHAPE.rank, 0)
        lane = offs_r - slice_id * SHAPE.rank
    else:
        slice_id = pid_slice
        rank = rank_of(ranks_ptr, pid_slice, slot, num_slots, SHAPE.rank, SHAPE.has_ranks)
        lane = offs_r
    return slice_id, lane, rank


@triton.jit
def _shrink_tile(
    tensors, operands, sorted_ptr, ranks_ptr, tile, place, pdl_anchor, num_tokens, num_slots, scaling, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of one tile x block_r ranks x one K split; ``together``: the ranks of all slices are side by side, so
    that x is read once for all of them. Slots of up to 16 ranks are read whole, as in `shrink_row`.

    ``tile``: slot, first sorted position and number of rows; ``place``: K split, first rank and slice.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    BLOCK_K: tl.constexpr = TILE.block_k
    x_ptr, out_ptr = tensors
    slot, start, num_rows = tile
    pid_k, first_r, pid_slice = place
    stride_xt, stride_xk = strides
    QUANT: tl.constexpr = SHAPE.quant
    WHOLE: tl.constexpr = SHAPE.has_ranks and SHAPE.rank <= 16
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (BLOCK_K * TILE.split_k) == 0
    # Masks of so many lanes take instructions: beyond the rank its last one is read again, and partials are written to
    # the end of the vector in which it ends. Expand drops what stands there.
    LOOSE: tl.constexpr = (
        QUANT.dense and TILE.swap_ab and EVEN_K and BLOCK_R > 32 and not SHAPE.direct and not SHAPE.accumulate
    )
    DTYPE: tl.constexpr = tl.float16 if QUANT.x_format > 0 else x_ptr.dtype.element_ty
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_m = tl.arange(0, BLOCK_M)
    slice_id, lane, rank = _lanes_of_tile(ranks_ptr, offs_r, pid_slice, slot, num_slots, SHAPE, TILE)
    needed = slot >= 0
    if not (TILE.together or SHAPE.direct or WHOLE):
        needed &= first_r < rank
    if needed:
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
        lane_read = lane
        if LOOSE:
            lane_read = tl.minimum(lane, rank - 1)
            if TILE.together:  # of some slice the rank may be 0
                lane_read = tl.maximum(lane_read, 0)
        a_lanes = (
            pick(operands, slice_id, SHAPE.slices)
            + slot.to(tl.int64) * (SHAPE.rank * SHAPE.k)
            + lane_read * SHAPE.stride_r
        )
        a_ptrs_block = a_lanes[None, :] + offs_k[:, None] * SHAPE.stride_k
        x_ptrs = x_ptr + rows[:, None] * stride_xt + offs_k[None, :] * stride_xk
        mask_lanes = lane < (SHAPE.rank if WHOLE else rank)
        factor = scaling
        if QUANT.format > 0 and QUANT.group_k == 0:
            scale = channel_scales(operands, slice_id, slot, lane, mask_lanes, SHAPE.rank, SHAPE.slices, QUANT)
            factor = (scale * scaling)[None, :]
        if QUANT.has_a:
            a_scale_ptrs = activation_scale_ptrs(operands, rows, SHAPE.slices, QUANT)
        mask_r = mask_lanes[None, :]
        if QUANT.group_k > 0:
            acc = _shrink_blocks(
                x_ptrs, a_ptrs_block, operands, (slice_id, pid_k), slot, lane, rows, mask_m, mask_lanes, stride_xk,
                SHAPE, TILE,
            )  # fmt: skip
        elif TILE.swap_ab and BLOCK_R <= 32:
            acc = _shrink_by_warps(x_ptr, a_lanes, rows, mask_m, mask_lanes, pid_k, strides, SHAPE, TILE)
        elif STEPS == 1 and not TILE.swap_ab:
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k)
            a = tl.load(a_ptrs_block, mask=mask_r & mask_k[:, None], other=0.0)
            if TILE.pdl:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            acc = dot(upcast(x, QUANT.x_format, DTYPE), upcast(a, QUANT.format, DTYPE), acc, False, TILE.interpret)
        else:
            acc = accumulator(BLOCK_M, BLOCK_R, TILE.swap_ab)
            # Where it was measured to gain: of high tiles, and not of slices side by side, as it takes registers. That
            # no stride is negative, torch sees to.
            pdl_wait(TILE.pdl, TILE.together or BLOCK_M < 64 or stride_xt >= 0)
            pdl_launch_dependents(TILE.pdl)
            for step in tl.range(0, STEPS, num_stages=TILE.stages):
                if EVEN_K:
                    # TILE.swap_ab: rows beyond the tile's are its first again, without masks, and no row of the result
                    x = tl.load(x_ptrs) if TILE.swap_ab else tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
                    a = tl.load(a_ptrs_block) if LOOSE else tl.load(a_ptrs_block, mask=mask_r, other=0.0)
                else:
                    mask_k = offs_k < SHAPE.k - step * (BLOCK_K * TILE.split_k)
                    x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
                    a = tl.load(a_ptrs_block, mask=mask_r & mask_k[:, None], other=0.0)
                acc = dot(
                    upcast(x, QUANT.x_format, DTYPE), upcast(a, QUANT.format, DTYPE), acc, TILE.swap_ab, TILE.interpret
                )
                x_ptrs += BLOCK_K * TILE.split_k * stride_xk
                a_ptrs_block += BLOCK_K * TILE.split_k * SHAPE.stride_k
            acc = result(acc, TILE.swap_ab)
        if QUANT.has_a and QUANT.group_k == 0:
            acc *= tl.load(a_scale_ptrs)[:, None]
        if WHOLE and SHAPE.direct:
            acc = tl.where((lane < rank)[None, :], acc, 0.0)
        out_lanes = out_ptr + (pid_k * SHAPE.slices + slice_id) * num_tokens.to(tl.int64) * SHAPE.out_rank + lane
        out_ptrs = rows[:, None] * SHAPE.out_rank + out_lanes[None, :]
        lanes_out = SHAPE.rank if SHAPE.direct else rank
        if LOOSE:
            lanes_out = (rank + 3) // 4 * 4
        mask = mask_m[:, None] & (lane < lanes_out)[None, :]
        _store_shrunk(out_ptrs, acc * factor, mask, SHAPE.accumulate)
    else:
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if pdl_anchor:
                tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_shrink_rows_kernel(
    tensors, operands, mapping_ptr, ranks_ptr, num_tokens, num_slots, scaling, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All rows, one by one."""
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    pid_k, pid_r = pid % TILE.split_k, (pid // TILE.split_k) % TILE.row.programs
    row = (pid // (TILE.split_k * TILE.row.programs)).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    shrink_row(
        tensors, operands, ranks_ptr, (row, slot, pid_k, pid_r, pid_slice), (pid == 0) & (pid_slice == 0),
        num_tokens, num_slots, scaling, strides, SHAPE, TILE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_segments", "num_tiles", "num_slots"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_search_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr,
    num_tokens, num_segments, num_tiles, num_slots, scaling, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All tiles; every program searches the segments for its own. With ``direct``, programs past the tiles zero bare
    rows.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    R_BLOCKS: tl.constexpr = (SHAPE.rank + BLOCK_R - 1) // BLOCK_R
    _, out_ptr = tensors
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    pid_k, first_r = pid % TILE.split_k, (pid // TILE.split_k) % R_BLOCKS * BLOCK_R
    tile = pid // (TILE.split_k * R_BLOCKS)
    if tile < num_tiles:
        found = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, TILE.segments)
        _shrink_tile(
            tensors, operands, sorted_ptr, ranks_ptr, found, (pid_k, first_r, pid_slice),
            (pid == 0) & (pid_slice == 0), num_tokens, num_slots, scaling, strides, SHAPE, TILE,
        )  # fmt: skip
    else:
        rows = (tile - num_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_r = first_r + tl.arange(0, BLOCK_R)
        bare = (rows < num_tokens) & (tl.load(mapping_ptr + rows, mask=rows < num_tokens, other=0) < 0)
        out_ptrs = out_ptr + (pid_slice * num_tokens.to(tl.int64) + rows)[:, None] * SHAPE.rank + offs_r[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=bare[:, None] & (offs_r < SHAPE.rank)[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "num_tiles", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_listed_kernel(
    tensors, operands, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tokens, num_tiles, num_rows, num_slots, scaling, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A persistent loop over the tiles of a step's list, by programs for ``num_tiles`` of them; where the list holds
    long segments only (``row.block_k`` above 0), also over the rows of the short ones, by programs for ``num_rows``.
    """
    LANES: tl.constexpr = SHAPE.rank * SHAPE.slices if TILE.together else SHAPE.rank
    R_BLOCKS: tl.constexpr = (LANES + TILE.block_r - 1) // TILE.block_r
    SHORT_SLICES: tl.constexpr = SHAPE.slices if TILE.together else 1
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    first = (pid == 0) & (pid_slice == 0)
    tile_programs = num_tiles * (TILE.split_k * R_BLOCKS)
    if pid < tile_programs:
        pid_k = pid % TILE.split_k
        tile, first_r = pid // (TILE.split_k * R_BLOCKS), (pid // TILE.split_k) % R_BLOCKS * TILE.block_r
        record = tl.load(tiles_ptr + tile)
        total = tl.load(totals_ptr + TILE.tiles_at)
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if first & (tile >= total):
                tl.extra.cuda.gdc_wait()
        while tile < total:
            _shrink_tile(
                tensors, operands, sorted_ptr, ranks_ptr, read_record(record), (pid_k, first_r, pid_slice), first,
                num_tokens, num_slots, scaling, strides, SHAPE, TILE,
            )  # fmt: skip
            tile += num_tiles
            record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)
    elif TILE.row.block_k > 0:
        pid -= tile_programs
        pid_r = pid // TILE.split_k % TILE.row.programs
        item = pid // (TILE.split_k * TILE.row.programs * SHORT_SLICES)
        pid_slice += pid // (TILE.split_k * TILE.row.programs) % SHORT_SLICES
        record = tl.load(rows_ptr + item)
        total = tl.load(totals_ptr + TILE.rows_at)
        while item < total:
            slot, row, _ = read_record(record)
            shrink_row(
                tensors, operands, ranks_ptr, (row.to(tl.int64), slot, pid % TILE.split_k, pid_r, pid_slice), False,
                num_tokens, num_slots, scaling, strides, SHAPE, TILE,
            )  # fmt: skip
            item += num_rows
            record = tl.load(rows_ptr + item, mask=item < total, other=0)


def plan_shrink(
    x: Tensor, weights: Weights, out_dtype: torch.dtype,
    batch: Batch,
    config: dict[str, Any],
    *,
    has_ranks: bool, direct: bool,
    accumulate: bool = False, overlap: bool = False, early: bool = False, quant: Quant = WIDE,
) -> KernelPlan:  # fmt: skip
    """The launch that `config` names, for x's shape and strides.

    ``direct``: the kernel writes the result [n, T, r]; else fp32 partials [split_k, n, T, `partial_rank`]. ``overlap``:
    it lets the kernel behind it start early; ``early``: it itself starts early. ``quant``: storage of A and x; scales
    then stand behind the weights that the launch is given.
    """
    tokens, rank, k, slices = x.shape[0], weights.rank, weights.widths[0], len(weights.widths)
    split_k = 1 if direct else config["split_k"]
    shape = stored_shape(weights, rank if direct else partial_rank(rank), quant, has_ranks)
    shape = shape._replace(direct=direct, accumulate=accumulate)
    shared: dict[str, Any] = {"num_warps": config["num_warps"], "pdl": early, "device": weights.device}
    dtypes = (x.dtype, weights.dtype, out_dtype)

    def row_tile(rows: int, block_k: int) -> RowTile:
        """Work of a program on one of ``rows`` rows."""
        block_r = min(config["block_r"], block_at_least(rank, 1))
        programs = triton.cdiv(rank, block_r)
        if not (direct or quant.format) and has_ranks:  # what a loop carries costs a register for each FP8 value
            programs = _rank_programs(programs, block_r, rows, rank)
        return RowTile(block_r, programs, min(block_k, block_at_least(k)))

    def launch(kernel: Any, grid: tuple[int, int, int] | None, tile: ShrinkTile) -> Launch:
        return Launch(kernel, grid, dtypes, x.stride(), {"SHAPE": shape, "TILE": tile}, **shared)

    if config["row_wise"]:
        row = row_tile(tokens * slices * split_k, config["block_k"])
        grid = (tokens * row.programs * split_k, slices, 1)
        return RowsPlan(
            launch(_lora_shrink_rows_kernel, grid, ShrinkTile(split_k, overlap, row)), (tokens, weights.slots)
        )

    listed = batch.listed and config["block_m"] in HEIGHTS and (accumulate or not direct)
    together = config["together"] and slices > 1 and listed
    lanes = rank * slices if together else rank
    block_m, block_r = config["block_m"], min(config["block_n"], block_at_least(lanes))
    block_k, bytes_of = min(config["block_k"], block_at_least(k)), (block_m + block_r) * max(2, x.element_size())
    if quant.group_k:
        block_k = min(block_k, quant.group_k, 128)  # a product per block of scales, the same in every step
    while block_k > 32 and block_k * bytes_of > 64 << 10:  # wide elements
        block_k //= 2
    if config["swap_ab"] and not quant.group_k:
        block_k = max(block_k, 64)  # 16 for each of four warps
    stages = stages_that_fit(config["num_stages"], block_k * bytes_of, weights.device)
    per_tile = triton.cdiv(lanes, block_r) * split_k
    tile = ShrinkTile(split_k, overlap, RowTile(), block_m, block_r, block_k, stages, config["swap_ab"], together)
    if listed:
        height, short_k = HEIGHTS.index(block_m), config["short_k"]
        row = row_tile(min(tokens, LONG * batch.shape.short) * slices * split_k, short_k)
        tile = tile._replace(row=row, tiles_at=2 * height + (short_k > 0), rows_at=TOTALS - 1)
        per_row = row.programs * split_k * (slices if together else 1) if short_k else 0
        listed_launch = launch(_lora_shrink_listed_kernel, None, tile)
        return ListedPlan(
            listed_launch, height, per_tile, per_row, 1 if together else slices, (tokens,), (weights.slots,)
        )
    segments = batch.max_segments
    tiles = max_tiles(tokens, segments, block_m)
    bare_tiles = triton.cdiv(tokens, block_m) if direct and not accumulate else 0
    tile = tile._replace(segments=block_at_least(batch.tensors[4].numel()))
    grid = ((tiles + bare_tiles) * per_tile, slices, 1)
    return SearchPlan(launch(_lora_shrink_search_kernel, grid, tile), (tokens, segments, tiles, weights.slots))


def stored_shape(weights: Weights, out_rank: int, quant: Quant, has_ranks: bool) -> ShrinkShape:
    """Shape of A, and of rows of partials with room for ``out_rank`` ranks."""
    rank, k = weights.rank, weights.widths[0]
    stride_r, stride_k = (k, 1) if weights.row_major else (1, rank)
    return ShrinkShape(k, rank, out_rank, stride_r, stride_k, len(weights.widths), quant, has_ranks, False, False)


def partial_rank(rank: int) -> int:
    """Ranks that a row of a partial has room for: rows of odd ranks would straddle the 32 bytes that memory moves."""
    return block_at_least(rank, 8)


def _rank_programs(blocks: int, block_r: int, others: int, rank: int) -> int:
    """Programs that share the rank blocks of one row when true ranks vary: as few as cover rank 16, or half a wider
    slot, at once, so that low ranks leave few idle programs behind, but enough to occupy the device."""
    programs, cover = blocks, max(16, rank // 2)
    while programs * block_r > cover and programs % 2 == 0 and programs // 2 * others >= 256:
        programs //= 2
    return programs
