"""Expand with an FP8 B stored rank after rank, read four columns to a word.

Loop-carried FP8 values occupy a register each, and instructions that pack and unpack them. So packed words are carried,
and unpacked where they are multiplied. In a GEMM a word's four columns belong to four products, whose threads upcast
them: through shared memory (where Hopper's product of 64 rows wants its operands) each block would wait for a store.
"""

import triton
import triton.language as tl

from punica.ops.triton_ops.device import dot, pdl_launch_then_wait, read_old_then_wait, read_shrunk
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

_HALVE = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit
def upcast_pairs(words, NATIVE: tl.constexpr):
    """Upcast words of two e4m3 values to two tensors in float16, of their lower and of their upper bytes."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            _HALVE, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = upcast((words & 0xFF).to(tl.uint8), 1, tl.float16)
        odd = upcast(((words >> 8) & 0xFF).to(tl.uint8), 1, tl.float16)
    return even, odd


@triton.jit
def upcast_words(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """Upcast words to four tensors, of every fourth column each. NATIVE: by instructions, to 16 bits or float32."""
    if not NATIVE:
        a = upcast((words & 0xFF).to(tl.uint8), FORMAT, DTYPE)
        b = upcast(((words >> 8) & 0xFF).to(tl.uint8), FORMAT, DTYPE)
        c = upcast(((words >> 16) & 0xFF).to(tl.uint8), FORMAT, DTYPE)
        d = upcast(((words >> 24) & 0xFF).to(tl.uint8), FORMAT, DTYPE)
    elif DTYPE == tl.float32:  # noqa: SIM300 (as Triton compares)
        a, b, c, d = tl.inline_asm_elementwise(
            _CONVERT_E4M3 if FORMAT == 1 else _CONVERT_E5M2, "=f,=f,=f,=f,r", [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:  # two words at a time: in an operand these are two ranks of the same columns, the order of its registers
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK_E4M3 if FORMAT == 1 else _UNPACK_E5M2, "=r,=r,=r,=r,r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)


@triton.jit
def expand_row_in_words(tensors, operands, place, block, strides, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute one row x COLUMNS columns, LANES ranks at a time, as `expand._by_ranks`. place: slice, slot, row and true
    rank; block: first column and width of the slice; strides: of h along partials and ranks.
    """
    COLUMNS: tl.constexpr = TILE.row.block_n
    LANES: tl.constexpr = TILE.row.lanes[0]
    h_ptr, b_ptr, y_ptr = tensors
    slice_id, slot, _, rank = place
    first_n, width = block
    stride_hp, stride_hr = strides
    NATIVE: tl.constexpr = b_ptr.dtype.element_ty != tl.uint8
    offs_r = tl.arange(0, LANES)
    offs_n = first_n + tl.arange(0, COLUMNS)
    mask_n = offs_n < width
    width_w = width // 4
    offs_w = first_n // 4 + tl.arange(0, COLUMNS // 4)
    mask_w = (offs_w < width_w)[:, None]
    word_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + offs_r[None, :] * width_w + offs_w[:, None]  # [COLUMNS/4, LANES]
    words = tl.load(word_ptrs, mask=mask_w & (offs_r < rank)[None, :], other=0)
    scale = channel_scales(operands, slice_id, slot, offs_n, mask_n, width, SHAPE)
    before = read_old_then_wait(y_ptr + offs_n, mask_n, tl.float32, SHAPE, TILE)  # [COLUMNS]
    h_ptrs = h_ptr + offs_r * stride_hr
    h = read_shrunk(h_ptrs, offs_r < rank, stride_hp, SHAPE.partials)  # [LANES]
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
        a, b, c, d = upcast_words(these, SHAPE.quant.format, NATIVE, tl.float32)  # each [COLUMNS/4, LANES]
        first += tl.sum(a * factors, 1)
        second += tl.sum(b * factors, 1)
        third += tl.sum(c * factors, 1)
        fourth += tl.sum(d * factors, 1)
    total = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (COLUMNS,))  # [COLUMNS]
    total = total * scale + before
    tl.store(y_ptr + offs_n, total.to(y_ptr.dtype.element_ty), mask=mask_n & ((rank > 0) | (not SHAPE.add)))


@triton.jit
def expand_tile_in_words(tensors, operands, place, rows, block, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Compute ``rows`` x tiles_n blocks of block_n columns, all ranks at once; arguments of `expand._expand_rows_of`.
    Unless ``late`` the PDL wait is in the loop's first iteration, behind the first loads of B and y.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_R: tl.constexpr = TILE.block_r
    h_ptr, b_ptr, y_ptr, strides = tensors
    slice_id, slot, rank = place
    rows, mask_m = rows
    first_n, width, column = block
    stride_hp, _, stride_ht, stride_hr, stride_yt = strides
    NATIVE: tl.constexpr = b_ptr.dtype.element_ty != tl.uint8
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_w = first_n // 4 + tl.arange(0, BLOCK_N // 4)
    offs_r = tl.arange(0, BLOCK_R)
    width_w = width // 4
    word_ptrs = b_ptr.to(tl.pointer_type(tl.int32)) + offs_r[:, None] * width_w + offs_w[None, :]  # [BLOCK_R, N/4]
    h_ptrs = h_ptr + rows[:, None] * stride_ht + offs_r[None, :] * stride_hr
    y_ptrs = y_ptr + rows[:, None] * stride_yt + (column + offs_n)[None, :]
    mask_h = mask_m[:, None] & (offs_r < (rank + SHAPE.vector - 1) // SHAPE.vector * SHAPE.vector)[None, :]
    h = tl.zeros([BLOCK_M, BLOCK_R], DTYPE)  # until the first turn, for the loop to carry
    if TILE.late:
        pdl_launch_then_wait(TILE.pdl)
        h = read_shrunk_rows(h_ptrs, mask_h, offs_r, rank, stride_hp, False, DTYPE, SHAPE)
    for step in tl.range(0, TILE.tiles_n, num_stages=TILE.stages):
        mask_n = offs_n < (1 << 30 if TILE.even_n else width)
        mask_w = (offs_w < (1 << 30 if TILE.even_n else width_w))[None, :]
        words = tl.load(word_ptrs, mask=(offs_r < rank)[:, None] & mask_w, other=0)  # [BLOCK_R, BLOCK_N/4]
        if SHAPE.add:
            before = tl.load(y_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)  # [BLOCK_M, BLOCK_N]
        if not TILE.late:  # noqa: SIM102 (TILE.late is decided at compile time)
            if step == 0:
                pdl_launch_then_wait(TILE.pdl)
                h = read_shrunk_rows(h_ptrs, mask_h, offs_r, rank, stride_hp, False, DTYPE, SHAPE)
        # not mask_n, though it says the same: known to be true, it makes the compiler run out of registers at rank 64
        scale = channel_scales(operands, slice_id, slot, offs_n, offs_n < width, width, SHAPE)
        a, b, c, d = upcast_words(words, SHAPE.quant.format, NATIVE, DTYPE)  # each [BLOCK_R, BLOCK_N/4]
        zeros = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32)
        a, b = dot(h, a, zeros), dot(h, b, zeros)
        c, d = dot(h, c, zeros), dot(h, d, zeros)
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
