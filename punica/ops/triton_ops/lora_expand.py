"""Expand: rank to output size, for every adapter and every slice of the batch in one launch.

    y[t, o_i : o_i + N_i] (+)= h[i, t] @ B_i[slot(t)]^T     h [n, T, r] or fp32 partials [splits, n, T, r]
                                                            B_i [L, N_i, r]

Summing the partials of a split shrink is part of reading h, so the split costs no kernel of its own. ``y + delta`` is
formed in fp32 and rounded once.

* **rows**: one row x ``BLOCK_N`` columns, multiply and sum. The width of the block in ranks is chosen on the device, so
  that an adapter of rank 8 in a slot of width 64 costs what rank 16 costs, not rank 64.
* **tiles**: ``BLOCK_M`` rows of one segment on the tensor cores. ``TILES_N > 1`` walks several column blocks with one
  load of h, so the partials are summed once for all of them. Prefills in FP8 have a form of their own (`fp8_words`).

With ``PDL`` the kernel starts while the one in front still runs: B is fetched first, and the old y too unless it is
``LATE`` (the one in front may write it), then it waits; or y is brought to the L2 cache (``FETCH``). Else what wrote y
has ended: in front stands the shrink, which lets this kernel start when it has waited itself.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import gcd
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
    pdl_launch_then_wait,
    pdl_wait,
    pdl_wait_or_barrier,
    pick,
    prefetch_l2,
    rank_of,
    read_record,
    read_shrunk,
    read_shrunk_rows,
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
from punica.ops.triton_ops.fp8_words import expand_row_in_words, expand_tile_in_words
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, stages_that_fit
from punica.ops.triton_ops.plan import Batch, KernelPlan, ListedPlan, RowsPlan, SearchPlan


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
    """Work of a program on a single row: block_n columns (``blocks`` of them in all slices), ``lanes`` ranks at once.

    lanes, steps: widths in ranks to choose from, and in how many steps each takes the columns. ahead: B is read before
    the true rank is known.
    """

    lanes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    block_n: int = 0
    blocks: int = 1
    ahead: bool = False


class ExpandTile(NamedTuple):
    """Schedule of a launch: a constexpr of the kernels. Fields as in `configs`, and:

    late: y is not read before the kernel in front has ended. blocks: runs of block_n x tiles_n columns in all slices.
    even_n: these divide every slice. at_once: blocks go through registers. tiles_at, rows_at, segments: as of shrink.
    """

    late: bool
    pdl: bool
    row: RowTile
    blocks: int = 1
    even_n: bool = False
    block_m: int = 16
    block_n: int = 16
    block_r: int = 16
    tiles_n: int = 1
    at_once: bool = False
    fetch: bool = False
    words: bool = False
    stages: int = 1
    ahead: bool = False
    swap_ab: bool = False
    tiles_at: int = 0
    rows_at: int = 0
    segments: int = 0
    interpret: bool = INTERPRETED


@triton.jit
def _column_block(pid_n, SHAPE: tl.constexpr, SPAN: tl.constexpr):
    """Slice, first column inside it, its width and its first column in y, for the pid_n-th run of SPAN columns."""
    WIDTHS: tl.constexpr = SHAPE.widths
    COLUMNS: tl.constexpr = SHAPE.columns
    slice_id = pid_n * 0
    blocks_before = slice_id
    blocks_until = 0
    for i in tl.static_range(SHAPE.slices - 1):
        blocks_until += (WIDTHS[i] + SPAN - 1) // SPAN
        slice_id = tl.where(pid_n >= blocks_until, i + 1, slice_id)
        blocks_before = tl.where(pid_n >= blocks_until, blocks_until, blocks_before)
    first_n = (pid_n - blocks_before) * SPAN
    return slice_id, first_n, pick(WIDTHS, slice_id, SHAPE.slices), pick(COLUMNS, slice_id, SHAPE.slices)


@triton.jit
def _shrunk_row(h_ptrs, offs_r, mask, operands, row, stride_hp, SHAPE: tl.constexpr):
    """[ranks] of one row of what shrink left, as float32: the sum of its partials, or FP8 values times their scales."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.x_format > 0:
        h = upcast(tl.load(h_ptrs, mask=mask, other=0.0), QUANT.x_format, tl.float32)
        h = row_scaled(h, operands, row, offs_r, mask, SHAPE.slices, QUANT)
    else:
        h = read_shrunk(h_ptrs, mask, stride_hp, SHAPE.partials)
    return h


@triton.jit
def _shrunk_rows(h_ptrs, mask, lanes, rank, stride_hp, WHOLE: tl.constexpr, DTYPE: tl.constexpr, SHAPE: tl.constexpr):
    """[rows, ranks] of what shrink left, in DTYPE; FP8 values without their scales."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.x_format > 0:
        h = upcast(tl.load(h_ptrs, mask=mask, other=0.0), QUANT.x_format, DTYPE)
        h = tl.where((lanes < rank)[None, :], h, 0.0)
    else:
        h = read_shrunk_rows(h_ptrs, mask, lanes, rank, stride_hp, SHAPE.partials, WHOLE, DTYPE)
    return h


@triton.jit
def _column_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE: tl.constexpr):
    """[columns] scales that follow the sum over the ranks; 1 where there are none."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.format > 0 and QUANT.group_k == 0:
        scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE.slices, QUANT)
    else:
        scale = tl.full([offs_n.shape[0]], 1.0, tl.float32)
    return scale


@triton.jit
def _expand_row(
    tensors, operands, place, block, lanes, rank, strides, WIDTH: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row x ``steps`` blocks of columns of a row-major B, each WIDTH ranks wide, of which ``lanes`` are read; the
    next block is fetched before one is summed. Arguments as of `_expand_row_by_ranks`.
    """
    QUANT: tl.constexpr = SHAPE.quant
    STEPS: tl.constexpr = TILE.row.steps[WIDTH]
    COLUMNS: tl.constexpr = TILE.row.block_n // STEPS
    LANES: tl.constexpr = TILE.row.lanes[WIDTH]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, row = place
    first_n, width = block
    stride_hp, stride_hr = strides
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    # Whole vectors are read (a mask cut inside one would narrow every load); what lies beyond the rank is dropped.
    mask_read = offs_r < (lanes + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector
    b_ptrs = b_ptr + offs_n[:, None] * SHAPE.rank + offs_r[None, :]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
    old = tl.zeros([COLUMNS], y_ptr.dtype.element_ty)
    if SHAPE.add and not TILE.late:
        old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
    pdl_launch_dependents(TILE.pdl)
    pdl_wait_or_barrier(TILE.pdl)
    if SHAPE.add and TILE.late:
        old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
    h = _shrunk_row(h_ptr + offs_r * stride_hr, offs_r, mask_read, operands, row, stride_hp, SHAPE)
    if QUANT.format == 0:
        h = h.to(b.dtype).to(tl.float32)
    for step in tl.range(0, STEPS):
        weights = upcast(b, QUANT.format, tl.float32)
        if QUANT.group_k > 0:
            mask_b = mask_n[:, None] & mask_read[None, :]
            weights = block_scaled(weights, operands, slice_id, slot, offs_n, offs_r, mask_b, SHAPE.slices, QUANT)
        product = tl.where((offs_r < rank)[None, :], weights * h[None, :], 0.0)
        if QUANT.format > 0:
            scale = _column_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
        before, y_ptrs, mask_y = old.to(tl.float32), y_ptr + offs_n, mask_n
        if STEPS > 1:
            offs_n += COLUMNS
            b_ptrs += COLUMNS * SHAPE.rank
            mask_n = (offs_n < width) & (step + 1 < STEPS)
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
            if SHAPE.add:
                old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
        total = tl.sum(product, 1)
        if QUANT.format > 0:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def _products(b, h, live, operands, place, offs_n, offs_r, mask_n, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """b [columns, ranks] times h in float32, h rounded to 16-bit weights' type; ranks that are not ``live`` dropped."""
    QUANT: tl.constexpr = SHAPE.quant
    slice_id, slot, _ = place
    if QUANT.format > 0:
        weights = tl.where(live[None, :], upcast(b, QUANT.format, tl.float32), 0.0)
        mask = mask_n[:, None] & live[None, :]
        if QUANT.group_k > 0:
            weights = block_scaled(weights, operands, slice_id, slot, offs_n, offs_r, mask, SHAPE.slices, QUANT)
        product = weights * h[None, :]
    else:
        weights = tl.where(live[None, :], b, 0.0) if TILE.row.ahead else b
        product = weights.to(tl.float32) * h.to(b.dtype).to(tl.float32)[None, :]
    return product


@triton.jit
def _expand_row_by_ranks(
    tensors, operands, place, block, rank, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row x COLUMNS columns of a B stored rank after rank, LANES ranks at a time as far as the true rank goes; the
    next ones are fetched before these are summed, and ``ahead`` the first ones before the true rank is known. Up to 16
    LANES are held by one thread for its columns: no sum leaves it.

    place: slice, slot and row; block: first column and width of the slice; strides: of h along partials and ranks.
    """
    QUANT: tl.constexpr = SHAPE.quant
    COLUMNS: tl.constexpr = TILE.row.block_n
    LANES: tl.constexpr = TILE.row.lanes[0]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, row = place
    first_n, width = block
    stride_hp, stride_hr = strides
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    b_ptrs = b_ptr + offs_r[None, :] * width + offs_n[:, None]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < (SHAPE.rank if TILE.row.ahead else rank))[None, :], other=0.0)
    before = tl.zeros([COLUMNS], tl.float32)
    if SHAPE.add and not TILE.late:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    pdl_launch_dependents(TILE.pdl)
    pdl_wait_or_barrier(TILE.pdl)
    if SHAPE.add and TILE.late:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32) if QUANT.format > 0 else before
    h_ptrs = h_ptr + offs_r * stride_hr
    h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)
    if SHAPE.rank > LANES:
        for _ in tl.range(LANES, rank, LANES):
            product = _products(b, h, offs_r < rank, operands, place, offs_n, offs_r, mask_n, SHAPE, TILE)
            offs_r += LANES
            b_ptrs += LANES * width
            h_ptrs += LANES * stride_hr
            b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < rank)[None, :], other=0.0)
            h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)
            total += tl.sum(product, 1)
    total += tl.sum(_products(b, h, offs_r < rank, operands, place, offs_n, offs_r, mask_n, SHAPE, TILE), 1)
    if QUANT.format > 0:
        total = total * _column_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE) + before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def _expand_row_of(
    tensors, operands, ranks_ptr, row, slot, block, pdl_anchor, num_slots, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row x a block of columns of one slice. With a row-major B the true rank chooses among the ascending ``lanes``
    the width in ranks of a block, and with it in how many ``steps`` the columns are taken: a program's blocks hold
    about as many elements either way. ``ahead``: B is read before the true rank is known, all ranks of the slot if it
    is row-major. ``pdl_anchor``: this program waits for the kernel in front even without work.
    """
    QUANT: tl.constexpr = SHAPE.quant
    h_ptr, y_ptr = tensors
    stride_hp, stride_hs, stride_ht, stride_hr, stride_yt = strides
    slice_id, first_n, width, column = _column_block(block, SHAPE, TILE.row.block_n)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE.rank, SHAPE.has_ranks)
    lanes = tl.where(slot >= 0, SHAPE.rank, 0) if TILE.row.ahead else rank
    if (lanes > 0) | ((slot >= 0) & (not SHAPE.add)):
        b_ptr = pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * SHAPE.rank * width
        h_ptr += row * stride_ht + slice_id.to(tl.int64) * stride_hs
        y_ptr += row * stride_yt + column
        given, place, columns = (h_ptr, b_ptr, y_ptr), (slice_id, slot, row), (first_n, width)
        if SHAPE.row_major:
            for i in tl.static_range(len(TILE.row.lanes)):
                above = TILE.row.lanes[i - 1] if i > 0 else -1
                if (lanes > above) & (lanes <= TILE.row.lanes[i]):
                    _expand_row(given, operands, place, columns, lanes, rank, (stride_hp, stride_hr), i, SHAPE, TILE)
        elif QUANT.words:
            expand_row_in_words(given, operands, place, columns, rank, (stride_hp, stride_hr), SHAPE, TILE)
        else:
            _expand_row_by_ranks(given, operands, place, columns, rank, (stride_hp, stride_hr), SHAPE, TILE)
    else:
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if pdl_anchor:  # one waiting program keeps the kernel behind the one in front of it
                tl.extra.cuda.gdc_wait()


@triton.constexpr_function
def _dtype_of_product(y_ptr, b_ptr, quant):
    """The type in which h and B are multiplied: B's own, for FP8 that of y, with FP8 activations float16."""
    if quant.x_format > 0:
        return tl.float16
    return y_ptr.dtype.element_ty if quant.format > 0 else b_ptr.dtype.element_ty


@triton.jit
def _expand_rows_of(
    tensors, operands, place, rows, mask_m, block, rank, strides,
    WHOLE: tl.constexpr, ALL_OF_B: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``rows`` x tiles_n blocks of block_n columns. WHOLE: the rank is a multiple of ``vector``, the ranks that a load
    of h or B takes; else the loads reach beyond it and what they bring from there is dropped. B by ranks is read as far
    as the rank, and with ALL_OF_B to the end of the slot, before the true rank is known.

    at_once: blocks go through registers, the first is fetched ahead of the kernel in front, and every other one while
    the one before it is multiplied. fetch: what they add to is brought to the L2 cache ahead of the kernel in front.
    place: slice and slot; block: first column, width of the slice and its first column in y.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    QUANT: tl.constexpr = SHAPE.quant
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot = place
    first_n, width, column = block
    stride_hp, _, stride_ht, stride_hr, stride_yt = strides
    CUT_B: tl.constexpr = ALL_OF_B or (SHAPE.row_major and not WHOLE)
    DTYPE: tl.constexpr = _dtype_of_product(y_ptr, b_ptr, QUANT)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    if SHAPE.row_major:
        b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * SHAPE.rank
    else:
        b_ptrs = b_ptr + offs_r[:, None] * width + offs_n[None, :]
    h_ptrs = h_ptr + rows[:, None] * stride_ht + offs_r[None, :] * stride_hr
    y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]
    if WHOLE:
        rank_read = rank // SHAPE.vector * SHAPE.vector  # it is the rank, and the compiler sees that it is a multiple
    else:
        rank_read = (rank + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector
    mask_h = mask_m[:, None] & (offs_r < rank_read)[None, :]
    if BLOCK_R >= SHAPE.rank:  # noqa: SIM300 (a constexpr stands left)
        if ALL_OF_B:
            mask_b = (offs_r < SHAPE.rank)[:, None]
        else:
            mask_b = (offs_r < (rank_read if SHAPE.row_major else rank))[:, None]
        if TILE.at_once:
            mask_n = (offs_n < width)[None, :]
            b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
            if SHAPE.add and not TILE.late:
                old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
        if TILE.fetch:
            LINE: tl.constexpr = 1024 // y_ptr.dtype.element_ty.primitive_bitwidth
            LINES: tl.constexpr = triton.next_power_of_2((BLOCK_N * TILE.tiles_n + LINE - 1) // LINE)
            lines = first_n + tl.arange(0, LINES) * LINE
            mask_lines = lines < tl.minimum(width, first_n + BLOCK_N * TILE.tiles_n)
            line_ptrs = y_ptr + rows[:, None] * stride_yt + (column + lines)[None, :]
            prefetch_l2(line_ptrs, mask_m[:, None] & mask_lines[None, :])
        pdl_launch_dependents(TILE.pdl)
        pdl_wait(TILE.pdl, TILE.at_once or stride_hp > 0)  # a block in registers would be waited for first
        if TILE.at_once and SHAPE.add and TILE.late:
            old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
        h = _shrunk_rows(h_ptrs, mask_h, offs_r, rank, stride_hp, WHOLE, DTYPE, SHAPE)
        for step in tl.range(0, TILE.tiles_n, num_stages=TILE.stages):
            if not TILE.at_once:
                mask_n = (offs_n < (1 << 30 if TILE.even_n else width))[None, :]
                b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
                if SHAPE.add:
                    old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
            weights, mask_y, out_ptrs = b, mask_m[:, None] & mask_n, y_ptrs
            if QUANT.format > 0:
                scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, SHAPE.slices, QUANT)
            if SHAPE.add:
                before = old.to(tl.float32)
            offs_n += BLOCK_N
            y_ptrs += BLOCK_N
            b_ptrs += BLOCK_N * (SHAPE.rank if SHAPE.row_major else 1)
            if TILE.at_once and TILE.tiles_n > 1:
                mask_n = ((offs_n < width) & (step + 1 < TILE.tiles_n))[None, :]
                b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
                if SHAPE.add:
                    old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
            weights = upcast(weights, QUANT.format, DTYPE)
            if CUT_B:
                weights = tl.where((offs_r < rank)[:, None], weights, 0.0)
            total = result(
                dot(h, weights, accumulator(BLOCK_M, BLOCK_N, TILE.swap_ab), TILE.swap_ab, TILE.interpret),
                TILE.swap_ab,
            )
            if QUANT.has_a:
                total *= tl.load(activation_scale_ptrs(operands, rows, SHAPE.slices, QUANT))[:, None]
            if QUANT.format > 0 and SHAPE.add:
                total = tl.fma(total, scale[None, :].broadcast_to(BLOCK_M, BLOCK_N), before)  # in every form alike
            elif QUANT.format > 0:
                total *= scale[None, :]
            elif SHAPE.add:
                total += before
            tl.store(out_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not SHAPE.add)))
    else:
        pdl_launch_then_wait(TILE.pdl)
        for _ in tl.range(0, TILE.tiles_n):
            mask_n = (offs_n < width)[None, :]
            acc = accumulator(BLOCK_M, BLOCK_N, TILE.swap_ab)
            if QUANT.group_k > 0:
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                scale_ptrs, scale_stride = block_scale_ptrs(operands, slice_id, slot, offs_n, SHAPE.slices, QUANT)
            for first_r in tl.range(0, rank, BLOCK_R, num_stages=TILE.stages):
                lanes = first_r + offs_r
                h_mask = mask_m[:, None] & (lanes < rank_read)[None, :]
                h = _shrunk_rows(h_ptrs + first_r * stride_hr, h_mask, lanes, rank, stride_hp, WHOLE, DTYPE, SHAPE)
                jump = first_r * (1 if SHAPE.row_major else width)
                b_mask = (lanes < (rank_read if SHAPE.row_major else rank))[:, None] & mask_n
                b = tl.load(b_ptrs + jump, mask=b_mask, other=0.0)
                b = upcast(b, QUANT.format, DTYPE)
                if CUT_B:
                    b = tl.where((lanes < rank)[:, None], b, 0.0)
                if QUANT.group_k > 0:  # BLOCK_R divides a block of scales
                    part = result(
                        dot(h, b, accumulator(BLOCK_M, BLOCK_N, TILE.swap_ab), TILE.swap_ab, TILE.interpret),
                        TILE.swap_ab,
                    )
                    block = first_r // QUANT.group_k
                    part *= tl.load(scale_ptrs + block * scale_stride, mask=offs_n < width, other=0.0)[None, :]
                    if QUANT.has_a:
                        a_scale_ptrs = activation_scale_ptrs(operands, rows, SHAPE.slices, QUANT)
                        part *= tl.load(a_scale_ptrs + block * QUANT.a_group)[:, None]
                    total += part
                else:
                    acc = dot(h, b, acc, TILE.swap_ab, TILE.interpret)
            if QUANT.group_k == 0:
                total = result(acc, TILE.swap_ab)
                if QUANT.has_a:
                    total *= tl.load(activation_scale_ptrs(operands, rows, SHAPE.slices, QUANT))[:, None]
            if SHAPE.add:
                before = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0).to(tl.float32)
            if QUANT.format > 0 and QUANT.group_k == 0:
                scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, SHAPE.slices, QUANT)
            if QUANT.format > 0 and QUANT.group_k == 0 and SHAPE.add:
                total = tl.fma(total, scale[None, :].broadcast_to(BLOCK_M, BLOCK_N), before)
            elif QUANT.format > 0 and QUANT.group_k == 0:
                total *= scale[None, :]
            elif SHAPE.add:
                total += before
            tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n)
            offs_n += BLOCK_N
            y_ptrs += BLOCK_N
            b_ptrs += BLOCK_N * (SHAPE.rank if SHAPE.row_major else 1)


@triton.jit
def _expand_tile(
    tensors, operands, sorted_ptr, ranks_ptr, tile, block, pdl_anchor, num_slots, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of one tile x tiles_n blocks of block_n columns of one slice; words: by `expand_tile_in_words`. ahead,
    where there is one block: all ranks of the slot are read before the true rank is known. In a loop, true ranks that
    are whole vectors have code of their own, as B streams best where nothing of it is dropped; float32 does without,
    since the shared memory of both counts. tile: slot, first sorted position and number of rows.
    """
    h_ptr, y_ptr = tensors
    slot, start, num_rows = tile
    _, stride_hs, _, _, _ = strides
    EITHER: tl.constexpr = SHAPE.has_ranks and SHAPE.vector > 1
    ALL_OF_B: tl.constexpr = TILE.ahead and TILE.tiles_n == 1 and TILE.block_r >= SHAPE.rank and not TILE.words
    slice_id, first_n, width, column = _column_block(block, SHAPE, TILE.block_n * TILE.tiles_n)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE.rank, SHAPE.has_ranks)
    if (slot >= 0) if ALL_OF_B or not SHAPE.add else (rank > 0):
        offs_m = tl.arange(0, TILE.block_m)
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        b_ptr = pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * SHAPE.rank * width
        h_ptr += slice_id.to(tl.int64) * stride_hs
        given, place, columns = (h_ptr, b_ptr, y_ptr), (slice_id, slot), (first_n, width, column)
        if EITHER and SHAPE.row_major and TILE.tiles_n > 1 and b_ptr.dtype.element_ty.primitive_bitwidth == 16:
            if rank % SHAPE.vector == 0:
                _expand_rows_of(given, operands, place, rows, mask_m, columns, rank, strides, True, False, SHAPE, TILE)
            else:
                _expand_rows_of(given, operands, place, rows, mask_m, columns, rank, strides, False, False, SHAPE, TILE)
        elif TILE.words:
            expand_tile_in_words(given, operands, place, rows, mask_m, columns, rank, strides, SHAPE, TILE)
        else:
            _expand_rows_of(
                given, operands, place, rows, mask_m, columns, rank, strides, not EITHER, ALL_OF_B, SHAPE, TILE
            )
    else:
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if pdl_anchor:
                tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_rows_kernel(
    tensors, operands, mapping_ptr, ranks_ptr, num_slots, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """All rows, one by one."""
    pid = tl.program_id(0)
    row = (pid // TILE.row.blocks).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    _expand_row_of(
        tensors, operands, ranks_ptr, row, slot, pid % TILE.row.blocks, pid == 0, num_slots, strides, SHAPE, TILE
    )


@triton.jit(do_not_specialize=["num_segments", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_search_kernel(
    tensors, operands, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr,
    num_segments, num_slots, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All tiles; every program searches the segments for its own."""
    pid = tl.program_id(0)
    tile = pid // TILE.blocks
    found = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, TILE.block_m, TILE.segments)
    _expand_tile(
        tensors, operands, sorted_ptr, ranks_ptr, found, pid % TILE.blocks, pid == 0, num_slots, strides, SHAPE, TILE
    )


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_listed_kernel(
    tensors, operands, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tiles, num_rows, num_slots, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A persistent loop over the tiles of a step's list, by programs for ``num_tiles`` of them; where the list holds
    long segments only (``row.block_n`` above 0), also over the rows of the short ones, by programs for ``num_rows``.
    """
    pid = tl.program_id(0)
    tile_programs = num_tiles * TILE.blocks
    if pid < tile_programs:
        tile = pid // TILE.blocks
        record = tl.load(tiles_ptr + tile)
        total = tl.load(totals_ptr + TILE.tiles_at)
        if TILE.pdl:  # noqa: SIM102 (decided at compile time)
            if (pid == 0) & (tile >= total):
                tl.extra.cuda.gdc_wait()
        while tile < total:
            _expand_tile(
                tensors, operands, sorted_ptr, ranks_ptr, read_record(record), pid % TILE.blocks, pid == 0, num_slots,
                strides, SHAPE, TILE,
            )  # fmt: skip
            tile += num_tiles
            record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)
    elif TILE.row.block_n > 0:
        pid -= tile_programs
        item = pid // TILE.row.blocks
        record = tl.load(rows_ptr + item)
        total = tl.load(totals_ptr + TILE.rows_at)
        while item < total:
            slot, row, _ = read_record(record)
            _expand_row_of(
                tensors, operands, ranks_ptr, row.to(tl.int64), slot, pid % TILE.row.blocks, False, num_slots, strides,
                SHAPE, TILE,
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
    """The launch that `config` names. h has strides of ``[partials, n, T, r]`` (rows may be wider than r); partials are
    added up. ``late``: y is not read before the kernel in front has ended. ``quant``: as in `plan_shrink`.
    """
    if pdl and h_strides[0] <= 0:  # kernels branch on it where they wait (`pdl_wait`)
        raise ValueError(f"partials of h lie {h_strides[0]} elements apart; give a positive stride, or pdl=False")
    rank, slices = weights.rank, len(weights.widths)
    partials, _, tokens, _ = h_shape
    strides = (*h_strides, y.stride(0))
    columns = tuple(accumulate(weights.widths[:-1], initial=offset_start))
    vector = gcd(rank, 16 // weights.dtype.itemsize if weights.row_major else 4)
    shape = ExpandShape(
        rank, weights.widths, columns, slices, quant, weights.row_major, vector, partials, has_ranks, add_inputs
    )
    shared: dict[str, Any] = {"num_warps": config["num_warps"], "pdl": pdl, "device": weights.device}
    dtypes = (h_dtype, weights.dtype, y.dtype)

    def blocks(block_n: int) -> int:
        """Blocks of this many columns in all slices."""
        return sum([triton.cdiv(width, block_n) for width in weights.widths])

    def row_tile(block_n: int, lanes: int, rows: int, ahead: bool) -> RowTile:
        """Work of a program that takes one of ``rows`` rows."""
        if not weights.row_major:
            lanes = min(lanes, quant.group_k or lanes, block_at_least(rank, 1))
            return RowTile((lanes,), (1,), block_n, blocks(block_n), ahead)
        widths, steps, block_n = _lane_blocks(rank, block_n, has_ranks, lambda columns: rows * blocks(columns))
        return RowTile(widths, steps, block_n, blocks(block_n), ahead)

    def launch(kernel: Any, grid: tuple[int, int, int] | None, tile: ExpandTile) -> Launch:
        return Launch(kernel, grid, dtypes, strides, {"SHAPE": shape, "TILE": tile}, **shared)

    if config["row_wise"]:
        ahead = has_ranks and (rank <= 16 if weights.row_major else config["ahead"])
        row = row_tile(config["block_n"], config["block_k"], tokens, ahead)
        tile = ExpandTile(late and pdl, pdl, row)
        return RowsPlan(launch(_lora_expand_rows_kernel, (tokens * row.blocks, 1, 1), tile), (weights.slots,))

    # All ranks in one pass where that fits, since more would read h again for every block of columns. The operands of
    # a float32 product are held in registers, whose number per program is the limit there.
    wide = 2 if quant.x_format else y.element_size() if quant.format else weights.dtype.itemsize
    most_r = min(quant.group_k or 128, 128 if wide == 2 else 16)
    block_m, block_r = config["block_m"], block_at_least(rank) if rank <= most_r else min(config["block_k"], most_r)
    block_n, tiles_n = config["block_n"], config["tiles_n"]
    row_bytes = block_n * y.element_size() if rank <= block_r else block_r * partials * h_dtype.itemsize
    at_once = tiles_n == 1 or config["num_stages"] == 1
    words = quant.words and config["in_words"] and not config["swap_ab"] and wide == 2
    words = words and rank <= block_r and block_n >= 64  # all ranks at once, and 16 words or more
    held_bytes = 1 if words else wide  # else they are made wide through shared memory
    stage_bytes = block_n * block_r * held_bytes + block_m * row_bytes  # B, and old y or the partials of h
    # not where the kernel in front writes y, nor where blocks of ranks follow one another
    fetch = config["prefetch_y"] and pdl and add_inputs and not (late or at_once) and rank <= block_r
    per_tile, ahead = blocks(block_n * tiles_n), has_ranks and config["ahead"]
    tile = ExpandTile(
        late and pdl, pdl, RowTile(), per_tile, all([width % (block_n * tiles_n) == 0 for width in weights.widths]),
        block_m, block_n, block_r, tiles_n, at_once, fetch, words,
        stages_that_fit(config["num_stages"], stage_bytes, weights.device), ahead, config["swap_ab"],
    )  # fmt: skip
    if batch.listed and block_m in HEIGHTS:
        height, short_n, row = HEIGHTS.index(block_m), config["short_n"], RowTile()
        if short_n:
            # beside the form of tiles, threads that make FP8 wide have registers for half as many ranks
            row = row_tile(short_n, 8 if quant.format else 16, min(tokens, LONG * batch.shape.short), ahead)
        tile = tile._replace(row=row, tiles_at=2 * height + (short_n > 0), rows_at=TOTALS - 1)
        per_row = row.blocks if short_n else 0
        listed = launch(_lora_expand_listed_kernel, None, tile)
        return ListedPlan(listed, height, per_tile, per_row, 1, (), (weights.slots,))
    segments = batch.max_segments
    tile = tile._replace(segments=block_at_least(batch.tensors[4].numel()))
    grid = (max_tiles(tokens, segments, block_m) * per_tile, 1, 1)
    return SearchPlan(launch(_lora_expand_search_kernel, grid, tile), (segments, weights.slots))
