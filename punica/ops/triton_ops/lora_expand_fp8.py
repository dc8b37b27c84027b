"""Expand with B in FP8: rank to output size, for every adapter and every slice of the batch in one launch.

    y[t, o_i + c] (+)= a(t) * b_i[l, c] * sum_k h[i, t, k] * B_i[l, c, k]     l = slot(t), B_i [L, N_i, r] float8
                                                                              h [n, T, r] or planes [splits, n, T, r]

and the other modes of `punica.ops.fp8_checks`. The forms are those of `punica.ops.triton_ops.lora_expand`, with true
ranks, planes and programmatic dependent launch as there:

* **rows**: one row x ``BLOCK_N`` columns. Threads hold neighbouring columns and walk over the ranks in chunks, the next
  chunk fetched before one is summed, as far as the true rank goes: no sum crosses threads.
* **tiles**: ``BLOCK_M`` rows of one segment on the tensor cores, B made wide between memory and product.
"""

from collections.abc import Sequence
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
from punica.ops.fp8_checks import (
    Form,
    Scales,
    Scheme,
    check_activation,
    check_plain,
    check_scales,
    form_of,
    forms_of,
    is_plain,
)
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.configs import choose
from punica.ops.triton_ops.device import (
    INDEX_POINTERS,
    accumulator,
    dot,
    find_tile,
    max_tiles,
    pick,
    rank_of,
    read_record,
    result,
    wait_for_front,
)
from punica.ops.triton_ops.fp8_device import (
    TYPES,
    as_operand,
    check_group_k,
    fp8_format,
    operands,
    pick_from,
    scale_constants,
    scales_of,
    widened,
)
from punica.ops.triton_ops.launch import INTERPRETED, Launch, block_at_least, on_device, stages_that_fit
from punica.ops.triton_ops.lora_expand import _column_block, expand
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named, names_of
from punica.ops.triton_ops.plan import Batch, KernelPlan, ListedPlan, RowsPlan, SearchPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch


@triton.jit
def _low_rank(h_ptrs, mask, stride_hp, PLANES: tl.constexpr, X_FORMAT: tl.constexpr):
    """h as float32: the sum of the split-K planes, always in ascending order, or FP8 values without their scales."""
    total = widened(tl.load(h_ptrs, mask=mask, other=0.0), X_FORMAT, tl.float32)
    for plane in tl.static_range(1, PLANES):
        total += tl.load(h_ptrs + plane * stride_hp, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _expand_row(
    h_ptr, b_ptr, y_ptr, scale_ptr, a_scale_ptr,
    first_n, width, rank, lanes, stride_hp, stride_hr, stride_bn, stride_br, scale_n, scale_k, stride_ag,
    R: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, VECTOR: tl.constexpr, PLANES: tl.constexpr, HAS_A: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x BLOCK_N columns, BLOCK_R of ``lanes`` ranks at a time; the next are fetched before these are summed."""
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < width
    # Whole vectors are read (a mask cut inside one would narrow every load); what lies beyond the rank is dropped.
    lanes_read = (lanes + VECTOR - 1) // VECTOR * VECTOR
    b_ptrs = b_ptr + offs_n[:, None] * stride_bn + offs_r[None, :] * stride_br
    b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < lanes_read)[None, :], other=0.0)
    scale_ptrs = scale_ptr + offs_n // GROUP_N * scale_n
    if GROUP_K == 0:
        scale = tl.load(scale_ptrs, mask=mask_n, other=0.0)
    old = tl.zeros([BLOCK_N], y_ptr.dtype.element_ty)
    if ADD:
        old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
    wait_for_front(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first_r in tl.range(0, rank, BLOCK_R):
        mask_r = first_r + offs_r < rank
        h = _low_rank(h_ptr + (first_r + offs_r) * stride_hr, mask_r, stride_hp, PLANES, X_FORMAT)
        values = widened(b, FORMAT, tl.float32)
        if BLOCK_R < R:
            b_ptrs += BLOCK_R * stride_br
            mask_next = first_r + BLOCK_R + offs_r < lanes_read
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_next[None, :], other=0.0)
        part = tl.sum(tl.where(mask_r[None, :], values * h[None, :], 0.0), 1)
        if GROUP_K > 0:
            group = first_r // GROUP_K
            part *= tl.load(scale_ptrs + group * scale_k, mask=mask_n, other=0.0)
            if HAS_A:
                part *= tl.load(a_scale_ptr + group * stride_ag)
        total += part
    if GROUP_K == 0:
        total *= scale
        if HAS_A:
            total *= tl.load(a_scale_ptr)
    total += old.to(tl.float32)
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not ADD)))


@triton.jit
def _expand_row_of(
    h_ptr, operands, y_ptr, ranks_ptr, row, slot, block, idle_waits,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
    R: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr, ROW_MAJOR: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PLANES: tl.constexpr, HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x BLOCK_N columns of one slice. ``idle_waits``: this program waits for the kernel in front even when it
    has nothing to do. Up to 16 ranks are read whole, and do not wait for the table of ranks.
    """
    WHOLE: tl.constexpr = HAS_RANKS and R <= 16
    slice_id, first_n, width, column = _column_block(block, WIDTHS, COLUMNS, BLOCK_N, NUM_SLICES)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, R, HAS_RANKS)
    lanes = tl.where(slot >= 0, R, 0) if WHOLE else rank
    if (lanes > 0) | ((slot >= 0) & (not ADD)):
        b_ptr = pick(operands, slice_id, NUM_SLICES) + slot.to(tl.int64) * R * width
        scale_ptr, scale_n, scale_k = scales_of(operands, slice_id, slot, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K)
        a_scale_ptr = pick_from(operands, 0, 2 * NUM_SLICES, 1) + row * stride_at
        h_ptr += row * stride_ht + slice_id.to(tl.int64) * stride_hs
        y_ptr += row * stride_yt + column
        if ROW_MAJOR:
            _expand_row(
                h_ptr, b_ptr, y_ptr, scale_ptr, a_scale_ptr,
                first_n, width, rank, lanes, stride_hp, stride_hr, R, 1, scale_n, scale_k, stride_ag,
                R, GROUP_N, GROUP_K, FORMAT, X_FORMAT, BLOCK_N, BLOCK_R, VECTOR, PLANES, HAS_A, ADD, PDL,
            )  # fmt: skip
        else:
            _expand_row(
                h_ptr, b_ptr, y_ptr, scale_ptr, a_scale_ptr,
                first_n, width, rank, lanes, stride_hp, stride_hr, 1, width, scale_n, scale_k, stride_ag,
                R, GROUP_N, GROUP_K, FORMAT, X_FORMAT, BLOCK_N, BLOCK_R, VECTOR, PLANES, HAS_A, ADD, PDL,
            )  # fmt: skip
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:  # one waiting program keeps the kernel behind the one in front of it
                tl.extra.cuda.gdc_wait()


@triton.jit
def _expand_tile(
    h_ptr, operands, y_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, block, idle_waits,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
    R: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr, ROW_MAJOR: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILES_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, PLANES: tl.constexpr, HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The rows of one tile x TILES_N blocks of BLOCK_N columns of one slice. A block of ranks lies in one block of the
    scales.
    """
    slice_id, first_n, width, column = _column_block(block, WIDTHS, COLUMNS, BLOCK_N * TILES_N, NUM_SLICES)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, R, HAS_RANKS)
    if (rank > 0) | ((slot >= 0) & (not ADD)):
        offs_m, offs_r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        b_ptr = pick(operands, slice_id, NUM_SLICES) + slot.to(tl.int64) * R * width
        scale_ptr, scale_n, scale_k = scales_of(operands, slice_id, slot, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K)
        a_scale_ptrs = pick_from(operands, 0, 2 * NUM_SLICES, 1) + rows * stride_at
        if ROW_MAJOR:
            b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * R
        else:
            b_ptrs = b_ptr + offs_r[:, None] * width + offs_n[None, :]
        h_ptrs = h_ptr + slice_id.to(tl.int64) * stride_hs + rows[:, None] * stride_ht + offs_r[None, :] * stride_hr
        y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]
        lanes_read = (rank + VECTOR - 1) // VECTOR * VECTOR
        if BLOCK_R >= R:
            mask_r = offs_r < rank
            if TILES_N == 1:
                mask_n = offs_n < width
                b = tl.load(b_ptrs, mask=(offs_r < lanes_read)[:, None] & mask_n[None, :], other=0.0)
                scale = tl.load(scale_ptr + offs_n // GROUP_N * scale_n, mask=mask_n, other=0.0)
                if ADD:
                    old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
            wait_for_front(PDL)
            h = _low_rank(h_ptrs, mask_m[:, None] & mask_r[None, :], stride_hp, PLANES, X_FORMAT).to(DTYPE)
            for _ in tl.range(0, TILES_N, num_stages=NUM_STAGES):
                if TILES_N > 1:
                    mask_n = offs_n < (1 << 30 if EVEN_N else width)
                    b = tl.load(b_ptrs, mask=(offs_r < lanes_read)[:, None] & mask_n[None, :], other=0.0)
                    scale = tl.load(scale_ptr + offs_n // GROUP_N * scale_n, mask=mask_n, other=0.0)
                values = tl.where(mask_r[:, None], widened(b, FORMAT, DTYPE), 0.0)
                total = result(dot(h, values, accumulator(BLOCK_M, BLOCK_N, LEFT), LEFT, INTERPRET), LEFT)
                total *= scale[None, :]
                if HAS_A:
                    total *= tl.load(a_scale_ptrs)[:, None]
                if ADD:
                    if TILES_N > 1:
                        old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
                    total += old.to(tl.float32)
                tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
                offs_n += BLOCK_N
                y_ptrs += BLOCK_N
                b_ptrs += BLOCK_N * (R if ROW_MAJOR else 1)
        else:
            wait_for_front(PDL)
            for _ in tl.range(0, TILES_N):
                mask_n = offs_n < width
                scale_ptrs = scale_ptr + offs_n // GROUP_N * scale_n
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                acc = accumulator(BLOCK_M, BLOCK_N, LEFT)
                for first_r in tl.range(0, rank, BLOCK_R, num_stages=NUM_STAGES):
                    lanes = first_r + offs_r
                    h_mask = mask_m[:, None] & (lanes < rank)[None, :]
                    h = _low_rank(h_ptrs + first_r * stride_hr, h_mask, stride_hp, PLANES, X_FORMAT).to(DTYPE)
                    jump = first_r * (1 if ROW_MAJOR else width)
                    b = tl.load(b_ptrs + jump, mask=(lanes < lanes_read)[:, None] & mask_n[None, :], other=0.0)
                    values = tl.where((lanes < rank)[:, None], widened(b, FORMAT, DTYPE), 0.0)
                    if GROUP_K == 0:
                        acc = dot(h, values, acc, LEFT, INTERPRET)
                    else:
                        group = first_r // GROUP_K
                        part = result(dot(h, values, accumulator(BLOCK_M, BLOCK_N, LEFT), LEFT, INTERPRET), LEFT)
                        part *= tl.load(scale_ptrs + group * scale_k, mask=mask_n, other=0.0)[None, :]
                        if HAS_A:
                            part *= tl.load(a_scale_ptrs + group * stride_ag)[:, None]
                        total += part
                if GROUP_K == 0:
                    total = result(acc, LEFT) * tl.load(scale_ptrs, mask=mask_n, other=0.0)[None, :]
                    if HAS_A:
                        total *= tl.load(a_scale_ptrs)[:, None]
                if ADD:
                    total += tl.load(y_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
                tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
                offs_n += BLOCK_N
                y_ptrs += BLOCK_N
                b_ptrs += BLOCK_N * (R if ROW_MAJOR else 1)
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:
                tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_fp8_rows_kernel(
    h_ptr, operands, y_ptr, mapping_ptr, ranks_ptr,
    num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
    R: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, SCALE_L: tl.constexpr, SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PLANES: tl.constexpr, HAS_A: tl.constexpr,
    HAS_RANKS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows, one by one."""
    pid = tl.program_id(0)
    row = (pid // NUM_BLOCKS).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    _expand_row_of(
        h_ptr, operands, y_ptr, ranks_ptr, row, slot, pid % NUM_BLOCKS, pid == 0,
        num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
        R, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
        VECTOR, BLOCK_N, BLOCK_R, PLANES, HAS_A, HAS_RANKS, ADD, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_segments", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_fp8_search_kernel(
    h_ptr, operands, y_ptr, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr,
    num_segments, num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
    R: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, SCALE_L: tl.constexpr, SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, VECTOR: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILES_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, PLANES: tl.constexpr, HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All tiles; every program searches the segments for its own."""
    pid = tl.program_id(0)
    tile = pid // NUM_BLOCKS
    slot, start, num_rows = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, BLOCK_SEGMENTS)
    _expand_tile(
        h_ptr, operands, y_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, pid % NUM_BLOCKS, pid == 0,
        num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
        R, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
        DTYPE, VECTOR, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, NUM_STAGES, PLANES, HAS_A, HAS_RANKS, ADD, PDL, LEFT,
        INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_expand_fp8_listed_kernel(
    h_ptr, operands, y_ptr, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tiles, num_rows, num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
    R: tl.constexpr, WIDTHS: tl.constexpr, COLUMNS: tl.constexpr, NUM_SLICES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, ROW_MAJOR: tl.constexpr, SCALE_L: tl.constexpr, SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, VECTOR: tl.constexpr, TILES_AT: tl.constexpr, ROWS_AT: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILES_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, SHORT_BLOCKS: tl.constexpr, SHORT_N: tl.constexpr, SHORT_R: tl.constexpr,
    PLANES: tl.constexpr, HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
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
                num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
                R, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT,
                X_FORMAT, DTYPE, VECTOR, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, NUM_STAGES, PLANES, HAS_A,
                HAS_RANKS, ADD, PDL, LEFT, INTERPRET,
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
                num_slots, stride_hp, stride_hs, stride_ht, stride_hr, stride_yt, stride_at, stride_ag,
                R, WIDTHS, COLUMNS, NUM_SLICES, ROW_MAJOR, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT,
                X_FORMAT, VECTOR, SHORT_N, SHORT_R, PLANES, HAS_A, HAS_RANKS, ADD, PDL,
            )  # fmt: skip
            item += num_rows
            record = tl.load(rows_ptr + item, mask=item < total, other=0)


def _row_blocks(block_n: int, warps: int, rank: int, row_major: bool, programs_at: Any) -> tuple[int, int]:
    """Columns of a program that takes one row, and how many ranks it reads at once: 4 KiB a warp.

    By ranks, threads hold 8 neighbouring columns or more, so 256 for each warp unless that leaves the device idle; by
    rows the ranks of a column are read at once.
    """
    lanes = block_at_least(rank)
    if row_major:
        return block_n, lanes
    block_n = max(block_n, 256 * warps)
    while block_n > 64 * warps and programs_at(block_n) < 512:
        block_n //= 2
    return block_n, min(lanes, max(16, 4096 * warps // block_n))


def plan_expand_fp8(
    h_shape: Sequence[int], h_strides: Sequence[int], h_dtype: torch.dtype, y: Tensor, weights: Weights, lie: Scales,
    scheme: Scheme, a_strides: tuple[int, int] | None, batch: Batch,
    config: dict[str, Any],
    *,
    offset_start: int, add_inputs: bool, has_ranks: bool,
    pdl: bool = False,
) -> KernelPlan:  # fmt: skip
    """The launch that `config` (made for 16-bit weights) names; ``a_strides`` as in `plan_shrink_fp8`, the others as in
    `lora_expand.plan_expand`.
    """
    rank, slices = weights.rank, len(weights.widths)
    planes, _, tokens, _ = h_shape
    strides = (*h_strides, y.stride(0), *(a_strides or (0, 0)))
    columns = tuple(accumulate(weights.widths[:-1], initial=offset_start))
    constants: dict[str, Any] = {"R": rank, "WIDTHS": weights.widths, "COLUMNS": columns, "NUM_SLICES": slices}
    constants |= scale_constants(lie, scheme, rank, a_strides is not None)
    constants |= {"FORMAT": fp8_format(weights.dtype), "X_FORMAT": fp8_format(h_dtype), "PLANES": planes}
    constants |= {"ROW_MAJOR": weights.row_major, "VECTOR": gcd(rank, 16) if weights.row_major else 1}
    constants |= {"HAS_RANKS": has_ranks, "ADD": add_inputs, "PDL": pdl}
    shared: dict[str, Any] = {"num_warps": config["num_warps"], "pdl": pdl, "device": weights.device}
    dtypes = (h_dtype, weights.dtype, y.dtype)
    most_r = scheme.group_k if constants["GROUP_K"] else 128  # ranks of one block

    def blocks(block_n: int) -> int:
        """Blocks of this many columns in all slices."""
        return sum([triton.cdiv(width, block_n) for width in weights.widths])

    def row_blocks(block_n: int, rows: int) -> tuple[int, int]:
        """Columns and ranks of a program of a row."""
        width, lanes = _row_blocks(
            block_n, config["num_warps"], rank, weights.row_major, lambda columns: rows * blocks(columns)
        )
        return width, min(lanes, max(16, most_r) if constants["GROUP_K"] else lanes)

    if config["row_wise"]:
        block_n, block_r = row_blocks(config["block_n"], tokens)
        constants |= {"BLOCK_N": block_n, "BLOCK_R": block_r, "NUM_BLOCKS": blocks(block_n)}
        launch = Launch(
            _lora_expand_fp8_rows_kernel, (tokens * blocks(block_n), 1, 1), dtypes, strides, constants, **shared
        )
        return RowsPlan(launch, (weights.slots,))

    wide = _wide(h_dtype, y.dtype)
    most_r = min(most_r, 128 if wide.itemsize == 2 else 16)
    # in a loop over ranks 64 at most: B lies in registers while it is made wide
    block_m, block_r = config["block_m"], block_at_least(rank) if rank <= most_r else min(config["block_k"], most_r, 64)
    block_n, tiles_n = config["block_n"], config["tiles_n"]
    even = all([width % (block_n * tiles_n) == 0 for width in weights.widths])
    row_bytes = block_n * y.element_size() if rank <= block_r else block_r * planes * h_dtype.itemsize
    stage_bytes = block_n * block_r * wide.itemsize + block_m * row_bytes  # B, and old y or the planes of h
    stages = stages_that_fit(config["num_stages"], stage_bytes, weights.device)
    per_tile = blocks(block_n * tiles_n)
    constants |= {"NUM_BLOCKS": per_tile, "EVEN_N": even, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_R": block_r}
    constants |= {"TILES_N": tiles_n, "NUM_STAGES": stages, "LEFT": config["weights_left"], "INTERPRET": INTERPRETED}
    constants |= {"DTYPE": TYPES[wide]}
    if batch.listed and block_m in HEIGHTS:
        height, short_n = HEIGHTS.index(block_m), config["short_n"]
        constants |= {"TILES_AT": 2 * height + (short_n > 0), "ROWS_AT": TOTALS - 1}
        short_r, per_row = 0, 0
        if short_n:
            short_n, short_r = row_blocks(short_n, min(tokens, LONG * batch.shape.short))
            per_row = blocks(short_n)
        constants |= {"SHORT_N": short_n, "SHORT_R": short_r, "SHORT_BLOCKS": per_row}
        launch = Launch(_lora_expand_fp8_listed_kernel, None, dtypes, strides, constants, **shared)
        return ListedPlan(launch, height, per_tile, per_row, 1, (), (weights.slots,))
    segments = batch.max_segments
    constants |= {"BLOCK_SEGMENTS": block_at_least(batch.tensors[4].numel())}
    grid = (max_tiles(tokens, segments, block_m) * per_tile, 1, 1)
    launch = Launch(_lora_expand_fp8_search_kernel, grid, dtypes, strides, constants, **shared)
    return SearchPlan(launch, (segments, weights.slots))


def _wide(h_dtype: torch.dtype, y_dtype: torch.dtype) -> torch.dtype:
    """What h and B are multiplied as on the tensor cores: FP8 fits float16, a float32 h is rounded to what y is."""
    if h_dtype in FP8_DTYPES:
        return torch.float16
    return y_dtype if h_dtype == torch.float32 else h_dtype


def _describe(names: Names, lora_b: Sequence[Tensor], b_scale: Sequence[Tensor]) -> tuple[Weights, tuple[Form, ...]]:
    return describe_stored(names.b, lora_b, -1, FP8_DTYPES), forms_of("b_scale", b_scale)


def _plan(call: Call, forms: tuple[Weights, tuple[Form, ...]]) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to add."""
    names, x, y, lora_ranks, batch, (offset_start, add_inputs, scheme, a_scale, options) = call
    weights, scales = forms
    scheme.check()
    lie = check_scales("b_scale", scales, weights, False, scheme)
    a_strides = check_activation(names.input, x, a_scale, weights.rank, scheme, weights)
    check_group_k(scheme, weights.rank)
    check_stored_output(names.output, y, weights, offset_start)
    tokens, rank, width = y.shape[0], weights.rank, max(weights.widths)
    check_low_rank(names.input, x, weights, tokens, (x.dtype,))
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, rank, batch.max_segments, width):
        return None
    config = choose(
        "expand", batch.shape, tokens, width, rank, len(weights.widths), options, add_inputs, 1, weights.row_major
    )
    return plan_expand_fp8(
        (1, *x.shape), (0, *x.stride()), x.dtype, y, weights, lie, scheme, None if a_scale is None else a_strides,
        batch, config, offset_start=offset_start, add_inputs=add_inputs, has_ranks=lora_ranks is not None,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_expand_fp8")
def expand_fp8(
    x: Tensor, lora_b_stacked: Sequence[Tensor], y: Tensor, batch: Batch,
    offset_start: int = 0, add_inputs: bool = True,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_expand_fp8` on a step: arguments as of `punica.ops.fp8_ops.expand_fp8`."""
    if batch.no_lora:
        return
    if is_plain(lora_b_stacked, b_scale):
        check_plain(names_of(batch).input, x, a_scale, scheme)
        expand(x, lora_b_stacked, y, batch, offset_start, add_inputs, lora_ranks=lora_ranks, options=options)
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {"b_scale": b_scale or [], "a_scale": a_scale, **scheme._asdict(), "offset_start": offset_start}
        given |= {"add_inputs": add_inputs, "lora_ranks": lora_ranks, **chosen}
        call_flat(lora_expand_fp8, (x, lora_b_stacked, y), batch, y.shape[0], **given)
        return
    a_form = None if a_scale is None else form_of("a_scale", a_scale)
    scales = () if b_scale is None else b_scale
    switches = (offset_start, add_inputs, scheme, a_form, options)
    plan, aligned = _PLANS.find(x, y, (lora_b_stacked, scales), lora_ranks, batch, switches)
    if plan is not None:
        aligned = aligned and (a_scale is None or not a_scale.data_ptr() & 15)
        with on_device(x.get_device()):
            plan.run(as_operand(x), operands(lora_b_stacked, scales, a_scale), y, batch, lora_ranks, aligned)


@custom_op(mutates="output_tensor")
def lora_expand_fp8(
    inputs: Tensor, lora_b_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    b_scale: Sequence[Tensor], a_scale: Tensor | None = None, offset_start: int = 0, add_inputs: bool = False,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, lora_ranks: Tensor | None = None, batch_invariant: bool = False, tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[t, o_i : o_i + N_i] (+)= inputs[i, t] @ B_i[slot(t)]^T`` for every slice i, B in FP8, in place.

    Args:
        inputs: [n, T, r] float16, bfloat16 or float32, or (``use_fp8_w8a8``) float8 with ``a_scale``; any strides.
        lora_b_weights: n x [L, (1,) N_i, r], all float8_e4m3fn or all float8_e5m2, contiguous (or with the last two
            dimensions swapped). Without ``b_scale`` weights of `lora_expand`, and its result.
        output_tensor: [T, W] with last stride 1; ``o_0 = offset_start``, ``o_{i+1} = o_i + N_i``.
        token_lora_mapping, ..., num_active_loras: the seven of `LoRAKernelMeta.meta_args`.
        b_scale: n float32 tensors [L] (per tensor), [L, N_i] (``per_channel_quant``) or [L, ceil(N_i/group_n),
            ceil(r/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: as in `lora_shrink_fp8`, K the rank; all slices of a row share its scales.
        offset_start, add_inputs, lora_ranks, batch_invariant, tuned_dir: as in `lora_expand`.
        group_k, group_n: as in `lora_shrink_fp8`.

    Rows at slot -1 and all other columns are never written. Errors as in `lora_shrink_fp8`.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    expand_fp8(
        inputs, lora_b_weights, output_tensor, batch, offset_start, add_inputs,
        b_scale=b_scale, a_scale=a_scale, scheme=Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant),
        lora_ranks=lora_ranks, options=Options(batch_invariant, tuned_dir=tuned_dir),
    )  # fmt: skip
