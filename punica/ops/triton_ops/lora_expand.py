"""Expand: rank to output size, for every adapter and every slice of the batch in one launch.

    y[t, o_i : o_i + N_i] (+)= h[i, t] @ B_i[slot(t)]^T     h [n, T, r] or fp32 planes [splits, n, T, r]
                                                            B_i [L, N_i, r]

Summing the planes of a split shrink is part of reading h, so the split costs no kernel of its own. ``y + delta`` is
formed in fp32 and rounded once.

* **rows**: one row x ``BLOCK_N`` columns, multiply and sum. The width of the block in ranks is chosen on the device, so
  that an adapter of rank 8 in a slot of width 64 costs what rank 16 costs, not rank 64.
* **tiles**: ``BLOCK_M`` rows of one segment on the tensor cores. ``TILES_N > 1`` walks several column blocks with one
  load of h, so the planes are summed once for all of them. Prefills in FP8 have a form of their own (`fp8_words`).

With ``PDL`` the kernel starts while the one in front still runs: B is fetched first, and the old y too unless it is
``LATE`` (the one in front may write it), then it waits; or y is brought to the L2 cache (``FETCH``). Else what wrote y
has ended: in front stands the shrink, which lets this kernel start when it has waited itself.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import HEIGHTS, LoRABatch
from punica.metadata.work import LONG, TOTALS
from punica.ops.checks import Names, Weights, check_low_rank, check_ranks, check_stored_output, describe_stored
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.device import (
    INDEX_POINTERS,
    accumulator,
    bring_to_cache,
    dot,
    find_tile,
    hold_loads,
    let_next_start,
    max_tiles,
    pick,
    rank_of,
    read_record,
    read_shrunk,
    read_shrunk_rows,
    result,
    wait_at_last,
    wait_for_front,
)
from punica.ops.triton_ops.fp8_device import (
    WIDE,
    Quant,
    activation_scale_ptrs,
    block_scale_ptrs,
    block_scaled,
    channel_scales,
    row_scaled,
    widened,
)
from punica.ops.triton_ops.fp8_words import expand_row_in_words, expand_tile_in_words
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, on_device, stages_that_fit
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named
from punica.ops.triton_ops.plan import Batch, KernelPlan, ListedPlan, RowsPlan, SearchPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch


@triton.jit
def _column_block(pid_n, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Slice, first column inside it, its width and its first column in y, for the pid_n-th run of SPAN columns."""
    slice_id = pid_n * 0
    blocks_before = slice_id
    blocks_until = 0
    for i in tl.static_range(NUM_SLICES - 1):
        blocks_until += (WIDTHS[i] + SPAN - 1) // SPAN
        slice_id = tl.where(pid_n >= blocks_until, i + 1, slice_id)
        blocks_before = tl.where(pid_n >= blocks_until, blocks_until, blocks_before)
    first_n = (pid_n - blocks_before) * SPAN
    return slice_id, first_n, pick(WIDTHS, slice_id, NUM_SLICES), pick(COLUMNS, slice_id, NUM_SLICES)


@triton.jit
def _shrunk_row(
    h_ptrs, offs_r, mask, operands, row, stride_hp,
    PLANES: tl.constexpr, NUM_SLICES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """[ranks] of one row of what shrink left, as float32: the sum of its planes, or FP8 values times their scales."""
    if QUANT.x_format > 0:
        h = widened(tl.load(h_ptrs, mask=mask, other=0.0), QUANT.x_format, tl.float32)
        h = row_scaled(h, operands, row, offs_r, mask, NUM_SLICES, QUANT)
    else:
        h = read_shrunk(h_ptrs, mask, stride_hp, PLANES)
    return h


@triton.jit
def _shrunk_rows(
    h_ptrs, mask, lanes, rank, stride_hp,
    PLANES: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """[rows, ranks] of what shrink left, in DTYPE; FP8 values without their scales."""
    if QUANT.x_format > 0:
        h = widened(tl.load(h_ptrs, mask=mask, other=0.0), QUANT.x_format, DTYPE)
        h = tl.where((lanes < rank)[None, :], h, 0.0)
    else:
        h = read_shrunk_rows(h_ptrs, mask, lanes, rank, stride_hp, PLANES, WHOLE, DTYPE)
    return h


@triton.jit
def _column_scales(
    operands, slice_id, slot, offs_n, mask_n, width, NUM_SLICES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """[columns] scales that follow the sum over the ranks; 1 where there are none."""
    if QUANT.format > 0 and QUANT.group_k == 0:
        scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, NUM_SLICES, QUANT)
    else:
        scale = tl.full([offs_n.shape[0]], 1.0, tl.float32)
    return scale


@triton.jit
def _expand_row(
    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, row,
    first_n, width, rank, lanes, stride_hp, stride_hr,
    R: tl.constexpr, QUANT: tl.constexpr, NUM_SLICES: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
    PLANES: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x STEPS blocks of COLUMNS columns of a B that lies row after row, each LANES ranks wide, of which
    ``lanes`` are read; the next block is fetched before one is summed.
    """
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    # Whole vectors are read (a mask cut inside one would narrow every load); what lies beyond the rank is dropped.
    mask_read = offs_r < (lanes + VECTOR - 1) // VECTOR * VECTOR
    b_ptrs = b_ptr + offs_n[:, None] * R + offs_r[None, :]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
    old = tl.zeros([COLUMNS], y_ptr.dtype.element_ty)
    if ADD and not LATE:
        old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
    let_next_start(PDL)
    hold_loads(PDL)
    if ADD and LATE:
        old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
    h = _shrunk_row(h_ptr + offs_r * stride_hr, offs_r, mask_read, operands, row, stride_hp, PLANES, NUM_SLICES, QUANT)
    if QUANT.format == 0:
        h = h.to(b.dtype).to(tl.float32)
    for step in tl.range(0, STEPS):
        weights = block_scaled(
            widened(b, QUANT.format, tl.float32), operands, slice_id, slot, offs_n, offs_r,
            mask_n[:, None] & mask_read[None, :], NUM_SLICES, QUANT,
        )  # fmt: skip
        product = tl.where((offs_r < rank)[None, :], weights * h[None, :], 0.0)
        if QUANT.format > 0:
            scale = _column_scales(operands, slice_id, slot, offs_n, mask_n, width, NUM_SLICES, QUANT)
        before, y_ptrs, mask_y = old.to(tl.float32), y_ptr + offs_n, mask_n
        if STEPS > 1:
            offs_n += COLUMNS
            b_ptrs += COLUMNS * R
            mask_n = (offs_n < width) & (step + 1 < STEPS)
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
            if ADD:
                old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
        total = tl.sum(product, 1)
        if QUANT.format > 0:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not ADD)))


@triton.jit
def _products(
    b, h, live, operands, slice_id, slot, offs_n, offs_r, mask_n,
    CUT: tl.constexpr, NUM_SLICES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """b [columns, ranks] times h in float32, h rounded to 16-bit weights' type; CUT drops ranks not ``live``."""
    if QUANT.format > 0:
        weights = tl.where(live[None, :], widened(b, QUANT.format, tl.float32), 0.0)
        mask = mask_n[:, None] & live[None, :]
        weights = block_scaled(weights, operands, slice_id, slot, offs_n, offs_r, mask, NUM_SLICES, QUANT)
        product = weights * h[None, :]
    else:
        weights = tl.where(live[None, :], b, 0.0) if CUT else b
        product = weights.to(tl.float32) * h.to(b.dtype).to(tl.float32)[None, :]
    return product


@triton.jit
def _expand_row_by_ranks(
    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, row, first_n, width, rank, stride_hp, stride_hr,
    R: tl.constexpr, QUANT: tl.constexpr, NUM_SLICES: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    AHEAD: tl.constexpr, PLANES: tl.constexpr,
    ADD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x COLUMNS columns of a B that lies rank after rank, LANES ranks at a time as far as the true rank goes;
    the next ones are fetched before these are summed, and AHEAD the first ones before the true rank is known. Up to 16
    LANES are held by one thread for its columns: no sum leaves it.
    """
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    b_ptrs = b_ptr + offs_r[None, :] * width + offs_n[:, None]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < (R if AHEAD else rank))[None, :], other=0.0)
    before = tl.zeros([COLUMNS], tl.float32)
    if ADD and not LATE:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    let_next_start(PDL)
    hold_loads(PDL)
    if ADD and LATE:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32) if QUANT.format > 0 else before
    h_ptrs = h_ptr + offs_r * stride_hr
    h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, PLANES, NUM_SLICES, QUANT)
    if R > LANES:
        for _ in tl.range(LANES, rank, LANES):
            product = _products(
                b, h, offs_r < rank, operands, slice_id, slot, offs_n, offs_r, mask_n, AHEAD, NUM_SLICES, QUANT
            )
            offs_r += LANES
            b_ptrs += LANES * width
            h_ptrs += LANES * stride_hr
            b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < rank)[None, :], other=0.0)
            h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, PLANES, NUM_SLICES, QUANT)
            total += tl.sum(product, 1)
    product = _products(b, h, offs_r < rank, operands, slice_id, slot, offs_n, offs_r, mask_n, AHEAD, NUM_SLICES, QUANT)
    total += tl.sum(product, 1)
    if QUANT.format > 0:
        total = total * _column_scales(operands, slice_id, slot, offs_n, mask_n, width, NUM_SLICES, QUANT) + before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not ADD)))


@triton.jit
def _expand_row_of(
    h_ptr, operands, y_ptr, ranks_ptr, row, slot, block, idle_waits,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
    PLANES: tl.constexpr, HAS_RANKS: tl.constexpr, AHEAD: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row x BLOCK_N columns of one slice. With B by rows the true rank chooses among the ascending LANES the width
    in ranks of a block, and with it in how many STEPS the columns are taken: a program's blocks hold about as many
    elements either way. AHEAD: B is read before the true rank is known, with B by rows all ranks of the slot.
    ``idle_waits``: this program waits for the kernel in front even when it has nothing to do.
    """
    slice_id, first_n, width, column = _column_block(block, WIDTHS, COLUMNS, BLOCK_N, NUM_SLICES)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, R, HAS_RANKS)
    lanes = tl.where(slot >= 0, R, 0) if AHEAD else rank
    if (lanes > 0) | ((slot >= 0) & (not ADD)):
        b_ptr = pick(operands, slice_id, NUM_SLICES) + slot.to(tl.int64) * R * width
        h_ptr += row * stride_ht + slice_id.to(tl.int64) * stride_hs
        y_ptr += row * stride_yt + column
        if ROW_MAJOR:
            for i in tl.static_range(len(LANES)):
                above = LANES[i - 1] if i > 0 else -1
                if (lanes > above) & (lanes <= LANES[i]):
                    _expand_row(
                        h_ptr, b_ptr, y_ptr, operands, slice_id, slot, row,
                        first_n, width, rank, lanes, stride_hp, stride_hr, R, QUANT, NUM_SLICES,
                        BLOCK_N // STEPS[i], STEPS[i], LANES[i], VECTOR, PLANES, ADD, LATE, PDL,
                    )  # fmt: skip
        elif QUANT.words:
            expand_row_in_words(
                h_ptr, b_ptr, y_ptr, operands, slice_id, slot, first_n, width, rank, stride_hp, stride_hr,
                R, QUANT, NUM_SLICES, BLOCK_N, LANES[0], AHEAD, PLANES, ADD, LATE, PDL,
            )  # fmt: skip
        else:
            _expand_row_by_ranks(
                h_ptr, b_ptr, y_ptr, operands, slice_id, slot, row, first_n, width, rank, stride_hp, stride_hr,
                R, QUANT, NUM_SLICES, BLOCK_N, LANES[0], AHEAD, PLANES, ADD, LATE, PDL,
            )  # fmt: skip
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:  # one waiting program keeps the kernel behind the one in front of it
                tl.extra.cuda.gdc_wait()


@triton.constexpr_function
def _dtype_of_product(y_ptr, b_ptr, quant):
    """The type in which h and B are multiplied: B's own, for FP8 that of y, with FP8 activations float16."""
    if quant.x_format > 0:
        return tl.float16
    return y_ptr.dtype.element_ty if quant.format > 0 else b_ptr.dtype.element_ty


@triton.jit
def _expand_rows_of(
    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, rows, mask_m, first_n, width, column, rank,
    stride_hp, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, NUM_SLICES: tl.constexpr, ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr,
    WHOLE: tl.constexpr, ALL_OF_B: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, TILES_N: tl.constexpr, AT_ONCE: tl.constexpr, FETCH: tl.constexpr, NUM_STAGES: tl.constexpr,
    PLANES: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr, LEFT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """``rows`` x TILES_N blocks of BLOCK_N columns. WHOLE: the rank is a multiple of VECTOR, the ranks that one load of
    h or B takes; else the loads reach beyond it and what lies there is dropped. B by ranks is read as far as the rank,
    and with ALL_OF_B to the end of the slot, before the true rank is known. AT_ONCE: blocks go through registers, the
    first is fetched ahead of the kernel in front, and every other one while the one before it is multiplied. FETCH:
    what they add to is brought to the L2 cache ahead of the kernel in front.
    """
    CUT_B: tl.constexpr = ALL_OF_B or (ROW_MAJOR and not WHOLE)
    DTYPE: tl.constexpr = _dtype_of_product(y_ptr, b_ptr, QUANT)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    if ROW_MAJOR:
        b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * R
    else:
        b_ptrs = b_ptr + offs_r[:, None] * width + offs_n[None, :]
    h_ptrs = h_ptr + rows[:, None] * stride_ht + offs_r[None, :] * stride_hr
    y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]
    if WHOLE:
        rank_read = rank // VECTOR * VECTOR  # it is the rank, and the compiler sees that it is a multiple
    else:
        rank_read = (rank + VECTOR - 1) // VECTOR * VECTOR
    mask_h = mask_m[:, None] & (offs_r < rank_read)[None, :]
    if BLOCK_R >= R:
        if ALL_OF_B:
            mask_b = (offs_r < R)[:, None]
        else:
            mask_b = (offs_r < (rank_read if ROW_MAJOR else rank))[:, None]
        if AT_ONCE:
            mask_n = (offs_n < width)[None, :]
            b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
            if ADD and not LATE:
                old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
        if FETCH:
            LINE: tl.constexpr = 1024 // y_ptr.dtype.element_ty.primitive_bitwidth
            LINES: tl.constexpr = triton.next_power_of_2((BLOCK_N * TILES_N + LINE - 1) // LINE)
            lines = first_n + tl.arange(0, LINES) * LINE
            mask_lines = lines < tl.minimum(width, first_n + BLOCK_N * TILES_N)
            line_ptrs = y_ptr + rows[:, None] * stride_yt + (column + lines)[None, :]
            bring_to_cache(line_ptrs, mask_m[:, None] & mask_lines[None, :])
        let_next_start(PDL)
        wait_at_last(PDL, AT_ONCE or stride_hp > 0)  # a block in registers would be waited for first
        if AT_ONCE and ADD and LATE:
            old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
        h = _shrunk_rows(h_ptrs, mask_h, offs_r, rank, stride_hp, PLANES, WHOLE, DTYPE, QUANT)
        for step in tl.range(0, TILES_N, num_stages=NUM_STAGES):
            if not AT_ONCE:
                mask_n = (offs_n < (1 << 30 if EVEN_N else width))[None, :]
                b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
                if ADD:
                    old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
            weights, mask_y, out_ptrs = b, mask_m[:, None] & mask_n, y_ptrs
            if QUANT.format > 0:
                scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, NUM_SLICES, QUANT)
            if ADD:
                before = old.to(tl.float32)
            offs_n += BLOCK_N
            y_ptrs += BLOCK_N
            b_ptrs += BLOCK_N * (R if ROW_MAJOR else 1)
            if AT_ONCE and TILES_N > 1:
                mask_n = ((offs_n < width) & (step + 1 < TILES_N))[None, :]
                b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
                if ADD:
                    old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
            weights = widened(weights, QUANT.format, DTYPE)
            if CUT_B:
                weights = tl.where((offs_r < rank)[:, None], weights, 0.0)
            total = result(dot(h, weights, accumulator(BLOCK_M, BLOCK_N, LEFT), LEFT, INTERPRET), LEFT)
            if QUANT.has_a:
                total *= tl.load(activation_scale_ptrs(operands, rows, NUM_SLICES, QUANT))[:, None]
            if QUANT.format > 0 and ADD:
                total = tl.fma(total, scale[None, :].broadcast_to(BLOCK_M, BLOCK_N), before)  # in every form alike
            elif QUANT.format > 0:
                total *= scale[None, :]
            elif ADD:
                total += before
            tl.store(out_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not ADD)))
    else:
        wait_for_front(PDL)
        for _ in tl.range(0, TILES_N):
            mask_n = (offs_n < width)[None, :]
            acc = accumulator(BLOCK_M, BLOCK_N, LEFT)
            if QUANT.group_k > 0:
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                scale_ptrs, scale_stride = block_scale_ptrs(operands, slice_id, slot, offs_n, NUM_SLICES, QUANT)
            for first_r in tl.range(0, rank, BLOCK_R, num_stages=NUM_STAGES):
                lanes = first_r + offs_r
                h_mask = mask_m[:, None] & (lanes < rank_read)[None, :]
                h = _shrunk_rows(
                    h_ptrs + first_r * stride_hr, h_mask, lanes, rank, stride_hp, PLANES, WHOLE, DTYPE, QUANT
                )
                jump = first_r * (1 if ROW_MAJOR else width)
                b_mask = (lanes < (rank_read if ROW_MAJOR else rank))[:, None] & mask_n
                b = tl.load(b_ptrs + jump, mask=b_mask, other=0.0)
                b = widened(b, QUANT.format, DTYPE)
                if CUT_B:
                    b = tl.where((lanes < rank)[:, None], b, 0.0)
                if QUANT.group_k > 0:  # BLOCK_R divides a block of scales
                    part = result(dot(h, b, accumulator(BLOCK_M, BLOCK_N, LEFT), LEFT, INTERPRET), LEFT)
                    block = first_r // QUANT.group_k
                    part *= tl.load(scale_ptrs + block * scale_stride, mask=offs_n < width, other=0.0)[None, :]
                    if QUANT.has_a:
                        a_scale_ptrs = activation_scale_ptrs(operands, rows, NUM_SLICES, QUANT)
                        part *= tl.load(a_scale_ptrs + block * QUANT.a_group)[:, None]
                    total += part
                else:
                    acc = dot(h, b, acc, LEFT, INTERPRET)
            if QUANT.group_k == 0:
                total = result(acc, LEFT)
                if QUANT.has_a:
                    total *= tl.load(activation_scale_ptrs(operands, rows, NUM_SLICES, QUANT))[:, None]
            if ADD:
                before = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0).to(tl.float32)
            if QUANT.format > 0 and QUANT.group_k == 0:
                scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, NUM_SLICES, QUANT)
            if QUANT.format > 0 and QUANT.group_k == 0 and ADD:
                total = tl.fma(total, scale[None, :].broadcast_to(BLOCK_M, BLOCK_N), before)
            elif QUANT.format > 0 and QUANT.group_k == 0:
                total *= scale[None, :]
            elif ADD:
                total += before
            tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n)
            offs_n += BLOCK_N
            y_ptrs += BLOCK_N
            b_ptrs += BLOCK_N * (R if ROW_MAJOR else 1)


@triton.jit
def _expand_tile(
    h_ptr, operands, y_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, block, idle_waits,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, TILES_N: tl.constexpr, AT_ONCE: tl.constexpr, FETCH: tl.constexpr, WORDS: tl.constexpr,
    NUM_STAGES: tl.constexpr, PLANES: tl.constexpr, HAS_RANKS: tl.constexpr, AHEAD: tl.constexpr, ADD: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The rows of one tile x TILES_N blocks of BLOCK_N columns of one slice; WORDS: by `expand_tile_in_words`. AHEAD,
    where there is one block: all ranks of the slot are read before the true rank is known. In a loop, true ranks that
    are whole vectors have code of their own, as B streams best where nothing of it is dropped; float32 does without,
    since the shared memory of both counts.
    """
    EITHER: tl.constexpr = HAS_RANKS and VECTOR > 1
    ALL_OF_B: tl.constexpr = AHEAD and TILES_N == 1 and BLOCK_R >= R and not WORDS
    slice_id, first_n, width, column = _column_block(block, WIDTHS, COLUMNS, BLOCK_N * TILES_N, NUM_SLICES)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, R, HAS_RANKS)
    if (slot >= 0) if ALL_OF_B or not ADD else (rank > 0):
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        b_ptr = pick(operands, slice_id, NUM_SLICES) + slot.to(tl.int64) * R * width
        h_ptr += slice_id.to(tl.int64) * stride_hs
        if EITHER and ROW_MAJOR and TILES_N > 1 and b_ptr.dtype.element_ty.primitive_bitwidth == 16:
            if rank % VECTOR == 0:
                _expand_rows_of(
                    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, rows, mask_m, first_n, width, column, rank,
                    stride_hp, stride_ht, stride_hr, stride_yt, R, QUANT, NUM_SLICES, ROW_MAJOR, VECTOR, True, False,
                    EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, AT_ONCE, FETCH, NUM_STAGES, PLANES, ADD, LATE, PDL,
                    LEFT, INTERPRET,
                )  # fmt: skip
            else:
                _expand_rows_of(
                    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, rows, mask_m, first_n, width, column, rank,
                    stride_hp, stride_ht, stride_hr, stride_yt, R, QUANT, NUM_SLICES, ROW_MAJOR, VECTOR, False, False,
                    EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, AT_ONCE, FETCH, NUM_STAGES, PLANES, ADD, LATE, PDL,
                    LEFT, INTERPRET,
                )  # fmt: skip
        elif WORDS:
            expand_tile_in_words(
                h_ptr, b_ptr, y_ptr, operands, slice_id, slot, rows, mask_m, first_n, width, column, rank,
                stride_hp, stride_ht, stride_hr, stride_yt, QUANT, NUM_SLICES, VECTOR, EVEN_N, BLOCK_M, BLOCK_N,
                BLOCK_R, TILES_N, NUM_STAGES, PLANES, ADD, LATE, PDL, INTERPRET,
            )  # fmt: skip
        else:
            _expand_rows_of(
                h_ptr, b_ptr, y_ptr, operands, slice_id, slot, rows, mask_m, first_n, width, column, rank,
                stride_hp, stride_ht, stride_hr, stride_yt, R, QUANT, NUM_SLICES, ROW_MAJOR, VECTOR, not EITHER,
                ALL_OF_B, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, AT_ONCE, FETCH, NUM_STAGES, PLANES, ADD, LATE,
                PDL, LEFT, INTERPRET,
            )  # fmt: skip
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:
                tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_rows_kernel(
    h_ptr, operands, y_ptr, mapping_ptr, ranks_ptr,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_N: tl.constexpr, PLANES: tl.constexpr, HAS_RANKS: tl.constexpr, AHEAD: tl.constexpr,
    ADD: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows, one by one."""
    pid = tl.program_id(0)
    row = (pid // NUM_BLOCKS).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    _expand_row_of(
        h_ptr, operands, y_ptr, ranks_ptr, row, slot, pid % NUM_BLOCKS, pid == 0,
        num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
        R, QUANT, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, VECTOR, LANES, STEPS, BLOCK_N, PLANES, HAS_RANKS, AHEAD, ADD,
        LATE, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_search_kernel(
    h_ptr, operands, y_ptr, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr,
    num_segments, num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TILES_N: tl.constexpr, AT_ONCE: tl.constexpr, FETCH: tl.constexpr, WORDS: tl.constexpr, NUM_STAGES: tl.constexpr,
    PLANES: tl.constexpr, HAS_RANKS: tl.constexpr, AHEAD: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All tiles; every program searches the segments for its own."""
    pid = tl.program_id(0)
    tile = pid // NUM_BLOCKS
    slot, start, num_rows = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, BLOCK_SEGMENTS)
    _expand_tile(
        h_ptr, operands, y_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, pid % NUM_BLOCKS, pid == 0,
        num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
        R, QUANT, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, VECTOR, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, AT_ONCE,
        FETCH, WORDS, NUM_STAGES, PLANES, HAS_RANKS, AHEAD, ADD, LATE, PDL, LEFT, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_listed_kernel(
    h_ptr, operands, y_ptr, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tiles, num_rows, num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
    R: tl.constexpr, QUANT: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, VECTOR: tl.constexpr, TILES_AT: tl.constexpr,
    ROWS_AT: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TILES_N: tl.constexpr, AT_ONCE: tl.constexpr, FETCH: tl.constexpr, WORDS: tl.constexpr, NUM_STAGES: tl.constexpr,
    SHORT_BLOCKS: tl.constexpr, SHORT_N: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, PLANES: tl.constexpr,
    HAS_RANKS: tl.constexpr, AHEAD: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
    LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The tiles of a step's list, by programs for ``num_tiles`` of them, which go on where there are more; and with
    SHORT_N, where the list holds long segments only, the rows of the short ones, by programs for ``num_rows``.
    """
    pid = tl.program_id(0)
    tile_programs = num_tiles * NUM_BLOCKS
    if pid < tile_programs:
        tile = pid // NUM_BLOCKS
        record = tl.load(tiles_ptr + tile)
        total = tl.load(totals_ptr + TILES_AT)
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if (pid == 0) & (tile >= total):
                tl.extra.cuda.gdc_wait()
        while tile < total:
            slot, start, tile_rows = read_record(record)
            _expand_tile(
                h_ptr, operands, y_ptr, sorted_ptr, ranks_ptr, slot, start, tile_rows, pid % NUM_BLOCKS, pid == 0,
                num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
                R, QUANT, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, VECTOR, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N,
                AT_ONCE, FETCH, WORDS, NUM_STAGES, PLANES, HAS_RANKS, AHEAD, ADD, LATE, PDL, LEFT, INTERPRET,
            )  # fmt: skip
            tile += num_tiles
            record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)
    elif SHORT_N > 0:
        pid -= tile_programs
        item = pid // SHORT_BLOCKS
        record = tl.load(rows_ptr + item)
        total = tl.load(totals_ptr + ROWS_AT)
        while item < total:
            slot, row, _ = read_record(record)
            _expand_row_of(
                h_ptr, operands, y_ptr, ranks_ptr, row.to(tl.int64), slot, pid % SHORT_BLOCKS, False,
                num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt,
                R, QUANT, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, VECTOR, LANES, STEPS, SHORT_N, PLANES, HAS_RANKS,
                AHEAD, ADD, LATE, PDL,
            )  # fmt: skip
            item += num_rows
            record = tl.load(rows_ptr + item, mask=item < total, other=0)


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


def plan_expand(
    h_shape: Sequence[int], h_strides: Sequence[int], h_dtype: torch.dtype, y: Tensor, weights: Weights,
    batch: Batch,
    config: dict[str, Any],
    *,
    offset_start: int, add_inputs: bool, has_ranks: bool,
    pdl: bool = False, late: bool = False, quant: Quant = WIDE,
) -> KernelPlan:  # fmt: skip
    """The launch that `config` names. h has strides of ``[planes, n, T, r]`` (rows may be wider than r); planes are
    added up. ``late``: y is not read before the kernel in front has ended. ``quant``: as in `plan_shrink`.
    """
    if pdl and h_strides[0] <= 0:  # kernels branch on it where they wait (`wait_at_last`)
        raise ValueError(f"planes of h lie {h_strides[0]} elements apart; give a positive stride, or pdl=False")
    rank, slices = weights.rank, len(weights.widths)
    planes, _, tokens, _ = h_shape
    strides = (*h_strides, y.stride(0))
    columns = tuple(accumulate(weights.widths[:-1], initial=offset_start))
    vector = gcd(rank, 16 // weights.dtype.itemsize if weights.row_major else 4)
    constants: dict[str, Any] = {"R": rank, "WIDTHS": weights.widths, "COLUMNS": columns, "NUM_SLICES": slices}
    constants |= {
        "QUANT": quant,
        "ROW_MAJOR": weights.row_major,
        "VECTOR": vector,
        "PLANES": planes,
        "HAS_RANKS": has_ranks,
    }
    constants |= {"ADD": add_inputs, "LATE": late and pdl, "PDL": pdl}
    shared: dict[str, Any] = {"num_warps": config["num_warps"], "pdl": pdl, "device": weights.device}
    dtypes = (h_dtype, weights.dtype, y.dtype)

    def blocks(block_n: int) -> int:
        """Blocks of this many columns in all slices."""
        return sum([triton.cdiv(width, block_n) for width in weights.widths])

    def row_blocks(block_n: int, lanes: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """LANES, STEPS and columns of a program that takes one row."""
        if not weights.row_major:
            lanes = min(lanes, block_at_least(rank, 1))
            return (lanes,), (1,), block_n
        return _lane_blocks(rank, block_n, has_ranks, lambda columns: rows * blocks(columns))

    if config["row_wise"]:
        lanes, steps, block_n = row_blocks(config["block_n"], config["block_k"], tokens)
        ahead = has_ranks and (rank <= 16 if weights.row_major else config["ahead"])
        constants |= {"LANES": lanes, "STEPS": steps, "BLOCK_N": block_n, "NUM_BLOCKS": blocks(block_n), "AHEAD": ahead}
        grid = (tokens * blocks(block_n), 1, 1)
        launch = Launch(_lora_expand_rows_kernel, grid, dtypes, strides, constants, **shared)
        return RowsPlan(launch, (weights.slots,))

    # All ranks in one pass where that fits, since more would read h again for every block of columns. The operands of
    # a float32 product lie in registers, whose number per program is the limit there.
    wide = 2 if quant.x_format else y.element_size() if quant.format else weights.dtype.itemsize
    most_r = min(quant.group_k or 128, 128 if wide == 2 else 16)
    block_m, block_r = config["block_m"], block_at_least(rank) if rank <= most_r else min(config["block_k"], most_r)
    block_n, tiles_n = config["block_n"], config["tiles_n"]
    even = all([width % (block_n * tiles_n) == 0 for width in weights.widths])
    row_bytes = block_n * y.element_size() if rank <= block_r else block_r * planes * h_dtype.itemsize
    at_once = tiles_n == 1 or config["num_stages"] == 1
    words = quant.words and config["in_words"] and not config["weights_left"] and wide == 2
    words = words and rank <= block_r and block_n >= 64  # all ranks at once, and 16 words or more
    held_bytes = 1 if words else wide  # else they are made wide through shared memory
    stage_bytes = block_n * block_r * held_bytes + block_m * row_bytes  # B, and old y or the planes of h
    stages = stages_that_fit(config["num_stages"], stage_bytes, weights.device)
    per_tile = blocks(block_n * tiles_n)
    constants |= {"NUM_BLOCKS": per_tile, "EVEN_N": even, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_R": block_r}
    # not where the kernel in front writes y, nor where blocks of ranks follow one another
    fetch = config["fetch_y"] and pdl and add_inputs and not (late or at_once) and rank <= block_r
    constants |= {"TILES_N": tiles_n, "AT_ONCE": at_once, "FETCH": fetch, "WORDS": words, "NUM_STAGES": stages}
    constants |= {"LEFT": config["weights_left"], "INTERPRET": INTERPRETED}
    constants |= {"AHEAD": has_ranks and config["ahead"]}
    if batch.listed and block_m in HEIGHTS:
        height, short_n = HEIGHTS.index(block_m), config["short_n"]
        constants |= {"TILES_AT": 2 * height + (short_n > 0), "ROWS_AT": TOTALS - 1}
        rows = min(tokens, LONG * batch.shape.short)
        lanes, steps, wide, per_row = (), (), 0, 0
        if short_n:
            # beside the form of tiles, threads that make FP8 wide have registers for half as many ranks
            lanes, steps, wide = row_blocks(short_n, 8 if quant.format else 16, rows)
            per_row = blocks(wide)
        constants |= {"LANES": lanes, "STEPS": steps, "SHORT_N": wide, "SHORT_BLOCKS": per_row}
        launch = Launch(_lora_expand_listed_kernel, None, dtypes, strides, constants, **shared)
        return ListedPlan(launch, height, per_tile, per_row, 1, (), (weights.slots,))
    segments = batch.max_segments
    constants |= {"BLOCK_SEGMENTS": block_at_least(batch.tensors[4].numel())}
    grid = (max_tiles(tokens, segments, block_m) * per_tile, 1, 1)
    launch = Launch(_lora_expand_search_kernel, grid, dtypes, strides, constants, **shared)
    return SearchPlan(launch, (segments, weights.slots))


def _describe(names: Names, lora_b: Sequence[Tensor]) -> Weights:
    return describe_stored(names.b, lora_b, -1)


def _plan(call: Call, weights: Weights) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, switches = call
    offset_start, add_inputs, options = switches
    check_stored_output(names.output, y, weights, offset_start)
    tokens, rank, width = y.shape[0], weights.rank, max(weights.widths)
    check_low_rank(names.input, x, weights, tokens, (torch.float32, weights.dtype))
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, rank, batch.max_segments, width):
        return None
    config = choose(
        "expand", batch.shape, tokens, width, rank, len(weights.widths), options, add_inputs, 1, weights.row_major
    )
    return plan_expand(
        (1, *x.shape), (0, *x.stride()), x.dtype, y, weights, batch, config,
        offset_start=offset_start, add_inputs=add_inputs, has_ranks=lora_ranks is not None,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_expand")
def expand(
    x: Tensor, lora_b_stacked: Sequence[Tensor], y: Tensor, batch: Batch,
    offset_start: int = 0, add_inputs: bool = True, *, lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_expand` on a step: ``y[t, o_i : o_i + N_i] (+)= x[i, t] @ B_i[slot(t)]^T``, arguments as there."""
    if batch.no_lora:
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {"offset_start": offset_start, "add_inputs": add_inputs, "lora_ranks": lora_ranks, **chosen}
        call_flat(lora_expand, (x, lora_b_stacked, y), batch, y.shape[0], **given)
        return
    switches = (offset_start, add_inputs, options)
    plan, aligned = _PLANS.find(x, y, (lora_b_stacked,), lora_ranks, batch, switches)
    if plan is not None:
        with on_device(x.get_device()):
            plan.run(x, lora_b_stacked, y, batch, lora_ranks, aligned)


@custom_op(mutates="output_tensor")
def lora_expand(
    inputs: Tensor, lora_b_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor,
    *, num_active_loras: int | Tensor | None = None, offset_start: int = 0, add_inputs: bool = False,
    lora_ranks: Tensor | None = None, batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[slot(t)]^T`` for every slice i, in place.

    Args:
        inputs: [n, T, r], float32 or the dtype of B, any strides.
        lora_b_weights: n x [L, (1,) N_i, r], contiguous (or with the last two dimensions swapped).
        output_tensor: [T, W] with last stride 1; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        token_lora_mapping, ..., no_lora_flag_cpu: the first six of `LoRAKernelMeta.meta_args`.
        num_active_loras: the seventh, how many entries of ``lora_ids`` may be in use (None: all).
        offset_start: first column written.
        add_inputs: add to the columns, else overwrite them.
        lora_ranks: int32 [n, L], true rank per slice and slot (None: r).
        batch_invariant, tuned_dir: as in `punica.config.LoRAConfig`.

    Rows at slot -1 and all other columns are never written. TypeError for dtypes, ValueError for shapes, ranges and
    devices, before any write.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    options = Options(batch_invariant, tuned_dir=tuned_dir)
    expand(
        inputs, lora_b_weights, output_tensor, batch, offset_start, add_inputs, lora_ranks=lora_ranks, options=options
    )
