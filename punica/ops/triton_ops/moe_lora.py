"""Kernels of fused MoE LoRA, for every (token, expert) pair i: hidden size to rank, then rank to width.

    shrink   h[split, s, i] = x_i[its part of K] @ A_s[l, e]^T       fp32 partials [splits, n, T*k, R]
    expand   y[i, o + s*N :] (+)= w_i * (sum of partials of h[s, i]) @ B_s[l, e]^T

for the pairs of every tile (l, e), each in two forms:

* **rows**: the block of weights is loaded once, and the tile's pairs are multiplied and summed one by one. In a decode
  step an adapter's expert has one or two pairs: most of a 16-row tensor-core tile would be padding.
* **tiles**: block_m pairs at once on the tensor cores; K, or the columns, in a pipelined loop.

Two slices (gate and up) of a shrink share one read of x in tiles. With a table of ranks, ``ranks_ptr`` int32 [n, L],
nothing is read or written beyond an adapter's rank. Weights and x may be FP8 (`fp8_device`).

With PDL expand starts while shrink runs. B, and the old y where it fits the registers, are loaded before the wait: the
writer of y has ended by then, since shrink launches expand after its own wait.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from punica.ops.triton_ops import device, moe_tiles
from punica.ops.triton_ops.fp8_device import Quant, channel_scales, dtype_named, real_rows, real_weights


class PairShape(NamedTuple):
    """Operands and options of a product: a constexpr of its kernel. A_s [slots, experts, rank, k], B_s [.., n, rank].

    dtype: name of that of products. first_rank: the adapter's rank with which A begins (sharded). factor: pairs per row
    of x. offset: first column of y. weighted: products are multiplied with routing weights. add: to y, else it is
    overwritten. vector: ranks that one load takes.
    """

    pairs: moe_tiles.Pairs
    rank: int
    slices: int
    has_ranks: bool
    dtype: str
    quant: Quant
    k: int = 0
    first_rank: int = 0
    factor: int = 1
    n: int = 0
    offset: int = 0
    weighted: bool = False
    add: bool = False
    vector: int = 1


class PairTile(NamedTuple):
    """Schedule of a product. rows: pairs one by one. block_n, block_r: elements of K, or columns, and ranks. split_k:
    parts of K, which an expand adds. tiles_n: blocks of columns of a program. joined: slices share x.
    """

    rows: bool
    block_n: int
    block_r: int
    stages: int
    split_k: int
    pdl: bool
    tiles_n: int = 1
    joined: bool = False


@triton.jit
def _shrink_rows(
    tensors, operands, sorted_ptr, place, first, pairs, rank, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """The tile's pairs x block_r ranks x one K split; one block of A where that covers the split."""
    x_ptr, out_ptr = tensors
    slice_id, index, pid_k, first_r = place
    stride_xt, stride_xk = strides
    BLOCK_K: tl.constexpr = TILE.block_n
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (BLOCK_K * TILE.split_k) == 0
    a_ptr = device.pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.k)
    offs_r = first_r + tl.arange(0, TILE.block_r)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_r = (offs_r < moe_tiles.ranks_read(rank, SHAPE))[:, None]  # only the adapter's own are stored
    mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k)
    mask_a = mask_r & mask_k[None, :]
    a_ptrs = a_ptr + offs_r[:, None] * SHAPE.k + offs_k[None, :]
    a = tl.load(a_ptrs, mask=mask_a, other=0.0)  # [TILE.block_r, BLOCK_K]
    PAIRS: tl.constexpr = SHAPE.pairs
    pair, num_rows = moe_tiles.first_pair(first, sorted_ptr, pairs, PAIRS)
    device.pdl_wait_then_launch(TILE.pdl)
    x = tl.load(x_ptr + pair // SHAPE.factor * stride_xt + offs_k * stride_xk, mask=mask_k, other=0.0)  # [BLOCK_K]
    for lane in tl.range(0, num_rows):
        row = pair // SHAPE.factor
        real_x = real_rows(x, operands, row, offs_k, mask_k, SHAPE, tl.float32)
        real_a = real_weights(a, operands, slice_id, index, offs_r[:, None], offs_k[None, :], mask_a, SHAPE, tl.float32)
        product = real_a * real_x[None, :]
        for step in tl.range(1, STEPS):
            jump = step * (BLOCK_K * TILE.split_k)
            offs_step = offs_k + jump
            mask_step = offs_k < SHAPE.k - jump
            mask_a_step = mask_r & mask_step[None, :]
            a_step = tl.load(a_ptrs + jump, mask=mask_a_step, other=0.0)
            x_step = tl.load(x_ptr + row * stride_xt + offs_step * stride_xk, mask=mask_step, other=0.0)
            real_x = real_rows(x_step, operands, row, offs_step, mask_step, SHAPE, tl.float32)
            real_a = real_weights(
                a_step, operands, slice_id, index, offs_r[:, None], offs_step[None, :], mask_a_step, SHAPE, tl.float32,
            )  # fmt: skip
            product += real_a * real_x[None, :]
        out_ptrs = out_ptr + pair * SHAPE.rank + offs_r
        if not SHAPE.pairs.naive:  # fetch the next pair's row before this one's sum is formed
            pair = moe_tiles.pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, SHAPE.pairs.naive)
            x = tl.load(x_ptr + pair // SHAPE.factor * stride_xt + offs_k * stride_xk, mask=mask_k, other=0.0)
        total = tl.sum(product, 1)  # [TILE.block_r]
        if SHAPE.quant.format > 0:
            total *= channel_scales(operands, slice_id, index, offs_r, offs_r < rank, 1, SHAPE)
        tl.store(out_ptrs, total, mask=offs_r < rank)


@triton.jit
def _shrink_tile(
    tensors, operands, sorted_ptr, place, first, pairs, rank, rank_next, partial, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tile's pairs x block_r ranks x one K split of a slice, or of both, whose outputs are ``partial`` apart."""
    x_ptr, out_ptr = tensors
    slice_id, index, pid_k, first_r = place
    stride_xt, stride_xk = strides
    DTYPE: tl.constexpr = dtype_named(SHAPE.dtype)
    BLOCK_M: tl.constexpr = SHAPE.pairs.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    BLOCK_K: tl.constexpr = TILE.block_n
    LAST: tl.constexpr = SHAPE.slices - 1
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (BLOCK_K * TILE.split_k) == 0
    PAIRS: tl.constexpr = SHAPE.pairs
    rows, valid = moe_tiles.pairs_of(first, sorted_ptr, pairs, PAIRS)
    a_ptr = device.pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.k)
    next_ptr = operands[LAST] + index * (SHAPE.rank * SHAPE.k)
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows // SHAPE.factor)[:, None] * stride_xt + offs_k[None, :] * stride_xk
    offs_a = offs_r[None, :] * SHAPE.k + offs_k[:, None]
    # a slice stores its own only
    mask_r = (offs_r < moe_tiles.ranks_read(tl.maximum(rank, rank_next), SHAPE))[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    acc_next = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    device.pdl_wait_then_launch(TILE.pdl)
    for step in tl.range(0, STEPS, num_stages=TILE.stages):
        jump = step * (BLOCK_K * TILE.split_k)
        mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k - jump)
        mask_x, mask_a = valid[:, None] & mask_k[None, :], mask_r & mask_k[:, None]
        offs_n, offs_step = offs_r[None, :], (offs_k + jump)[:, None]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        x = real_rows(x, operands, (rows // SHAPE.factor)[:, None], (offs_k + jump)[None, :], mask_x, SHAPE, DTYPE)
        a = tl.load(a_ptr + offs_a, mask=mask_a, other=0.0)  # [BLOCK_K, BLOCK_R]
        a = real_weights(a, operands, slice_id, index, offs_n, offs_step, mask_a, SHAPE, DTYPE)
        acc = device.dot(x, a, acc)
        if TILE.joined:
            b = tl.load(next_ptr + offs_a, mask=mask_a, other=0.0)
            b = real_weights(b, operands, LAST, index, offs_n, offs_step, mask_a, SHAPE, DTYPE)
            acc_next = device.dot(x, b, acc_next)
        x_ptrs += BLOCK_K * TILE.split_k * stride_xk
        offs_a += BLOCK_K * TILE.split_k
    if SHAPE.quant.format > 0 and SHAPE.quant.group_k == 0:
        acc *= channel_scales(operands, slice_id, index, offs_r, offs_r < rank, 1, SHAPE)[None, :]
        acc_next *= channel_scales(operands, LAST, index, offs_r, offs_r < rank_next, 1, SHAPE)[None, :]
    offs_out = rows[:, None] * SHAPE.rank + offs_r[None, :]
    tl.store(out_ptr + offs_out, acc, mask=valid[:, None] & (offs_r < rank)[None, :])
    if TILE.joined:
        tl.store(out_ptr + partial + offs_out, acc_next, mask=valid[:, None] & (offs_r < rank_next)[None, :])


@triton.jit(do_not_specialize=moe_tiles.COUNTS, do_not_specialize_on_alignment=device.INDEX_POINTERS)
def moe_shrink_kernel(
    tensors, operands, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr, ranks_ptr,
    pairs, num_tiles, padded, blocks, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A persistent loop over tiles x (K splits, blocks of ranks, slices), by programs for ``num_tiles`` of them."""
    PAIRS: tl.constexpr = SHAPE.pairs
    R_BLOCKS: tl.constexpr = (SHAPE.rank + TILE.block_r - 1) // TILE.block_r
    PARTS: tl.constexpr = TILE.split_k * R_BLOCKS * (1 if TILE.joined else SHAPE.slices)
    x_ptr, out_ptr = tensors
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    pid_k, first_r = part % TILE.split_k, part // TILE.split_k % R_BLOCKS * TILE.block_r
    slice_id = part // (TILE.split_k * R_BLOCKS)
    partial = pairs.to(tl.int64) * SHAPE.rank
    out_ptr += (pid_k * SHAPE.slices + slice_id) * partial
    slots, until, total = moe_tiles.slot_table(counts_ptr, enabled_ptr, ids_ptr, pairs, padded, PAIRS)
    device.pdl_wait(TILE.pdl, (tl.program_id(0) == 0) & (tile >= total))  # one that waits keeps the chain transitive
    while tile < total:
        where = experts_ptr, mapping_ptr, enabled_ptr
        slot, index, first, owner = moe_tiles.find_tile(tile, (slots, until, total), where, padded, blocks, PAIRS)
        rank = moe_tiles.rank_of(ranks_ptr, slice_id, owner, SHAPE)
        rank_next = rank
        if TILE.joined:
            rank_next = moe_tiles.rank_of(ranks_ptr, SHAPE.slices - 1, owner, SHAPE)
        if (slot >= 0) & (first_r < moe_tiles.ranks_read(tl.maximum(rank, rank_next), SHAPE)):
            place = slice_id, index, pid_k, first_r
            if TILE.rows:
                _shrink_rows((x_ptr, out_ptr), operands, sorted_ptr, place, first, pairs, rank, strides, SHAPE, TILE)
            else:
                _shrink_tile(
                    (x_ptr, out_ptr), operands, sorted_ptr, place, first, pairs, rank, rank_next, partial, strides,
                    SHAPE, TILE,
                )  # fmt: skip
        else:
            device.pdl_wait(TILE.pdl, tl.program_id(0) == 0)
        tile += num_tiles


@triton.jit
def _expand_rows(
    tensors, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """The tile's pairs x block_n columns. Their weights are read once, and requested before the pairs are known."""
    h_ptr, y_ptr, weights_ptr = tensors
    slice_id, index, first_n = place
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < SHAPE.n
    mask_r = offs_r < moe_tiles.ranks_read(rank, SHAPE)
    mask_b = mask_n[:, None] & mask_r[None, :]
    b_ptr = device.pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.n)
    b = tl.load(b_ptr + offs_n[:, None] * SHAPE.rank + offs_r[None, :], mask=mask_b, other=0.0)  # [BLOCK_N, BLOCK_R]
    scale = channel_scales(operands, slice_id, index, offs_n, mask_n, 1, SHAPE)
    PAIRS: tl.constexpr = SHAPE.pairs
    pair, num_rows = moe_tiles.first_pair(first, sorted_ptr, pairs, PAIRS)
    old = tl.zeros([BLOCK_N], y_ptr.dtype.element_ty)
    if SHAPE.add:
        old = tl.load(y_ptr + pair * strides[0] + offs_n, mask=mask_n, other=0.0)
    device.pdl_wait_then_launch(TILE.pdl)
    for lane in tl.range(0, num_rows):
        h = device.read_shrunk(h_ptr + pair * SHAPE.rank + offs_r, mask_r, partial, TILE.split_k)  # [BLOCK_R]
        h = moe_tiles.live(h, offs_r, rank, SHAPE)
        if SHAPE.weighted:
            h *= tl.load(weights_ptr + pair).to(tl.float32)
        real_b = real_weights(b, operands, slice_id, index, offs_n[:, None], offs_r[None, :], mask_b, SHAPE, tl.float32)
        product = moe_tiles.live(real_b, offs_r[None, :], rank, SHAPE) * h[None, :]
        before, y_ptrs = old.to(tl.float32), y_ptr + pair * strides[0] + offs_n
        if not SHAPE.pairs.naive:
            pair = moe_tiles.pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, SHAPE.pairs.naive)
            if SHAPE.add:  # not of the last lane again: that one is being written
                old = tl.load(y_ptr + pair * strides[0] + offs_n, mask=mask_n & (lane + 1 < num_rows), other=0.0)
        total = tl.sum(product, 1)  # [BLOCK_N]
        if SHAPE.quant.format > 0:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def _sum_of_rank_blocks(found, operands, place, rank, partial, acc, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """acc + h @ B^T of a tile and one block of columns, [BLOCK_M, BLOCK_N], over blocks of the true rank."""
    h_ptrs, b_ptrs, offs_n, valid, mask_n = found
    slice_id, index, _ = place
    DTYPE: tl.constexpr = dtype_named(SHAPE.dtype)
    BLOCK_R: tl.constexpr = TILE.block_r
    offs_r = tl.arange(0, BLOCK_R)
    read = moe_tiles.ranks_read(rank, SHAPE)
    for first_r in tl.range(0, rank, BLOCK_R, num_stages=TILE.stages):
        lanes, left = offs_r < read - first_r, rank - first_r
        h = device.read_shrunk(h_ptrs + first_r, valid[:, None] & lanes[None, :], partial, TILE.split_k)
        h = moe_tiles.live(h, offs_r[None, :], left, SHAPE)  # [BLOCK_M, BLOCK_R]
        mask_b = lanes[:, None] & mask_n[None, :]
        b = tl.load(b_ptrs + first_r, mask=mask_b, other=0.0)  # [BLOCK_R, BLOCK_N]
        ranks = (offs_r + first_r)[:, None]
        b = real_weights(b, operands, slice_id, index, offs_n[None, :], ranks, mask_b, SHAPE, DTYPE)
        acc = device.dot_of_shrunk(h, moe_tiles.live(b, offs_r[:, None], left, SHAPE), acc, DTYPE)
    return acc


@triton.jit
def _expand_tile(
    tensors, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """The tile's pairs x tiles_n blocks of block_n columns. WHOLE: all ranks fit a block, so partials are summed once.
    AT_ONCE: it and the old y of one block fit the registers, and are loaded before the wait.
    """
    h_ptr, y_ptr, weights_ptr = tensors
    slice_id, index, first_n = place
    DTYPE: tl.constexpr = dtype_named(SHAPE.dtype)
    BLOCK_M: tl.constexpr = SHAPE.pairs.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    EVEN_N: tl.constexpr = SHAPE.n % (BLOCK_N * TILE.tiles_n) == 0
    WHOLE: tl.constexpr = SHAPE.rank <= BLOCK_R
    AT_ONCE: tl.constexpr = TILE.tiles_n == 1 and WHOLE and BLOCK_M * BLOCK_N <= 4096
    PAIRS: tl.constexpr = SHAPE.pairs
    rows, valid = moe_tiles.pairs_of(first, sorted_ptr, pairs, PAIRS)
    b_ptr = device.pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.n)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    h_ptrs = h_ptr + rows[:, None] * SHAPE.rank + offs_r[None, :]
    b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * SHAPE.rank
    y_ptrs = y_ptr + rows[:, None] * strides[0] + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    read = moe_tiles.ranks_read(rank, SHAPE)
    if AT_ONCE:
        columns = (offs_n < (1 << 30 if EVEN_N else SHAPE.n))[None, :]
        b = tl.load(b_ptrs, mask=(offs_r < read)[:, None] & columns, other=0.0)  # [BLOCK_R, BLOCK_N]
        if SHAPE.add:
            old = tl.load(y_ptrs, mask=valid[:, None] & columns, other=0.0)  # [BLOCK_M, BLOCK_N]
    device.pdl_wait_then_launch(TILE.pdl)
    factors = tl.full(valid.shape, 1.0, tl.float32)  # [BLOCK_M]
    if SHAPE.weighted:
        factors = tl.load(weights_ptr + rows, mask=valid, other=0.0).to(tl.float32)
    if WHOLE:
        h = device.read_shrunk(h_ptrs, valid[:, None] & (offs_r < read)[None, :], partial, TILE.split_k)
        h = moe_tiles.live(h, offs_r[None, :], rank, SHAPE)  # [BLOCK_M, BLOCK_R]
    for _ in tl.range(0, TILE.tiles_n, num_stages=TILE.stages if WHOLE else None):
        mask_n = offs_n < (1 << 30 if EVEN_N else SHAPE.n)
        mask_y = valid[:, None] & mask_n[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if WHOLE:
            mask_b = (offs_r < read)[:, None] & mask_n[None, :]
            if not AT_ONCE:
                b = tl.load(b_ptrs, mask=mask_b, other=0.0)
            real_b = real_weights(b, operands, slice_id, index, offs_n[None, :], offs_r[:, None], mask_b, SHAPE, DTYPE)
            acc = device.dot_of_shrunk(h, moe_tiles.live(real_b, offs_r[:, None], rank, SHAPE), acc, DTYPE)
        else:
            found = h_ptrs, b_ptrs, offs_n, valid, mask_n
            acc = _sum_of_rank_blocks(found, operands, place, rank, partial, acc, SHAPE, TILE)
        total = acc * factors[:, None]
        if SHAPE.quant.format > 0 and SHAPE.quant.group_k == 0:
            total *= channel_scales(operands, slice_id, index, offs_n, offs_n < SHAPE.n, 1, SHAPE)[None, :]
        if SHAPE.add:
            if not AT_ONCE:
                old = tl.load(y_ptrs, mask=mask_y, other=0.0)
            total += old.to(tl.float32)
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_y)
        offs_n += BLOCK_N
        b_ptrs += BLOCK_N * SHAPE.rank
        y_ptrs += BLOCK_N


@triton.jit(do_not_specialize=moe_tiles.COUNTS, do_not_specialize_on_alignment=device.INDEX_POINTERS)
def moe_expand_kernel(
    tensors, operands, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr, ranks_ptr,
    pairs, num_tiles, padded, blocks, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A persistent loop over tiles x (runs of tiles_n column blocks, slices), as a shrink's."""
    RUN: tl.constexpr = TILE.block_n * TILE.tiles_n
    N_BLOCKS: tl.constexpr = (SHAPE.n + RUN - 1) // RUN
    h_ptr, y_ptr, weights_ptr = tensors
    tile, part = tl.program_id(0) // (N_BLOCKS * SHAPE.slices), tl.program_id(0) % (N_BLOCKS * SHAPE.slices)
    slice_id, first_n = part // N_BLOCKS, part % N_BLOCKS * RUN
    partial = pairs.to(tl.int64) * (SHAPE.rank * SHAPE.slices)
    h_ptr += slice_id * (pairs.to(tl.int64) * SHAPE.rank)
    y_ptr += SHAPE.offset + slice_id * SHAPE.n
    total = tile + 1  # until the table is read: for every tile again, as it would hold registers meanwhile
    PAIRS: tl.constexpr = SHAPE.pairs
    while tile < total:
        slots, until, total = moe_tiles.slot_table(counts_ptr, enabled_ptr, ids_ptr, pairs, padded, PAIRS)
        where = experts_ptr, mapping_ptr, enabled_ptr
        slot, index, first, owner = moe_tiles.find_tile(tile, (slots, until, total), where, padded, blocks, PAIRS)
        rank = moe_tiles.rank_of(ranks_ptr, slice_id, owner, SHAPE)
        if (slot >= 0) & ((rank > 0) | (not SHAPE.add)):
            found, place = (h_ptr, y_ptr, weights_ptr), (slice_id, index, first_n)
            if TILE.rows:
                _expand_rows(found, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE, TILE)
            else:
                _expand_tile(found, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE, TILE)
        else:
            device.pdl_wait(TILE.pdl, tl.program_id(0) == 0)
        tile += num_tiles
