"""The two kernels of two-stage fused MoE LoRA; `fused_moe_lora` plans and launches them.

    shrink:  h[split, s, i] = x_i[its part of K] @ A_s[l, e]^T            fp32 partials [splits, n, T*k, R]
    expand:  y[i, o + s*N :] (+)= w_i * (sum of partials of h[s, i]) @ B_s[l, e]^T

for the pairs i of every tile (l, e). Two forms each, as in `lora_shrink` and `lora_expand`:

* **rows**: the block of weights is loaded once, and the tile's pairs go by it one after the other, multiply and sum.
  An adapter's expert rarely has more than one or two pairs in a decode step, so a 16-row tensor-core tile would be
  padding; and where pairs are grouped, two of one expert read its weights once.
* **tiles**: BLOCK_M pairs at once on the tensor cores, K in a pipelined loop, columns in an inner loop.

Two slices (gate and up) share one read of x in the tiled shrink. With a table of ranks, ``ranks_ptr`` int32 [n, L],
neither form reads or writes what lies beyond an adapter's rank. Weights may be FP8, and x in shrink (`moe_reading`).
"""

import triton
import triton.language as tl

from punica.ops.triton_ops.device import dot, dot_of_shrunk, pick, read_shrunk
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
from punica.ops.triton_ops.moe_tiles import (
    INDEX_POINTERS,
    find_tile,
    first_pair,
    pair_at,
    pairs_of,
    program_place,
    slot_table,
)

NUMBERS = ["pairs", "num_tiles", "top_k", "padded", "blocks", "num_slots", "num_experts"]


@triton.jit
def _shrink_rows(
    x_ptr, operands, a_ptr, scale_ptr, out_ptr, sorted_ptr, first, pairs, rank, pid_k, first_r, stride_xt, stride_xk,
    K: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NAIVE: tl.constexpr, READ: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The tile's pairs x BLOCK_R ranks x one K split; one block of A where that covers the split."""
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_r = (offs_r < ranks_read(rank, R, 1))[:, None]  # only the adapter's own are stored
    mask_k = offs_k < (1 << 30 if EVEN_K else K)
    mask_a = mask_r & mask_k[None, :]
    a_ptrs = a_ptr + offs_r[:, None] * K + offs_k[None, :]
    a = tl.load(a_ptrs, mask=mask_a, other=0.0)
    pair, num_rows = first_pair(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + pair // FACTOR * stride_xt + offs_k * stride_xk, mask=mask_k, other=0.0)
    for lane in tl.range(0, num_rows):
        row = pair // FACTOR
        real_x = real_rows(x, operands, row, offs_k, mask_k, NUM_SLICES, READ, tl.float32)
        real_a = real_weights(a, scale_ptr, offs_r[:, None], offs_k[None, :], mask_a, READ, tl.float32)
        product = real_a * real_x[None, :]
        for step in tl.range(1, STEPS):
            jump = step * (BLOCK_K * SPLIT_K)
            offs_step = offs_k + jump
            mask_step = offs_k < K - jump
            mask_a_step = mask_r & mask_step[None, :]
            a_step = tl.load(a_ptrs + jump, mask=mask_a_step, other=0.0)
            x_step = tl.load(x_ptr + row * stride_xt + offs_step * stride_xk, mask=mask_step, other=0.0)
            real_x = real_rows(x_step, operands, row, offs_step, mask_step, NUM_SLICES, READ, tl.float32)
            real_a = real_weights(a_step, scale_ptr, offs_r[:, None], offs_step[None, :], mask_a_step, READ, tl.float32)
            product += real_a * real_x[None, :]
        out_ptrs = out_ptr + pair * R + offs_r
        if not NAIVE:  # fetch the next pair's row before this one's sum is formed
            pair = pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, NAIVE)
            x = tl.load(x_ptr + pair // FACTOR * stride_xt + offs_k * stride_xk, mask=mask_k, other=0.0)
        total = tl.sum(product, 1)
        if READ.weights > 0:
            total *= column_scales(scale_ptr, offs_r, offs_r < rank, READ)
        tl.store(out_ptrs, total, mask=offs_r < rank)


@triton.jit
def _shrink_tile(
    x_ptr, operands, a_ptr, b_ptr, scale_ptr, scale_next, out_ptr, out_next, rows, valid, rank, rank_next, pid_k,
    first_r, stride_xt, stride_xk,
    K: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, NUM_SLICES: tl.constexpr, JOINED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, READ: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The pairs ``rows`` x BLOCK_R ranks x one K split of one slice (``a_ptr``), or JOINED of two (and ``b_ptr``)."""
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows // FACTOR)[:, None] * stride_xt + offs_k[None, :] * stride_xk
    offs_a = offs_r[None, :] * K + offs_k[:, None]
    mask_r = (offs_r < ranks_read(tl.maximum(rank, rank_next), R, 1))[None, :]  # a slice stores its own only
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    acc_next = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
        jump = step * (BLOCK_K * SPLIT_K)
        mask_k = offs_k < (1 << 30 if EVEN_K else K - jump)
        mask_x, mask_a = valid[:, None] & mask_k[None, :], mask_r & mask_k[:, None]
        offs_n, offs_step = offs_r[None, :], (offs_k + jump)[:, None]
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        x = real_rows(
            x, operands, (rows // FACTOR)[:, None], (offs_k + jump)[None, :], mask_x, NUM_SLICES, READ, READ.dtype
        )
        a = tl.load(a_ptr + offs_a, mask=mask_a, other=0.0)
        acc = dot(x, real_weights(a, scale_ptr, offs_n, offs_step, mask_a, READ, READ.dtype), acc, False, INTERPRET)
        if JOINED:
            b = tl.load(b_ptr + offs_a, mask=mask_a, other=0.0)
            b = real_weights(b, scale_next, offs_n, offs_step, mask_a, READ, READ.dtype)
            acc_next = dot(x, b, acc_next, False, INTERPRET)
        x_ptrs += BLOCK_K * SPLIT_K * stride_xk
        offs_a += BLOCK_K * SPLIT_K
    if READ.weights > 0:
        acc *= column_scales(scale_ptr, offs_r, offs_r < rank, READ)[None, :]
        acc_next *= column_scales(scale_next, offs_r, offs_r < rank_next, READ)[None, :]
    offs_out = rows[:, None] * R + offs_r[None, :]
    tl.store(out_ptr + offs_out, acc, mask=valid[:, None] & (offs_r < rank)[None, :])
    if JOINED:
        tl.store(out_next + offs_out, acc_next, mask=valid[:, None] & (offs_r < rank_next)[None, :])


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDEX_POINTERS)
def moe_shrink_kernel(
    x_ptr, a_ptrs, out_ptr, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr, ranks_ptr,
    pairs, num_tiles, top_k, padded, blocks, num_slots, num_experts, stride_xt, stride_xk,
    K: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, NUM_SLICES: tl.constexpr, NAIVE: tl.constexpr,
    HAS_IDS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr, ROWS: tl.constexpr, JOINED: tl.constexpr,
    HAS_RANKS: tl.constexpr, FIRST_R: tl.constexpr, READ: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles x (K splits, blocks of ranks, slices), by programs for ``num_tiles`` of them, which go on where there are
    more. The adapters' ranks are counted from FIRST_R on, which is where A begins.
    """
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    STEP_SLICES: tl.constexpr = 1 if JOINED else NUM_SLICES
    tile, part = program_place(tl.program_id(0), num_tiles, SPLIT_K * R_BLOCKS * STEP_SLICES, GROUP_M)
    pid_k, first_r = part % SPLIT_K, part // SPLIT_K % R_BLOCKS * BLOCK_R
    slice_id = part // (SPLIT_K * R_BLOCKS)
    slots, until, total = slot_table(
        counts_ptr, enabled_ptr, ids_ptr, pairs, padded, num_slots, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS
    )
    ranks = rank_table(ranks_ptr, slice_id, num_slots, BLOCK_SLOTS, HAS_RANKS)
    ranks_next = rank_table(ranks_ptr, NUM_SLICES - 1 if JOINED else slice_id, num_slots, BLOCK_SLOTS, HAS_RANKS)
    partial = pairs.to(tl.int64) * R
    out_ptr += (pid_k * NUM_SLICES + slice_id) * partial
    if PDL:  # noqa: SIM102 (PDL is decided at compile time)
        if (tl.program_id(0) == 0) & (tile >= total):  # one waiting program keeps a kernel behind the one in front
            tl.extra.cuda.gdc_wait()
    while tile < total:
        slot, expert, first = find_tile(
            tile, slots, until, sorted_ptr, experts_ptr, mapping_ptr, enabled_ptr, top_k, padded, blocks, num_slots,
            num_experts, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS,
        )  # fmt: skip
        rank = rank_in(ranks, slot, R, FIRST_R, BLOCK_SLOTS, HAS_RANKS)
        rank_next = rank_in(ranks_next, slot, R, FIRST_R, BLOCK_SLOTS, HAS_RANKS)
        if (slot >= 0) & (first_r < ranks_read(tl.maximum(rank, rank_next), R, 1)):
            index = slot.to(tl.int64) * num_experts + expert
            weights = index * (R * K)
            scale_ptr = scales_at(a_ptrs, slice_id, index, NUM_SLICES, READ)
            if ROWS:
                _shrink_rows(
                    x_ptr, a_ptrs, pick(a_ptrs, slice_id, NUM_SLICES) + weights, scale_ptr, out_ptr, sorted_ptr, first,
                    pairs, rank, pid_k, first_r, stride_xt, stride_xk,
                    K, R, FACTOR, NUM_SLICES, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT_K, NAIVE, READ, PDL,
                )  # fmt: skip
            else:
                rows, valid = pairs_of(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
                _shrink_tile(
                    x_ptr, a_ptrs, pick(a_ptrs, slice_id, NUM_SLICES) + weights, a_ptrs[NUM_SLICES - 1] + weights,
                    scale_ptr, scales_at(a_ptrs, NUM_SLICES - 1, index, NUM_SLICES, READ), out_ptr, out_ptr + partial,
                    rows, valid, rank, rank_next, pid_k, first_r, stride_xt, stride_xk,
                    K, R, FACTOR, NUM_SLICES, JOINED, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT_K, NUM_STAGES, READ, PDL,
                    INTERPRET,
                )  # fmt: skip
        else:
            if PDL:  # noqa: SIM102 (PDL is decided at compile time)
                if tl.program_id(0) == 0:
                    tl.extra.cuda.gdc_wait()
        tile += num_tiles


@triton.jit
def _expand_rows(
    h_ptr, b_ptr, scale_ptr, y_ptr, weights_ptr, sorted_ptr, first, pairs, rank, first_n, partial, stride_y,
    R: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    PARTIALS: tl.constexpr, NAIVE: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, HAS_RANKS: tl.constexpr,
    VECTOR: tl.constexpr, READ: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tile's pairs x BLOCK_N columns, whose weights are read once, and asked for before the pairs are known."""
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    mask_r = offs_r < ranks_read(rank, R, VECTOR)
    mask_b = mask_n[:, None] & mask_r[None, :]
    b = tl.load(b_ptr + offs_n[:, None] * R + offs_r[None, :], mask=mask_b, other=0.0)
    scale = column_scales(scale_ptr, offs_n, mask_n, READ)
    pair, num_rows = first_pair(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
    old = tl.zeros([BLOCK_N], y_ptr.dtype.element_ty)
    if ADD:
        old = tl.load(y_ptr + pair * stride_y + offs_n, mask=mask_n, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for lane in tl.range(0, num_rows):
        h = live(read_shrunk(h_ptr + pair * R + offs_r, mask_r, partial, PARTIALS), offs_r, rank, HAS_RANKS)
        if WEIGHTED:
            h *= tl.load(weights_ptr + pair).to(tl.float32)
        real_b = real_weights(b, scale_ptr, offs_n[:, None], offs_r[None, :], mask_b, READ, tl.float32)
        product = live(real_b, offs_r[None, :], rank, HAS_RANKS) * h[None, :]
        before, y_ptrs = old.to(tl.float32), y_ptr + pair * stride_y + offs_n
        if not NAIVE:
            pair = pair_at(first, tl.minimum(lane + 1, num_rows - 1), sorted_ptr, NAIVE)
            if ADD:  # not of the last lane again: that one is being written
                old = tl.load(y_ptr + pair * stride_y + offs_n, mask=mask_n & (lane + 1 < num_rows), other=0.0)
        total = tl.sum(product, 1)
        if READ.weights > 0:
            total *= scale
        total += before
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def _expand_tile(
    h_ptr, b_ptr, scale_ptr, y_ptr, weights_ptr, rows, valid, rank, first_n, partial, stride_y,
    R: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TILES_N: tl.constexpr, NUM_STAGES: tl.constexpr, PARTIALS: tl.constexpr, WEIGHTED: tl.constexpr,
    ADD: tl.constexpr, HAS_RANKS: tl.constexpr, VECTOR: tl.constexpr, READ: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The pairs ``rows`` x TILES_N blocks of BLOCK_N columns. Planes are summed once where all ranks fit a block.
    AT_ONCE: there is one block, and it and the old y are few enough for registers, so that they are loaded before
    shrink has ended; whoever wrote y has, as shrink lets this kernel start when it has waited itself.
    """
    EVEN_N: tl.constexpr = N % (BLOCK_N * TILES_N) == 0
    AT_ONCE: tl.constexpr = TILES_N == 1 and BLOCK_R >= R and BLOCK_M * BLOCK_N <= 4096
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    h_ptrs = h_ptr + rows[:, None] * R + offs_r[None, :]
    b_ptrs = b_ptr + offs_r[:, None] + offs_n[None, :] * R
    y_ptrs = y_ptr + rows[:, None] * stride_y + offs_n[None, :]
    read = ranks_read(rank, R, VECTOR)
    mask_n = (offs_n < (1 << 30 if EVEN_N else N))[None, :]
    mask_b = (offs_r < read)[:, None] & mask_n
    if AT_ONCE:
        b = tl.load(b_ptrs, mask=mask_b, other=0.0)
        if ADD:
            old = tl.load(y_ptrs, mask=valid[:, None] & mask_n, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factors = tl.full([BLOCK_M], 1.0, tl.float32)
    if WEIGHTED:
        factors = tl.load(weights_ptr + rows, mask=valid, other=0.0).to(tl.float32)
    if BLOCK_R >= R:
        h = read_shrunk(h_ptrs, valid[:, None] & (offs_r < read)[None, :], partial, PARTIALS)
        h = live(h, offs_r[None, :], rank, HAS_RANKS)
        for _ in tl.range(0, TILES_N, num_stages=NUM_STAGES):
            if not AT_ONCE:
                mask_n = (offs_n < (1 << 30 if EVEN_N else N))[None, :]
                mask_b = (offs_r < read)[:, None] & mask_n
                b = tl.load(b_ptrs, mask=mask_b, other=0.0)
            real_b = real_weights(b, scale_ptr, offs_n[None, :], offs_r[:, None], mask_b, READ, READ.dtype)
            real_b = live(real_b, offs_r[:, None], rank, HAS_RANKS)
            total = dot_of_shrunk(h, real_b, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), READ.dtype, INTERPRET)
            total *= factors[:, None]
            if READ.weights > 0:
                total *= column_scales(scale_ptr, offs_n, offs_n < N, READ)[None, :]
            if ADD:
                if not AT_ONCE:
                    old = tl.load(y_ptrs, mask=valid[:, None] & mask_n, other=0.0)
                total += old.to(tl.float32)
            tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=valid[:, None] & mask_n)
            offs_n += BLOCK_N
            b_ptrs += BLOCK_N * R
            y_ptrs += BLOCK_N
    else:
        for _ in tl.range(0, TILES_N):
            mask_n = (offs_n < N)[None, :]
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first_r in tl.range(0, rank, BLOCK_R, num_stages=NUM_STAGES):
                lanes, left = offs_r < read - first_r, rank - first_r
                h = read_shrunk(h_ptrs + first_r, valid[:, None] & lanes[None, :], partial, PARTIALS)
                h = live(h, offs_r[None, :], left, HAS_RANKS)
                mask_b = lanes[:, None] & mask_n
                b = tl.load(b_ptrs + first_r, mask=mask_b, other=0.0)
                b = real_weights(b, scale_ptr, offs_n[None, :], (offs_r + first_r)[:, None], mask_b, READ, READ.dtype)
                acc = dot_of_shrunk(h, live(b, offs_r[:, None], left, HAS_RANKS), acc, READ.dtype, INTERPRET)
            total = acc * factors[:, None]
            if READ.weights > 0:
                total *= column_scales(scale_ptr, offs_n, offs_n < N, READ)[None, :]
            if ADD:
                total += tl.load(y_ptrs, mask=valid[:, None] & mask_n, other=0.0).to(tl.float32)
            tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=valid[:, None] & mask_n)
            offs_n += BLOCK_N
            b_ptrs += BLOCK_N * R
            y_ptrs += BLOCK_N


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=[*INDEX_POINTERS, "weights_ptr"])
def moe_expand_kernel(
    h_ptr, b_ptrs, y_ptr, weights_ptr, sorted_ptr, experts_ptr, counts_ptr, mapping_ptr, enabled_ptr, ids_ptr,
    ranks_ptr, pairs, num_tiles, top_k, padded, blocks, num_slots, num_experts, stride_y,
    R: tl.constexpr, N: tl.constexpr, OFFSET: tl.constexpr, NUM_SLICES: tl.constexpr, NAIVE: tl.constexpr,
    HAS_IDS: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, TILES_N: tl.constexpr, GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr,
    PARTIALS: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, HAS_RANKS: tl.constexpr,
    VECTOR: tl.constexpr, READ: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles x (runs of TILES_N column blocks, slices), as `moe_shrink_kernel`. With PDL it starts while shrink runs:
    rows, and tiles of one block, ask for weights and the old y, then it waits for h. VECTOR: ranks that one load takes.
    """
    N_BLOCKS: tl.constexpr = (N + BLOCK_N * TILES_N - 1) // (BLOCK_N * TILES_N)
    tile, part = program_place(tl.program_id(0), num_tiles, N_BLOCKS * NUM_SLICES, GROUP_M)
    slice_id, first_n = part // N_BLOCKS, part % N_BLOCKS * (BLOCK_N * TILES_N)
    slots, until, total = slot_table(
        counts_ptr, enabled_ptr, ids_ptr, pairs, padded, num_slots, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS
    )
    ranks = rank_table(ranks_ptr, slice_id, num_slots, BLOCK_SLOTS, HAS_RANKS)
    partial = pairs.to(tl.int64) * (R * NUM_SLICES)
    h_ptr += slice_id * (pairs.to(tl.int64) * R)
    y_ptr += OFFSET + slice_id * N
    if PDL:  # noqa: SIM102 (PDL is decided at compile time)
        if (tl.program_id(0) == 0) & (tile >= total):
            tl.extra.cuda.gdc_wait()
    while tile < total:
        slot, expert, first = find_tile(
            tile, slots, until, sorted_ptr, experts_ptr, mapping_ptr, enabled_ptr, top_k, padded, blocks, num_slots,
            num_experts, BLOCK_M, BLOCK_SLOTS, NAIVE, HAS_IDS,
        )  # fmt: skip
        rank = rank_in(ranks, slot, R, 0, BLOCK_SLOTS, HAS_RANKS)
        if (slot >= 0) & ((rank > 0) | (not ADD)):
            index = slot.to(tl.int64) * num_experts + expert
            b_ptr = pick(b_ptrs, slice_id, NUM_SLICES) + index * (R * N)
            scale_ptr = scales_at(b_ptrs, slice_id, index, NUM_SLICES, READ)
            if ROWS:
                _expand_rows(
                    h_ptr, b_ptr, scale_ptr, y_ptr, weights_ptr, sorted_ptr, first, pairs, rank, first_n, partial,
                    stride_y, R, N, BLOCK_M, BLOCK_N, BLOCK_R, PARTIALS, NAIVE, WEIGHTED, ADD, HAS_RANKS, VECTOR, READ,
                    PDL,
                )  # fmt: skip
            else:
                rows, valid = pairs_of(first, sorted_ptr, pairs, BLOCK_M, NAIVE)
                _expand_tile(
                    h_ptr, b_ptr, scale_ptr, y_ptr, weights_ptr, rows, valid, rank, first_n, partial, stride_y,
                    R, N, BLOCK_M, BLOCK_N, BLOCK_R, TILES_N, NUM_STAGES, PARTIALS, WEIGHTED, ADD, HAS_RANKS, VECTOR,
                    READ, PDL, INTERPRET,
                )  # fmt: skip
        else:
            if PDL:  # noqa: SIM102 (PDL is decided at compile time)
                if tl.program_id(0) == 0:
                    tl.extra.cuda.gdc_wait()
        tile += num_tiles
