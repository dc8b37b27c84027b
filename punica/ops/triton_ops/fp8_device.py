"""Operand readers of the kernels: FP8 values upcast in registers, and the layout of their scales (`Quant`).

Weights are read as FP8, so memory moves half the bytes, and every value is upcast exactly: in hardware from compute
capability 8.9 on, by its bits before that (and in the interpreter, which converts FP8 wrongly, and on ROCm). Products
are in 16 bits on the tensor cores, or float32. These operators are bandwidth-bound, so FP8 instructions could gain no
time; they would lose bits of the sums and pad a rank of 16 to 32.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.quant import FP8_DTYPES
from punica.ops.scales import Scheme
from punica.ops.triton_ops.device import pick, read_shrunk
from punica.ops.triton_ops.launch import INTERPRETED, IS_ROCM
from punica.ops.weights import Form

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Name of the compute dtype of products: hooks of Triton write constants as JSON, which has no dtypes."""


@triton.constexpr_function
def dtype_named(name):
    return tl.dtype(name)


def fp8_format(dtype: torch.dtype) -> int:
    """Return the format number of an operand in kernels: 0 not FP8, 1 e4m3, 2 e5m2."""
    return FP8_DTYPES.index(dtype) + 1 if dtype in FP8_DTYPES else 0


@functools.cache
def reads_fp8(device: torch.device) -> bool:
    """Tell whether instructions of ``device`` convert FP8."""
    native = device.type == "cuda" and not (INTERPRETED or IS_ROCM)
    return native and torch.cuda.get_device_capability(device) >= (8, 9)


def as_operand(tensor: Tensor) -> Tensor:
    """View ``tensor`` as a kernel takes it: FP8 as bytes in the interpreter and where no hardware converts e4m3fn."""
    if tensor.dtype not in FP8_DTYPES or not (INTERPRETED or tensor.is_cuda):
        return tensor
    return tensor if reads_fp8(tensor.device) else tensor.view(torch.uint8)


def operands(weights: Sequence[Tensor], scales: Sequence[Tensor], a_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Join weights of all slices, their scales, and the activations' (or any scale) to one kernel argument."""
    return (*[as_operand(weight) for weight in weights], *scales, scales[0] if a_scale is None else a_scale)


class Quant(NamedTuple):
    """Storage of a product's operands, one constexpr of a kernel; the defaults are 16- or 32-bit weights.

    format, x_format: `fp8_format` of weights and activations.
    dense: a scale per channel (``channel``) or per slot, slot after slot without gaps; else the strides hold.
    slots, columns, blocks: strides of the weights' scales per slice (one entry where all slices share it).
    group_n, group_k: columns and elements of K that share a scale; group_k 0: all of K.
    has_a, a_row, a_group: scales of the activations, and their strides along rows and groups of K.
    words: B is read four columns to a word (`fp8_words`).
    """

    format: int = 0
    dense: bool = False
    channel: bool = False
    slots: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    group_n: int = 1
    group_k: int = 0
    x_format: int = 0
    has_a: bool = False
    a_row: int = 0
    a_group: int = 0
    words: bool = False


WIDE = Quant()


def quant_of(
    form: Form, x_dtype: torch.dtype, channels: Sequence[int], k: int, a_strides: tuple[int, int] | None
) -> Quant:
    """Return the storage of weights with ``channels`` outputs per slice in a product over ``k`` elements.
    ``a_strides``: of the activations' scales along rows and groups; None without them.
    """
    if form.scales is None:
        return WIDE
    weights, scales, scheme = form.stored, form.scales, form.scheme
    split = 0 < scheme.group_k < k
    wanted = list(channels) if scheme.per_channel_quant else [1] * len(channels)
    dense = not scheme.block_wise and list(scales.slot) == wanted
    dense = dense and set(scales.column) == {int(scheme.per_channel_quant)} and a_strides is None
    quant = Quant(fp8_format(weights.dtype), dense, scheme.per_channel_quant)
    if dense:
        return quant
    slots, columns, blocks = (each[:1] if len(set(each)) == 1 else each for each in scales)
    return quant._replace(
        slots=slots, columns=columns, blocks=blocks, group_n=max(1, scheme.group_n),
        group_k=scheme.group_k if split else 0, x_format=fp8_format(x_dtype), has_a=a_strides is not None,
        a_row=(a_strides or (0, 0))[0], a_group=(a_strides or (0, 0))[1],
    )  # fmt: skip


def check_group_k(scheme: Scheme, k: int) -> None:
    """Raise ValueError where a tile of K could cross a block."""
    group = scheme.group_k
    if 0 < group < k and (group < 16 or group & (group - 1)):
        raise ValueError(f"group_k is {group}; kernels need a power of two >= 16, or at least K = {k} (torch_ops any)")


@triton.jit
def upcast(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Convert `stored` to DTYPE, exactly, NaN to NaN; FORMAT 0: not FP8. bfloat16 goes through float32, two
    instructions per value: from FP8 itself the compiler takes one that runs at a quarter of their rate.
    """
    if FORMAT == 0:
        value = stored
    elif stored.dtype != tl.uint8:
        value = stored.to(tl.float32 if DTYPE == tl.bfloat16 else DTYPE)  # noqa: SIM300 (as Triton compares)
    elif FORMAT == 1:
        bits = stored.to(tl.uint16)  # exponents of float16 are 8 higher
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    else:
        tl.static_assert(FORMAT == 2)
        value = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)  # the upper byte of a float16
    return value.to(DTYPE)


@triton.jit
def _codes(real, MANTISSA: tl.constexpr):
    """Round float32 values in range to bytes of e4m3 (MANTISSA 3) or e5m2 (2), ties to even."""
    CUT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    bits = real.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = ((size + ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    # below the least normal number: a sum whose last bit is worth the least number of all rounds to multiples of that
    FIXED: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    fixed = (tl.abs(real) + FIXED).to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = tl.where(size < ((128 - BIAS) << 23), fixed, code)
    code = tl.where(real == real, code, 0x7F)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def narrowed(real, TYPE: tl.constexpr, MANTISSA: tl.constexpr, LIMIT):
    """Convert float32 values to FP8 as `as_operand` gives it (TYPE), saturated at LIMIT."""
    real = tl.where(real > LIMIT, LIMIT, tl.where(real < -LIMIT, -LIMIT, real))  # a NaN stays
    if TYPE == tl.uint8:  # noqa: SIM300 (as Triton compares)
        values = _codes(real, MANTISSA)
    else:
        values = real.to(TYPE)
    return values


@triton.jit
def read_shrunk_rows(
    h_ptrs, mask, lanes, rank, stride_hp, WHOLE: tl.constexpr, DTYPE: tl.constexpr, SHAPE: tl.constexpr
):  # fmt: skip
    """Read the result [BLOCK_M, BLOCK_R] of shrink in DTYPE, without scales. Unless WHOLE, ``mask`` drops ranks beyond.
    """
    if SHAPE.quant.x_format > 0:
        h = upcast(tl.load(h_ptrs, mask=mask, other=0.0), SHAPE.quant.x_format, DTYPE)
    else:
        h = read_shrunk(h_ptrs, mask, stride_hp, SHAPE.partials)
    if not WHOLE or SHAPE.quant.x_format > 0:
        h = tl.where((lanes < rank)[None, :], h, 0.0)
    return h.to(DTYPE)


@triton.jit
def read_shrunk_row(h_ptrs, offs_r, mask, operands, row, stride_hp, SHAPE: tl.constexpr):
    """Read the result [ranks] of shrink for one row in float32: summed partials, or FP8 values times their scales."""
    if SHAPE.quant.x_format > 0:
        h = upcast(tl.load(h_ptrs, mask=mask, other=0.0), SHAPE.quant.x_format, tl.float32)
        h = row_scaled(h, operands, row, offs_r, mask, SHAPE)
    else:
        h = read_shrunk(h_ptrs, mask, stride_hp, SHAPE.partials)
    return h


@triton.jit
def channel_scales(operands, slice_id, slot, channels, mask, COUNT, SHAPE: tl.constexpr):
    """Return a slot's scales [channels] that follow the sum over K, of COUNT in a slice; 1 without them."""
    QUANT: tl.constexpr = SHAPE.quant
    SLOTS: tl.constexpr = QUANT.slots
    COLUMNS: tl.constexpr = QUANT.columns
    if QUANT.format == 0 or QUANT.group_k > 0:
        scale = 1.0
    else:
        scale_ptr = pick(operands, slice_id, SHAPE.slices, SHAPE.slices)
        if not QUANT.dense:
            scale_ptr += slot.to(tl.int64) * pick(SLOTS, slice_id, len(SLOTS))
            offsets = channels // QUANT.group_n * pick(COLUMNS, slice_id, len(COLUMNS))
        elif QUANT.channel:
            offsets = slot.to(tl.int64) * COUNT + channels
        else:
            offsets = slot.to(tl.int64) + channels * 0
        scale = tl.load(scale_ptr + offsets, mask=mask, other=0.0)
    return scale


@triton.jit
def block_scale_ptrs(operands, slice_id, slot, channels, SHAPE: tl.constexpr):
    """Return addresses [channels] of the scales of a slot's first block of K, and the stride from block to block."""
    QUANT: tl.constexpr = SHAPE.quant
    SLOTS: tl.constexpr = QUANT.slots
    COLUMNS: tl.constexpr = QUANT.columns
    BLOCKS: tl.constexpr = QUANT.blocks
    scale_ptr = pick(operands, slice_id, SHAPE.slices, SHAPE.slices)
    scale_ptr += slot.to(tl.int64) * pick(SLOTS, slice_id, len(SLOTS))
    scale_ptrs = scale_ptr + channels // QUANT.group_n * pick(COLUMNS, slice_id, len(COLUMNS))
    return scale_ptrs, pick(BLOCKS, slice_id, len(BLOCKS))


@triton.jit
def activation_scale_ptrs(operands, rows, SHAPE: tl.constexpr):
    """Return the addresses [rows] of the scales of the activations' first group."""
    return operands[2 * SHAPE.slices] + rows * SHAPE.quant.a_row


@triton.jit
def row_scaled(x, operands, row, ks, mask, SHAPE: tl.constexpr):
    """Multiply [ks] float32 values of one row of activations by their scales."""
    scale_ptr = activation_scale_ptrs(operands, row, SHAPE)
    if SHAPE.quant.group_k > 0:
        scale = tl.load(scale_ptr + ks // SHAPE.quant.group_k * SHAPE.quant.a_group, mask=mask, other=0.0)
    else:
        scale = tl.load(scale_ptr)
    return x * scale


@triton.jit
def real_weights(stored, operands, slice_id, slot, channels, ks, mask, SHAPE: tl.constexpr, DTYPE: tl.constexpr):
    """Convert ``stored`` to DTYPE, times its scales where these belong to blocks of K."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.group_k > 0:
        scale_ptrs, stride = block_scale_ptrs(operands, slice_id, slot, channels, SHAPE)
        scale = tl.load(scale_ptrs + ks // QUANT.group_k * stride, mask=mask, other=0.0)
        value = (upcast(stored, QUANT.format, tl.float32) * scale).to(DTYPE)
    else:
        value = upcast(stored, QUANT.format, DTYPE)
    return value


@triton.jit
def real_rows(stored, operands, rows, ks, mask, SHAPE: tl.constexpr, DTYPE: tl.constexpr):
    """Convert activations to DTYPE, times their scales if they are FP8."""
    QUANT: tl.constexpr = SHAPE.quant
    if QUANT.has_a:
        GROUP: tl.constexpr = QUANT.group_k if QUANT.group_k > 0 else 1 << 30
        scale_ptrs = activation_scale_ptrs(operands, rows, SHAPE) + ks // GROUP * QUANT.a_group
        scale = tl.load(scale_ptrs, mask=mask, other=0.0)
        value = (upcast(stored, QUANT.x_format, tl.float32) * scale).to(DTYPE)
    else:
        value = stored.to(DTYPE)
    return value
