"""Shrink with A in FP8: hidden size to rank, for every adapter of the batch in one launch.

    out[i, t, c] = scaling * a(t) * b_i[l, c] * sum_k x[t, k] * A_i[l, c, k]       l = slot(t), A_i [L, r, K] float8

and the other modes of `punica.ops.fp8_checks`. The forms are those of `punica.ops.triton_ops.lora_shrink`, *rows* and
*tiles*, with true ranks, planes and programmatic dependent launch as there. A program reads FP8 in wide vectors, makes
it wide in registers and multiplies; scales come after the sum over K, or where K has blocks, after the sum over each.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import HEIGHTS, LoRABatch
from punica.metadata.work import TOTALS
from punica.ops.checks import FLOATS, Names, Weights, check_input, check_low_rank, check_ranks, describe_stored
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
from punica.ops.triton_ops.lora_shrink import _store_shrunk, shrink
from punica.ops.triton_ops.op import Call, Options, Plans, call_flat, custom_op, is_traced, named, names_of
from punica.ops.triton_ops.plan import Batch, KernelPlan, ListedPlan, RowsPlan, SearchPlan
from punica.ops.triton_ops.tensor_batch import TensorBatch


@triton.jit
def _shrink_row(
    x_ptr, operands, out_ptr, ranks_ptr, row, slot, pid_k, pid_r, pid_slice, idle_waits,
    num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
    K: tl.constexpr, R: tl.constexpr, STRIDE_AR: tl.constexpr, STRIDE_AK: tl.constexpr, NUM_SLICES: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, DIRECT: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x BLOCK_R ranks x one K split. DIRECT: `out` is the result (absent lanes and rows are zeros), not planes.
    ``idle_waits``: this program waits for the kernel in front even when it has nothing to do. Slots of up to 16 ranks
    are read whole, so that reading them does not wait for the table.
    """
    WHOLE: tl.constexpr = HAS_RANKS and R <= 16
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    rank = rank_of(ranks_ptr, pid_slice, slot, num_slots, R, HAS_RANKS)
    lanes = tl.where(slot >= 0, R, 0) if WHOLE else rank
    offs_r = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    out_ptrs = out_ptr + ((pid_k * NUM_SLICES + pid_slice) * num_tokens.to(tl.int64) + row) * R + offs_r

    if pid_r * BLOCK_R < lanes:
        offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptr = pick(operands, pid_slice, NUM_SLICES) + slot.to(tl.int64) * (R * K)
        a_block = a_ptr + offs_r[:, None] * STRIDE_AR + offs_k[None, :] * STRIDE_AK
        x_ptrs = x_ptr + row * stride_xt + offs_k * stride_xk
        scale_ptr, scale_n, scale_k = scales_of(operands, pid_slice, slot, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K)
        scale_ptrs = scale_ptr + offs_r // GROUP_N * scale_n
        mask_r = offs_r < lanes
        mask_k = offs_k < (1 << 30 if EVEN_K else K)
        if GROUP_K == 0:
            a = tl.load(a_block, mask=mask_r[:, None] & mask_k[None, :], other=0.0)
            scale = tl.load(scale_ptrs, mask=mask_r, other=0.0)
        if PDL:  # A was written long before; x and its scales may come from the kernel in front of this one
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if GROUP_K == 0:
            x = tl.load(x_ptrs, mask=mask_k, other=0.0)
            product = widened(a, FORMAT, tl.float32) * widened(x, X_FORMAT, tl.float32)[None, :]
            for step in tl.range(1, STEPS):
                jump = step * (BLOCK_K * SPLIT_K)
                mask_step = offs_k < K - jump
                a_step = tl.load(a_block + jump * STRIDE_AK, mask=mask_r[:, None] & mask_step[None, :], other=0.0)
                x_step = tl.load(x_ptrs + jump * stride_xk, mask=mask_step, other=0.0)
                product += widened(a_step, FORMAT, tl.float32) * widened(x_step, X_FORMAT, tl.float32)[None, :]
            if HAS_A:
                scale *= tl.load(pick_from(operands, 0, 2 * NUM_SLICES, 1) + row * stride_at)
            total = tl.sum(product, 1) * scale
        else:
            SPAN: tl.constexpr = min(BLOCK_K, GROUP_K)
            GROUPS: tl.constexpr = BLOCK_K // SPAN
            total = tl.zeros([BLOCK_R], tl.float32)
            for step in tl.range(0, STEPS):
                jump = step * (BLOCK_K * SPLIT_K)
                mask_step = offs_k < K - jump
                a_step = tl.load(a_block + jump * STRIDE_AK, mask=mask_r[:, None] & mask_step[None, :], other=0.0)
                x_step = tl.load(x_ptrs + jump * stride_xk, mask=mask_step, other=0.0)
                products = widened(a_step, FORMAT, tl.float32) * widened(x_step, X_FORMAT, tl.float32)[None, :]
                parts = tl.sum(tl.reshape(products, (BLOCK_R, GROUPS, SPAN)), 2)
                offs_g = (pid_k * BLOCK_K + jump) // GROUP_K + tl.arange(0, GROUPS)
                mask_g = offs_g * GROUP_K < K
                scales = tl.load(
                    scale_ptrs[:, None] + offs_g[None, :] * scale_k, mask=mask_r[:, None] & mask_g[None, :], other=0.0
                )
                if HAS_A:
                    a_scale_ptr = pick_from(operands, 0, 2 * NUM_SLICES, 1) + row * stride_at
                    scales *= tl.load(a_scale_ptr + offs_g * stride_ag, mask=mask_g, other=0.0)[None, :]
                total += tl.sum(parts * scales, 1)
        total *= scaling
        if WHOLE and DIRECT:
            total = tl.where(offs_r < rank, total, 0.0)
        _store_shrunk(out_ptrs, total, offs_r < (R if DIRECT else rank), ACCUMULATE)
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:
                tl.extra.cuda.gdc_wait()
        if DIRECT and not ACCUMULATE:
            tl.store(out_ptrs, tl.zeros([BLOCK_R], out_ptr.dtype.element_ty), mask=offs_r < R)


@triton.jit
def _shrink_tile(
    x_ptr, operands, out_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, pid_k, first_r, pid_slice, idle_waits,
    num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
    K: tl.constexpr, R: tl.constexpr, STRIDE_AR: tl.constexpr, STRIDE_AK: tl.constexpr, NUM_SLICES: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_A: tl.constexpr,
    HAS_RANKS: tl.constexpr, DIRECT: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr, LEFT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The rows of one tile x BLOCK_R ranks x one K split. A tile of K lies in one block of the scales."""
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_m = tl.arange(0, BLOCK_M)
    rank = rank_of(ranks_ptr, pid_slice, slot, num_slots, R, HAS_RANKS)
    if (slot >= 0) & ((first_r < rank) | DIRECT):
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptr = pick(operands, pid_slice, NUM_SLICES) + slot.to(tl.int64) * (R * K)
        a_block = a_ptr + offs_r[None, :] * STRIDE_AR + offs_k[:, None] * STRIDE_AK
        x_ptrs = x_ptr + rows[:, None] * stride_xt + offs_k[None, :] * stride_xk
        scale_ptr, scale_n, scale_k = scales_of(operands, pid_slice, slot, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K)
        scale_ptrs = scale_ptr + offs_r // GROUP_N * scale_n
        a_scale_ptrs = pick_from(operands, 0, 2 * NUM_SLICES, 1) + rows * stride_at
        mask_r = offs_r < rank
        acc = accumulator(BLOCK_M, BLOCK_R, LEFT)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
                a = tl.load(a_block, mask=mask_r[None, :], other=0.0)
            else:
                mask_k = offs_k < K - step * (BLOCK_K * SPLIT_K)
                x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
                a = tl.load(a_block, mask=mask_r[None, :] & mask_k[:, None], other=0.0)
            x, a = widened(x, X_FORMAT, DTYPE), widened(a, FORMAT, DTYPE)
            if GROUP_K == 0:
                acc = dot(x, a, acc, LEFT, INTERPRET)
            else:
                group = (pid_k + step * SPLIT_K) * BLOCK_K // GROUP_K
                mask_g = group * GROUP_K < K
                scale = tl.load(scale_ptrs + group * scale_k, mask=mask_r & mask_g, other=0.0)
                part = result(dot(x, a, accumulator(BLOCK_M, BLOCK_R, LEFT), LEFT, INTERPRET), LEFT) * scale[None, :]
                if HAS_A:
                    part *= tl.load(a_scale_ptrs + group * stride_ag, mask=mask_m & mask_g, other=0.0)[:, None]
                total += part
            x_ptrs += BLOCK_K * SPLIT_K * stride_xk
            a_block += BLOCK_K * SPLIT_K * STRIDE_AK
        if GROUP_K == 0:
            total = result(acc, LEFT) * tl.load(scale_ptrs, mask=mask_r, other=0.0)[None, :]
            if HAS_A:
                total *= tl.load(a_scale_ptrs)[:, None]
        out_ptr += (pid_k * NUM_SLICES + pid_slice) * num_tokens.to(tl.int64) * R
        out_ptrs = out_ptr + rows[:, None] * R + offs_r[None, :]
        mask = mask_m[:, None] & (offs_r < (R if DIRECT else rank))[None, :]
        _store_shrunk(out_ptrs, total * scaling, mask, ACCUMULATE)
    else:
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if idle_waits:
                tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _lora_shrink_fp8_rows_kernel(
    x_ptr, operands, out_ptr, mapping_ptr, ranks_ptr,
    num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
    K: tl.constexpr, R: tl.constexpr, STRIDE_AR: tl.constexpr, STRIDE_AK: tl.constexpr, NUM_SLICES: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, DIRECT: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows, one by one."""
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    pid_k, pid_r = pid % SPLIT_K, (pid // SPLIT_K) % R_BLOCKS
    row = (pid // (SPLIT_K * R_BLOCKS)).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    _shrink_row(
        x_ptr, operands, out_ptr, ranks_ptr, row, slot, pid_k, pid_r, pid_slice, (pid == 0) & (pid_slice == 0),
        num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
        K, R, STRIDE_AR, STRIDE_AK, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
        BLOCK_R, BLOCK_K, SPLIT_K, HAS_A, HAS_RANKS, DIRECT, ACCUMULATE, PDL,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_segments", "num_tiles", "num_slots"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_fp8_search_kernel(
    x_ptr, operands, out_ptr, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr,
    num_tokens, num_segments, num_tiles, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
    K: tl.constexpr, R: tl.constexpr, STRIDE_AR: tl.constexpr, STRIDE_AK: tl.constexpr, NUM_SLICES: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, HAS_A: tl.constexpr, HAS_RANKS: tl.constexpr, DIRECT: tl.constexpr,
    ACCUMULATE: tl.constexpr, PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All tiles; every program searches the segments for its own. With DIRECT, programs past the tiles zero bare
    rows.
    """
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    pid_k, first_r = pid % SPLIT_K, (pid // SPLIT_K) % R_BLOCKS * BLOCK_R
    tile = pid // (SPLIT_K * R_BLOCKS)
    if tile < num_tiles:
        slot, start, num_rows = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, BLOCK_SEGMENTS)
        _shrink_tile(
            x_ptr, operands, out_ptr, sorted_ptr, ranks_ptr, slot, start, num_rows, pid_k, first_r, pid_slice,
            (pid == 0) & (pid_slice == 0),
            num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
            K, R, STRIDE_AR, STRIDE_AK, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
            DTYPE, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT_K, NUM_STAGES, HAS_A, HAS_RANKS, DIRECT, ACCUMULATE, PDL, LEFT,
            INTERPRET,
        )  # fmt: skip
    else:
        rows = (tile - num_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_r = first_r + tl.arange(0, BLOCK_R)
        bare = (rows < num_tokens) & (tl.load(mapping_ptr + rows, mask=rows < num_tokens, other=0) < 0)
        out_ptrs = out_ptr + (pid_slice * num_tokens.to(tl.int64) + rows)[:, None] * R + offs_r[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=bare[:, None] & (offs_r < R)[None, :])


@triton.jit(
    do_not_specialize=["num_tokens", "num_tiles", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _lora_shrink_fp8_listed_kernel(
    x_ptr, operands, out_ptr, sorted_ptr, tiles_ptr, rows_ptr, totals_ptr, ranks_ptr,
    num_tokens, num_tiles, num_rows, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
    K: tl.constexpr, R: tl.constexpr, STRIDE_AR: tl.constexpr, STRIDE_AK: tl.constexpr, NUM_SLICES: tl.constexpr,
    SCALE_L: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, DTYPE: tl.constexpr, TILES_AT: tl.constexpr, ROWS_AT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SHORT_R: tl.constexpr, SHORT_K: tl.constexpr, HAS_A: tl.constexpr,
    HAS_RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr, LEFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The tiles of a step's list, by programs for ``num_tiles`` of them, which go on where there are more; and with
    SHORT_K, where the list holds long segments only, the rows of the short ones, by programs for ``num_rows``.
    """
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid, pid_slice = tl.program_id(0), tl.program_id(1)
    first = (pid == 0) & (pid_slice == 0)
    tile_programs = num_tiles * (SPLIT_K * R_BLOCKS)
    if pid < tile_programs:
        pid_k = pid % SPLIT_K
        tile, first_r = pid // (SPLIT_K * R_BLOCKS), (pid // SPLIT_K) % R_BLOCKS * BLOCK_R
        record = tl.load(tiles_ptr + tile)
        total = tl.load(totals_ptr + TILES_AT)
        if PDL:  # noqa: SIM102 (PDL is decided at compile time)
            if first & (tile >= total):
                tl.extra.cuda.gdc_wait()
        while tile < total:
            slot, start, tile_rows = read_record(record)
            _shrink_tile(
                x_ptr, operands, out_ptr, sorted_ptr, ranks_ptr, slot, start, tile_rows, pid_k, first_r, pid_slice,
                first, num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
                K, R, STRIDE_AR, STRIDE_AK, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
                DTYPE, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT_K, NUM_STAGES, HAS_A, HAS_RANKS, False, ACCUMULATE, PDL, LEFT,
                INTERPRET,
            )  # fmt: skip
            tile += num_tiles
            record = tl.load(tiles_ptr + tile, mask=tile < total, other=0)
    elif SHORT_K > 0:
        pid -= tile_programs
        SHORT_BLOCKS: tl.constexpr = (R + SHORT_R - 1) // SHORT_R
        item, pid_r = pid // (SPLIT_K * SHORT_BLOCKS), pid // SPLIT_K % SHORT_BLOCKS
        record = tl.load(rows_ptr + item)
        total = tl.load(totals_ptr + ROWS_AT)
        while item < total:
            slot, row, _ = read_record(record)
            _shrink_row(
                x_ptr, operands, out_ptr, ranks_ptr, row.to(tl.int64), slot, pid % SPLIT_K, pid_r, pid_slice, False,
                num_tokens, num_slots, scaling, stride_xt, stride_xk, stride_at, stride_ag,
                K, R, STRIDE_AR, STRIDE_AK, NUM_SLICES, SCALE_L, SCALE_N, SCALE_K, GROUP_N, GROUP_K, FORMAT, X_FORMAT,
                SHORT_R, SHORT_K, SPLIT_K, HAS_A, HAS_RANKS, False, ACCUMULATE, PDL,
            )  # fmt: skip
            item += num_rows
            record = tl.load(rows_ptr + item, mask=item < total, other=0)


def fp8_shrink_config(config: dict[str, Any], k: int, rank: int) -> dict[str, Any]:
    """A configuration of `lora_shrink` for weights of half the bytes. Where rows are taken one by one, a program has at
    most 32 Ki elements, a thread about 128: as many bytes in flight as the registers of wide values leave room for.
    """
    if not config["row_wise"]:
        return config
    block_k = min(config["block_k"], block_at_least(k))
    block_r = max(1, min(config["block_r"], block_at_least(rank, 1), (32 << 10) // block_k))
    warps = max(1, min(8, block_r * block_k // 4096))
    return config | {"block_k": block_k, "block_r": block_r, "num_warps": warps}


def plan_shrink_fp8(
    x: Tensor, weights: Weights, lie: Scales, scheme: Scheme, a_strides: tuple[int, int] | None,
    out_dtype: torch.dtype, batch: Batch, config: dict[str, Any],
    *,
    has_ranks: bool, direct: bool,
    accumulate: bool = False, overlap: bool = False, early: bool = False,
) -> KernelPlan:  # fmt: skip
    """The launch that `config` (made for 16-bit weights) names; ``a_strides``: of a_scale along rows and groups, None
    without. The others as in `lora_shrink.plan_shrink`.
    """
    tokens, rank, k, slices = x.shape[0], weights.rank, weights.widths[0], len(weights.widths)
    config = fp8_shrink_config(config, k, rank)
    split_k = 1 if direct else config["split_k"]
    stride_ar, stride_ak = (k, 1) if weights.row_major else (1, rank)
    constants: dict[str, Any] = {"K": k, "R": rank, "STRIDE_AR": stride_ar, "STRIDE_AK": stride_ak}
    constants |= scale_constants(lie, scheme, k, a_strides is not None)
    constants |= {"NUM_SLICES": slices, "FORMAT": fp8_format(weights.dtype), "X_FORMAT": fp8_format(x.dtype)}
    constants |= {"SPLIT_K": split_k, "HAS_RANKS": has_ranks, "ACCUMULATE": accumulate, "PDL": overlap}
    shared: dict[str, Any] = {"num_warps": config["num_warps"], "pdl": early, "device": weights.device}
    dtypes, strides = (weights.dtype, x.dtype, out_dtype), (*x.stride(), *(a_strides or (0, 0)))
    if config["row_wise"]:
        block_r = config["block_r"]
        constants |= {"BLOCK_R": block_r, "BLOCK_K": config["block_k"], "DIRECT": direct}
        grid = (tokens * triton.cdiv(rank, block_r) * split_k, slices, 1)
        launch = Launch(_lora_shrink_fp8_rows_kernel, grid, dtypes, strides, constants, **shared)
        return RowsPlan(launch, (tokens, weights.slots))

    wide = torch.float16 if x.dtype in FP8_DTYPES else x.dtype
    block_m, block_r = config["block_m"], min(config["block_n"], block_at_least(rank))
    block_k, bytes_of = min(config["block_k"], block_at_least(k)), block_m * x.element_size() + block_r
    if constants["GROUP_K"]:
        block_k = min(block_k, scheme.group_k)
    if config["weights_left"]:  # K lies interleaved over the splits: the block decides what each of them sums
        block_k = min(block_k, 128)
    while block_k > 32 and block_k * (block_m + block_r) * wide.itemsize > 64 << 10:  # wide elements
        block_k //= 2
    stages = stages_that_fit(config["num_stages"], block_k * bytes_of, weights.device)
    per_tile = triton.cdiv(rank, block_r) * split_k
    constants |= {"BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_K": block_k, "NUM_STAGES": stages}
    constants |= {"LEFT": config["weights_left"], "INTERPRET": INTERPRETED, "DTYPE": TYPES[wide]}
    if batch.listed and block_m in HEIGHTS and (accumulate or not direct):
        height, short_k = HEIGHTS.index(block_m), min(config["short_k"], block_at_least(k))
        short_r = min(config["block_r"], block_at_least(rank, 1))
        constants |= {"TILES_AT": 2 * height + (short_k > 0), "ROWS_AT": TOTALS - 1}
        constants |= {"SHORT_K": short_k, "SHORT_R": short_r}
        launch = Launch(_lora_shrink_fp8_listed_kernel, None, dtypes, strides, constants, **shared)
        per_row = triton.cdiv(rank, short_r) * split_k if short_k else 0
        return ListedPlan(launch, height, per_tile, per_row, slices, (tokens,), (weights.slots,))
    segments = batch.max_segments
    tiles = max_tiles(tokens, segments, block_m)
    bare_tiles = triton.cdiv(tokens, block_m) if direct and not accumulate else 0
    constants |= {"BLOCK_SEGMENTS": block_at_least(batch.tensors[4].numel()), "DIRECT": direct}
    grid = ((tiles + bare_tiles) * per_tile, slices, 1)
    launch = Launch(_lora_shrink_fp8_search_kernel, grid, dtypes, strides, constants, **shared)
    return SearchPlan(launch, (tokens, segments, tiles, weights.slots))


def _describe(names: Names, lora_a: Sequence[Tensor], b_scale: Sequence[Tensor]) -> tuple[Weights, tuple[Form, ...]]:
    return describe_stored(names.a, lora_a, -2, FP8_DTYPES), forms_of("b_scale", b_scale)


def _plan(call: Call, forms: tuple[Weights, tuple[Form, ...]]) -> KernelPlan | None:
    """The remaining checks, then the launch; None when there is nothing to multiply."""
    names, x, y, lora_ranks, batch, (accumulate, scheme, a_scale, options) = call
    weights, scales = forms
    scheme.check()
    lie = check_scales("b_scale", scales, weights, True, scheme)
    a_strides = check_activation(names.input, x, a_scale, weights.widths[0], scheme, weights)
    check_group_k(scheme, weights.widths[0])
    check_input(names.input, x, weights._replace(dtype=x.dtype), names.a)
    (tokens, k), segments = x.shape, batch.max_segments
    check_low_rank(names.output, y, weights, tokens, FLOATS)
    if not y.is_contiguous():
        raise ValueError(f"{names.output} must be contiguous, got shape {tuple(y.shape)} with strides {y.stride()}")
    batch.check_tensors(tokens, x.device)
    check_ranks(lora_ranks, weights)
    if 0 in (tokens, k, weights.rank, segments):
        return None
    sizes = tokens, k, weights.rank, len(weights.widths)
    config = choose("shrink", batch.shape, *sizes, options, listed=False)  # slices are not multiplied together here
    return plan_shrink_fp8(
        x, weights, lie, scheme, None if a_scale is None else a_strides, y.dtype, batch, config,
        has_ranks=lora_ranks is not None, direct=True, accumulate=accumulate,
    )  # fmt: skip


_PLANS = Plans(_describe, _plan)


@named("lora_shrink_fp8")
def shrink_fp8(
    x: Tensor, lora_a_stacked: Sequence[Tensor], y: Tensor, batch: Batch, scale: float = 1.0,
    *, b_scale: Sequence[Tensor] | None, a_scale: Tensor | None = None, scheme: Scheme = Scheme(),
    accumulate: bool = False, lora_ranks: Tensor | None = None, options: Options = Options(),
) -> None:  # fmt: skip
    """`lora_shrink_fp8` on a step: arguments as of `punica.ops.fp8_ops.shrink_fp8`."""
    if batch.no_lora:
        if isinstance(batch, LoRABatch) and not accumulate:
            y.zero_()  # with the flag of the flat form set, nothing is written
        return
    if is_plain(lora_a_stacked, b_scale):
        check_plain(names_of(batch).input, x, a_scale, scheme)
        shrink(x, lora_a_stacked, y, batch, scale, accumulate=accumulate, lora_ranks=lora_ranks, options=options)
        return
    if isinstance(batch, LoRABatch) and is_traced():
        chosen = {"batch_invariant": options.batch_invariant, "tuned_dir": options.tuned_dir}
        given = {
            "scaling": scale,
            "b_scale": b_scale or [],
            "a_scale": a_scale,
            **scheme._asdict(),
            "lora_ranks": lora_ranks,
        }
        call_flat(lora_shrink_fp8, (x, lora_a_stacked, y), batch, x.shape[0], **given, accumulate=accumulate, **chosen)
        return
    switches = (accumulate, scheme, None if a_scale is None else form_of("a_scale", a_scale), options)
    scales = () if b_scale is None else b_scale
    plan, aligned = _PLANS.find(x, y, (lora_a_stacked, scales), lora_ranks, batch, switches, scale)
    if plan is not None:
        aligned = aligned and (a_scale is None or not a_scale.data_ptr() & 15)
        with on_device(x.get_device()):
            weights = operands(lora_a_stacked, scales, a_scale)
            plan.run(as_operand(x), weights, y, batch, lora_ranks, aligned, float(scale))
    elif not accumulate:
        y.zero_()


@custom_op(mutates="output_tensor")
def lora_shrink_fp8(
    inputs: Tensor, lora_a_weights: Sequence[Tensor], output_tensor: Tensor, token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor, num_tokens_per_lora: Tensor, lora_token_start_loc: Tensor,
    lora_ids: Tensor, no_lora_flag_cpu: Tensor, num_active_loras: int | Tensor | None,
    scaling: float, b_scale: Sequence[Tensor], a_scale: Tensor | None = None,
    group_k: int = 0, group_n: int = 0, use_fp8_w8a8: bool = False, per_channel_quant: bool = False,
    *, accumulate: bool = False, lora_ranks: Tensor | None = None, batch_invariant: bool = False,
    tuned_dir: str | None = None,
) -> None:  # fmt: skip
    """``output_tensor[i, t] (+)= scaling * inputs[t] @ A_i[slot(t)]^T`` for every slice i, A in FP8, in place.

    Args:
        inputs: [T, K] float16, bfloat16 or float32, or (``use_fp8_w8a8``) float8 with ``a_scale``; any strides.
        lora_a_weights: n x [L, (1,) r, K], all float8_e4m3fn or all float8_e5m2, contiguous (or with the last two
            dimensions swapped). Without ``b_scale`` weights of `lora_shrink`, and its result.
        output_tensor: [n, T, r] contiguous, float32, float16 or bfloat16.
        token_lora_mapping, ..., num_active_loras: the seven of `LoRAKernelMeta.meta_args`.
        scaling: finite factor.
        b_scale: n float32 tensors [L] (per tensor), [L, r] (``per_channel_quant``) or [L, ceil(r/group_n),
            ceil(K/group_k)] (block-wise); a 1 may follow L; any strides.
        a_scale: float32, one element, [T], [T, 1], or block-wise [T, ceil(K/group_k)].
        group_k, group_n: block sizes; group_k a power of two >= 16, or at least K.
        accumulate, lora_ranks, batch_invariant, tuned_dir: as in `lora_shrink`.

    Rows at slot -1: 0, or unchanged with ``accumulate``. With the no-adapter flag set nothing is written. TypeError for
    dtypes, ValueError for shapes, sizes and missing scales, before any write.
    """
    batch = TensorBatch.given(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc, lora_ids,
        flag=no_lora_flag_cpu, count=num_active_loras,
    )  # fmt: skip
    shrink_fp8(
        inputs, lora_a_weights, output_tensor, batch, scaling,
        b_scale=b_scale, a_scale=a_scale, scheme=Scheme(group_k, group_n, use_fp8_w8a8, per_channel_quant),
        accumulate=accumulate, lora_ranks=lora_ranks, options=Options(batch_invariant, tuned_dir=tuned_dir),
    )  # fmt: skip
