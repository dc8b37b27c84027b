"""The angles of RoPE for a step, one launch, where torch takes five:

    cos[t, i] = factor * cos(positions[t] * frequencies[i]),      sin[t, i] likewise

in float32, rounded once. A program takes a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_rows, check_same, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable

_NUM_WARPS = 1


class _Shape(NamedTuple):
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

    ValueError, TypeError: shapes, layouts, dtypes or devices; RuntimeError: no Triton kernel runs on this device.
    """
    check_runnable(cos.device)
    tokens, _, half = check_shape("cos", cos, (None, 1, None))
    check_shape("sin", sin, (tokens, 1, half))
    check_shape("positions", positions, (tokens,))
    check_shape("frequencies", frequencies, (half,))
    check_same(cos, sin=sin)
    for name, tensor, dtype in (("positions", positions, torch.int64), ("frequencies", frequencies, torch.float32)):
        if tensor.dtype != dtype or tensor.device != cos.device:
            raise TypeError(f"{name} must be {dtype} on {cos.device}, got {tensor.dtype} on {tensor.device}")
        check_rows(name, tensor)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; allocate it for this call")
    if tokens == 0:
        return
    shape = _Shape(half, block_at_least(half), factor, supports_pdl(cos.device))
    tensors = (positions, frequencies, cos, sin)
    launch_alone(_rotary_angles_kernel, (tokens, 1, 1), tensors, shape, dtypes=(cos.dtype,), num_warps=_NUM_WARPS)
