"""The activation of a Llama MLP, on the packed product of its first two projections, one launch:

    out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i],      silu(z) = z / (1 + exp(-z))        for i < I

in float32, rounded once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_rows, check_same, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.launch import launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable

_BLOCK = 1024
_NUM_WARPS = 4


class _Shape(NamedTuple):
    size: int
    block: int
    pdl: bool


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
    """Compute the activation of ``gate_up [T, 2 * I]`` (gate, then up) into ``out [T, I]``: float16, bfloat16 or
    float32, the elements of a row side by side.

    ValueError, TypeError: shapes, layouts, dtypes or devices; RuntimeError: no Triton kernel runs on this device.
    """
    check_runnable(gate_up.device)
    tokens, size = check_shape("out", out, (None, None))
    check_shape("gate_up", gate_up, (tokens, 2 * size))
    check_same(gate_up, out=out)
    check_rows("out", out)
    check_rows("gate_up", gate_up)
    if tokens == 0 or size == 0:
        return
    launch_alone(
        _swiglu_kernel, (tokens, triton.cdiv(size, _BLOCK), 1), (gate_up, out),
        _Shape(size, _BLOCK, supports_pdl(out.device)),
        strides=(gate_up.stride(0), out.stride(0)), dtypes=(out.dtype,), num_warps=_NUM_WARPS,
    )  # fmt: skip
