"""Expand of fused MoE LoRA: rank to output width, for every (token, expert) pair.

    y[i, o + s*N :] (+)= w_i * (sum of partials of h[s, i]) @ B_s[l, e]^T

for the pairs i of every tile (l, e), in the forms of `moe_shrink`; tiles have their columns in an inner loop. With a
table of ranks, h and B are not read beyond an adapter's rank. Weights may be FP8 (`fp8_device`).

With PDL the kernel starts while shrink runs. B, and the old y where it fits the registers, are loaded before the wait:
the writer of y has ended by then, since shrink launches this kernel after its own wait.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from punica.ops.triton_ops.device import dot_of_shrunk, pdl_wait, pdl_wait_then_launch, pick, read_shrunk
from punica.ops.triton_ops.fp8_device import Quant, channel_scales, real_weights
from punica.ops.triton_ops.moe_tiles import (
    COUNTS,
    INDEX_POINTERS,
    Pairs,
    find_tile,
    first_pair,
    live,
    pair_at,
    pairs_of,
    rank_of,
    ranks_read,
    slot_table,
)


class PairExpandShape(NamedTuple):
    """Operands of an expand, B_s [slots, experts, n, rank]: a constexpr.

    offset: first column of y. weighted: products are multiplied with routing weights. add: to y, else overwrite.
    vector: ranks that one load takes.
    """

    pairs: Pairs
    n: int
    rank: int
    slices: int
    offset: int
    weighted: bool
    add: bool
    has_ranks: bool
    vector: int
    dtype: Any
    quant: Quant


class PairExpandTile(NamedTuple):
    """Schedule of an expand: a constexpr. tiles_n: blocks of columns of a program. partials: of the K splits."""

    rows: bool
    block_n: int
    block_r: int
    tiles_n: int
    stages: int
    partials: int
    pdl: bool


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
    mask_r = offs_r < ranks_read(rank, SHAPE.rank, SHAPE.vector)
    mask_b = mask_n[:, None] & mask_r[None, :]
    b_ptr = pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.n)
    b = tl.load(b_ptr + offs_n[:, None] * SHAPE.rank + offs_r[None, :], mask=mask_b, other=0.0)  # [BLOCK_N, BLOCK_R]
    scale = channel_scales(operands, slice_id, index, offs_n, mask_n, 1, SHAPE)
    pair, num_rows = first_pair(first, sorted_ptr, pairs, SHAPE.pairs)
    old = tl.zeros([BLOCK_N], y_ptr.dtype.element_ty)
    if SHAPE.add:
        old = tl.load(y_ptr + pair * strides[0] + offs_n, mask=mask_n, other=0.0)
    pdl_wait_then_launch(TILE.pdl)
    for lane in tl.range(0, num_rows):
        h = read_shrunk(h_ptr + pair * SHAPE.rank + offs_r, mask_r, partial, TILE.partials)  # [BLOCK_R]
        h = live(h, offs_r, rank, SHAPE.has_ranks)
        if SHAPE.weighted:
            h *= tl.load(weights_ptr + pair).to(tl.float32)
        real_b = real_weights(b, operands, slice_id, index, offs_n[:, None], offs_r[None, :], mask_b, SHAPE, tl.float32)
        product = live(real_b, offs_r[None, :], rank, SHAPE.has_ranks) * h[None, :]
        before, y_ptrs = old.to(tl.float32), y_ptr + pair * strides[0] + offs_n
        if not SHAPE.pairs.naive:
            pair = pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, SHAPE.pairs.naive)
            if SHAPE.add:  # not of the last lane again: that one is being written
                old = tl.load(y_ptr + pair * strides[0] + offs_n, mask=mask_n & (lane + 1 < num_rows), other=0.0)
        total = tl.sum(product, 1)  # [BLOCK_N]
        if SHAPE.quant.format > 0:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def _factors_of(weights_ptrs, valid, SHAPE: tl.constexpr):
    """Routing weights of a tile's pairs, or ones."""
    factors = tl.full(valid.shape, 1.0, tl.float32)
    if SHAPE.weighted:
        factors = tl.load(weights_ptrs, mask=valid, other=0.0).to(tl.float32)
    return factors


@triton.jit
def _sum_of_rank_blocks(found, operands, place, rank, partial, acc, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """acc + h @ B^T of a tile and one block of columns, [BLOCK_M, BLOCK_N], over blocks of the true rank."""
    h_ptrs, b_ptrs, offs_n, valid, mask_n = found
    slice_id, index, _ = place
    BLOCK_R: tl.constexpr = TILE.block_r
    offs_r = tl.arange(0, BLOCK_R)
    read = ranks_read(rank, SHAPE.rank, SHAPE.vector)
    for first_r in tl.range(0, rank, BLOCK_R, num_stages=TILE.stages):
        lanes, left = offs_r < read - first_r, rank - first_r
        h = read_shrunk(h_ptrs + first_r, valid[:, None] & lanes[None, :], partial, TILE.partials)  # [BLOCK_M, BLOCK_R]
        h = live(h, offs_r[None, :], left, SHAPE.has_ranks)
        mask_b = lanes[:, None] & mask_n[None, :]
        b = tl.load(b_ptrs + first_r, mask=mask_b, other=0.0)  # [BLOCK_R, BLOCK_N]
        ranks = (offs_r + first_r)[:, None]
        b = real_weights(b, operands, slice_id, index, offs_n[None, :], ranks, mask_b, SHAPE, SHAPE.dtype)
        acc = dot_of_shrunk(h, live(b, offs_r[:, None], left, SHAPE.has_ranks), acc, SHAPE.dtype)
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
    DTYPE: tl.constexpr = SHAPE.dtype
    BLOCK_M: tl.constexpr = SHAPE.pairs.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    EVEN_N: tl.constexpr = SHAPE.n % (BLOCK_N * TILE.tiles_n) == 0
    WHOLE: tl.constexpr = SHAPE.rank <= BLOCK_R
    AT_ONCE: tl.constexpr = TILE.tiles_n == 1 and WHOLE and BLOCK_M * BLOCK_N <= 4096
    rows, valid = pairs_of(first, sorted_ptr, pairs, SHAPE.pairs)
    b_ptr = pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.n)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    h_ptrs = h_ptr + rows[:, None] * SHAPE.rank + offs_r[None, :]
    b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * SHAPE.rank
    y_ptrs = y_ptr + rows[:, None] * strides[0] + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    read = ranks_read(rank, SHAPE.rank, SHAPE.vector)
    if AT_ONCE:
        columns = (offs_n < (1 << 30 if EVEN_N else SHAPE.n))[None, :]
        b = tl.load(b_ptrs, mask=(offs_r < read)[:, None] & columns, other=0.0)  # [BLOCK_R, BLOCK_N]
        if SHAPE.add:
            old = tl.load(y_ptrs, mask=valid[:, None] & columns, other=0.0)  # [BLOCK_M, BLOCK_N]
    pdl_wait_then_launch(TILE.pdl)
    factors = _factors_of(weights_ptr + rows, valid, SHAPE)  # [BLOCK_M]
    if WHOLE:
        h = read_shrunk(h_ptrs, valid[:, None] & (offs_r < read)[None, :], partial, TILE.partials)  # [BLOCK_M, BLOCK_R]
        h = live(h, offs_r[None, :], rank, SHAPE.has_ranks)
    for _ in tl.range(0, TILE.tiles_n, num_stages=TILE.stages if WHOLE else None):
        mask_n = offs_n < (1 << 30 if EVEN_N else SHAPE.n)
        mask_y = valid[:, None] & mask_n[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if WHOLE:
            mask_b = (offs_r < read)[:, None] & mask_n[None, :]
            if not AT_ONCE:
                b = tl.load(b_ptrs, mask=mask_b, other=0.0)
            real_b = real_weights(b, operands, slice_id, index, offs_n[None, :], offs_r[:, None], mask_b, SHAPE, DTYPE)
            acc = dot_of_shrunk(h, live(real_b, offs_r[:, None], rank, SHAPE.has_ranks), acc, DTYPE)
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


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDEX_POINTERS)
def moe_expand_kernel(
    tensors, operands, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr, ranks_ptr,
    pairs, num_tiles, padded, blocks, strides,
    SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A persistent loop over tiles x (runs of tiles_n column blocks, slices), as in `moe_shrink`."""
    RUN: tl.constexpr = TILE.block_n * TILE.tiles_n
    N_BLOCKS: tl.constexpr = (SHAPE.n + RUN - 1) // RUN
    h_ptr, y_ptr, weights_ptr = tensors
    tile, part = tl.program_id(0) // (N_BLOCKS * SHAPE.slices), tl.program_id(0) % (N_BLOCKS * SHAPE.slices)
    slice_id, first_n = part // N_BLOCKS, part % N_BLOCKS * RUN
    partial = pairs.to(tl.int64) * (SHAPE.rank * SHAPE.slices)
    h_ptr += slice_id * (pairs.to(tl.int64) * SHAPE.rank)
    y_ptr += SHAPE.offset + slice_id * SHAPE.n
    total = tile + 1  # until the table is read: for every tile again, as it would hold registers meanwhile
    while tile < total:
        slots, until, total = slot_table(counts_ptr, enabled_ptr, ids_ptr, pairs, padded, SHAPE.pairs)
        where = experts_ptr, mapping_ptr, enabled_ptr
        slot, index, first, owner = find_tile(tile, (slots, until, total), where, padded, blocks, SHAPE.pairs)
        rank = rank_of(ranks_ptr, slice_id, owner, 0, SHAPE.rank, SHAPE.has_ranks, SHAPE.pairs)
        if (slot >= 0) & ((rank > 0) | (not SHAPE.add)):
            found, place = (h_ptr, y_ptr, weights_ptr), (slice_id, index, first_n)
            if TILE.rows:
                _expand_rows(found, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE, TILE)
            else:
                _expand_tile(found, operands, sorted_ptr, place, first, pairs, rank, partial, strides, SHAPE, TILE)
        else:
            pdl_wait(TILE.pdl, tl.program_id(0) == 0)
        tile += num_tiles
