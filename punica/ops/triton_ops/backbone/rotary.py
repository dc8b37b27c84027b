"""RoPE: the angles of a step, once (`rotary_angles`; torch takes five launches for them), a program per row:

    cos[t, i] = factor * cos(positions[t] * frequencies[i]),      sin[t, i] likewise, in float32, rounded once

and, in each layer, rotation and the write into the KV cache, on the packed product of its q, k and v projections:

    qkv[t, h]   = rotated by the angles of token t                  for the H query and Hkv key heads, in place
    keys[r_t]   = the rotated keys of token t,      values[r_t] = its values                with r_t = kv_rows[t]

The rotation is that of :mod:`punica.models.rotary` (halves layout), in float32 and rounded once; with ``norms`` (Qwen3)
each query and key head passes the RMSNorm of its kind first. Queries, keys and values stay in the projection's output,
for the attention of a prompt. A program takes a few heads of one token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.backbone import HeadNorms
from punica.ops.quant import FP8_MAX
from punica.ops.triton_ops.backbone.checks import check_cache, check_dense, check_heads, check_numbers, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.fp8_device import as_operand, narrowed
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable

_HEADS_PER_PROGRAM = 8
_NUM_WARPS = 4


class _Shape(NamedTuple):
    """Heads of q and of the cache, half the head size, and blocks of both. eps: of the norms (None: no norms).
    fp8_limit: largest value of the cache's e4m3; 0: it has the dtype of qkv.
    """

    heads: int
    kv_heads: int
    half: int
    eps: float | None
    block_h: int
    block_d: int
    fp8_limit: float
    pdl: bool


@triton.jit
def _normalised(x, y, q_weight_ptr, k_weight_ptr, is_query, offs_d, mask_d, SHAPE: tl.constexpr):
    """Return both halves [BLOCK_H, HALF] of heads, each divided by its root mean square and weighted by its kind."""
    HALF: tl.constexpr = SHAPE.half
    scale = (1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + SHAPE.eps))[:, None]
    q_first = tl.load(q_weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    q_second = tl.load(q_weight_ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    k_first = tl.load(k_weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    k_second = tl.load(k_weight_ptr + HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    return x * scale * tl.where(is_query, q_first, k_first), y * scale * tl.where(is_query, q_second, k_second)


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr, cos_ptr, sin_ptr, kv_rows_ptr, keys_ptr, values_ptr, q_weight_ptr, k_weight_ptr, qkv_stride,
    SHAPE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = SHAPE.heads
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    HALF: tl.constexpr = SHAPE.half
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * SHAPE.block_h + tl.arange(0, SHAPE.block_h)
    offs_d = tl.arange(0, SHAPE.block_d)
    mask_d = offs_d < HALF
    places = heads[:, None] * (2 * HALF) + offs_d[None, :]  # [BLOCK_H, BLOCK_D]
    mask = (heads < HEADS + 2 * KV_HEADS)[:, None] & mask_d[None, :]
    pdl_launch_then_wait(SHAPE.pdl)
    kv_row = tl.load(kv_rows_ptr + token)
    cos = tl.load(cos_ptr + token * HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    row_ptr = qkv_ptr + token * qkv_stride
    first = tl.load(row_ptr + places, mask=mask, other=0.0)
    second = tl.load(row_ptr + HALF + places, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if SHAPE.eps is not None:
        x, y = _normalised(x, y, q_weight_ptr, k_weight_ptr, (heads < HEADS)[:, None], offs_d, mask_d, SHAPE)
    turns = (heads < HEADS + KV_HEADS)[:, None]
    first = tl.where(turns, (x * cos - y * sin).to(first.dtype), first)
    second = tl.where(turns, (y * cos + x * sin).to(second.dtype), second)
    tl.store(row_ptr + places, first, mask=mask & turns)
    tl.store(row_ptr + HALF + places, second, mask=mask & turns)

    stored = kv_row >= 0
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS) & stored
    is_value = (heads >= HEADS + KV_HEADS) & stored
    if SHAPE.fp8_limit > 0:
        first = narrowed(first.to(tl.float32), keys_ptr.dtype.element_ty, 3, SHAPE.fp8_limit)
        second = narrowed(second.to(tl.float32), keys_ptr.dtype.element_ty, 3, SHAPE.fp8_limit)
    key_ptr = keys_ptr + (kv_row * KV_HEADS - HEADS) * (2 * HALF)
    value_ptr = values_ptr + (kv_row * KV_HEADS - HEADS - KV_HEADS) * (2 * HALF)
    tl.store(key_ptr + places, first, mask=mask & is_key[:, None])
    tl.store(key_ptr + HALF + places, second, mask=mask & is_key[:, None])
    tl.store(value_ptr + places, first, mask=mask & is_value[:, None])
    tl.store(value_ptr + HALF + places, second, mask=mask & is_value[:, None])


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, keys: Tensor, values: Tensor,
    norms: HeadNorms | None = None,
) -> None:  # fmt: skip
    """Rotate queries and keys of T tokens in place, and write keys and values into the cache of one layer.

    Args:
        qkv: ``[T, H + 2 * Hkv, D]``: heads of q, k and v side by side, D even; float16, bfloat16 or float32. Rows may
            be apart.
        cos, sin: ``[T, 1, D / 2]``, contiguous, of the same dtype.
        kv_rows: int64 ``[T]``: row of the cache that each token writes, no row twice; negative (padding): none.
        keys, values: ``[num_blocks * block_size, Hkv, D]``, contiguous; of the same dtype, or float8_e4m3fn, where
            values beyond its range become the largest.
        norms: of query and key heads; ``None``: they have none.

    Values of ``kv_rows`` are on the device and not checked.
    """
    check_runnable(qkv.device)
    check_cache(keys, values, qkv)
    kv_heads, size = keys.shape[1:]
    tokens, heads = _check(qkv, cos, sin, kv_rows, kv_heads, size)
    if norms:
        check_dense(qkv, q_weight=(norms.q_weight, (size,)), k_weight=(norms.k_weight, (size,)))
    if tokens == 0:
        return
    block_h = min(_HEADS_PER_PROGRAM, block_at_least(heads + 2 * kv_heads, 1))
    shape = _Shape(
        heads, kv_heads, size // 2, norms.eps if norms else None, block_h, block_at_least(size // 2),
        FP8_MAX.get(keys.dtype, 0.0), supports_pdl(qkv.device),
    )  # fmt: skip
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, block_h), 1)
    weights = (norms.q_weight, norms.k_weight) if norms else (cos, cos)  # unused operands are filled with cos
    tensors = (qkv, cos, sin, kv_rows, as_operand(keys), as_operand(values), *weights)
    launch_alone(
        _rotate_and_store_kernel, grid, tensors, shape,
        strides=(qkv.stride(0),), dtypes=(qkv.dtype, keys.dtype), num_warps=_NUM_WARPS,
    )  # fmt: skip


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, kv_heads: int, size: int) -> tuple[int, int]:
    tokens, packed, _ = check_shape("qkv", qkv, (None, None, size))
    if size % 2:
        raise ValueError(f"heads must have an even size to be rotated, got {size}")
    if packed <= 2 * kv_heads:
        raise ValueError(f"qkv must have more than {2 * kv_heads} heads (twice the cache's, and q's), got {packed}")
    check_heads(qkv=qkv)
    check_shape("cos", cos, (tokens, 1, size // 2))
    check_shape("sin", sin, (tokens, 1, size // 2))
    check_numbers(qkv.device, qkv.dtype, cos=cos, sin=sin)
    check_shape("kv_rows", kv_rows, (tokens,))
    check_numbers(qkv.device, torch.int64, kv_rows=kv_rows)
    return tokens, packed - 2 * kv_heads


class _AnglesShape(NamedTuple):
    half: int
    block: int
    factor: float
    pdl: bool


@triton.jit
def _rotary_angles_kernel(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, SHAPE.block)
    mask = offs < SHAPE.half
    frequency = tl.load(frequencies_ptr + offs, mask=mask, other=0.0)
    pdl_launch_then_wait(SHAPE.pdl)
    angle = tl.load(positions_ptr + row).to(tl.float32) * frequency
    places = row * SHAPE.half + offs
    tl.store(cos_ptr + places, (tl.cos(angle) * SHAPE.factor).to(cos_ptr.dtype.element_ty), mask=mask)
    tl.store(sin_ptr + places, (tl.sin(angle) * SHAPE.factor).to(sin_ptr.dtype.element_ty), mask=mask)


def rotary_angles(cos: Tensor, sin: Tensor, positions: Tensor, frequencies: Tensor, factor: float) -> None:
    """Write cosines and sines of T positions.

    Args:
        cos, sin: ``[T, 1, D / 2]``, contiguous; float16, bfloat16 or float32.
        positions: int64 ``[T]``, contiguous.
        frequencies: float32 ``[D / 2]``, contiguous.
        factor: of both.
    """
    check_runnable(cos.device)
    tokens, _, half = check_shape("cos", cos, (None, 1, None))
    check_shape("sin", sin, (tokens, 1, half))
    check_shape("positions", positions, (tokens,))
    check_shape("frequencies", frequencies, (half,))
    check_dense(cos)
    check_numbers(cos.device, torch.int64, positions=positions)
    check_numbers(cos.device, torch.float32, frequencies=frequencies)
    check_numbers(cos.device, cos.dtype, cos=cos, sin=sin)
    if tokens == 0:
        return
    shape = _AnglesShape(half, block_at_least(half), factor, supports_pdl(cos.device))
    tensors = (positions, frequencies, cos, sin)
    launch_alone(_rotary_angles_kernel, (tokens, 1, 1), tensors, shape, dtypes=(cos.dtype,), num_warps=1)
