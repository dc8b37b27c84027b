"""Shrink as a GEMV: one row of x times ``block_r`` ranks, multiplied and summed without tensor cores.

For segments of single rows: a tensor-core tile of 16 rows would be 15/16 padding, and the time is that of reading A.
"""

import triton
import triton.language as tl

from punica.ops.triton_ops.device import pdl_launch_dependents, pdl_wait, pdl_wait_or_barrier, pick, rank_of
from punica.ops.triton_ops.fp8_device import block_scaled, channel_scales, row_scaled, upcast


@triton.jit
def store_shrunk(out_ptrs, value, mask, ACCUMULATE: tl.constexpr):
    """Store float32 values in the output's type, or add them to it."""
    if ACCUMULATE:
        value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, value.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _read_x(x_ptrs, operands, row, offs_k, mask_k, SHAPE: tl.constexpr):
    """Read elements [BLOCK_K] of a row of x in float32, times their scales."""
    QUANT: tl.constexpr = SHAPE.quant
    x = upcast(tl.load(x_ptrs, mask=mask_k, other=0.0), QUANT.x_format, tl.float32)
    if QUANT.has_a:
        x = row_scaled(x, operands, row, offs_k, mask_k, SHAPE)
    return x


@triton.jit
def _multiply(a, x, operands, place, offs_r, offs_k, mask, SHAPE: tl.constexpr):
    """Compute products [BLOCK_R, BLOCK_K] in float32; block scales are applied, channel scales are not."""
    QUANT: tl.constexpr = SHAPE.quant
    weights = upcast(a, QUANT.format, tl.float32)
    if QUANT.group_k > 0:
        _, slot, slice_id = place
        weights = block_scaled(weights, operands, (slice_id, slot), offs_r, offs_k, mask, SHAPE)
    return weights * x[None, :]


@triton.jit
def _sum_steps(loaded, pointers, operands, place, offsets, masks, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Sum products [BLOCK_R, BLOCK_K] of one block of ranks over the steps of a K split.

    loaded: A and x of the first step; pointers: of both, and the stride of x along K.
    """
    a, x = loaded
    a_ptrs, x_ptrs, stride_xk = pointers
    offs_r, offs_k = offsets
    mask_r, mask_k = masks
    row, _, _ = place
    STRIDE: tl.constexpr = TILE.row.block_k * TILE.split_k
    total = _multiply(a, x, operands, place, offs_r, offs_k, mask_r & mask_k[None, :], SHAPE)
    for step in tl.range(1, (SHAPE.k + STRIDE - 1) // STRIDE):
        jump = step * STRIDE
        mask_k = offs_k < SHAPE.k - jump
        mask = mask_r & mask_k[None, :]
        a = tl.load(a_ptrs + jump * SHAPE.stride_k, mask=mask, other=0.0)  # [BLOCK_R, BLOCK_K]
        x = _read_x(x_ptrs + jump * stride_xk, operands, row, offs_k + jump, mask_k, SHAPE)  # [BLOCK_K]
        total += _multiply(a, x, operands, place, offs_r, offs_k + jump, mask, SHAPE)
    return total


@triton.jit
def shrink_row(tensors, operands, place, block, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute one row x ``block_r`` ranks x one K split, in a grid-stride loop over blocks of ranks up to the true one.

    FP8 has a program per block: loop-carried FP8 values occupy a register each. ``direct``: padding ranks and rows
    without adapter are zero-filled. Slots of up to 16 ranks are read whole, without waiting for the table of ranks.

    place: row, slot and slice; block: K split and block of ranks; call: table of ranks, numbers of rows and slots,
    scaling, and whether this program waits even without work (`pdl_wait`).
    """
    x_ptr, out_ptr = tensors
    row, slot, slice_id = place
    pid_k, pid_r = block
    ranks_ptr, num_tokens, num_slots, scaling, pdl_anchor = call
    stride_xt, stride_xk = strides
    ROW: tl.constexpr = TILE.row
    QUANT: tl.constexpr = SHAPE.quant
    BLOCK_R: tl.constexpr = ROW.block_r
    BLOCK_K: tl.constexpr = ROW.block_k
    LOOP: tl.constexpr = ROW.programs * BLOCK_R < SHAPE.rank
    WHOLE: tl.constexpr = SHAPE.has_ranks and SHAPE.rank <= 16
    CHANNELS: tl.constexpr = QUANT.format > 0 and QUANT.group_k == 0
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    lanes = tl.where(slot >= 0, SHAPE.rank, 0) if WHOLE else rank
    first_r = pid_r * BLOCK_R
    offs_r = first_r + tl.arange(0, BLOCK_R)
    out_ptrs = out_ptr + ((pid_k * SHAPE.slices + slice_id) * num_tokens.to(tl.int64) + row) * SHAPE.out_rank + offs_r
    if first_r < lanes:
        offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptr = pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * (SHAPE.rank * SHAPE.k)
        a_ptrs = a_ptr + offs_r[:, None] * SHAPE.stride_r + offs_k[None, :] * SHAPE.stride_k  # [BLOCK_R, BLOCK_K]
        x_ptrs = x_ptr + row * stride_xt + offs_k * stride_xk  # [BLOCK_K]
        mask_k = offs_k < (1 << 30 if SHAPE.k % (BLOCK_K * TILE.split_k) == 0 else SHAPE.k)
        a = tl.load(a_ptrs, mask=(offs_r < lanes)[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_R, BLOCK_K]
        if CHANNELS:
            scale = channel_scales(operands, slice_id, slot, offs_r, offs_r < lanes, SHAPE.rank, SHAPE)  # [BLOCK_R]
        pdl_wait_or_barrier(TILE.pdl)  # A was written long before; x may be the predecessor's
        pdl_launch_dependents(TILE.pdl)  # after the wait: expand reads early what the predecessor writes, y
        x = _read_x(x_ptrs, operands, row, offs_k, mask_k, SHAPE)  # [BLOCK_K]
        for _ in tl.range(first_r, lanes if LOOP else first_r + 1, ROW.programs * BLOCK_R):
            masks = ((offs_r < lanes)[:, None], mask_k)
            pointers, offsets = (a_ptrs, x_ptrs, stride_xk), (offs_r, offs_k)
            total = _sum_steps((a, x), pointers, operands, place, offsets, masks, SHAPE, TILE)  # [BLOCK_R, BLOCK_K]
            mask_out = offs_r < (SHAPE.rank if SHAPE.direct else rank)
            factor = scaling
            if CHANNELS:
                factor = scale * scaling
            if LOOP:  # load the next ranks before this block's sum is formed
                a_ptrs += ROW.programs * BLOCK_R * SHAPE.stride_r
                offs_r += ROW.programs * BLOCK_R
                a = tl.load(a_ptrs, mask=(offs_r < lanes)[:, None] & mask_k[None, :], other=0.0)
            sums = tl.sum(total, 1) * factor  # [BLOCK_R]
            if WHOLE and SHAPE.direct:
                sums = tl.where(offs_r < rank, sums, 0.0)
            store_shrunk(out_ptrs, sums, mask_out, SHAPE.accumulate)
            out_ptrs += ROW.programs * BLOCK_R
    else:
        pdl_wait(TILE.pdl, pdl_anchor)
        if SHAPE.direct and not SHAPE.accumulate:
            tl.store(out_ptrs, tl.zeros([BLOCK_R], out_ptr.dtype.element_ty), mask=offs_r < SHAPE.rank)
