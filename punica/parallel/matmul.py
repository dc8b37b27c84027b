"""The dense product of every base layer: ``x @ weight^T + bias``.

On a GPU a few rows of 16 bits go through `skinny_gemm`, which reads the weight once and starts early (PDL). So do those
of a weight in FP8; for more rows, and on a CPU, it is dequantised for each product.

torch sends float32 products on a CPU to MKL, which is slow for a few rows on AMD's processors: 81 ms for four rows of
``llama-small``'s linear layers, 33 ms by oneDNN (also in torch), and 17 against 19 ms for one. So batches go to oneDNN
and a single row to MKL; experiments measure both and set `onednn_for`, the library does not, since bits would then
depend on a clock. oneDNN's operator is not public: where torch lacks it, or it differs, ``F.linear`` serves all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.ops.quant import E4M3, dequantize

MOST_SKINNY_ROWS = 32
"""Rows up to which `skinny_gemm` was measured to be faster than cuBLAS."""
MOST_FP8_ROWS = 64
"""The same for a weight in FP8, which cuBLAS cannot read: all that `skinny_gemm` takes."""
MOST_DEQUANTISED = 1 << 27
"""Elements of a weight in FP8 that are dequantised at once: 256 MiB of 16 bits."""


@dataclass
class OneDnnRows:
    """Row counts that oneDNN multiplies."""

    one: bool = False
    several: bool = True


onednn_for = OneDnnRows()

PLAIN_TENSORS: set[type[Tensor]] = {Tensor}
"""Classes of tensors without an arithmetic of their own."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., in]``, ``weight [out, in]``, ``bias [out]`` or None to ``[..., out]``; any device, any dtype."""
    if x.is_cuda and is_skinny(x, weight, bias):
        return _few_rows(x, weight, bias)
    if x.is_cpu and x.dtype == weight.dtype == torch.float32 and x.dim() > 1 and x.numel():
        rows = x.shape[0] if x.dim() == 2 else x.numel() // x.shape[-1]
        wanted = onednn_for.several if rows > 1 else onednn_for.one
        if wanted and not needs_gradient(x, weight, bias):  # oneDNN's operator has none, and says so in a warning
            onednn = onednn_linear()
            if onednn is not None:
                if x.dim() == 2:
                    return through(onednn, x, weight, bias)
                return through(onednn, x.reshape(rows, -1), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `linear` with ``weight * scale[:, None]``: ``weight [out, in]`` in float8_e4m3fn, ``scale [out]`` in
    float32. `skinny_gemm` multiplies sums by scales; elsewhere the weight is dequantised and rounded to ``x``'s dtype.
    """
    if x.is_cuda and is_skinny(x, weight, bias):
        return _few_rows(x, weight, bias, scale)
    if weight.numel() <= MOST_DEQUANTISED:
        return linear(x, dequantised(weight, scale, x.dtype), bias)
    rows = max(1, MOST_DEQUANTISED // weight.shape[1])
    parts = [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]
    tiles = ((dequantised(weight[part], scale[part], x.dtype), bias if bias is None else bias[part]) for part in parts)
    return torch.cat([linear(x, *tile) for tile in tiles], -1)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    from punica.ops.triton_ops.backbone import skinny_gemm  # importing punica must not need Triton

    out = x.new_empty(x.shape[0], weight.shape[0])
    skinny_gemm(out, x, weight, bias, scale)
    return out


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight * scale[:, None]`` of a weight in FP8, rounded once to ``dtype``."""
    if not weight.is_cuda or dtype == torch.float64 or torch.compiler.is_compiling():
        return dequantize(weight, scale).to(dtype)
    from punica.ops.triton_ops.backbone import dequantise

    real = weight.new_empty(weight.shape, dtype=dtype)
    dequantise(real, weight, scale)
    return real


def is_skinny(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Tell whether `skinny_gemm` serves a product on a GPU: few rows, 16 bits, no gradient, no tracer."""
    most, dtype = (MOST_FP8_ROWS, x.dtype) if weight.dtype == E4M3 else (MOST_SKINNY_ROWS, weight.dtype)
    if x.dim() != 2 or x.shape[0] > most or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    plain = type(x) in PLAIN_TENSORS and x.stride(1) == weight.stride(1) == 1 and x.dtype == dtype
    return plain and x.numel() > 0 and not (needs_gradient(x, weight, bias) or torch.compiler.is_compiling())


def needs_gradient(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether autograd records a product: kernels without a backward would drop its gradients."""
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and torch.is_grad_enabled()


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `linear` on a GPU, with bits of a row that do not depend on the other rows."""
    from punica.ops.triton_ops.backbone import MAX_TOKENS, skinny_gemm

    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    for some, target in zip(rows.split(MAX_TOKENS), out.split(MAX_TOKENS), strict=True):
        skinny_gemm(target, some, weight, bias, batch_invariant=True)
    return out.view(*x.shape[:-1], -1)


def through(onednn: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return onednn(x, weight, bias, "none", [], "")


@functools.cache
def onednn_linear() -> Any | None:
    """oneDNN's fused linear, if this torch has it and it agrees with ``F.linear``; probed once."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    numbers = torch.linspace(-1, 1, 20, device="cpu")  # wherever tensors are made by default
    x, weight, bias = numbers[:15].view(3, 5), numbers.view(4, 5), numbers[:4]
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (RuntimeError, TypeError):  # built without it, or with another signature
        return None
    return torch.ops.mkldnn._linear_pointwise if torch.allclose(found, F.linear(x, weight, bias), atol=1e-5) else None
