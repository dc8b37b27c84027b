"""Segmented outer products: gradients of A and B, for every adapter and every slice of the batch in one launch.

    out_i[l] = sum over rows t of slot l of low[i, t]^T x[t, c_i : c_i + W_i]        low [n, T, r], out_i [L, r, W_i]

A program sums over all rows of one segment in their sorted order: the same bits in every run, without atomic adds.
"""

from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.triton_ops.device import INDEX_POINTERS, accumulator, column_block, dot_of_shrunk, rank_of
from punica.ops.triton_ops.launch import block_at_least, launch_alone, stages_that_fit
from punica.ops.triton_ops.schedules import Gpu
from punica.ops.weights import Stack

_MOST_LANES, _STAGES = 64, 5
_TILES = {128: 128, 64: 128, 32: 256}
"""Columns of a tile, and rows: chosen are the most columns of which there are programs for all processors."""


class OuterShape(NamedTuple):
    """Constexpr of the kernel. columns: where each slice begins; shared: but in x, where all read the same columns."""

    rank: int
    widths: tuple[int, ...]
    columns: tuple[int, ...]
    slices: int
    shared: bool
    has_ranks: bool
    block_t: int
    block_r: int
    block_n: int
    stages: int
    pdl: bool = False


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _outer_kernel(
    low_ptr, x_ptr, out_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr, ranks_ptr, num_tokens, num_slots,
    stride_t, stride_n, SHAPE: tl.constexpr,
):  # fmt: skip
    BLOCK_T: tl.constexpr = SHAPE.block_t
    BLOCK_R: tl.constexpr = SHAPE.block_r
    BLOCK_N: tl.constexpr = SHAPE.block_n
    segment, first_r = tl.program_id(1), tl.program_id(2) * BLOCK_R
    slot = tl.load(ids_ptr + segment)
    slice_id, first_n, width, column = column_block(tl.program_id(0), SHAPE, BLOCK_N)
    rank = rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
    if first_r < rank:
        count = tl.load(counts_ptr + segment)
        sorted_ptr += tl.load(starts_ptr + segment)
        offs_t = tl.arange(0, BLOCK_T)
        offs_r = first_r + tl.arange(0, BLOCK_R)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_r, mask_n = (offs_r < rank)[:, None], (offs_n < width)[None, :]
        low_ptrs = low_ptr + slice_id * num_tokens.to(tl.int64) * SHAPE.rank + offs_r[:, None]  # [BLOCK_R, 1]
        x_ptrs = x_ptr + (offs_n + (0 if SHAPE.shared else column)).to(tl.int64)[None, :] * stride_n  # [1, BLOCK_N]
        acc = accumulator(BLOCK_R, BLOCK_N)
        for first_t in tl.range(0, count, BLOCK_T, num_stages=SHAPE.stages):
            mask_t = first_t + offs_t < count
            rows = tl.load(sorted_ptr + first_t + offs_t, mask=mask_t, other=0).to(tl.int64)  # [BLOCK_T]
            low = tl.load(low_ptrs + rows[None, :] * SHAPE.rank, mask=mask_r & mask_t[None, :], other=0.0)
            x = tl.load(x_ptrs + rows[:, None] * stride_t, mask=mask_t[:, None] & mask_n, other=0.0)
            acc = dot_of_shrunk(low, x, acc, x.dtype)  # [BLOCK_R, BLOCK_T] @ [BLOCK_T, BLOCK_N]
        out_ptr += (num_slots.to(tl.int64) * column + slot.to(tl.int64) * width) * SHAPE.rank
        out_ptrs = out_ptr + offs_r[:, None] * width + offs_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_r & mask_n)


def outer_products(out: Tensor, low: Tensor, x: Tensor, stack: Stack, batch: LoRABatch) -> None:
    """Write into the zeros of `Stack.gradients`. The grid is that of the step: a captured graph serves it alone."""
    stored, ranks, segments = stack.form.stored, stack.ranks, len(batch.rows.present[0])
    widths = stored.widths
    block_r, wanted = min(_MOST_LANES, block_at_least(stored.rank)), Gpu.of(out.device).multiprocessors
    lanes = triton.cdiv(stored.rank, block_r)
    grids = {n: (sum(triton.cdiv(width, n) for width in widths), segments, lanes) for n in _TILES}
    block_n = next((n for n, (blocks, *_) in grids.items() if blocks * segments * lanes >= wanted), min(_TILES))
    block_t = _TILES[block_n]
    stages = stages_that_fit(_STAGES, block_t * (block_n * x.element_size() + block_r * 4), out.device)
    shape = OuterShape(
        stored.rank, widths, (0, *accumulate(widths[:-1])), len(widths), stack.rank_dim == -2, ranks is not None,
        block_t, block_r, block_n, stages,
    )  # fmt: skip
    mapping, order, counts, starts, ids = batch.tensors
    launch_alone(
        _outer_kernel, grids[block_n],
        (low, x, out, order, counts, starts, ids, mapping if ranks is None else ranks), shape,
        strides=x.stride(), dtypes=(x.dtype, low.dtype), num_warps=4, counts=(low.shape[1], stored.slots),
    )  # fmt: skip
