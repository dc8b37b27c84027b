"""Mixtures of adapters: the terms of several per row in two launches, whatever their number.

    low[j, i, t] = gate[t, j] * x[t] @ A_i[slot[t, j]]^T
    y[t, o_i :] += sum_j low[j, i, t] @ B_i[slot[t, j]]^T            in the order of j, float32, rounded once

Both are persistent loops over the tiles of a step's list, each of rows with one list of slots. Tile sizes depend on the
weights alone, so bits of a row depend on no other row.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.metadata import MixedBatch
from punica.metadata.mixture import HEIGHT, TILE_ROWS
from punica.ops.interface import check_equal_rows, check_input, check_last_stride, check_output
from punica.ops.triton_ops import device
from punica.ops.triton_ops.launch import INTERPRETED, Launch, all_aligned, block_at_least, on_device, supports_pdl
from punica.ops.triton_ops.lora_expand import ExpandMode, ExpandTile, LowRank, expand_shape
from punica.ops.triton_ops.lora_shrink import RowTile, ShrinkMode, ShrinkTile, partial_rank, stored_shape
from punica.ops.triton_ops.op import check_runnable
from punica.ops.triton_ops.plan import operands_of
from punica.ops.triton_ops.shrink import shrink_tile
from punica.ops.weights import STEP, LoRAWeights, check_stored

_LEAST_TILES = 64
"""Tiles that a grid has programs for at least: a captured one serves steps with more."""
_FREE = ["num_tokens", "num_slots", "num_tiles", "fan"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=device.INDEX_POINTERS)
def _mix_shrink_kernel(
    tensors, operands, sorted_ptr, tiles_ptr, totals_ptr, lists_ptr, gates_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, fan, strides, SHAPE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Shrink tiles for the place and slice of program axis 1 into ``low [fan, split_k, n, T, out_rank]``."""
    x_ptr, low_ptr = tensors
    R_BLOCKS: tl.constexpr = (SHAPE.rank + TILE.block_r - 1) // TILE.block_r
    pid, part = tl.program_id(0), tl.program_id(1)
    j = part // SHAPE.slices
    low_ptr += j * (TILE.split_k * SHAPE.slices * num_tokens.to(tl.int64) * SHAPE.out_rank)
    place = (pid % TILE.split_k, pid // TILE.split_k % R_BLOCKS * TILE.block_r, part % SHAPE.slices)
    tile = pid // (TILE.split_k * R_BLOCKS)
    device.pdl_wait_then_launch(EARLY)
    total = tl.load(totals_ptr + TILE.height)
    while tile < total:
        found = device.read_record(tl.load(tiles_ptr + tile))
        group, start, size = found
        slot = tl.load(lists_ptr + group * fan + j)
        rows, _ = device.rows_of_tile(sorted_ptr, found, TILE.block_m)
        gates = tl.load(gates_ptr + rows * fan + j)[:, None]  # [BLOCK_M, 1]
        call = (ranks_ptr, num_tokens, num_slots, gates, False)
        given = (sorted_ptr, (slot, start, size))
        shrink_tile((x_ptr, low_ptr), operands, given, place, call, strides, SHAPE, TILE)
        tile += num_tiles


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=device.INDEX_POINTERS)
def _mix_expand_kernel(
    tensors, operands, sorted_ptr, tiles_ptr, totals_ptr, lists_ptr, gates_ptr, ranks_ptr,
    num_tokens, num_slots, num_tiles, fan, strides, SHAPE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Expand tiles x block_n columns of one slice, for all places in order; strides: of rows of y and low."""
    low_ptr, y_ptr = tensors
    stride_yt, stride_ht = strides
    BLOCK_N: tl.constexpr = TILE.block_n
    R_BLOCKS: tl.constexpr = (SHAPE.rank + TILE.block_r - 1) // TILE.block_r
    pid = tl.program_id(0)
    slice_id, first_n, width, column = device.column_block(pid % TILE.blocks, SHAPE, BLOCK_N)
    tile = pid // TILE.blocks
    b_ptr = device.pick(operands, slice_id, SHAPE.slices)
    DTYPE: tl.constexpr = b_ptr.dtype.element_ty
    offs_n = first_n + tl.arange(0, BLOCK_N)
    stride_hs = num_tokens.to(tl.int64) * stride_ht
    device.pdl_wait_then_launch(EARLY)
    total = tl.load(totals_ptr + TILE.height)
    while tile < total:
        found = device.read_record(tl.load(tiles_ptr + tile))
        rows, mask_m = device.rows_of_tile(sorted_ptr, found, TILE.block_m)
        acc = device.accumulator(TILE.block_m, BLOCK_N)
        for step in tl.range(0, fan * R_BLOCKS, num_stages=TILE.stages):
            j, lanes = step // R_BLOCKS, step % R_BLOCKS * TILE.block_r + tl.arange(0, TILE.block_r)
            slot = tl.load(lists_ptr + found[0] * fan + j)
            mask_r = lanes < device.rank_of(ranks_ptr, slice_id, slot, num_slots, SHAPE)
            h_ptr = low_ptr + (j * (SHAPE.partials * SHAPE.slices) + slice_id) * stride_hs
            h_ptrs = h_ptr + rows[:, None] * stride_ht + lanes[None, :]  # [BLOCK_M, BLOCK_R]
            h = device.read_shrunk(h_ptrs, mask_m[:, None] & mask_r[None, :], SHAPE.slices * stride_hs, SHAPE.partials)
            b_ptrs = b_ptr + slot.to(tl.int64) * SHAPE.rank * width
            if SHAPE.row_major:
                b_ptrs += offs_n[None, :] * SHAPE.rank + lanes[:, None]  # [BLOCK_R, BLOCK_N]
            else:
                b_ptrs += lanes[:, None] * width + offs_n[None, :]
            b = tl.load(b_ptrs, mask=mask_r[:, None] & (offs_n < width)[None, :], other=0.0)
            acc = device.dot_of_shrunk(h, b, acc, DTYPE)
        y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]  # [BLOCK_M, BLOCK_N]
        mask_y = mask_m[:, None] & (offs_n < width)[None, :]
        acc += tl.load(y_ptrs, mask=mask_y, other=0.0).to(tl.float32)
        tl.store(y_ptrs, acc.to(y_ptrs.dtype.element_ty), mask=mask_y)
        tile += num_tiles


class MixPlan(NamedTuple):
    """Both launches, their programs for a tile, and shape [split_k, n] and ranks of the sums between them."""

    shrink: Launch
    expand: Launch
    per_tile: tuple[int, int]
    parts: tuple[int, int]
    out_rank: int

    def run(self, y: Tensor, x: Tensor, weights: LoRAWeights, mixed: MixedBatch) -> None:
        """Launch; the sums have room for all rows of x, which a replayed graph may mix."""
        order, records, totals, number = mixed.groups.tiles(HEIGHT)
        tokens, fan, tiles = x.shape[0], mixed.fan, min(x.shape[0], max(number, _LEAST_TILES))
        counts = tokens, weights.a.form.stored.slots, tiles, fan
        step = order, records, totals, *mixed.tensors, weights.a.ranks
        with on_device(x.get_device()):
            low = torch.empty((fan, *self.parts, tokens, self.out_rank), dtype=torch.float32, device=x.device)
            aligned = all_aligned(x, y, *weights.a.tensors, *weights.b.tensors)
            grid = tiles * self.per_tile[0], fan * self.parts[1], 1
            self.shrink(((x, low), operands_of(weights.a), *step), counts, aligned, grid)
            self.expand(((low, y), operands_of(weights.b), *step), counts, aligned, (tiles * self.per_tile[1], 1, 1))


def plan_mix(y: Tensor, x: Tensor, weights: LoRAWeights, pdl: bool) -> MixPlan | None:
    """Check operands and plan both launches; None where there is nothing to multiply. NotImplementedError: FP8."""
    a, b = weights.a.form.stored, weights.b.form.stored
    if weights.a.form.is_fp8:
        raise NotImplementedError(f"mixtures take adapters in 16 or 32 bits, got {a.dtype}; leave out LoRAConfig.fp8")
    check_stored(weights.a, STEP.a)
    check_stored(weights.b, STEP.b)
    check_input(STEP, x, a)
    check_output(STEP, y, b, 0)
    check_last_stride(STEP.output, y)
    check_equal_rows(STEP, x, y)
    k, widths, slices = a.widths[0], b.widths, len(b.widths)
    if 0 in (x.shape[0], k, a.rank, max(widths)):
        return None
    check_runnable(x.device)
    split_k, block_r, pdl = max(1, min(8, k // 1024)), min(block_at_least(a.rank), 64), pdl and supports_pdl(x.device)
    block_k = min(block_at_least(k), 64 if INTERPRETED or a.dtype.itemsize > 2 else 128)
    columns = sum([triton.cdiv(width, 128) for width in widths])
    low = LowRank.sums(split_k, slices, x.shape[0], partial_rank(a.rank))
    shrink = ShrinkTile("list", split_k, False, RowTile(), TILE_ROWS, block_r, block_k, 3, height=HEIGHT)
    expand = ExpandTile("list", False, False, blocks=columns, block_m=TILE_ROWS, block_n=128, block_r=block_r, stages=2)

    def launch(kernel: Any, strides: tuple[int, ...], shape: NamedTuple, tile: NamedTuple) -> Launch:
        constants, dtypes = {"SHAPE": shape, "TILE": tile, "EARLY": pdl}, (x.dtype, a.dtype, y.dtype)
        return Launch(kernel, None, dtypes, strides, constants, num_warps=4, pdl=pdl, device=x.device)

    first = launch(_mix_shrink_kernel, x.stride(), stored_shape(weights.a.form, x.dtype, ShrinkMode()), shrink)
    shape = expand_shape(low, weights.b.form, ExpandMode())
    second = launch(_mix_expand_kernel, (y.stride(0), low.shape[3]), shape, expand._replace(height=HEIGHT))
    per_tile = triton.cdiv(a.rank, block_r) * split_k, columns
    return MixPlan(first, second, per_tile, (split_k, slices), low.shape[3])
