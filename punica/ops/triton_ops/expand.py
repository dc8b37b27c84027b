"""Bodies of the expand kernel: a GEMV of single rows, and a GEMM of tiles.

**GEMV** (`expand_row`): one row of h times a block of columns of B, multiplied and summed without tensor cores. B by
rows: the true rank chooses the width in ranks of a block on the device, so that rank 8 in a slot of width 64 costs what
rank 16 costs. B rank after rank: a loop over the ranks, as far as the true rank goes.

**GEMM** (`expand_tile`): the rows of one tile times blocks of columns of B on the tensor cores. ``tiles_n`` > 1 walks
several blocks with one load of h, so the split-K partials are summed once for all of them. All ranks go in one pass
where a block holds them (`_one_pass`), else in a loop over blocks of ranks (`_rank_loop`).
"""

import triton
import triton.language as tl

from punica.ops.triton_ops import device
from punica.ops.triton_ops import fp8_device as fp8
from punica.ops.triton_ops.fp8_words import expand_row_in_words, expand_tile_in_words


@triton.jit
def _by_columns(
    tensors, operands, place, block, strides, WIDTH: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply ``steps`` blocks of columns of a row-major B, ``lanes[WIDTH]`` ranks wide; arguments of `_by_ranks`."""
    QUANT: tl.constexpr = SHAPE.quant
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
    old = device.read_old_then_wait(y_ptr + offs_n, mask_n, y_ptr.dtype.element_ty, SHAPE, TILE)  # [COLUMNS]
    h = fp8.read_shrunk_row(h_ptr + offs_r * stride_hr, offs_r, mask_read, operands, row, stride_hp, SHAPE)  # [LANES]
    if QUANT.format == 0:
        h = h.to(b.dtype).to(tl.float32)
    for step in tl.range(0, STEPS):
        mask_b = mask_n[:, None] & mask_read[None, :]
        weights = fp8.real_weights(
            b, operands, slice_id, slot, offs_n[:, None], offs_r[None, :], mask_b, SHAPE, tl.float32
        )  # fmt: skip
        product = tl.where((offs_r < rank)[None, :], weights * h[None, :], 0.0)  # [COLUMNS, LANES]
        scale = fp8.channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
        before, y_ptrs, mask_y = old.to(tl.float32), y_ptr + offs_n, mask_n
        if STEPS > 1:
            offs_n += COLUMNS
            b_ptrs += COLUMNS * SHAPE.rank
            mask_n = (offs_n < width) & (step + 1 < STEPS)
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_read[None, :], other=0.0)
            if SHAPE.add:
                old = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0)
        total = tl.sum(product, 1)  # [COLUMNS]
        total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def _multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE: tl.constexpr):
    """Multiply b [COLUMNS, LANES] by h [LANES] in float32; h is rounded as 16-bit weights are."""
    slice_id, slot, _, rank = place
    live = offs_r < rank
    if SHAPE.quant.format > 0:
        mask, columns, lanes = mask_n[:, None] & live[None, :], offs_n[:, None], offs_r[None, :]
        weights = fp8.real_weights(b, operands, slice_id, slot, columns, lanes, mask, SHAPE, tl.float32)
        product = tl.where(live[None, :], weights, 0.0) * h[None, :]
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
    before = device.read_old_then_wait(y_ptr + offs_n, mask_n, tl.float32, SHAPE, TILE)  # [COLUMNS]
    total = tl.zeros([COLUMNS], tl.float32) if SHAPE.quant.format > 0 else before
    h_ptrs = h_ptr + offs_r * stride_hr
    h = fp8.read_shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)  # [LANES]
    if SHAPE.rank > LANES:
        for _ in tl.range(LANES, rank, LANES):
            product = _multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE)
            offs_r += LANES
            b_ptrs += LANES * width
            h_ptrs += LANES * stride_hr
            b = tl.load(b_ptrs, mask=mask_n[:, None] & (offs_r < rank)[None, :], other=0.0)
            h = fp8.read_shrunk_row(h_ptrs, offs_r, offs_r < rank, operands, row, stride_hp, SHAPE)
            total += tl.sum(product, 1)
    total += tl.sum(_multiply(b, h, operands, place, offs_n, offs_r, mask_n, SHAPE), 1)
    if SHAPE.quant.format > 0:
        if SHAPE.quant.group_k == 0:
            total *= fp8.channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
        total += before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def expand_row(tensors, operands, place, block, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute one row x a block of columns of one slice.

    With a row-major B the true rank chooses among the ascending ``lanes`` the width in ranks of a block, and with it in
    how many ``steps`` the columns are taken: the elements in flight stay about as many.

    place: row and slot; call: table of ranks, slots, and whether this program waits even without work (`pdl_wait`).
    """
    h_ptr, y_ptr = tensors
    row, slot = place
    ranks_ptr, num_slots, pdl_anchor = call
    stride_hp, stride_hs, stride_ht, stride_hr, stride_yt = strides
    slice_id, first_n, width, column = device.column_block(block, SHAPE, TILE.row.block_n)
    rank = device.rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    if (rank > 0) | ((slot >= 0) & (not SHAPE.add)):
        b_ptr = device.pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * SHAPE.rank * width
        h_ptr += row * stride_ht + slice_id.to(tl.int64) * stride_hs
        y_ptr += row * stride_yt + column
        given, where, columns = (h_ptr, b_ptr, y_ptr), (slice_id, slot, row, rank), (first_n, width)
        if SHAPE.row_major:
            for i in tl.static_range(len(TILE.row.lanes)):
                above = TILE.row.lanes[i - 1] if i > 0 else -1
                if (rank > above) & (rank <= TILE.row.lanes[i]):
                    _by_columns(given, operands, where, columns, (stride_hp, stride_hr), i, SHAPE, TILE)
        elif SHAPE.quant.words:
            expand_row_in_words(given, operands, where, columns, (stride_hp, stride_hr), SHAPE, TILE)
        else:
            _by_ranks(given, operands, where, columns, (stride_hp, stride_hr), SHAPE, TILE)
    else:
        device.pdl_wait(TILE.pdl, pdl_anchor)


@triton.constexpr_function
def _dtype_of_product(y_ptr, b_ptr, quant):
    """Return the type in which h and B are multiplied: B's own, for FP8 that of y, with FP8 activations float16."""
    if quant.x_format > 0:
        return tl.float16
    return y_ptr.dtype.element_ty if quant.format > 0 else b_ptr.dtype.element_ty


@triton.jit
def _ranks_of_h(h_ptrs, lanes, rank):
    """Tell which lanes of h are below ``rank``; in 16 bits by a difference. A comparison as of B would be computed with
    B's in one vector, whose lanes overflow into each other in the LLVM of Triton 3.6: misaligned addresses.
    """
    if h_ptrs.dtype.element_ty.primitive_bitwidth == 32:
        return lanes < rank  # fewer registers
    return rank - lanes > 0


@triton.jit
def _finish(total, before, scale, operands, rows, SHAPE: tl.constexpr):
    """Multiply sums [BLOCK_M, BLOCK_N] by the scales of activations and columns, and add y: an FMA in every form."""
    QUANT: tl.constexpr = SHAPE.quant
    CHANNELS: tl.constexpr = QUANT.format > 0 and QUANT.group_k == 0
    if QUANT.has_a and QUANT.group_k == 0:
        total *= tl.load(fp8.activation_scale_ptrs(operands, rows, SHAPE))[:, None]
    if CHANNELS and SHAPE.add:
        total = tl.fma(total, scale[None, :].broadcast_to(total.shape[0], total.shape[1]), before)
    elif CHANNELS:
        total *= scale[None, :]
    elif SHAPE.add:
        total += before
    return total


@triton.jit
def _one_pass(
    pointers, operands, place, rows, columns, READ: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute all ranks at once. ``at_once``: blocks go through registers, the first is loaded ahead of the PDL wait,
    and every other one while the one before it is multiplied; else the compiler pipelines the loop over columns.

    pointers: of blocks of h, B and y, and the strides of h along partials and ranks; place: slice, slot, true rank, and
    ranks that are read.
    """
    h_ptrs, b_ptrs, y_ptrs, stride_hp, _ = pointers
    rows, mask_m = rows
    offs_n, width = columns
    _, _, rank, rank_read = place
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = _dtype_of_product(y_ptrs, b_ptrs, QUANT)
    STRIDE_B: tl.constexpr = SHAPE.rank if SHAPE.row_major else 1
    offs_r = tl.arange(0, TILE.block_r)
    mask_h = mask_m[:, None] & _ranks_of_h(h_ptrs, offs_r, rank_read)[None, :]  # [BLOCK_M, BLOCK_R]
    mask_b = (offs_r < (rank_read if SHAPE.row_major else rank))[:, None]
    if TILE.at_once:
        mask_n = (offs_n < width)[None, :]
        b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)  # [BLOCK_R, BLOCK_N]
        if SHAPE.add and not TILE.late:
            old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)  # [BLOCK_M, BLOCK_N]
    device.pdl_launch_dependents(TILE.pdl)
    device.pdl_wait(TILE.pdl, TILE.at_once or stride_hp > 0)  # blocks in registers would be waited for first
    if TILE.at_once and SHAPE.add and TILE.late:
        old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
    h = fp8.read_shrunk_rows(h_ptrs, mask_h, offs_r, rank, stride_hp, READ == "rank", DTYPE, SHAPE)
    for step in tl.range(0, TILE.tiles_n, num_stages=TILE.stages):
        if not TILE.at_once:
            mask_n = (offs_n < (1 << 30 if TILE.even_n else width))[None, :]
            b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)  # [BLOCK_R, BLOCK_N]
            if SHAPE.add:
                old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)  # [BLOCK_M, BLOCK_N]
        weights, mask_y, out_ptrs = b, mask_m[:, None] & mask_n, y_ptrs
        scale = fp8.channel_scales(operands, place[0], place[1], offs_n, offs_n < width, width, SHAPE)
        before = old.to(tl.float32) if SHAPE.add else 0.0  # before the next block is loaded: it frees registers
        offs_n += TILE.block_n
        y_ptrs += TILE.block_n
        b_ptrs += TILE.block_n * STRIDE_B
        if TILE.at_once and TILE.tiles_n > 1:
            mask_n = ((offs_n < width) & (step + 1 < TILE.tiles_n))[None, :]
            b = tl.load(b_ptrs, mask=mask_b & mask_n, other=0.0)
            if SHAPE.add:
                old = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n, other=0.0)
        weights = fp8.upcast(weights, SHAPE.quant.format, DTYPE)
        if SHAPE.row_major and READ != "rank":
            weights = tl.where((offs_r < rank)[:, None], weights, 0.0)
        total = _finish(device.product(h, weights, TILE), before, scale, operands, rows, SHAPE)
        tl.store(out_ptrs, total.to(y_ptrs.dtype.element_ty), mask=mask_y & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def _sum_ranks(
    pointers, operands, place, rows, columns, READ: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute sums [BLOCK_M, BLOCK_N] over blocks of ranks; a block with a scale of its own is a product of its own."""
    h_ptrs, b_ptrs, y_ptrs, stride_hp, stride_hr = pointers
    rows, mask_m = rows
    offs_n, width = columns
    slice_id, slot, rank, rank_read = place
    QUANT: tl.constexpr = SHAPE.quant
    DTYPE: tl.constexpr = _dtype_of_product(y_ptrs, b_ptrs, QUANT)
    offs_r = tl.arange(0, TILE.block_r)
    acc = device.accumulator(TILE.block_m, TILE.block_n, TILE.swap_ab and QUANT.group_k == 0)
    for first_r in tl.range(0, rank, TILE.block_r, num_stages=TILE.stages):
        lanes = first_r + offs_r
        mask_h, h_block = mask_m[:, None] & _ranks_of_h(h_ptrs, lanes, rank_read)[None, :], h_ptrs + first_r * stride_hr
        h = fp8.read_shrunk_rows(h_block, mask_h, lanes, rank, stride_hp, READ == "rank", DTYPE, SHAPE)
        mask_b = (lanes < (rank_read if SHAPE.row_major else rank))[:, None] & (offs_n < width)[None, :]
        b = tl.load(b_ptrs + first_r * (1 if SHAPE.row_major else width), mask=mask_b, other=0.0)  # [BLOCK_R, BLOCK_N]
        b = fp8.upcast(b, QUANT.format, DTYPE)
        if SHAPE.row_major and READ != "rank":
            b = tl.where((lanes < rank)[:, None], b, 0.0)
        if QUANT.group_k > 0:  # BLOCK_R divides a block of scales
            block = first_r // QUANT.group_k
            scale_ptrs, scale_stride = fp8.block_scale_ptrs(operands, slice_id, slot, offs_n, SHAPE)
            part = device.product(h, b, TILE)
            part *= tl.load(scale_ptrs + block * scale_stride, mask=offs_n < width, other=0.0)[None, :]
            if QUANT.has_a:
                a_scale_ptrs = fp8.activation_scale_ptrs(operands, rows, SHAPE)
                part *= tl.load(a_scale_ptrs + block * QUANT.a_group)[:, None]
            acc += part
        else:
            acc = device.dot(h, b, acc, TILE.swap_ab)
    return acc if QUANT.group_k > 0 else device.result(acc, TILE.swap_ab)


@triton.jit
def _rank_loop(
    pointers, operands, place, rows, columns, READ: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute column blocks one after the other, each with a loop over blocks of ranks. Arguments as of `_one_pass`."""
    h_ptrs, b_ptrs, y_ptrs, stride_hp, stride_hr = pointers
    offs_n, width = columns
    device.pdl_launch_then_wait(TILE.pdl)
    for _ in tl.range(0, TILE.tiles_n):
        mask_y = rows[1][:, None] & (offs_n < width)[None, :]
        pointers = (h_ptrs, b_ptrs, y_ptrs, stride_hp, stride_hr)
        total = _sum_ranks(pointers, operands, place, rows, (offs_n, width), READ, SHAPE, TILE)  # [BLOCK_M, BLOCK_N]
        before = 0.0
        if SHAPE.add:
            before = tl.load(y_ptrs, mask=mask_y, other=0.0).to(tl.float32)
        scale = fp8.channel_scales(operands, place[0], place[1], offs_n, offs_n < width, width, SHAPE)
        total = _finish(total, before, scale, operands, rows[0], SHAPE)
        tl.store(y_ptrs, total.to(y_ptrs.dtype.element_ty), mask=mask_y)
        offs_n += TILE.block_n
        y_ptrs += TILE.block_n
        b_ptrs += TILE.block_n * (SHAPE.rank if SHAPE.row_major else 1)


@triton.jit
def _expand_rows_of(
    tensors, operands, place, rows, block, READ: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute ``rows`` x tiles_n blocks of block_n columns.

    READ: how far loads of h and B reach. "rank": as far as the rank, a multiple of ``vector``, the ranks of one load.
    "vectors": to the end of a vector, and values beyond the rank are dropped (B by ranks: as far as the rank).

    tensors: h, B and y, and strides as in `expand_tile`; place: slice, slot and true rank; block: first column, width
    of the slice and its first column in y.
    """
    h_ptr, b_ptr, y_ptr, strides = tensors
    slice_id, slot, rank = place
    first_n, width, column = block
    stride_hp, _, stride_ht, stride_hr, stride_yt = strides
    offs_n = first_n + tl.arange(0, TILE.block_n)
    offs_r = tl.arange(0, TILE.block_r)
    if SHAPE.row_major:
        b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * SHAPE.rank  # [BLOCK_R, BLOCK_N]
    else:
        b_ptrs = b_ptr + offs_r[:, None] * width + offs_n[None, :]
    h_ptrs = h_ptr + rows[0][:, None] * stride_ht + offs_r[None, :] * stride_hr  # [BLOCK_M, BLOCK_R]
    y_ptrs = y_ptr + rows[0][:, None] * stride_yt + (column + offs_n)[None, :]  # [BLOCK_M, BLOCK_N]
    # "rank": it is the rank, and the compiler sees that it is a multiple
    rank_read = (rank if READ == "rank" else rank + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector
    pointers, columns = (h_ptrs, b_ptrs, y_ptrs, stride_hp, stride_hr), (offs_n, width)
    if TILE.block_r >= SHAPE.rank:
        _one_pass(pointers, operands, (slice_id, slot, rank, rank_read), rows, columns, READ, SHAPE, TILE)
    else:
        _rank_loop(pointers, operands, (slice_id, slot, rank, rank_read), rows, columns, READ, SHAPE, TILE)


@triton.jit
def expand_tile(tensors, operands, tile, block, call, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute the rows of one tile x tiles_n blocks of block_n columns of one slice.

    In a loop, true ranks that are whole vectors have code of their own, as B streams best where nothing of it is
    dropped; float32 does without, since the shared memory of both counts.

    tile: as in `shrink.shrink_tile`; call: as in `expand_row`.
    """
    h_ptr, y_ptr = tensors
    sorted_ptr, found = tile
    slot, _, _ = found
    ranks_ptr, num_slots, pdl_anchor = call
    _, stride_hs, _, _, _ = strides
    EITHER: tl.constexpr = SHAPE.has_ranks and SHAPE.vector > 1
    READ: tl.constexpr = "vectors" if EITHER else "rank"
    slice_id, first_n, width, column = device.column_block(block, SHAPE, TILE.block_n * TILE.tiles_n)
    rank = device.rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    if (rank > 0) if SHAPE.add else (slot >= 0):
        rows = device.rows_of_tile(sorted_ptr, found, TILE.block_m)
        b_ptr = device.pick(operands, slice_id, SHAPE.slices) + slot.to(tl.int64) * SHAPE.rank * width
        h_ptr += slice_id.to(tl.int64) * stride_hs
        given, place, columns = (h_ptr, b_ptr, y_ptr, strides), (slice_id, slot, rank), (first_n, width, column)
        if EITHER and SHAPE.row_major and TILE.tiles_n > 1 and b_ptr.dtype.element_ty.primitive_bitwidth == 16:
            if rank % SHAPE.vector == 0:
                _expand_rows_of(given, operands, place, rows, columns, "rank", SHAPE, TILE)
            else:
                _expand_rows_of(given, operands, place, rows, columns, "vectors", SHAPE, TILE)
        elif TILE.words:
            expand_tile_in_words(given, operands, place, rows, columns, SHAPE, TILE)
        else:
            _expand_rows_of(given, operands, place, rows, columns, READ, SHAPE, TILE)
    else:
        device.pdl_wait(TILE.pdl, pdl_anchor)
