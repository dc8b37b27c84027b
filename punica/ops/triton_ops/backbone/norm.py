"""RMSNorm after a residual connection, in one launch: the seam between two blocks of a decoder layer.

    x[t] += delta[t];      out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight

The sum is rounded to its dtype before it is normalised, as it is where the two are apart. A program takes a row, all of
it at once, so its sum of squares has one order. The weight is read before the PDL wait.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_rows, check_same, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable


class _Shape(NamedTuple):
    size: int
    block: int
    eps: float
    has_delta: bool
    pdl: bool


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

    ValueError, TypeError: shapes, layouts, dtypes or devices; RuntimeError: no Triton kernel runs on this device.
    """
    check_runnable(x.device)
    tokens, size = check_shape("x", x, (None, None))
    check_shape("weight", weight, (size,))
    rows = {"x": x, "out": out} | ({} if delta is None else {"delta": delta})
    for name, tensor in rows.items():
        check_shape(name, tensor, (tokens, size))
        check_rows(name, tensor)
    check_rows("weight", weight)
    check_same(x, weight=weight, **rows)
    if tokens == 0:
        return
    delta_or_x, block = x if delta is None else delta, block_at_least(size)
    shape = _Shape(size, block, eps, delta is not None, supports_pdl(x.device))
    launch_alone(
        _add_rms_norm_kernel, (tokens, 1, 1), (x, delta_or_x, weight, out), shape,
        strides=(x.stride(0), delta_or_x.stride(0), out.stride(0)), dtypes=(x.dtype,),
        num_warps=max(1, min(16, block // 512)),  # 8 to 16 elements a thread, as far as a block has threads
    )  # fmt: skip
