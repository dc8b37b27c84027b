"""How the fused MoE LoRA kernels read their operands: true ranks, and weights and activations that may be FP8.

FP8 values are made wide in registers (`fp8_device`). A scale that belongs to whole columns of the product multiplies
its sum; one that belongs to blocks of K, or to activations, multiplies the elements as they are made wide, so that a
block of the product may span several of them, of any size.

A kernel gets the weights of all slices, their scales, and the activations' scales as one tuple of operands.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.fp8_checks import Scheme
from punica.ops.triton_ops.fp8_device import TYPES, as_operand, fp8_format, pick_from, upcast


class Reading(NamedTuple):
    """What a kernel is told of one product, all of it at compile time.

    ``dtype``: the wide type of the product; ``weights``: format of the weights (`fp8_device.fp8_format`); ``scales``:
    how many an expert has; ``column``: how far apart those of two groups of ``group_n`` columns lie (0: one for all);
    ``group_k``: 0, or the contraction indices that share one. ``x``: format of the activations; ``x_row``, ``x_block``:
    how far apart the scales of two rows, and of two groups of ``x_group`` columns of theirs lie.
    """

    dtype: Any
    weights: int = 0
    scales: int = 0
    column: int = 0
    group_n: int = 1
    group_k: int = 0
    x: int = 0
    x_row: int = 0
    x_block: int = 0
    x_group: int = 1


def reading_of(
    weights: Tensor, wide: torch.dtype, scheme: Scheme, x: Tensor | None = None, x_scale: Tensor | None = None
) -> Reading:
    """Of FP8 weights, of which one slice is ``[L, E, N, K]``, multiplied as ``wide``; ``x`` with scales: FP8, too."""
    rows, k = weights.shape[-2:]
    reading = Reading(TYPES[wide], fp8_format(weights.dtype))
    if scheme.block_wise:
        blocks = -(-k // scheme.group_k)
        reading = reading._replace(
            scales=-(-rows // scheme.group_n) * blocks, column=blocks, group_n=scheme.group_n,
            group_k=scheme.group_k if blocks > 1 else 0,
        )  # fmt: skip
    elif scheme.per_channel_quant:
        reading = reading._replace(scales=rows, column=1)
    else:
        reading = reading._replace(scales=1)
    if x is None or x_scale is None:
        return reading
    groups = x_scale.shape[1] if x_scale.ndim == 2 else 1
    row = 0 if x_scale.numel() == 1 else groups
    return reading._replace(
        x=fp8_format(x.dtype), x_row=row, x_block=int(groups > 1), x_group=scheme.group_k if groups > 1 else 1 << 30
    )


def operands_of(weights: Sequence[Tensor], scales: Sequence[Tensor], x_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Weights of all slices, their scales and the activations', as one argument of a kernel."""
    if not scales:
        return tuple(weights)
    return (*[as_operand(weight) for weight in weights], *scales, scales[0] if x_scale is None else x_scale)


def stage_bytes(read: Reading, itemsize: int, x: int, weights: int) -> int:
    """Shared memory of one stage of a loop that loads so many elements of x and of weights, ``itemsize`` bytes each
    once they are wide: scales that multiply elements lie beside them.
    """
    return x * (itemsize + 4 * (read.x > 0)) + weights * (itemsize + 4 * (read.group_k > 0))


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def rank_table(ranks_ptr, slice_id, num_slots, BLOCK_SLOTS: tl.constexpr, HAS_RANKS: tl.constexpr):
    """True ranks of all slots, [BLOCK_SLOTS]: loaded at once, so that no tile waits for its own."""
    slots = tl.arange(0, BLOCK_SLOTS)
    ranks = tl.zeros([BLOCK_SLOTS], tl.int32)
    if HAS_RANKS:
        ranks = tl.load(ranks_ptr + slice_id * num_slots + slots, mask=slots < num_slots, other=0)
    return ranks


@triton.jit
def rank_in(ranks, slot, R: tl.constexpr, FIRST_R: tl.constexpr, BLOCK_SLOTS: tl.constexpr, HAS_RANKS: tl.constexpr):
    """How many of the ranks FIRST_R to FIRST_R + R the adapter in ``slot`` has; R without a table."""
    if HAS_RANKS:
        rank = tl.sum(tl.where(tl.arange(0, BLOCK_SLOTS) == slot, ranks, 0), 0) - FIRST_R
        rank = tl.minimum(tl.maximum(rank, 0), R)
    else:
        rank = tl.full([], R, tl.int32)
    return rank


@triton.jit
def ranks_read(rank, R: tl.constexpr, VECTOR: tl.constexpr):
    """How many ranks are loaded. Slots of up to 16 are read whole, so that reading does not wait for the table; of
    others ``rank`` up to the next multiple of VECTOR, which the compiler sees to be one. `live` drops what lies beyond
    the rank.
    """
    if R <= 16:
        read = tl.full([], R, tl.int32)
    else:
        read = (rank + (VECTOR - 1)) // VECTOR * VECTOR
    return read


@triton.jit
def live(values, offs_r, rank, HAS_RANKS: tl.constexpr):
    """``values`` with zeros beyond the rank, whatever is there."""
    if HAS_RANKS:
        values = tl.where(offs_r < rank, values, 0.0)
    return values


@triton.jit
def scales_at(operands, slice_id, index, NUM_SLICES: tl.constexpr, READ: tl.constexpr):
    """Where the scales of expert number ``index`` of a slice begin (without any: some address)."""
    if READ.weights > 0:
        scale_ptr = pick_from(operands, slice_id, NUM_SLICES, NUM_SLICES) + index * READ.scales
    else:
        scale_ptr = operands[0]
    return scale_ptr


@triton.jit
def real_weights(stored, scale_ptr, offs_n, offs_k, mask, READ: tl.constexpr, DTYPE: tl.constexpr):
    """``stored`` as DTYPE; times the scales where these belong to blocks of K."""
    if READ.group_k > 0:
        scale_ptrs = scale_ptr + offs_n // READ.group_n * READ.column + offs_k // READ.group_k
        scale = tl.load(scale_ptrs, mask=mask, other=0.0)
        value = (upcast(stored, READ.weights, tl.float32) * scale).to(DTYPE)
    else:
        value = upcast(stored, READ.weights, DTYPE)
    return value


@triton.jit
def column_scales(scale_ptr, offs_n, mask, READ: tl.constexpr):
    """What a product's columns are to be multiplied by, where scales do not belong to blocks of K."""
    if READ.weights > 0 and READ.group_k == 0:
        scale = tl.load(scale_ptr + offs_n // READ.group_n * READ.column, mask=mask, other=0.0)
    else:
        scale = tl.full(offs_n.shape, 1.0, tl.float32)
    return scale


@triton.jit
def real_rows(stored, operands, row, offs_k, mask, NUM_SLICES: tl.constexpr, READ: tl.constexpr, DTYPE: tl.constexpr):
    """Activations as DTYPE, times their scales if they are FP8."""
    if READ.x > 0:
        scale_ptrs = operands[2 * NUM_SLICES] + row * READ.x_row + offs_k // READ.x_group * READ.x_block
        scale = tl.load(scale_ptrs, mask=mask, other=0.0)
        value = (upcast(stored, READ.x, tl.float32) * scale).to(DTYPE)
    else:
        value = stored.to(DTYPE)
    return value
