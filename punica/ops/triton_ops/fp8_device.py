"""What the FP8 kernels share: FP8 values made wide in registers, where their scales lie, and how they are launched.

Weights are read as FP8, so memory moves half the bytes, and every value is made wide exactly: in hardware from compute
capability 8.9 on, by its bits before that (and in the interpreter, which converts FP8 wrongly). All products are those
of the wide type, 16-bit on the tensor cores or float32: these operators wait for memory, so FP8 instructions
could gain no time, and would lose bits of the sums and pad a rank of 16 to 32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.checks import Weights
from punica.ops.fp8_checks import Scales, Scheme
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.launch import INTERPRETED

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""The wide type of products, as kernels name it."""


def fp8_format(dtype: torch.dtype) -> int:
    """What kernels call the dtype of an operand: 0 not FP8, 1 e4m3, 2 e5m2."""
    return FP8_DTYPES.index(dtype) + 1 if dtype in FP8_DTYPES else 0


def as_operand(tensor: Tensor) -> Tensor:
    """``tensor`` as a kernel takes it: FP8 as bytes in the interpreter and on GPUs whose compiler knows no e4m3."""
    if tensor.dtype not in FP8_DTYPES or not (INTERPRETED or tensor.is_cuda):
        return tensor
    known = not INTERPRETED and torch.cuda.get_device_capability(tensor.device) >= (8, 9)
    return tensor if known else tensor.view(torch.uint8)


def operands(weights: Sequence[Tensor], scales: Sequence[Tensor], a_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Weights of all slices, their scales, and the activations' (or any scale), as one argument of a kernel."""
    return (*[as_operand(weight) for weight in weights], *scales, scales[0] if a_scale is None else a_scale)


def scale_constants(lie: Scales, scheme: Scheme, k: int, has_a: bool) -> dict[str, Any]:
    """What kernels know of the scales of a product with contraction size ``k``: strides (one where all slices share
    it), and block sizes; GROUP_K is 0 where a scale belongs to all of K.
    """
    strides = {"SCALE_L": lie.slot, "SCALE_N": lie.column, "SCALE_K": lie.block}
    constants: dict[str, Any] = {name: each[:1] if len(set(each)) == 1 else each for name, each in strides.items()}
    split = 0 < scheme.group_k < k
    return constants | {"GROUP_N": max(1, scheme.group_n), "GROUP_K": scheme.group_k if split else 0, "HAS_A": has_a}


class Held(NamedTuple):
    """How the 16-bit kernels' weights are held, where a scale belongs to whole channels: ``format`` as of `fp8_format`;
    ``channel``: a scale for each of them, else one for a slot. Scales lie densely, slot after slot.
    """

    format: int = 0
    channel: bool = False


WIDE = Held()


def held_as(weights: Weights, lie: Scales, scheme: Scheme, channels: Sequence[int]) -> Held | None:
    """Of FP8 weights whose slices have so many ``channels``; None where scales lie otherwise."""
    if scheme.block_wise:
        return None
    wanted = list(channels) if scheme.per_channel_quant else [1] * len(channels)
    if list(lie.slot) != wanted or set(lie.column) != {int(scheme.per_channel_quant)}:
        return None
    return Held(fp8_format(weights.dtype), scheme.per_channel_quant)


def check_group_k(scheme: Scheme, k: int) -> None:
    """ValueError where a tile of K could cross a block."""
    group = scheme.group_k
    if 0 < group < k and (group < 16 or group & (group - 1)):
        raise ValueError(
            f"group_k is {group}; the kernels need a power of two >= 16, or at least K = {k} (punica.ops.fp8_ops takes "
            "any)"
        )


@triton.jit
def pick_from(values, index, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Entry ``FIRST + index`` of the tuple `values`, index below COUNT: as `device.pick`."""
    chosen = values[FIRST]
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, values[FIRST + i], chosen)
    return chosen


@triton.jit
def widened(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """`stored` as DTYPE, exactly, NaN as NaN; FORMAT 0: it is wide already. To bfloat16 through float32, two
    instructions for a value: from FP8 itself the compiler takes one that runs at a quarter of their rate.
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
        value = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)  # the upper byte of a float16
    return value.to(DTYPE)


@triton.jit
def _codes(real, MANTISSA: tl.constexpr):
    """The bytes of e4m3 (MANTISSA 3) or e5m2 (2) that are nearest to float32 values in range, ties to even."""
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
def narrowed(real, TYPE: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 values in FP8, as `as_operand` gives its tensors (TYPE); beyond LIMIT the largest value stands."""
    real = tl.where(real > LIMIT, LIMIT, tl.where(real < -LIMIT, -LIMIT, real))  # a NaN stays
    if TYPE == tl.uint8:  # noqa: SIM300 (as Triton compares)
        values = _codes(real, MANTISSA)
    else:
        values = real.to(TYPE)
    return values


@triton.jit
def channel_scales(operands, slice_id, slot, channels, mask, COUNT, NUM_SLICES: tl.constexpr, HELD: tl.constexpr):
    """Scales of `channels` of a slot of a slice with COUNT of them; `operands`: weights of all slices, their scales."""
    scale_ptr = pick_from(operands, slice_id, NUM_SLICES, NUM_SLICES)
    if HELD.channel:
        offsets = slot.to(tl.int64) * COUNT + channels
    else:
        offsets = slot.to(tl.int64) + channels * 0
    return tl.load(scale_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def scales_of(
    operands, slice_id, slot, NUM_SLICES: tl.constexpr, SCALE_L: tl.constexpr, SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
):  # fmt: skip
    """Where the scales of a slot of a slice begin, and their strides along columns and blocks of K."""
    scale_ptr = pick_from(operands, slice_id, NUM_SLICES, NUM_SLICES)
    scale_ptr += slot.to(tl.int64) * pick_from(SCALE_L, slice_id, 0, len(SCALE_L))
    return scale_ptr, pick_from(SCALE_N, slice_id, 0, len(SCALE_N)), pick_from(SCALE_K, slice_id, 0, len(SCALE_K))
