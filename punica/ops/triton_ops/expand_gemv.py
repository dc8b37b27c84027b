"""Expand as a GEMV: one row of h times a block of columns of B, multiplied and summed without tensor cores.

B by rows: the true rank chooses the width in ranks of a block on the device, so that rank 8 in a slot of width 64 costs
what rank 16 costs. B rank after rank: a loop over the ranks, as far as the true rank goes.
"""

import triton
import triton.language as tl

from punica.ops.triton_ops.device import pdl_wait, pick, rank_of, read_old_then_wait, read_shrunk
from punica.ops.triton_ops.fp8_device import block_scaled, channel_scales, row_scaled, upcast
from punica.ops.triton_ops.fp8_words import expand_row_in_words


@triton.jit
def column_block(pid_n, SHAPE: tl.constexpr, SPAN: tl.constexpr):
    """Return slice, first column in it, its width and its first column in y, of the pid_n-th run of SPAN columns."""
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
    """Read the result [ranks] of shrink for one row in float32: summed partials, or FP8 values times their scales."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.x_format > 0:
        h = upcast(tl.load(h_ptrs, mask=mask, other=0.0), QUANT.x_format, tl.float32)
        h = row_scaled(h, operands, row, offs_r, mask, SHAPE)
    else:
        h = read_shrunk(h_ptrs, mask, stride_hp, SHAPE.partials)
    return h


@triton.jit
def _by_columns(
    tensors, operands, place, block, strides, WIDTH: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply ``steps`` blocks of columns of a row-major B, each ``lanes[WIDTH]`` ranks wide; the next block is loaded
    before one is summed. Arguments as of `_by_ranks`.
    """
    QUANT: tl.constexpr = SHAPE.quant
    CHANNELS: tl.constexpr = QUANT.format > 0 and QUANT.group_k == 0
    STEPS: tl.constexpr = TILE.row.steps[WIDTH]
    COLUMNS: tl.constexpr = TILE.row.block_n // STEPS
    LANES: tl.constexpr = TILE.row.lanes[WIDTH]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, row, rank = place
    first_n, width = block
    stride_hp, stride_hr = strides
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    # Whole vectors are read (a mask that cuts one would narrow every load); values beyond the rank are dropped.
    mask_read = offs_r < (rank + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector
    b_ptrs = b_ptr + offs_n[:, None] * SHAPE.rank + offs_r[None, :]  # [COLUMNS, LANES]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
    old = read_old_then_wait(y_ptr + offs_n, mask_n, y_ptr.dtype.element_ty, SHAPE, TILE)  # [COLUMNS]
    h = _shrunk_row(h_ptr + offs_r * stride_hr, offs_r, mask_read, operands, row, stride_hp, SHAPE)  # [LANES]
    if QUANT.format == 0:
        h = h.to(b.dtype).to(tl.float32)
    for step in tl.range(0, STEPS):
        weights = upcast(b, QUANT.format, tl.float32)
        if QUANT.group_k > 0:
            mask_b = mask_n[:, None] & mask_read[None, :]
            weights = block_scaled(weights, operands, (slice_id, slot), offs_n, offs_r, mask_b, SHAPE)
        product = tl.where((offs_r < rank)[None, :], weights * h[None, :], 0.0)  # [COLUMNS, LANES]
        if CHANNELS:
            scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
        before, y_ptrs, mask_y = old.to(tl.float32), y_ptr + offs_n, mask_n
        if STEPS > 1:
            offs_n += COLUMNS
            b_ptrs += COLUMNS * SHAPE.rank
            mask_n = (offs_n < width) & (step + 1 < STEPS)
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
            if SHAPE.add:
                old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
        total = tl.sum(product, 1)  # [COLUMNS]
        if CHANNELS:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def _multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE: tl.constexpr):
    """Multiply b [COLUMNS, LANES] by h [LANES] in float32; h is rounded to the type of 16-bit weights, and ranks beyond
    the true rank are dropped.
    """
    QUANT: tl.constexpr = SHAPE.quant
    slice_id, slot, _, rank = place
    live = offs_r < rank
    if QUANT.format > 0:
        weights = tl.where(live[None, :], upcast(b, QUANT.format, tl.float32), 0.0)
        mask = mask_n[:, None] & live[None, :]
        if QUANT.group_k > 0:
            weights = block_scaled(weights, operands, (slice_id, slot), offs_n, offs_r, mask, SHAPE)
        product = weights * h[None, :]
    else:
        product = b.to(tl.float32) * h.to(b.dtype).to(tl.float32)[None, :]
    return product


@triton.jit
def _by_ranks(tensors, operands, place, block, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Multiply a block of columns of a B stored rank after rank, LANES ranks at a time up to the true rank. The next
    ranks are loaded before these are summed. Up to 16 LANES are held by one thread for its columns: no shuffles.

    place: slice, slot, row and true rank; block: first column and width of the slice; strides: of h along partials and
    ranks.
    """
    QUANT: tl.constexpr = SHAPE.quant
    COLUMNS: tl.constexpr = TILE.row.block_n
    LANES: tl.constexpr = TILE.row.lanes[0]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, row, rank = place
    first_n, width = block
    stride_hp, stride_hr = strides
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    b_ptrs = b_ptr + offs_r[None, :] * width + offs_n[:, None]  # [COLUMNS, LANES]
    b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < rank)[None, :], other=0.0)  # [COLUMNS, LANES]
    before = read_old_then_wait(y_ptr + offs_n, mask_n, tl.float32, SHAPE, TILE)  # [COLUMNS]
    total = tl.zeros([COLUMNS], tl.float32) if QUANT.format > 0 else before
    h_ptrs = h_ptr + offs_r * stride_hr
    h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)  # [LANES]
    if SHAPE.rank > LANES:
        for _ in tl.range(LANES, rank, LANES):
            product = _multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE)
            offs_r += LANES
            b_ptrs += LANES * width
            h_ptrs += LANES * stride_hr
            b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < rank)[None, :], other=0.0)
            h = _shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)
            total += tl.sum(product, 1)
    total += tl.sum(_multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE), 1)
    if QUANT.format > 0:
        if QUANT.group_k == 0:
            total *= channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
        total += before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def expand_row(tensors, operands, place, block, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute one row x a block of columns of one slice.

    With a row-major B the true rank chooses among the ascending ``lanes`` the width in ranks of a block, and with it in
    how many ``steps`` the columns are taken: the elements in flight stay about as many.

    place: row and slot; call: table of ranks, slots, and whether this program waits even without work (`pdl_wait`).
    """
    QUANT: tl.constexpr = SHAPE.quant
    h_ptr, y_ptr = tensors
    row, slot = place
    ranks_ptr, num_slots, pdl_anchor = call
    stride_hp, stride_hs, stride_ht, stride_hr, stride_yt = strides
    slice_id, first_n, width, column = column_block(block, SHAPE, TILE.row.block_n)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    if (rank > 0) | ((slot >= 0) & (not SHAPE.add)):
        b_ptr = pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * SHAPE.rank * width
        h_ptr += row * stride_ht + slice_id.to(tl.int64) * stride_hs
        y_ptr += row * stride_yt + column
        given, where, columns = (h_ptr, b_ptr, y_ptr), (slice_id, slot, row, rank), (first_n, width)
        if SHAPE.row_major:
            for i in tl.static_range(len(TILE.row.lanes)):
                above = TILE.row.lanes[i - 1] if i > 0 else -1
                if (rank > above) & (rank <= TILE.row.lanes[i]):
                    _by_columns(given, operands, where, columns, (stride_hp, stride_hr), i, SHAPE, TILE)
        elif QUANT.words:
            expand_row_in_words(given, operands, where, columns, (stride_hp, stride_hr), SHAPE, TILE)
        else:
            _by_ranks(given, operands, where, columns, (stride_hp, stride_hr), SHAPE, TILE)
    else:
        pdl_wait(TILE.pdl, pdl_anchor)
