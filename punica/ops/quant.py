"""FP8 values and their scales: ``real = stored * scale``, one scale per tensor, per channel or per block.

A scale belongs to a *unit* of elements and is ``max(max|w|, 1e-12) / fp8_max`` over it;
``stored = cast(clamp(w / scale))`` in float32, rounded to nearest even (the cast itself does not saturate). A weight
``[N, K]`` has the units

    per tensor   all of it                          scale []
    per channel  a row                              scale [N]
    block-wise   ``block_n`` rows x ``block_k`` columns, fewer at the edges     scale [ceil(N/block_n), ceil(K/block_k)]

Values are read back to the host to be checked; with ``check=False`` a NaN stays NaN and an inf gives an inf scale.
TypeError: dtypes; ValueError: shapes, sizes, or an element that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from punica.ops.expect import FLOAT32, FLOATS, WITH_DOUBLE, expect

E4M3 = torch.float8_e4m3fn
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The FP8 formats, and the largest finite value of each."""
FP8_DTYPES = tuple(FP8_MAX)
WITH_FP8 = (*FLOATS, *FP8_DTYPES)
"""Weights and activations that kernels take."""
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(E4M3).float()
LEAST = 1e-12
"""Assumed largest element of a unit of zeros."""


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to an FP8 ``dtype`` without a scale, saturating at the largest value; NaN stays NaN."""
    return x.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def quantize_per_tensor(w: Tensor, dtype: torch.dtype = E4M3, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Quantise ``w`` of any shape as (values of the same shape, 0-d scale)."""
    _check_source("w", w, dtype, check)
    scale = _scale_of(w.float().abs().amax() if w.numel() else w.new_zeros((), dtype=torch.float32), dtype)
    return _stored(w, scale, dtype), scale


def quantize_per_channel(w: Tensor, dtype: torch.dtype = E4M3, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Quantise ``w [..., N, K]`` as (values, scale ``[..., N]``)."""
    _check_source("w", w, dtype, check, 2)
    scale = _scale_of(_largest(w.float().abs()), dtype)
    return _stored(w, scale[..., None], dtype), scale


def quantize_blockwise(
    w: Tensor, block_n: int, block_k: int, dtype: torch.dtype = E4M3, *, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantise ``w [..., N, K]`` as (values, scale ``[..., ceil(N/block_n), ceil(K/block_k)]``)."""
    _check_source("w", w, dtype, check, 2)
    blocks, (rows, columns) = (block_n, block_k), w.shape[-2:]
    counts = block_counts(w, blocks)
    # zeros around the edge change no maximum
    padded = F.pad(w.float().abs(), (0, -columns % block_k, 0, -rows % block_n))
    tiles = padded.reshape(*w.shape[:-2], counts[0], block_n, counts[1], block_k)
    scale = _scale_of(_largest(_largest(tiles).transpose(-1, -2)), dtype)
    return _stored(w, over_elements(scale, w.shape, blocks), dtype), scale


def quantize_per_token(
    x: Tensor, group_k: int = 0, dtype: torch.dtype = E4M3, *, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Quantise activations ``x [T, K]`` or ``[n, T, K]`` as (values, a_scale ``[T, 1]``), or ``[T, ceil(K/group_k)]``
    with one scale per group of ``group_k`` columns. The n slices of a row share its scales.
    """
    _check_source("x", x, dtype, check)
    (_, groups), columns = scale_shape(x, group_k), x.shape[-1]
    width = group_k or max(1, columns)
    magnitudes = x.float().abs() if x.ndim == 2 else x.float().abs().amax(0)
    padded = F.pad(magnitudes, (0, groups * width - columns))
    scale = _scale_of(_largest(padded.unflatten(-1, (groups, width))), dtype)
    return _stored(x, scale.repeat_interleave(width, -1)[..., :columns], dtype), scale


def scale_shape(x: Tensor, group_k: int) -> tuple[int, int]:
    """Return the shape of the scales of activations ``[T, K]`` or ``[n, T, K]``; ValueError for others."""
    if x.ndim not in (2, 3) or group_k < 0:
        raise ValueError(f"shape is {tuple(x.shape)}, group_k is {group_k}; expected [T, K] or [n, T, K], and >= 0")
    return x.shape[-2], -(-x.shape[-1] // group_k) if group_k else 1


def dequantize(q: Tensor, scale: Tensor, block: Sequence[int] | None = None) -> Tensor:
    """Return the float32 values behind ``q``: exact products with a scale per tensor (0-d or one element), per channel
    (``q.shape[:-1]``), or with ``block`` ``(block_n, block_k)`` per block.
    """
    expect("q", q, dtype=FP8_DTYPES)
    expect("scale", scale, dtype=FLOAT32)
    if block is not None:
        wanted = (*q.shape[:-2], *block_counts(q, block))
        if tuple(scale.shape) != wanted:
            raise ValueError(f"scale has shape {tuple(scale.shape)}; blocks {block} of {tuple(q.shape)} need {wanted}")
        return upcast(q).mul_(over_elements(scale, q.shape, block))
    if scale.numel() == 1:
        return upcast(q).mul_(scale.reshape(()))
    if scale.shape != q.shape[:-1]:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; expected one element or, by channel, {q.shape[:-1]}")
    return upcast(q).mul_(scale[..., None])


def upcast(q: Tensor) -> Tensor:
    """Convert FP8 values to float32, without a scale: ``q.float()``, but on a CPU three times as fast for e4m3."""
    if q.dtype != E4M3 or q.device.type != "cpu":
        return q.float()
    if q.ndim > 1 and not q.is_contiguous() and q.mT.is_contiguous():
        return upcast(q.mT).mT  # in the order of memory
    return _E4M3_VALUES.index_select(0, q.reshape(-1).view(torch.uint8).int()).view(q.shape)


def validate_scales(scales: Tensor | Sequence[Tensor], name: str) -> None:
    """Raise TypeError unless scales are float32, ValueError unless all are finite and >= 0. Waits for the device."""
    for i, scale in enumerate([scales] if isinstance(scales, Tensor) else scales):
        label = name if isinstance(scales, Tensor) else f"{name}[{i}]"
        expect(label, scale, dtype=FLOAT32)
        bad = (~torch.isfinite(scale) | (scale < 0)).nonzero()
        if len(bad):
            index = tuple(bad[0].tolist())
            raise ValueError(f"{label} is {scale[index].item()} at {list(index)}; scales must be finite and >= 0")


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A matrix ``[N, K]`` of an adapter in FP8 with one scale per row, or one of every expert, ``[E, N, K]``: in place
    of a tensor, so that values never go anywhere without their scales.
    """

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        expect("values", self.values, dtype=FP8_DTYPES)
        expect("scale", self.scale, dtype=FLOAT32)
        if self.values.ndim not in (2, 3) or self.scale.shape != self.values.shape[:-1]:
            shapes = f"values have shape {tuple(self.values.shape)} and scale {tuple(self.scale.shape)}"
            raise ValueError(f"{shapes}; expected [N, K] and [N], or [E, N, K] and [E, N]")

    @classmethod
    def of(cls, w: Tensor | Fp8Matrix, dtype: torch.dtype, *, check: bool = True) -> Fp8Matrix:
        """Quantise ``w [..., N, K]`` per channel; itself where it is that already."""
        if isinstance(w, Fp8Matrix):
            if w.dtype == dtype:
                return w
            w = w.real()
        return cls(*quantize_per_channel(w.detach(), dtype, check=check))

    shape = property(attrgetter("values.shape"))
    ndim = property(attrgetter("values.ndim"))
    dtype = property(attrgetter("values.dtype"))
    device = property(attrgetter("values.device"))

    def real(self) -> Tensor:
        """Return the matrix in float32, of the same shape."""
        return dequantize(self.values, self.scale)

    def cut(self, part: Callable[[Tensor], Any]) -> Fp8Matrix:
        """Apply ``part``, which selects rows and columns of a tensor, to values and scales."""
        values = part(self.values)
        # a tensor of the matrix's shape whose every column is the scales, without their memory
        scale = part(self.scale[..., None].expand(self.shape))
        return Fp8Matrix(values, scale[..., 0].contiguous() if values.shape[-1] else scale.sum(-1))

    def split(self, sizes: Sequence[int]) -> list[Fp8Matrix]:
        rows = list(sizes)
        return [Fp8Matrix(*part) for part in zip(self.values.split(rows), self.scale.split(rows), strict=True)]


def _check_source(name: str, w: Any, dtype: torch.dtype, check: bool, least_dims: int = 0) -> None:
    expect(name, w, dtype=WITH_DOUBLE)
    if dtype not in FP8_MAX:
        raise TypeError(f"dtype is {dtype}; FP8 formats are {', '.join(map(str, FP8_MAX))}")
    if w.ndim < least_dims:
        raise ValueError(f"{name} has shape {tuple(w.shape)}; expected [..., N, K]")
    if check and not bool(torch.isfinite(w).all()):
        index = (~torch.isfinite(w)).nonzero()[0].tolist()
        raise ValueError(f"{name} is {w[tuple(index)].item()} at {index}; it must be finite to be quantised")


def _largest(magnitudes: Tensor) -> Tensor:
    return magnitudes.amax(-1) if magnitudes.shape[-1] else magnitudes.sum(-1)


def _scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=LEAST) / FP8_MAX[dtype]


def _stored(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return saturated(w.float() / scale, dtype)


def block_counts(w: Tensor, block: Sequence[int]) -> tuple[int, int]:
    """Return the number of blocks along the last two dimensions. ValueError: an empty block."""
    if min(block) < 1:
        raise ValueError(f"blocks are {block[0]} rows x {block[1]} columns; both must be >= 1")
    return -(-w.shape[-2] // block[0]), -(-w.shape[-1] // block[1])


def over_elements(scale: Tensor, shape: torch.Size, block: Sequence[int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]
