"""Rows times a B in FP8 that lies rank after rank, read four columns to a word.

Bytes that a loop carries from one turn to the next cost the compiler a register each, and instructions that pack and
unpack them: more than what is done with them. So words are carried, and come apart where they are multiplied. Of a tile
of rows every word's four columns belong to four products, and the threads that multiply them make them wide: through
shared memory (where Hopper's product of 64 rows wants them) each block would wait for what was stored before it.
"""


import triton
import triton.language as tl

from punica.ops.triton_ops.device import (
    dot,
    pdl_launch_dependents,
    pdl_launch_then_wait,
    pdl_wait_or_barrier,
    read_shrunk,
)
from punica.ops.triton_ops.fp8_device import channel_scales, read_shrunk_rows, upcast

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


_UNPACK = """{
    .reg .b32 first, second;
    .reg .b16 a, b, c, d;
    prmt.b32 first, $4, $5, 0x5140;
    prmt.b32 second, $4, $5, 0x7362;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.rn.f16x2.FORMATx2 $0, a;
    cvt.rn.f16x2.FORMATx2 $1, b;
    cvt.rn.f16x2.FORMATx2 $2, c;
    cvt.rn.f16x2.FORMATx2 $3, d;
}"""
_UNPACK_E4M3 = tl.constexpr(_UNPACK.replace("FORMAT", "e4m3"))
_UNPACK_E5M2 = tl.constexpr(_UNPACK.replace("FORMAT", "e5m2"))


@triton.jit
def _unpacked(words, FORMAT: tl.constexpr):
    """The four FP8 values of each word as float16, from the lowest byte up; two words at a time, in a product's operand
    two ranks of the same columns, as its registers want them.
    """
    return tl.inline_asm_elementwise(
        _UNPACK_E4M3 if FORMAT == 1 else _UNPACK_E5M2, "=r,=r,=r,=r,r,r", [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _byte(words, place: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    return upcast(((words >> (8 * place)) & 0xFF).to(tl.uint8), FORMAT, DTYPE)


@triton.jit
def _by_their_bits(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    a, b = _byte(words, 0, FORMAT, DTYPE), _byte(words, 1, FORMAT, DTYPE)
    c, d = _byte(words, 2, FORMAT, DTYPE), _byte(words, 3, FORMAT, DTYPE)
    return a, b, c, d


@triton.jit
def _wide_words(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """[columns / 4, ranks] words as four tensors of float32: the first of every four columns, the second, ..."""
    if NATIVE:
        values = _converted(words, FORMAT)
    else:
        values = _by_their_bits(words, FORMAT, tl.float32)
    return values


@triton.jit
def _operands_of(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """The same as operands of a product in 16-bit DTYPE."""
    if NATIVE:
        a, b, c, d = _unpacked(words, FORMAT)
        values = (a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE))
    else:
        values = _by_their_bits(words, FORMAT, DTYPE)
    return values


@triton.jit
def expand_row_in_words(
    tensors, operands, place, block, rank, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row x COLUMNS columns, LANES ranks at a time as far as the true rank goes: the next ones are loaded before
    these are summed.

    place: slice, slot and row; block: first column and width of the slice; strides: of h along partials and ranks.
    """
    QUANT: tl.constexpr = SHAPE.quant
    COLUMNS: tl.constexpr = TILE.row.block_n
    LANES: tl.constexpr = TILE.row.lanes[0]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, _ = place
    first_n, width = block
    stride_hp, stride_hr = strides
    NATIVE: tl.constexpr = b_ptr.dtype.element_ty != tl.uint8
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    width_w = width // 4
    offs_w = first_n // 4 + tl.arange(0, COLUMNS // 4)
    mask_w = (offs_w < width_w)[:, None]
    word_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + offs_r[None, :] * width_w + offs_w[:, None]
    words = tl.load(word_ptrs, mask=mask_w & (offs_r < rank)[None, :], other=0)
    scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
    before = tl.zeros([COLUMNS], tl.float32)
    if SHAPE.add and not TILE.late:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    pdl_launch_dependents(TILE.pdl)
    pdl_wait_or_barrier(TILE.pdl)
    if SHAPE.add and TILE.late:
        before = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    h_ptrs = h_ptr + offs_r * stride_hr
    h = read_shrunk(h_ptrs, offs_r < rank, stride_hp, SHAPE.partials)
    first = tl.zeros([COLUMNS // 4], tl.float32)
    second, third, fourth = first, first, first
    for _ in tl.range(0, rank if SHAPE.rank > LANES else 1, LANES):
        these, factors = words, h[None, :]
        if SHAPE.rank > LANES:
            offs_r += LANES
            word_ptrs += LANES * width_w
            h_ptrs += LANES * stride_hr
            words = tl.load(word_ptrs, mask=mask_w & (offs_r < rank)[None, :], other=0)
            h = read_shrunk(h_ptrs, offs_r < rank, stride_hp, SHAPE.partials)
        a, b, c, d = _wide_words(these, QUANT.format, NATIVE)
        first += tl.sum(a * factors, 1)
        second += tl.sum(b * factors, 1)
        third += tl.sum(c * factors, 1)
        fourth += tl.sum(d * factors, 1)
    total = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (COLUMNS,))
    total = total * scale + before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def expand_tile_in_words(
    tensors, operands, place, rows, block, rank, strides, SHAPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``rows`` x tiles_n blocks of block_n columns, all ranks at once. Unless ``late`` the wait for the kernel in front
    is in the first turn of the loop, so that the first blocks of B and y are under way before it.

    place: slice and slot; block: first column, width of the slice and its first column in y.
    """
    QUANT: tl.constexpr = SHAPE.quant
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot = place
    rows, mask_m = rows
    first_n, width, column = block
    stride_hp, _, stride_ht, stride_hr, stride_yt = strides
    NATIVE: tl.constexpr = b_ptr.dtype.element_ty != tl.uint8
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_w = first_n // 4 + tl.arange(0, BLOCK_N // 4)
    offs_r = tl.arange(0, BLOCK_R)
    width_w = width // 4
    word_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + offs_r[:, None] * width_w + offs_w[None, :]
    h_ptrs = h_ptr + rows[:, None] * stride_ht + offs_r[None, :] * stride_hr
    y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]
    mask_h = mask_m[:, None] & (offs_r < (rank + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector)[None, :]
    h = tl.zeros([BLOCK_M, BLOCK_R], DTYPE)  # until the first turn, for the loop to carry
    if TILE.late:
        pdl_launch_then_wait(TILE.pdl)
        h = read_shrunk_rows(h_ptrs, mask_h, offs_r < rank, stride_hp, False, DTYPE, SHAPE)
    for step in tl.range(0, TILE.tiles_n, num_stages=TILE.stages):
        mask_n = offs_n < (1 << 30 if TILE.even_n else width)
        mask_w = (offs_w < (1 << 30 if TILE.even_n else width_w))[None, :]
        words = tl.load(word_ptrs, mask=(offs_r < rank)[:, None] & mask_w, other=0)
        if SHAPE.add:
            before = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
        if not TILE.late:  # noqa: SIM102 (TILE.late is decided at compile time)
            if step == 0:
                pdl_launch_then_wait(TILE.pdl)
                h = read_shrunk_rows(h_ptrs, mask_h, offs_r < rank, stride_hp, False, DTYPE, SHAPE)
        # not mask_n, though it says the same: known to be true, it makes the compiler run out of registers at rank 64
        scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, SHAPE)
        a, b, c, d = _operands_of(words, QUANT.format, NATIVE, DTYPE)
        zeros = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32)
        a, b = dot(h, a, zeros, False, TILE.interpret), dot(h, b, zeros, False, TILE.interpret)
        c, d = dot(h, c, zeros, False, TILE.interpret), dot(h, d, zeros, False, TILE.interpret)
        total = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_M, BLOCK_N))
        if SHAPE.add:
            total = tl.fma(total, scale[None, :].broadcast_to(BLOCK_M, BLOCK_N), before.to(tl.float32))
        else:
            total *= scale[None, :]
        tl.store(y_ptrs, total.to(DTYPE), mask=mask_m[:, None] & mask_n[None, :])
        offs_n += BLOCK_N
        offs_w += BLOCK_N // 4
        y_ptrs += BLOCK_N
        word_ptrs += BLOCK_N // 4
