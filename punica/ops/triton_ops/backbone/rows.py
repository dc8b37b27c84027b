"""Kernels of rows, each one launch; a program takes a row or a part of it.

    add_rms_norm    x[t] += delta[t];    out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight
    swiglu          out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i],    silu(z) = z / (1 + exp(-z))    for i < I
    dequantise      out[n, k] = weight[n, k] * scale[n]
    argmax          out[s] = min {i : logits[s, i] = max_j logits[s, j]},    or `no_index` where a logits[s, j] is NaN

Sums and products are in float32, rounded once. The sum of a residual connection is rounded to its dtype before it is
normalised, as it is where the two are apart; a row's squares have one order. argmax goes block after block: every lane
keeps the highest value that it has seen, and its place.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_dense, check_numbers, check_row_scales, check_rows, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.fp8_device import as_operand, upcast
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable

_MOST_LANES, _SWIGLU_BLOCK, _DEQUANTISE_BLOCK = 8192, 1024, 4096
_NO_PLACE = tl.constexpr(0x7FFFFFFF)


class _Shape(NamedTuple):
    """Elements of a row, those taken at once, and a kernel's numbers: its constexpr."""

    size: int
    block: int
    pdl: bool
    eps: float = 0.0
    has_delta: bool = False
    no_index: int = 0


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, x_stride, delta_stride, out_stride, SHAPE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, SHAPE.block)
    mask = offs < SHAPE.size
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    pdl_launch_then_wait(SHAPE.pdl)
    x = tl.load(x_ptr + row * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if SHAPE.has_delta:
        x += tl.load(delta_ptr + row * delta_stride + offs, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + offs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SHAPE.size + SHAPE.eps)
    tl.store(out_ptr + row * out_stride + offs, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(out: Tensor, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> None:
    """Add ``delta`` to the residual stream ``x`` in place, and the norm of that into ``out``.

    Args:
        out, x, delta: ``[T, hidden]`` in float16, bfloat16 or float32, elements of a row side by side. ``delta`` None
            (before the first layer): ``x`` stays as it is.
        weight: ``[hidden]``, contiguous, of the same dtype.
        eps: of the norm.
    """
    check_runnable(x.device)
    tokens, size = check_shape("x", x, (None, None))
    delta_or_x, block, shape = x if delta is None else delta, block_at_least(size), (tokens, size)
    check_dense(x, x=(x, shape), out=(out, shape), delta=(delta_or_x, shape), weight=(weight, (size,)))
    if tokens == 0:
        return
    launch_alone(
        _add_rms_norm_kernel, (tokens, 1, 1), (x, delta_or_x, weight, out),
        _Shape(size, block, supports_pdl(x.device), eps, delta is not None),
        strides=(x.stride(0), delta_or_x.stride(0), out.stride(0)), dtypes=(x.dtype,),
        num_warps=max(1, min(16, block // 512)),  # 8 to 16 elements a thread, as far as a block has threads
    )  # fmt: skip


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * SHAPE.block + tl.arange(0, SHAPE.block)
    mask = offs < SHAPE.size
    pdl_launch_then_wait(SHAPE.pdl)
    gate = tl.load(gate_up_ptr + row * gate_up_stride + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + SHAPE.size + offs, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + offs, product.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(out: Tensor, gate_up: Tensor) -> None:
    """Compute the activation of ``gate_up [T, 2 * I]`` (gate, then up) into ``out [T, I]``; dense rows."""
    check_runnable(gate_up.device)
    tokens, size = check_shape("out", out, (None, None))
    check_dense(gate_up, gate_up=(gate_up, (tokens, 2 * size)), out=(out, (tokens, size)))
    if tokens == 0 or size == 0:
        return
    launch_alone(
        _swiglu_kernel, (tokens, triton.cdiv(size, _SWIGLU_BLOCK), 1), (gate_up, out),
        _Shape(size, _SWIGLU_BLOCK, supports_pdl(out.device)),
        strides=(gate_up.stride(0), out.stride(0)), dtypes=(out.dtype,), num_warps=4,
    )  # fmt: skip


@triton.jit
def _dequantise_kernel(weight_ptr, scale_ptr, out_ptr, weight_stride, out_stride, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * SHAPE.block + tl.arange(0, SHAPE.block)
    mask = offs < SHAPE.size
    real = upcast(tl.load(weight_ptr + row * weight_stride + offs, mask=mask, other=0.0), 1, tl.float32)
    real *= tl.load(scale_ptr + row)
    pdl_launch_then_wait(SHAPE.pdl)  # the predecessor may read what was in the memory of `out`
    tl.store(out_ptr + row * out_stride + offs, real.to(out_ptr.dtype.element_ty), mask=mask)


def dequantise(out: Tensor, weight: Tensor, scale: Tensor) -> None:
    """Write ``weight [N, K]`` in float8_e4m3fn times ``scale [N]`` in float32 to ``out [N, K]``; dense rows."""
    check_runnable(out.device)
    rows, size = check_shape("weight", weight, (None, None))
    check_dense(out, out=(out, (rows, size)))
    check_row_scales("weight", weight, scale, out.device)
    check_rows("weight", weight)
    if rows == 0 or size == 0:
        return
    launch_alone(
        _dequantise_kernel, (rows, triton.cdiv(size, _DEQUANTISE_BLOCK), 1), (as_operand(weight), scale, out),
        _Shape(size, _DEQUANTISE_BLOCK, supports_pdl(out.device)),
        strides=(weight.stride(0), out.stride(0)), dtypes=(weight.dtype, out.dtype), num_warps=8,
    )  # fmt: skip


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, stride, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    offs = tl.arange(0, SHAPE.block)
    pdl_launch_then_wait(SHAPE.pdl)
    best = tl.load(row_ptr + offs, mask=offs < SHAPE.size, other=float("-inf")).to(tl.float32)
    place, none = offs, (best != best).to(tl.int32)
    for start in tl.range(SHAPE.block, SHAPE.size, SHAPE.block, loop_unroll_factor=4):  # several loads in flight
        here = start + offs
        value = tl.load(row_ptr + here, mask=here < SHAPE.size, other=float("-inf")).to(tl.float32)
        none |= (value != value).to(tl.int32)
        higher = value > best
        best, place = tl.where(higher, value, best), tl.where(higher, here, place)
    first = tl.min(tl.where(best == tl.max(best, 0), place, _NO_PLACE), 0)
    tl.store(out_ptr + row, tl.where(tl.max(none, 0) > 0, SHAPE.no_index, first).to(tl.int64))


def argmax(out: Tensor, logits: Tensor, no_index: int) -> None:
    """Write the index of the highest element of each row, of equal ones the lowest.

    Args:
        out: int64 ``[S]``, contiguous.
        logits: ``[S, vocab]`` in float16, bfloat16 or float32, elements of a row side by side; ``vocab`` at least 1.
        no_index: for a row that holds NaN; negative.
    """
    check_runnable(logits.device)
    rows, vocab = check_shape("logits", logits, (None, None))
    check_shape("out", out, (rows,))
    check_dense(logits, logits=(logits, (rows, vocab)))
    if vocab == 0:
        raise ValueError("logits must have at least one column, got 0; give those of a vocabulary")
    check_numbers(logits.device, torch.int64, out=out)
    if rows == 0:
        return
    block = min(_MOST_LANES, block_at_least(vocab))
    launch_alone(
        _argmax_kernel, (rows, 1, 1), (logits, out),
        _Shape(vocab, block, supports_pdl(logits.device), no_index=no_index),
        strides=(logits.stride(0),), dtypes=(logits.dtype,), num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
