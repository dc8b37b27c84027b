"""Quantisation of activations to FP8 in one launch, bit for bit that of `punica.ops.quant.quantize_per_token`.

    scale[t, g] = max(max |x[i, t, j]|, 1e-12) / fp8_max      over the slices i and the columns j of group g
    values[i, t, j] = cast(clamp(x[i, t, j] / scale[t, g]))

A program takes one group of columns of one row, or of several rows where groups are short. Where it holds them in
registers x is read once; else twice, from the cache the second time. Nothing waits for the host.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.expect import WITH_DOUBLE, expect
from punica.ops.quant import E4M3, FP8_MAX, LEAST, scale_shape
from punica.ops.triton_ops.fp8_device import as_operand, narrowed
from punica.ops.triton_ops.launch import Launch, block_at_least, on_device
from punica.ops.triton_ops.op import check_runnable, untraced

MOST_COLUMNS = 8192
"""Columns of a program; longer groups are taken in steps."""


class _Shape(NamedTuple):
    """Shape and schedule of the kernel, and the FP8 format. rows: of a program, with ``block`` of the ``group`` columns
    at a time. limit: largest FP8 value; least: of scales.
    """

    columns: int
    group: int
    slices: int
    rows: int
    block: int
    mantissa: int
    limit: float
    least: float = LEAST


@triton.jit
def _add_magnitudes(x, largest, nan):
    """Add magnitudes of x [ROWS, BLOCK] to ``largest`` [ROWS], and a NaN, which `tl.max` may drop, to ``nan``."""
    is_number = x == x
    largest = tl.maximum(largest, tl.max(tl.where(is_number, tl.abs(x), 0.0), 1))
    return largest, nan + tl.sum(tl.where(is_number, 0.0, x), 1)


@triton.jit
def _store_rounded(x, scale, values_ptrs, mask, SHAPE: tl.constexpr):
    real = tl.div_rn(x, scale[:, None].broadcast_to(x.shape[0], x.shape[1]))
    tl.store(values_ptrs, narrowed(real, values_ptrs.dtype.element_ty, SHAPE.mantissa, SHAPE.limit), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr, values_ptr, scale_ptr, num_rows, stride_xs, stride_xt, stride_xk, SHAPE: tl.constexpr
):  # fmt: skip
    """Quantise ROWS rows x one group of columns, BLOCK at a time, of all slices."""
    K: tl.constexpr = SHAPE.columns
    GROUP: tl.constexpr = SHAPE.group
    ROWS: tl.constexpr = SHAPE.rows
    BLOCK: tl.constexpr = SHAPE.block
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK
    group = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_rows = rows < num_rows
    offs, first = tl.arange(0, BLOCK), tl.zeros([], tl.int64)  # slices may lie far apart
    x_ptrs = x_ptr + rows[:, None] * stride_xt + (group * GROUP + offs)[None, :] * stride_xk  # [ROWS, BLOCK]
    values_ptrs = values_ptr + rows[:, None] * K + (group * GROUP + offs)[None, :]
    largest, nan = tl.full([ROWS], SHAPE.least, tl.float32), tl.zeros([ROWS], tl.float32)
    if SHAPE.slices * STEPS == 1:
        mask = mask_rows[:, None] & ((offs < GROUP) & (group * GROUP + offs < K))[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        largest, nan = _add_magnitudes(x, largest, nan)
    else:
        for piece in tl.range(0, SHAPE.slices * STEPS):
            step, at = piece % STEPS * BLOCK, first + piece // STEPS
            mask = mask_rows[:, None] & ((offs < GROUP - step) & (group * GROUP + step + offs < K))[None, :]
            x = tl.load(x_ptrs + at * stride_xs + step * stride_xk, mask=mask, other=0.0).to(tl.float32)
            largest, nan = _add_magnitudes(x, largest, nan)
    scale = tl.div_rn(largest + nan, tl.full([ROWS], SHAPE.limit, tl.float32))
    tl.store(scale_ptr + rows * GROUPS + group, scale, mask=mask_rows)
    if SHAPE.slices * STEPS == 1:
        _store_rounded(x, scale, values_ptrs, mask, SHAPE)
    else:
        for piece in tl.range(0, SHAPE.slices * STEPS):
            step, at = piece % STEPS * BLOCK, first + piece // STEPS
            mask = mask_rows[:, None] & ((offs < GROUP - step) & (group * GROUP + step + offs < K))[None, :]
            x = tl.load(x_ptrs + at * stride_xs + step * stride_xk, mask=mask, other=0.0).to(tl.float32)
            _store_rounded(x, scale, values_ptrs + at * num_rows * K + step, mask, SHAPE)


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: torch.Size, strides: tuple[int, ...], kinds: tuple[torch.dtype, torch.dtype], group: int,
    device: torch.device,
) -> Launch:  # fmt: skip
    slices, rows, columns = shape
    block = min(block_at_least(group), MOST_COLUMNS)
    per_program = max(1, 1024 // block)
    mantissa = 3 if kinds[1] == E4M3 else 2
    constants = {"SHAPE": _Shape(columns, group, slices, per_program, block, mantissa, FP8_MAX[kinds[1]])}
    grid = (triton.cdiv(rows, per_program), triton.cdiv(columns, group), 1)
    warps = max(1, min(8, per_program * block // 1024))
    return Launch(_quantize_rows_kernel, grid, kinds, strides, constants, num_warps=warps, pdl=False, device=device)


@untraced
def quantize_rows(inputs: Tensor, values: Tensor, scale: Tensor, group_k: int = 0) -> None:
    """Write ``inputs`` as ``values * scale``, both written in place.

    Args:
        inputs: [T, K] or [n, T, K] float16, bfloat16, float32 or float64, any strides.
        values: float8, contiguous, of the inputs' shape.
        scale: float32 [T, 1] contiguous, or [T, ceil(K/group_k)] with one scale per group of ``group_k`` columns.

    TypeError for dtypes, ValueError for shapes, before any write.
    """
    expect("inputs", inputs, dtype=WITH_DOUBLE)
    expect("values", values, dtype=tuple(FP8_MAX))
    expect("scale", scale, dtype=(torch.float32,))
    wanted = scale_shape(inputs, group_k)
    if values.shape != inputs.shape or tuple(scale.shape) != wanted:
        shapes = f"{tuple(values.shape)} and {tuple(scale.shape)}, must be {tuple(inputs.shape)} and {wanted}"
        raise ValueError(f"values and scale have shapes {shapes}")
    if not (values.is_contiguous() and scale.is_contiguous()):
        raise ValueError(f"values has strides {values.stride()} and scale {scale.stride()}; both must be contiguous")
    check_runnable(inputs.device)
    if not inputs.numel():
        return
    x = inputs if inputs.ndim == 3 else inputs.unsqueeze(0)
    launch = _launch(x.shape, x.stride(), (x.dtype, values.dtype), group_k or x.shape[2], x.device)
    aligned = not (x.data_ptr() | values.data_ptr() | scale.data_ptr()) & 15
    with on_device(x.get_device()):
        launch((x, as_operand(values), scale), (x.shape[1],), aligned)


def quantized_rows(x: Tensor, group_k: int = 0, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Quantise as `punica.ops.quant.quantize_per_token`, without its check of values."""
    expect("x", x, dtype=WITH_DOUBLE)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(scale_shape(x, group_k), dtype=torch.float32, device=x.device)
    if not x.shape[-1]:
        scale.fill_(LEAST / FP8_MAX[dtype])
    quantize_rows(x, values, scale, group_k)
    return values, scale
