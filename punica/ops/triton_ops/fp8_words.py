"""One row times a B in FP8 that lies rank after rank, read four columns to a word.

Bytes that a loop carries from one turn to the next cost the compiler a register each, and instructions that pack and
unpack them: more than what is done with them. So words are carried, and come apart where they are multiplied.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.device import hold_loads, let_next_start, read_shrunk
from punica.ops.triton_ops.fp8_device import channel_scales, widened


def fill_words(widths: Sequence[int]) -> bool:
    """Whether every rank of slices of such widths ends with a word. Others are so rare that they go by FP8's own
    kernels, whatever their form.
    """
    return not any([width % 4 for width in widths])


def starts_words(lora_b: Sequence[Tensor]) -> bool:
    """Whether every slice begins where a word may be read; a view into some buffer of bytes need not."""
    return not any([weight.data_ptr() % 4 for weight in lora_b])


_CONVERT = """{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.FORMATx2 first, low;
    cvt.rn.f16x2.FORMATx2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}"""
_CONVERT_E4M3 = tl.constexpr(_CONVERT.replace("FORMAT", "e4m3"))
_CONVERT_E5M2 = tl.constexpr(_CONVERT.replace("FORMAT", "e5m2"))


@triton.jit
def _converted(words, FORMAT: tl.constexpr):
    """The four FP8 values of each word as float32, from the lowest byte up, by instructions of the GPU."""
    return tl.inline_asm_elementwise(
        _CONVERT_E4M3 if FORMAT == 1 else _CONVERT_E5M2, "=f,=f,=f,=f,r", [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _byte(words, place: tl.constexpr, FORMAT: tl.constexpr):
    return widened(((words >> (8 * place)) & 0xFF).to(tl.uint8), FORMAT, tl.float32)


@triton.jit
def _wide_words(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """[columns / 4, ranks] words as four tensors of float32: the first of every four columns, the second, ..."""
    if NATIVE:
        values = _converted(words, FORMAT)
    else:
        values = (_byte(words, 0, FORMAT), _byte(words, 1, FORMAT), _byte(words, 2, FORMAT), _byte(words, 3, FORMAT))
    return values


@triton.jit
def expand_row_in_words(
    h_ptr, b_ptr, y_ptr, operands, slice_id, slot, first_n, width, rank, stride_hp, stride_hr,
    R: tl.constexpr, HELD: tl.constexpr, NUM_SLICES: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    AHEAD: tl.constexpr, PLANES: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x COLUMNS columns, LANES ranks at a time as far as the true rank goes: the next ones are fetched before
    these are summed, and AHEAD the first ones before the true rank is known.
    """
    NATIVE: tl.constexpr = b_ptr.dtype.element_ty != tl.uint8
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    width_w = width // 4
    offs_w = first_n // 4 + tl.arange(0, COLUMNS // 4)
    mask_w = (offs_w < width_w)[:, None]
    word_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + offs_r[None, :] * width_w + offs_w[:, None]
    words = tl.load(word_ptrs, mask=mask_w & (offs_r < (R if AHEAD else rank))[None, :], other=0)
    scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, NUM_SLICES, HELD)
    before = tl.zeros([COLUMNS], tl.float32)
    if ADD and not LATE:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    let_next_start(PDL)
    hold_loads(PDL)
    if ADD and LATE:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    h_ptrs = h_ptr + offs_r * stride_hr
    h = read_shrunk(h_ptrs, offs_r < rank, stride_hp, PLANES)
    first = tl.zeros([COLUMNS // 4], tl.float32)
    second, third, fourth = first, first, first
    for _ in tl.range(0, rank if R > LANES else 1, LANES):
        these, factors = words, h[None, :]
        if AHEAD:
            these = tl.where((offs_r < rank)[None, :], words, 0)
        if R > LANES:
            offs_r += LANES
            word_ptrs += LANES * width_w
            h_ptrs += LANES * stride_hr
            words = tl.load(word_ptrs, mask=mask_w & (offs_r < rank)[None, :], other=0)
            h = read_shrunk(h_ptrs, offs_r < rank, stride_hp, PLANES)
        a, b, c, d = _wide_words(these, HELD.format, NATIVE)
        first += tl.sum(a * factors, 1)
        second += tl.sum(b * factors, 1)
        third += tl.sum(c * factors, 1)
        fourth += tl.sum(d * factors, 1)
    total = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (COLUMNS,))
    total = total * scale + before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not ADD)))
