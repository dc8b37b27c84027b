"""Bodies of the shrink kernel: a GEMV of single rows, and a GEMM of tiles.

**GEMV** (`shrink_row`): one row of x times ``block_r`` ranks, multiplied and summed without tensor cores. For segments
of single rows a tile of 16 would be 15/16 padding, and the time is that of reading A.

**GEMM** (`shrink_tile`): ``block_m`` rows of one segment times ``block_r`` ranks on the tensor cores, with three loops
over K: `_sum_over_k` for any schedule; `_single_step` where one block covers a split of K, so that all of A is loaded
before the PDL wait; `_sum_by_warps` for swap-AB with up to 32 ranks, whose instruction and order of sums depend on no
schedule (batch invariance).
"""

import triton
import triton.language as tl

from punica.ops.triton_ops import device
from punica.ops.triton_ops.fp8_device import activation_scale_ptrs, block_scale_ptrs, channel_scales, row_scaled, upcast


@triton.jit
def store_shrunk(out_ptrs, value, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, value.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _read_x(x_ptrs, operands, row, offs_k, mask_k, SHAPE: tl.constexpr):
    x = upcast(tl.load(x_ptrs, mask=mask_k, other=0.0), SHAPE.quant.x_format, tl.float32)
    if SHAPE.quant.has_a:
        x = row_scaled(x, operands, row, offs_k, mask_k, SHAPE)
    return x


@triton.jit
def _multiply(a, x, operands, place, offs_r, offs_k, mask, SHAPE: tl.constexpr):
    """Compute products [BLOCK_R, BLOCK_K] in float32; block scales are applied, channel scales are not."""
    weights = upcast(a, SHAPE.quant.format, tl.float32)
    if SHAPE.quant.group_k > 0:
        _, slot, slice_id = place
        scale_ptrs, stride = block_scale_ptrs(operands, slice_id, slot, offs_r, SHAPE)
        blocks = (offs_k // SHAPE.quant.group_k)[None, :]
        weights *= tl.load(scale_ptrs[:, None] + blocks * stride, mask=mask, other=0.0)
    return weights * x[None, :]


@triton.jit
def _sum_steps(loaded, pointers, operands, place, offsets, masks, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Sum products [BLOCK_R, BLOCK_K] over a K split. loaded: first blocks of A and x; pointers: also x's K stride."""
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
    BLOCK_R: tl.constexpr = ROW.block_r
    BLOCK_K: tl.constexpr = ROW.block_k
    LOOP: tl.constexpr = ROW.programs * BLOCK_R < SHAPE.rank
    WHOLE: tl.constexpr = SHAPE.has_ranks and SHAPE.rank <= 16
    rank = device.rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    lanes = tl.where(slot >= 0, SHAPE.rank, 0) if WHOLE else rank
    first_r = pid_r * BLOCK_R
    offs_r = first_r + tl.arange(0, BLOCK_R)
    out_ptrs = out_ptr + ((pid_k * SHAPE.slices + slice_id) * num_tokens.to(tl.int64) + row) * SHAPE.out_rank + offs_r
    if first_r < lanes:
        offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
        a_ptr = device.pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * (SHAPE.rank * SHAPE.k)
        a_ptrs = a_ptr + offs_r[:, None] * SHAPE.stride_r + offs_k[None, :] * SHAPE.stride_k  # [BLOCK_R, BLOCK_K]
        x_ptrs = x_ptr + row * stride_xt + offs_k * stride_xk  # [BLOCK_K]
        mask_k = offs_k < (1 << 30 if SHAPE.k % (BLOCK_K * TILE.split_k) == 0 else SHAPE.k)
        a = tl.load(a_ptrs, mask=(offs_r < lanes)[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_R, BLOCK_K]
        scale = channel_scales(operands, slice_id, slot, offs_r, offs_r < lanes, SHAPE.rank, SHAPE)  # [BLOCK_R]
        device.pdl_wait_or_barrier(TILE.pdl)  # A was written long before; x may be the predecessor's
        device.pdl_launch_dependents(TILE.pdl)  # after the wait: expand reads early what the predecessor writes, y
        x = _read_x(x_ptrs, operands, row, offs_k, mask_k, SHAPE)  # [BLOCK_K]
        for _ in tl.range(first_r, lanes if LOOP else first_r + 1, ROW.programs * BLOCK_R):
            masks = ((offs_r < lanes)[:, None], mask_k)
            pointers, offsets = (a_ptrs, x_ptrs, stride_xk), (offs_r, offs_k)
            total = _sum_steps((a, x), pointers, operands, place, offsets, masks, SHAPE, TILE)  # [BLOCK_R, BLOCK_K]
            mask_out = offs_r < (SHAPE.rank if SHAPE.direct else rank)
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
        device.pdl_wait(TILE.pdl, pdl_anchor)
        if SHAPE.direct and not SHAPE.accumulate:
            tl.store(out_ptrs, tl.zeros([BLOCK_R], out_ptr.dtype.element_ty), mask=offs_r < SHAPE.rank)


@triton.constexpr_function
def dtype_of_product(x_type, quant):
    """Return the type in which x and A are multiplied: that of x, float16 for FP8 activations."""
    return tl.float16 if quant.x_format > 0 else x_type


@triton.constexpr_function
def _even_k(shape, tile):
    return shape.k % (tile.block_k * tile.split_k) == 0


@triton.constexpr_function
def _pads_ranks(shape, tile):
    """Tell whether A is read without masks: lanes beyond the rank repeat its last one, and partials are written up to
    the end of the vector in which it ends. Expand drops them. Masks of so many lanes would cost instructions.
    """
    even_k = shape.k % (tile.block_k * tile.split_k) == 0  # no call: Triton 3.6 makes plain tuples of its arguments
    partials = not (shape.direct or shape.accumulate)
    return shape.quant.dense and tile.swap_ab and even_k and tile.block_r > 32 and partials


@triton.jit
def _batched_dot(a, b, acc):
    if device.INTERPRETED:
        acc += tl.sum(a.to(tl.float32)[:, :, :, None] * b.to(tl.float32)[:, None, :, :], 2)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _sum_by_warps(x_ptr, a_lanes, rows, masks, pid_k, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute sums [BLOCK_M, BLOCK_R] of one K split: a batch of WARPS products, one per warp and of its own quarter of
    the split, added up at the end. Neither instruction nor order of the sums depends on block_m or block_k.
    """
    stride_xt, stride_xk = strides
    mask_m, mask_lanes = masks
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = dtype_of_product(x_ptr.dtype.element_ty, QUANT)
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    WARPS: tl.constexpr = 4
    PART: tl.constexpr = TILE.block_k // WARPS
    QUARTER: tl.constexpr = (SHAPE.k + 64 * TILE.split_k * WARPS - 1) // (64 * TILE.split_k * WARPS) * 64
    STEPS: tl.constexpr = (QUARTER + PART - 1) // PART
    first_k = (pid_k * WARPS + tl.arange(0, WARPS)[:, None, None]) * QUARTER
    offs_ak = tl.arange(0, PART)[None, None, :]
    offs_xk = tl.arange(0, PART)[None, :, None]
    a_ptrs = a_lanes[None, :, None] + (first_k + offs_ak) * SHAPE.stride_k  # [WARPS, BLOCK_R, PART]
    x_ptrs = x_ptr + rows[None, None, :] * stride_xt + (first_k + offs_xk) * stride_xk  # [WARPS, PART, BLOCK_M]
    mask_r = mask_lanes[None, :, None]
    mask_rows = mask_m[None, None, :]
    acc = tl.zeros([WARPS, BLOCK_R, BLOCK_M], tl.float32)
    # a [WARPS, BLOCK_R, PART], x [WARPS, PART, BLOCK_M]
    if STEPS == 1:
        a = tl.load(a_ptrs, mask=mask_r & (offs_ak < QUARTER) & (first_k + offs_ak < SHAPE.k), other=0.0)
        device.pdl_wait_then_launch(TILE.pdl)
        x = tl.load(x_ptrs, mask=mask_rows & (offs_xk < QUARTER) & (first_k + offs_xk < SHAPE.k), other=0.0)
        x = upcast(x, QUANT.x_format, DTYPE)
        acc = _batched_dot(upcast(a, QUANT.format, DTYPE), x, acc)
    else:
        device.pdl_wait_then_launch(TILE.pdl)
        for step in tl.range(0, STEPS, num_stages=TILE.stages):
            left = QUARTER - step * PART
            end = SHAPE.k - step * PART
            a = tl.load(a_ptrs, mask=mask_r & (offs_ak < left) & (first_k + offs_ak < end), other=0.0)
            x = tl.load(x_ptrs, mask=mask_rows & (offs_xk < left) & (first_k + offs_xk < end), other=0.0)
            x = upcast(x, QUANT.x_format, DTYPE)
            acc = _batched_dot(upcast(a, QUANT.format, DTYPE), x, acc)
            a_ptrs += PART * SHAPE.stride_k
            x_ptrs += PART * stride_xk
    return tl.trans(tl.sum(acc, 0))  # [BLOCK_M, BLOCK_R]


@triton.jit
def _single_step(x_ptrs, a_ptrs, offs_k, masks, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute sums [BLOCK_M, BLOCK_R] of one K split that one block covers; A is loaded before the PDL wait."""
    mask_m, mask_lanes = masks
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = dtype_of_product(x_ptrs.dtype.element_ty, QUANT)
    acc = device.accumulator(TILE.block_m, TILE.block_r)
    mask_k = offs_k < (1 << 30 if _even_k(SHAPE, TILE) else SHAPE.k)
    a = tl.load(a_ptrs, mask=mask_lanes[None, :] & mask_k[:, None], other=0.0)  # [BLOCK_K, BLOCK_R]
    device.pdl_wait_then_launch(TILE.pdl)
    x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
    return device.dot(upcast(x, SHAPE.quant.x_format, DTYPE), upcast(a, SHAPE.quant.format, DTYPE), acc)


@triton.jit
def _read_block(x_ptrs, a_ptrs, offs_k, end, masks, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Read x [BLOCK_M, BLOCK_K] and A [BLOCK_K, BLOCK_R] of one step, masked only where needed."""
    mask_m, mask_lanes = masks
    if _even_k(SHAPE, TILE):
        # swap_ab: rows beyond the tile's repeat its first, without masks; they are no rows of the result
        x = tl.load(x_ptrs) if TILE.swap_ab else tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
        a = tl.load(a_ptrs) if _pads_ranks(SHAPE, TILE) else tl.load(a_ptrs, mask=mask_lanes[None, :], other=0.0)
    else:
        mask_k = offs_k < end
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=mask_lanes[None, :] & mask_k[:, None], other=0.0)
    return x, a


@triton.jit
def _block_scaled(part, block, operands, place, rows, masks, SHAPE: tl.constexpr):
    slice_id, slot, lane = place
    mask_m, mask_lanes = masks
    inside = block * SHAPE.quant.group_k < SHAPE.k
    scale_ptrs, stride = block_scale_ptrs(operands, slice_id, slot, lane, SHAPE)
    part *= tl.load(scale_ptrs + block * stride, mask=mask_lanes & inside, other=0.0)[None, :]
    if SHAPE.quant.has_a:
        a_scale_ptrs = activation_scale_ptrs(operands, rows, SHAPE)
        part *= tl.load(a_scale_ptrs + block * SHAPE.quant.a_group, mask=mask_m & inside, other=0.0)[:, None]
    return part


@triton.jit
def _sum_over_k(pointers, operands, place, pid_k, rows, masks, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute sums [BLOCK_M, BLOCK_R] of one K split; a block of K with a scale of its own is a product of its own.
    pointers: of x and A, and the strides of x; place: slice, slot and ranks.
    """
    x_ptrs, a_ptrs, strides = pointers
    stride_xt, stride_xk = strides
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = dtype_of_product(x_ptrs.dtype.element_ty, QUANT)
    STRIDE: tl.constexpr = TILE.block_k * TILE.split_k
    offs_k = pid_k * TILE.block_k + tl.arange(0, TILE.block_k)
    acc = device.accumulator(TILE.block_m, TILE.block_r, TILE.swap_ab and QUANT.group_k == 0)
    # An opaque wait where it was measured to gain, of high tiles. torch knows no negative strides.
    device.pdl_wait(TILE.pdl, TILE.block_m < 64 or stride_xt >= 0)
    device.pdl_launch_dependents(TILE.pdl)
    for step in tl.range(0, (SHAPE.k + STRIDE - 1) // STRIDE, num_stages=TILE.stages):
        x, a = _read_block(x_ptrs, a_ptrs, offs_k, SHAPE.k - step * STRIDE, masks, SHAPE, TILE)
        x, a = upcast(x, QUANT.x_format, DTYPE), upcast(a, QUANT.format, DTYPE)
        if QUANT.group_k > 0:
            block = (pid_k + step * TILE.split_k) * TILE.block_k // QUANT.group_k
            acc += _block_scaled(device.product(x, a, TILE), block, operands, place, rows, masks, SHAPE)
        else:
            acc = device.dot(x, a, acc, TILE.swap_ab)
        x_ptrs += STRIDE * stride_xk
        a_ptrs += STRIDE * SHAPE.stride_k
    return acc if QUANT.group_k > 0 else device.result(acc, TILE.swap_ab)


@triton.jit
def shrink_tile(tensors, operands, tile, place, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the rows of one tile x block_r ranks x one K split. tile: sorted rows, and slot, first sorted position
    and number of rows of the tile; place: K split, first rank and slice; call: of `shrink_row`.
    """
    x_ptr, out_ptr = tensors
    sorted_ptr, found = tile
    slot, _, _ = found
    pid_k, first_r, slice_id = place
    ranks_ptr, num_tokens, num_slots, scaling, pdl_anchor = call
    stride_xt, stride_xk = strides
    QUANT: tl.constexpr = SHAPE.quant
    WHOLE: tl.constexpr = SHAPE.has_ranks and SHAPE.rank <= 16
    LOOSE: tl.constexpr = _pads_ranks(SHAPE, TILE)
    lane = first_r + tl.arange(0, TILE.block_r)
    rank = device.rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    needed = slot >= 0
    if not (SHAPE.direct or WHOLE):
        needed &= first_r < rank
    if needed:
        rows, mask_m = device.rows_of_tile(sorted_ptr, found, TILE.block_m)
        offs_k = pid_k * TILE.block_k + tl.arange(0, TILE.block_k)
        lane_read = lane
        if LOOSE:
            lane_read = tl.minimum(lane, rank - 1)
        a_lanes = device.pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * (SHAPE.rank * SHAPE.k)
        a_lanes += lane_read * SHAPE.stride_r  # [BLOCK_R]
        a_ptrs = a_lanes[None, :] + offs_k[:, None] * SHAPE.stride_k  # [BLOCK_K, BLOCK_R]
        x_ptrs = x_ptr + rows[:, None] * stride_xt + offs_k[None, :] * stride_xk  # [BLOCK_M, BLOCK_K]
        masks = (mask_m, lane < (SHAPE.rank if WHOLE else rank))
        factor = scaling
        if QUANT.format > 0 and QUANT.group_k == 0:
            scale = channel_scales(operands, slice_id, slot, lane, masks[1], SHAPE.rank, SHAPE)
            factor = (scale * scaling)[None, :]
        if TILE.swap_ab and TILE.block_r <= 32 and QUANT.group_k == 0:
            acc = _sum_by_warps(x_ptr, a_lanes, rows, masks, pid_k, strides, SHAPE, TILE)
        elif SHAPE.k <= TILE.block_k * TILE.split_k and not TILE.swap_ab and QUANT.group_k == 0:
            acc = _single_step(x_ptrs, a_ptrs, offs_k, masks, SHAPE, TILE)
        else:
            pointers = (x_ptrs, a_ptrs, strides)
            acc = _sum_over_k(pointers, operands, (slice_id, slot, lane), pid_k, rows, masks, SHAPE, TILE)
        if QUANT.has_a and QUANT.group_k == 0:
            acc *= tl.load(activation_scale_ptrs(operands, rows, SHAPE))[:, None]
        if WHOLE and SHAPE.direct:
            acc = tl.where((lane < rank)[None, :], acc, 0.0)
        out_lanes = out_ptr + (pid_k * SHAPE.slices + slice_id) * num_tokens.to(tl.int64) * SHAPE.out_rank + lane
        out_ptrs = rows[:, None] * SHAPE.out_rank + out_lanes[None, :]  # [BLOCK_M, BLOCK_R]
        lanes_out = SHAPE.rank if SHAPE.direct else (rank + 3) // 4 * 4 if LOOSE else rank
        store_shrunk(out_ptrs, acc * factor, mask_m[:, None] & (lane < lanes_out)[None, :], SHAPE.accumulate)
    else:
        device.pdl_wait(TILE.pdl, pdl_anchor)
