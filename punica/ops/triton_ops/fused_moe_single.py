"""Fused MoE LoRA in one launch: each program computes the rank vectors it needs itself, and keeps them in registers.

No workspace and no second launch, but programs that share a pair and differ in their columns shrink it again. So one
launch pays where two cannot overlap and A is small (a short K, as after the activation) or pairs are few; or where
tiles fill the device without sharing: some programs read A while others read B, and memory never waits.

* **one shot**: tiles of the alignment (or single pairs) on the tensor cores; N is split among programs where tiles are
  few.
* **small batch**: a fixed grid drains a list of (pair, slice, chunk of columns), matrix-vector products in fp32.

Ranks and FP8 weights as in `fused_moe_kernels`; ``READ_A`` and ``READ_B`` say how either product reads.
"""

import triton
import triton.language as tl

from punica.ops.triton_ops.device import dot, dot_of_shrunk, pick
from punica.ops.triton_ops.fused_moe_kernels import NUMBERS
from punica.ops.triton_ops.moe_reading import (
    column_scales,
    live,
    rank_in,
    rank_table,
    ranks_read,
    real_rows,
    real_weights,
    scales_at,
)
from punica.ops.triton_ops.moe_tiles import INDEX_POINTERS, find_tile, pairs_of, slot_table


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=[*INDEX_POINTERS, "weights_ptr"])
def moe_one_shot_kernel(
    x_ptr, a_ptrs, b_ptrs, y_ptr, weights_ptr, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr,
    ranks_ptr, pairs, num_tiles, top_k, padded, blocks, num_slots, num_experts, stride_xt, stride_xk, stride_y,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
    NUM_SLICES: tl.constexpr, NAIVE: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, NUM_STAGES: tl.constexpr,
    STAGES_N: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, HAS_RANKS: tl.constexpr, VECTOR: tl.constexpr,
    READ_A: tl.constexpr, READ_B: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles x PARTS of the column blocks; program_id(1) is the slice. Programs go on where there are more tiles. With
    PDL it may start early, and waits before it reads anything: even the alignment may be from the kernel in front.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part, slice_id = tl.program_id(0) % PARTS, tl.program_id(1)
    tile = tl.program_id(0) // PARTS
    slots, until, total = slot_table(
        counts_ptr, enabled_ptr, ids_ptr, pairs, padded, num_slots, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS
    )
    ranks = rank_table(ranks_ptr, slice_id, num_slots, BLOCK_SLOTS, HAS_RANKS)
    offs_r, offs_k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    y_ptr += OFFSET + slice_id * N
    while tile < total:
        slot, expert, first = find_tile(
            tile, slots, until, sorted_ptr, experts_ptr, mapping_ptr, enabled_ptr, top_k, padded, blocks, num_slots,
            num_experts, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS,
        )  # fmt: skip
        rank = rank_in(ranks, slot, R, 0, BLOCK_SLOTS, HAS_RANKS)
        if (slot >= 0) & ((rank > 0) | (not ADD)):
            mask_r, read = offs_r < rank, ranks_read(rank, R, VECTOR)
            index = slot.to(tl.int64) * num_experts + expert
            a_ptr = pick(a_ptrs, slice_id, NUM_SLICES) + index * (R * K)
            b_ptr = pick(b_ptrs, slice_id, NUM_SLICES) + index * (R * N)
            a_scale = scales_at(a_ptrs, slice_id, index, NUM_SLICES, READ_A)
            b_scale = scales_at(b_ptrs, slice_id, index, NUM_SLICES, READ_B)
            rows, valid = pairs_of(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
            x_ptrs = x_ptr + (rows // FACTOR)[:, None] * stride_xt + offs_k[None, :] * stride_xk
            a_ptrs_block = a_ptr + offs_r[None, :] * K + offs_k[:, None]
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for first_k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
                mask_k = offs_k < (1 << 30 if K % BLOCK_K == 0 else K - first_k)
                mask_x, mask_a = valid[:, None] & mask_k[None, :], mask_r[None, :] & mask_k[:, None]
                offs_step = first_k + offs_k
                x = tl.load(x_ptrs, mask=mask_x, other=0.0)
                x = real_rows(
                    x, a_ptrs, (rows // FACTOR)[:, None], offs_step[None, :], mask_x, NUM_SLICES, READ_A, READ_A.dtype
                )
                a = tl.load(a_ptrs_block, mask=mask_a, other=0.0)
                a = real_weights(a, a_scale, offs_r[None, :], offs_step[:, None], mask_a, READ_A, READ_A.dtype)
                acc = dot(x, a, acc, False, INTERPRET)
                x_ptrs += BLOCK_K * stride_xk
                a_ptrs_block += BLOCK_K
            if READ_A.weights > 0:
                acc *= column_scales(a_scale, offs_r, mask_r, READ_A)[None, :]
            factors = tl.full([BLOCK_M], 1.0, tl.float32)
            if WEIGHTED:
                factors = tl.load(weights_ptr + rows, mask=valid, other=0.0).to(tl.float32)
            for first_n in tl.range(part * BLOCK_N, N, PARTS * BLOCK_N, num_stages=STAGES_N):
                offs_n = first_n + tl.arange(0, BLOCK_N)
                mask_n = (offs_n < N)[None, :]
                mask_b = (offs_r < read)[:, None] & mask_n
                b = tl.load(b_ptr + offs_r[:, None] + offs_n[None, :] * R, mask=mask_b, other=0.0)
                b = real_weights(b, b_scale, offs_n[None, :], offs_r[:, None], mask_b, READ_B, READ_B.dtype)
                b = live(b, offs_r[:, None], rank, HAS_RANKS)
                delta = dot_of_shrunk(acc, b, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), READ_B.dtype, INTERPRET)
                delta *= factors[:, None]
                if READ_B.weights > 0:
                    delta *= column_scales(b_scale, offs_n, offs_n < N, READ_B)[None, :]
                y_ptrs = y_ptr + rows[:, None] * stride_y + offs_n[None, :]
                if ADD:
                    delta += tl.load(y_ptrs, mask=valid[:, None] & mask_n, other=0.0).to(tl.float32)
                tl.store(y_ptrs, delta.to(y_ptr.dtype.element_ty), mask=valid[:, None] & mask_n)
        tile += tl.num_programs(0) // PARTS


@triton.jit(
    do_not_specialize=["work_total", "chunks", "tiles_per_chunk", "top_k", "num_slots", "num_experts"],
    do_not_specialize_on_alignment=["experts_ptr", "mapping_ptr", "enabled_ptr", "ranks_ptr", "weights_ptr"],
)
def _fused_moe_lora_small_batch_kernel(
    x_ptr, a_ptrs, b_ptrs, y_ptr, weights_ptr, experts_ptr, mapping_ptr, enabled_ptr, ranks_ptr,
    work_total, chunks, tiles_per_chunk, top_k, num_slots, num_experts, stride_xt, stride_xk, stride_y,
    K: tl.constexpr, R: tl.constexpr, N: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr,
    NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN_K: tl.constexpr,
    WEIGHTED: tl.constexpr, ADD: tl.constexpr, HAS_RANKS: tl.constexpr, READ_A: tl.constexpr, READ_B: tl.constexpr,
):  # fmt: skip
    """Work items (pair, slice, chunk of ``tiles_per_chunk`` column tiles); programs stride over them."""
    offs_r, offs_k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    lanes = tl.where(offs_r < R, offs_r, 0)  # past the slot's width: row 0, masked
    for item in tl.range(tl.program_id(0), work_total, tl.num_programs(0)):
        chunk, slice_id = item % chunks, item // chunks % NUM_SLICES
        pair = (item // (chunks * NUM_SLICES)).to(tl.int64)
        slot = tl.load(mapping_ptr + pair // top_k)
        expert = tl.load(experts_ptr + pair)
        active = (slot >= 0) & (slot < num_slots) & (expert >= 0) & (expert < num_experts)
        expert = expert.to(tl.int32)
        active = active & (tl.load(enabled_ptr + tl.where(slot >= 0, slot, 0), mask=active, other=0) != 0)
        rank = tl.full([], R, tl.int32)
        if HAS_RANKS:
            rank = tl.minimum(tl.load(ranks_ptr + slice_id * num_slots + slot, mask=active, other=0), R)
        if active & ((rank > 0) | (not ADD)):
            mask_r = offs_r < rank
            index = slot.to(tl.int64) * num_experts + expert
            a_block = pick(a_ptrs, slice_id, NUM_SLICES) + index * (R * K) + lanes[:, None] * K + offs_k[None, :]
            a_scale = scales_at(a_ptrs, slice_id, index, NUM_SLICES, READ_A)
            row = pair // FACTOR
            x_ptrs = x_ptr + row * stride_xt + offs_k * stride_xk
            sums = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            for first_k in tl.range(0, K, BLOCK_K):
                mask_k = offs_k < (1 << 30 if EVEN_K else K - first_k)
                mask_a, offs_step = mask_r[:, None] & mask_k[None, :], first_k + offs_k
                a = tl.load(a_block, mask=mask_a, other=0.0)
                x = tl.load(x_ptrs, mask=mask_k, other=0.0)
                x = real_rows(x, a_ptrs, row, offs_step, mask_k, NUM_SLICES, READ_A, tl.float32)
                a = real_weights(a, a_scale, offs_r[:, None], offs_step[None, :], mask_a, READ_A, tl.float32)
                sums += a * x[None, :]
                a_block += BLOCK_K
                x_ptrs += BLOCK_K * stride_xk
            h = tl.sum(sums, 1)
            if READ_A.weights > 0:
                h *= column_scales(a_scale, offs_r, mask_r, READ_A)
            if WEIGHTED:
                h *= tl.load(weights_ptr + pair).to(tl.float32)
            b_ptr = pick(b_ptrs, slice_id, NUM_SLICES) + index * (R * N)
            b_scale = scales_at(b_ptrs, slice_id, index, NUM_SLICES, READ_B)
            y_row = y_ptr + pair * stride_y + OFFSET + slice_id * N
            for step in tl.range(0, tiles_per_chunk):
                offs_n = (chunk * tiles_per_chunk + step) * BLOCK_N + tl.arange(0, BLOCK_N)
                mask_n = offs_n < N
                b_ptrs_block = b_ptr + offs_n[:, None] * R + lanes[None, :]
                mask_b = mask_n[:, None] & mask_r[None, :]
                b = tl.load(b_ptrs_block, mask=mask_b, other=0.0)
                b = real_weights(b, b_scale, offs_n[:, None], offs_r[None, :], mask_b, READ_B, tl.float32)
                delta = tl.sum(b * h[None, :], 1)
                if READ_B.weights > 0:
                    delta *= column_scales(b_scale, offs_n, mask_n, READ_B)
                if ADD:
                    delta += tl.load(y_row + offs_n, mask=mask_n, other=0.0).to(tl.float32)
                tl.store(y_row + offs_n, delta.to(y_ptr.dtype.element_ty), mask=mask_n)
