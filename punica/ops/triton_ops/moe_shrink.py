"""Shrink of fused MoE LoRA: hidden size to rank, for every (token, expert) pair.

    h[split, s, i] = x_i[its part of K] @ A_s[l, e]^T            fp32 partials [splits, n, T*k, R]

for the pairs i of every tile (l, e). Two forms, as in `lora_shrink`:

* **rows**: the block of A is loaded once, and the tile's pairs are multiplied and summed one after the other. In a
  decode step an adapter's expert has one or two pairs: most of a 16-row tensor-core tile would be padding.
* **tiles**: block_m pairs at once on the tensor cores, K in a pipelined loop.

Two slices (gate and up) share one read of x in tiles. With a table of ranks, ``ranks_ptr`` int32 [n, L], neither form
reads or writes beyond an adapter's rank. Weights and x may be FP8 (`fp8_device`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from punica.ops.triton_ops.device import dot, pdl_wait, pdl_wait_then_launch, pick
from punica.ops.triton_ops.fp8_device import Quant, channel_scales, real_rows, real_weights
from punica.ops.triton_ops.moe_tiles import (
    COUNTS,
    INDEX_POINTERS,
    Pairs,
    find_tile,
    first_pair,
    pair_at,
    pairs_of,
    rank_of,
    ranks_read,
    slot_table,
)


class PairShrinkShape(NamedTuple):
    """Operands of a shrink, A_s [slots, experts, rank, k]: a constexpr.

    factor: pairs per row of x. first_rank: the adapter's rank with which A begins (sharded). dtype: of the products.
    """

    pairs: Pairs
    k: int
    rank: int
    slices: int
    factor: int
    first_rank: int
    has_ranks: bool
    dtype: Any
    quant: Quant


class PairShrinkTile(NamedTuple):
    """Schedule of a shrink: a constexpr. rows: pairs one by one. joined: both slices share a read of x."""

    rows: bool
    block_r: int
    block_k: int
    split_k: int
    stages: int
    joined: bool
    pdl: bool


@triton.jit
def _shrink_rows(
    tensors, operands, sorted_ptr, place, first, pairs, rank, strides, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """The tile's pairs x block_r ranks x one K split; one block of A where that covers the split."""
    x_ptr, out_ptr = tensors
    slice_id, index, pid_k, first_r = place
    stride_xt, stride_xk = strides
    BLOCK_K: tl.constexpr = TILE.block_k
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (BLOCK_K * TILE.split_k) == 0
    a_ptr = pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.k)
    offs_r = first_r + tl.arange(0, TILE.block_r)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_r = (offs_r < ranks_read(rank, SHAPE.rank, 1))[:, None]  # only the adapter's own are stored
    mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k)
    mask_a = mask_r & mask_k[None, :]
    a_ptrs = a_ptr + offs_r[:, None] * SHAPE.k + offs_k[None, :]
    a = tl.load(a_ptrs, mask=mask_a, other=0.0)  # [TILE.block_r, BLOCK_K]
    pair, num_rows = first_pair(first, sorted_ptr, pairs, SHAPE.pairs)
    pdl_wait_then_launch(TILE.pdl)
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
            pair = pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, SHAPE.pairs.naive)
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
    """The tile's pairs x block_r ranks x one K split of one slice, or ``joined`` of both; ``partial``: from the output
    of one slice to that of the next.
    """
    x_ptr, out_ptr = tensors
    slice_id, index, pid_k, first_r = place
    stride_xt, stride_xk = strides
    DTYPE: tl.constexpr = SHAPE.dtype
    BLOCK_M: tl.constexpr = SHAPE.pairs.block_m
    BLOCK_R: tl.constexpr = TILE.block_r
    BLOCK_K: tl.constexpr = TILE.block_k
    LAST: tl.constexpr = SHAPE.slices - 1
    STEPS: tl.constexpr = (SHAPE.k + BLOCK_K * TILE.split_k - 1) // (BLOCK_K * TILE.split_k)
    EVEN_K: tl.constexpr = SHAPE.k % (BLOCK_K * TILE.split_k) == 0
    rows, valid = pairs_of(first, sorted_ptr, pairs, SHAPE.pairs)
    a_ptr = pick(operands, slice_id, SHAPE.slices) + index * (SHAPE.rank * SHAPE.k)
    next_ptr = operands[LAST] + index * (SHAPE.rank * SHAPE.k)
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows // SHAPE.factor)[:, None] * stride_xt + offs_k[None, :] * stride_xk
    offs_a = offs_r[None, :] * SHAPE.k + offs_k[:, None]
    # a slice stores its own only
    mask_r = (offs_r < ranks_read(tl.maximum(rank, rank_next), SHAPE.rank, 1))[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    acc_next = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    pdl_wait_then_launch(TILE.pdl)
    for step in tl.range(0, STEPS, num_stages=TILE.stages):
        jump = step * (BLOCK_K * TILE.split_k)
        mask_k = offs_k < (1 << 30 if EVEN_K else SHAPE.k - jump)
        mask_x, mask_a = valid[:, None] & mask_k[None, :], mask_r & mask_k[:, None]
        offs_n, offs_step = offs_r[None, :], (offs_k + jump)[:, None]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        x = real_rows(x, operands, (rows // SHAPE.factor)[:, None], (offs_k + jump)[None, :], mask_x, SHAPE, DTYPE)
        a = tl.load(a_ptr + offs_a, mask=mask_a, other=0.0)  # [BLOCK_K, BLOCK_R]
        a = real_weights(a, operands, slice_id, index, offs_n, offs_step, mask_a, SHAPE, DTYPE)
        acc = dot(x, a, acc)
        if TILE.joined:
            b = tl.load(next_ptr + offs_a, mask=mask_a, other=0.0)
            b = real_weights(b, operands, LAST, index, offs_n, offs_step, mask_a, SHAPE, DTYPE)
            acc_next = dot(x, b, acc_next)
        x_ptrs += BLOCK_K * TILE.split_k * stride_xk
        offs_a += BLOCK_K * TILE.split_k
    if SHAPE.quant.format > 0 and SHAPE.quant.group_k == 0:
        acc *= channel_scales(operands, slice_id, index, offs_r, offs_r < rank, 1, SHAPE)[None, :]
        acc_next *= channel_scales(operands, LAST, index, offs_r, offs_r < rank_next, 1, SHAPE)[None, :]
    offs_out = rows[:, None] * SHAPE.rank + offs_r[None, :]
    tl.store(out_ptr + offs_out, acc, mask=valid[:, None] & (offs_r < rank)[None, :])
    if TILE.joined:
        tl.store(out_ptr + partial + offs_out, acc_next, mask=valid[:, None] & (offs_r < rank_next)[None, :])


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDEX_POINTERS)
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
    slots, until, total = slot_table(counts_ptr, enabled_ptr, ids_ptr, pairs, padded, PAIRS)
    pdl_wait(TILE.pdl, (tl.program_id(0) == 0) & (tile >= total))  # one waiting program keeps the chain transitive
    while tile < total:
        where = experts_ptr, mapping_ptr, enabled_ptr
        slot, index, first, owner = find_tile(tile, (slots, until, total), where, padded, blocks, PAIRS)
        rank = rank_of(ranks_ptr, slice_id, owner, SHAPE.first_rank, SHAPE.rank, SHAPE.has_ranks, PAIRS)
        rank_next = rank
        if TILE.joined:
            rank_next = rank_of(
                ranks_ptr, SHAPE.slices - 1, owner, SHAPE.first_rank, SHAPE.rank, SHAPE.has_ranks, PAIRS
            )
        if (slot >= 0) & (first_r < ranks_read(tl.maximum(rank, rank_next), SHAPE.rank, 1)):
            place = slice_id, index, pid_k, first_r
            if TILE.rows:
                _shrink_rows((x_ptr, out_ptr), operands, sorted_ptr, place, first, pairs, rank, strides, SHAPE, TILE)
            else:
                _shrink_tile(
                    (x_ptr, out_ptr), operands, sorted_ptr, place, first, pairs, rank, rank_next, partial, strides,
                    SHAPE, TILE,
                )  # fmt: skip
        else:
            pdl_wait(TILE.pdl, tl.program_id(0) == 0)
        tile += num_tiles
