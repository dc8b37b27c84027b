"""Attention of decode rows over the paged KV cache: one query row per request, any number of cached tokens.

For request i with ``n_i`` cached tokens, and head h of the G = H / Hkv heads that share kv head ``h // G``:

    out[i, h] = softmax(q[i, h] K_i^T / sqrt(D)) V_i,     K_i[t], V_i[t]: cache row table[i, t // B] * B + t % B

A program takes the G queries of one kv head of one request, padded to the rows of a tensor-core tile, so that K and V
are read once. Of the request's tokens it takes one of ``SPLITS`` equal parts. It keeps a running maximum and sum
(Milakov and Gimelshein, 2018), so scores never reach memory. A second kernel adds the parts in ascending order
(flash-decoding with an ordered reduction): the same bits every run.

The grid is (Hkv, requests, splits). It follows none of the lengths, which are read on the device, so a captured graph
serves every context that its block table has room for. Programs begin in the order of the grid, and the kernel ends
with the last: so requests are taken in a given ``order``, longest first (Llama-2 7B, batch 32, H200: 3.0 ms of a step
in the order of slots, 2.6 in that of arrival, nearly that of length). With ``splits`` given, a request's bits depend on
its own length alone.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.backbone import MAX_HEAD_SIZE
from punica.ops.quant import FP8_DTYPES
from punica.ops.triton_ops.backbone.checks import check_cache, check_heads, check_numbers, check_same, check_shape
from punica.ops.triton_ops.device import dot, pdl_launch_then_wait
from punica.ops.triton_ops.fp8_device import as_operand, fp8_format, upcast
from punica.ops.triton_ops.fp8_words import upcast_words
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable
from punica.ops.triton_ops.schedules import Gpu

MAX_SPLITS = 32
KIB_PER_SM = 128
"""Tiles of keys and values that a multiprocessor's programs hold: enough loads under way. Programs beyond these wait,
and each split adds partials to read again."""


class _Shape(NamedTuple):
    """Shape and schedule: a constexpr of the kernels.

    group: queries per kv head. size: of a head. page: tokens of a block of the cache. scale: of scores, base 2. format:
    of keys and values, as of `fp8_format`. words: FP8 values are read four elements of a head to a word.
    """

    kv_heads: int
    group: int
    size: int
    page: int
    splits: int
    block_g: int
    block_n: int
    block_d: int
    scale: float
    format: int
    words: bool
    pdl: bool
    stages: int = 3  # block ids are read two tiles ahead and, from their places, keys and values one


@triton.jit
def _add_values(sums, weights, shrunk, values, NATIVE: tl.constexpr, SHAPE: tl.constexpr):
    """Add weights [BLOCK_G, BLOCK_N] times values [BLOCK_N, BLOCK_D] to the shrunk sums. In words the sums are four, of
    every fourth element: tokens are the inner dimension of this product, so its operand takes pairs of them, and FP8
    values that are not in words would leave shared memory byte by byte.
    """
    parts: tl.tuple = (values,)
    if SHAPE.words:
        parts = upcast_words(values, SHAPE.format, NATIVE, weights.dtype)  # each [BLOCK_N, BLOCK_D / 4]
    else:
        parts = (upcast(values, SHAPE.format, weights.dtype),)
    added: tl.tuple = ()
    for part in tl.static_range(len(parts)):
        before = sums[part] * shrunk[:, None]
        added = added + (dot(weights, parts[part], before),)  # noqa: RUF005
    return added


@triton.jit
def _attend(q, keys_ptr, values_ptr, table_ptr, begin, end, SHAPE: tl.constexpr):
    """Attend to tokens [begin, end) of one request: sums of values [BLOCK_G, BLOCK_D], largest scores (base 2) and sums
    of weights, each [BLOCK_G]. No token: 0, -inf, 0.
    """
    BLOCK_G: tl.constexpr = SHAPE.block_g
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_D: tl.constexpr = SHAPE.block_d
    row_stride = SHAPE.kv_heads * SHAPE.size
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < SHAPE.size
    PARTS: tl.constexpr = 4 if SHAPE.words else 1
    NATIVE: tl.constexpr = values_ptr.dtype.element_ty != tl.uint8
    ZERO: tl.constexpr = 0 if SHAPE.words else 0.0
    offs_v = tl.arange(0, BLOCK_D // PARTS)
    sums: tl.tuple = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_G, BLOCK_D // PARTS], tl.float32),)  # noqa: RUF005 (no starred tuples in Triton)
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if SHAPE.words:
        values_ptr = values_ptr.to(tl.pointer_type(tl.int32))
    for start in tl.range(begin, end, BLOCK_N, num_stages=SHAPE.stages):
        tokens = start + offs_n
        mask_n = tokens < end
        pages = tl.load(table_ptr + tokens // SHAPE.page, mask=mask_n, other=0)
        rows = (pages.to(tl.int64) * SHAPE.page + tokens % SHAPE.page) * row_stride
        keys = tl.load(
            keys_ptr + rows[None, :] + offs_d[:, None], mask=mask_n[None, :] & mask_d[:, None], other=0.0
        )  # fmt: skip
        mask_v = mask_n[:, None] & (offs_v < SHAPE.size // PARTS)[None, :]
        values = tl.load(values_ptr + (rows // PARTS)[:, None] + offs_v[None, :], mask=mask_v, other=ZERO)
        keys = upcast(keys, SHAPE.format, q.dtype)
        # keys [BLOCK_D, BLOCK_N], values [BLOCK_N, BLOCK_D / PARTS], scores [BLOCK_G, BLOCK_N]
        scores = dot(q, keys, tl.zeros([BLOCK_G, BLOCK_N], tl.float32)) * SHAPE.scale
        scores = tl.where(mask_n[None, :], scores, float("-inf"))
        raised = tl.maximum(largest, tl.max(scores, 1))  # finite: every tile has a token
        shrunk = tl.exp2(largest - raised)
        weights = tl.exp2(scores - raised[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        sums = _add_values(sums, weights.to(q.dtype), shrunk, values, NATIVE, SHAPE)
        largest = raised
    if SHAPE.words:
        acc = tl.reshape(tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3])), (BLOCK_G, BLOCK_D))
    else:
        acc = sums[0]
    return acc, largest, total


@triton.jit
def tokens_of_part(length, part, parts, BLOCK_N: tl.constexpr):
    """Return begin and end of one of ``parts`` parts of ``length`` tokens, in whole tiles; the last may be empty."""
    size = tl.cdiv(tl.cdiv(length, BLOCK_N), parts) * BLOCK_N
    begin = tl.minimum(part * size, length)
    return begin, tl.minimum(begin + size, length)


@triton.jit(do_not_specialize=["table_width"])
def _decode_attention_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, order_ptr, out_ptr, sums_ptr, table_width,
    q_stride, out_stride, SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one request's tokens. ``out``: the result [T, H, D], or with more than one split the parts
    [T, H, SPLITS, D] in float32, and ``sums`` their log-sum-exp (base 2) [T, H, SPLITS].
    """
    GROUP: tl.constexpr = SHAPE.group
    SIZE: tl.constexpr = SHAPE.size
    SPLITS: tl.constexpr = SHAPE.splits
    HEADS: tl.constexpr = SHAPE.kv_heads * GROUP
    kv_head, split = tl.program_id(0), tl.program_id(2)
    row = tl.load(order_ptr + tl.program_id(1)).to(tl.int64)
    offs_g = tl.arange(0, SHAPE.block_g)
    offs_d = tl.arange(0, SHAPE.block_d)
    heads = kv_head * GROUP + offs_g
    mask = (offs_g < GROUP)[:, None] & (offs_d < SIZE)[None, :]
    length = tl.load(lengths_ptr + row)  # no kernel writes it, nor the order or the table
    begin, end = tokens_of_part(length, split, SPLITS, SHAPE.block_n)
    pdl_launch_then_wait(SHAPE.pdl)
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * SIZE + offs_d[None, :], mask=mask, other=0.0)
    acc, largest, total = _attend(
        q, keys_ptr + kv_head * SIZE, values_ptr + kv_head * SIZE, table_ptr + row * table_width, begin, end, SHAPE
    )  # fmt: skip
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]  # [BLOCK_G, BLOCK_D]
    if SPLITS == 1:
        targets = row * out_stride + heads[:, None] * SIZE + offs_d[None, :]
        tl.store(out_ptr + targets, mean.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partial = (row * HEADS + heads) * SPLITS + split
        sums = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(sums_ptr + partial, sums, mask=offs_g < GROUP)
        tl.store(out_ptr + partial[:, None] * SIZE + offs_d[None, :], mean, mask=mask & (begin < end))


class _Parts(NamedTuple):
    """Shape of the parts of one result: a constexpr of the kernel that adds them."""

    heads: int
    size: int
    splits: int
    block_d: int
    pdl: bool


@triton.jit
def _combine_kernel(parts_ptr, sums_ptr, out_ptr, out_stride, SHAPE: tl.constexpr):
    """Add the parts of one head of one row, weighted by their share of the whole sum, first to last."""
    SIZE: tl.constexpr = SHAPE.size
    SPLITS: tl.constexpr = SHAPE.splits
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_d = tl.arange(0, SHAPE.block_d)
    first = (row * SHAPE.heads + head) * SPLITS
    pdl_launch_then_wait(SHAPE.pdl)
    largest = tl.max(tl.load(sums_ptr + first + tl.arange(0, SPLITS)), 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # a request without tokens
    acc = tl.zeros_like(offs_d).to(tl.float32)
    total = 0.0
    for split in tl.static_range(SPLITS):
        share = tl.load(sums_ptr + first + split)
        weight = tl.exp2(share - largest)
        width = tl.where(share > float("-inf"), SIZE, 0)  # of what was written
        acc += weight * tl.load(parts_ptr + (first + split) * SIZE + offs_d, mask=offs_d < width, other=0.0)
        total += weight
    mean = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * out_stride + head * SIZE + offs_d, mean.to(out_ptr.dtype.element_ty), mask=offs_d < SIZE)


def choose_splits(requests: int, kv_heads: int, tile_bytes: int, device: torch.device) -> int:
    """Return the parts that each request's tokens are cut into, a power of two up to ``MAX_SPLITS``: enough programs
    for the device when few requests with few kv heads run. Not a function of the lengths.
    """
    per_sm = max(2, min(4, (KIB_PER_SM << 10) // tile_bytes))
    programs = per_sm * Gpu.of(device).multiprocessors // (requests * kv_heads)
    return min(MAX_SPLITS, 1 << max(programs, 1).bit_length() - 1)


def _tokens_at_once(group: int, size: int, itemsize: int) -> int:
    """Return the tokens of a tile: 32 KiB of keys and values under way suit queries that share a kv head, others are
    read as fast with twice that (heads of 128 elements, H200). Small tiles and FP8 take two warps: 5 and
    11 % less time.
    """
    return max(16, min(128, (64 if group > 1 else 128) * 256 // (block_at_least(size) * itemsize)))


def _in_words(values: Tensor) -> bool:
    """Check that four elements of a head may be read at once, and are enough for a product of a quarter of a head."""
    size = values.shape[2]
    return values.dtype in FP8_DTYPES and size > 32 and size % 4 == 0 and values.data_ptr() % 4 == 0


class Pages(NamedTuple):
    """Cached tokens of R requests, on the device and not checked. No kernel in flight may write these tensors, which
    are read before the PDL wait.

    block_table: int32 ``[R, W]``: block of each ``block_size`` tokens of a request, in order; entries behind the last
        token's are not read.
    lengths: int32 ``[R]``: cached tokens of each request, at most ``W * block_size``. 0 (a row that pads a captured
        batch): nothing is read and the row of the result becomes 0.
    order: int32 ``[R]``: the requests in the order in which they are taken, each once; longest first is fastest, and no
        result depends on it.
    block_size: tokens of a block.
    """

    block_table: Tensor
    lengths: Tensor
    order: Tensor
    block_size: int


def decode_attention(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, splits: int | None = None
) -> None:
    """Compute attention of R requests with one query row each, into ``out``; the newest token is in the cache already.

    Args:
        out: ``[R, H, D]``, overwritten; rows may be apart, heads side by side.
        q: ``[R, H, D]``, in the same way, rotated; float16, bfloat16 or float32 as the cache, unless that is FP8.
        keys: ``[num_blocks * block_size, Hkv, D]``, contiguous, of one layer; H is a multiple of Hkv, D at
            most 256. float8_e4m3fn is upcast, exactly, before it is multiplied.
        values: as ``keys``.
        pages: of each request.
        splits: a power of two up to 32; ``None``: :func:`choose_splits`.
    """
    _check(out, q, keys, values, pages, splits)
    requests, heads, size = q.shape
    kv_heads = keys.shape[1]
    if requests == 0:
        return
    group, width, fp8 = heads // kv_heads, block_at_least(size), fp8_format(keys.dtype)
    tokens = _tokens_at_once(group, size, q.element_size())
    splits = splits or choose_splits(requests, kv_heads, 2 * tokens * width * keys.element_size(), q.device)
    shape = _Shape(
        kv_heads, group, size, pages.block_size, splits, block_at_least(group), tokens, width,
        math.log2(math.e) / math.sqrt(size), fp8, _in_words(values), supports_pdl(q.device),
    )  # fmt: skip
    parts, sums = scratch_of_parts(out, splits) if splits > 1 else (out, out)  # stand for what one does not need
    tensors = (q, as_operand(keys), as_operand(values), *pages[:3], parts, sums)
    launch_alone(
        _decode_attention_kernel, (kv_heads, requests, splits), tensors, shape,
        strides=(q.stride(0), out.stride(0)), dtypes=(q.dtype, keys.dtype), num_warps=2 if fp8 or tokens <= 64 else 4,
        counts=(pages.block_table.shape[1],),
    )  # fmt: skip
    if splits > 1:
        combine(out, parts, sums)


def scratch_of_parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Allocate parts ``[T, H, splits, D]`` and their log-sum-exp ``[T, H, splits]``, float32, for ``out [T, H, D]``."""
    rows, heads, size = out.shape
    parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=out.device)
    return parts, parts.new_empty(rows, heads, splits)


def combine(out: Tensor, parts: Tensor, sums: Tensor) -> None:
    """Add parts in ascending order, weighted by their share; of a row that no kernel wrote the result is undefined."""
    rows, heads, splits, size = parts.shape
    shape = _Parts(heads, size, splits, block_at_least(size), supports_pdl(out.device))
    launch_alone(
        _combine_kernel, (rows, heads, 1), (parts, sums, out), shape,
        strides=(out.stride(0),), dtypes=(out.dtype,), num_warps=1,
    )  # fmt: skip


def check_splits(splits: int | None) -> None:
    """ValueError: no power of two up to ``MAX_SPLITS``."""
    if splits is not None and (splits not in range(1, MAX_SPLITS + 1) or splits & (splits - 1)):
        raise ValueError(f"splits must be a power of two in [1, {MAX_SPLITS}], got {splits}")


def _check(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, splits: int | None) -> None:
    block_table, lengths, order, block_size = pages
    check_runnable(q.device)
    check_cache(keys, values, q)
    requests, heads, size = check_shape("q", q, (None, None, keys.shape[2]))
    check_shape("out", out, (requests, heads, size))
    check_shape("block_table", block_table, (requests, None))
    check_shape("lengths", lengths, (requests,))
    check_shape("order", order, (requests,))
    check_same(q, out=out)
    if size > MAX_HEAD_SIZE:
        raise ValueError(f"heads must have at most {MAX_HEAD_SIZE} elements, got {size}; use SDPA on gathered tokens")
    if heads == 0 or heads % keys.shape[1]:
        raise ValueError(f"q has {heads} heads, must be a multiple of the cache's {keys.shape[1]}")
    check_heads(q=q, out=out)
    check_numbers(q.device, torch.int32, block_table=block_table, lengths=lengths, order=order)
    if block_size < 1 or keys.shape[0] % block_size:
        raise ValueError(f"block_size must divide the cache's {keys.shape[0]} rows, got {block_size}")
    check_splits(splits)
