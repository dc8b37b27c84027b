"""Attention of several rows of a request: each to the request's cached tokens, and to its own rows up to itself.

For the rows of prompt p, and head h of the G = H / Hkv heads that share kv head ``h // G``:

    out[t, h] = softmax(q[t, h] [C_p, K[s : t + 1]]^T / sqrt(D)) [D_p, V[s : t + 1]]    s = starts[p] <= t < starts[p+1]

C_p and D_p are keys and values of the tokens before, in blocks of the cache: of a prefix that another request computed,
or of earlier chunks of the prompt. Without any (``cached``) the rows are whole prompts. Own keys and values are read
as they are projected, before the cache rounds them.

A program takes a tile of rows of one prompt and one head, and walks over its keys in blocks counted from the prompt's
first row (FlashAttention-2). So a prompt in one part has the same bits wherever its rows are and whatever prompts are
beside it.

Where every request has a few rows (verified drafts) a tile has 16 of them, and products of fewer instructions.

The grid is (H, P), with P at least the most tiles that so many rows of so many prompts can have. Where they begin is
read on the device: a captured graph serves all prompts that fit into its rows. Of a prompt the last tiles, which have
the most keys, begin first.

A few rows behind a long prefix are few tiles. Then P has several programs for each, which take a part of the cached
tokens; the last takes the own rows as well. A second kernel adds the parts in order (as `decode_attention`).

torch 2.11's `varlen_attn` has no instructions of Hopper: with 32 heads of 128 on an H200, 2,048 rows take 91 us here
and 171 there, a prompt of 512 rows in a graph of 32 takes 15 and 36.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.backbone import MAX_HEAD_SIZE
from punica.ops.triton_ops.backbone.checks import check_cache, check_heads, check_numbers, check_same, check_shape
from punica.ops.triton_ops.backbone.decode_attention import (
    check_splits,
    choose_splits,
    combine,
    scratch_of_parts,
    tokens_of_part,
)
from punica.ops.triton_ops.device import accumulator, dot, max_tiles, pdl_launch_then_wait
from punica.ops.triton_ops.fp8_device import as_operand, fp8_format, upcast
from punica.ops.triton_ops.launch import block_at_least, launch_alone, stages_that_fit, supports_pdl
from punica.ops.triton_ops.op import check_runnable

FEW_ROWS = 16
"""Rows of a request, and of a tile, where all requests have so few."""
MOST_PROGRAMS = (1 << 16) - 1
"""Programs along the second axis of CUDA's grid."""


class _Shape(NamedTuple):
    """Shape and schedule: a constexpr of the kernel.

    group: queries per kv head. size: of a head. prompts: power of two >= prompts. scale: of scores, base 2.
    page: tokens of a block of the cache, 0 without. format: of cached keys and values, as of `fp8_format`.
    splits: parts of the cached tokens at most.
    """

    group: int
    size: int
    prompts: int
    block_m: int
    block_n: int
    block_d: int
    stages: int
    scale: float
    pdl: bool
    page: int = 0
    format: int = 0
    splits: int = 1


@triton.jit
def _find_tile(index, starts_ptr, num_prompts, SHAPE: tl.constexpr):
    """Return first and last + 1 row of a program's prompt (zeros: of none), the number of its tile in it, the prompt,
    the part of its cached tokens, and how many parts it has.
    """
    offs = tl.arange(0, SHAPE.prompts)
    mask = offs < num_prompts
    starts = tl.load(starts_ptr + offs, mask=mask, other=0)
    ends = tl.load(starts_ptr + 1 + offs, mask=mask, other=0)
    tiles = (ends - starts + SHAPE.block_m - 1) // SHAPE.block_m  # [PROMPTS]
    until = tl.cumsum(tiles, 0)
    most = tl.maximum(tl.max(until, 0), 1)
    part, parts = index // most, tl.minimum(tl.num_programs(1) // most, SHAPE.splits)
    tile = index - part * most
    own = (until > tile) & (until - tiles <= tile) & (part < parts)
    begin = tl.sum(tl.where(own, starts, 0), 0)
    end = tl.sum(tl.where(own, ends, 0), 0)
    number = tl.sum(tl.where(own, tile - until + tiles, 0), 0)
    return begin, end, number, tl.sum(tl.where(own, offs, 0), 0), part, parts


@triton.jit
def _add_block(state, q, heads, first, rows, end, SHAPE: tl.constexpr, CAUSAL: tl.constexpr):
    """Add keys and values [first, first + BLOCK_N) to the sums of the rows; ``CAUSAL``: only up to each row.

    state: sums of values [BLOCK_M, BLOCK_D], largest scores (base 2) and sums of weights, each [BLOCK_M]; heads: keys
    and values of one kv head, and their row stride.
    """
    acc, largest, total = state
    k_ptr, v_ptr, stride = heads
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    offs_d = tl.arange(0, SHAPE.block_d)
    tokens = first + tl.arange(0, BLOCK_N)
    inside = tokens < end
    mask_d = offs_d < SHAPE.size
    at = tokens.to(tl.int64) * stride
    k_ptrs, v_ptrs = k_ptr + at[None, :] + offs_d[:, None], v_ptr + at[:, None] + offs_d[None, :]
    if CAUSAL:
        keys = tl.load(k_ptrs, mask=inside[None, :] & mask_d[:, None], other=0.0)
        values = tl.load(v_ptrs, mask=inside[:, None] & mask_d[None, :], other=0.0)
    elif SHAPE.size == SHAPE.block_d:
        keys, values = tl.load(k_ptrs), tl.load(v_ptrs)
    else:
        keys = tl.load(k_ptrs, mask=mask_d[:, None], other=0.0)
        values = tl.load(v_ptrs, mask=mask_d[None, :], other=0.0)
    # q [BLOCK_M, BLOCK_D], keys [BLOCK_D, BLOCK_N], values [BLOCK_N, BLOCK_D]
    scores = dot(q, keys, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    if CAUSAL:
        scores = tl.where(tokens[None, :] <= rows[:, None], scores, float("-inf"))
    return _weighted((acc, largest, total), q, scores, values, SHAPE)


@triton.jit
def _weighted(state, q, scores, values, SHAPE: tl.constexpr):
    """Add values [BLOCK_N, BLOCK_D], weighted by scores [BLOCK_M, BLOCK_N] before their scale, to the sums."""
    acc, largest, total = state
    raised = tl.maximum(largest, tl.max(scores, 1) * SHAPE.scale)  # finite: the first block has a key for every row
    shrunk = tl.exp2(largest - raised)
    # fma is said, not left to the compiler: cached and own keys have the same bits
    weights = tl.exp2(tl.fma(scores, SHAPE.scale, -raised[:, None]))
    total = total * shrunk + tl.sum(weights, 1)
    acc = dot(weights.to(q.dtype), values, acc * shrunk[:, None])
    return acc, raised, total


@triton.jit
def _add_cached(state, q, cached, first, end, SHAPE: tl.constexpr):
    """Add cached keys and values [first, first + BLOCK_N), up to ``end``, to the sums of all rows. cached: keys and
    values of one kv head, the row stride, and the block table of the request.
    """
    k_ptr, v_ptr, stride, table_ptr = cached
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    FORMAT: tl.constexpr = SHAPE.format
    offs_d = tl.arange(0, SHAPE.block_d)
    tokens = first + tl.arange(0, BLOCK_N)
    inside, mask_d = tokens < end, offs_d < SHAPE.size
    block = tl.load(table_ptr + tokens // SHAPE.page, mask=inside, other=0).to(tl.int64)
    at = (block * SHAPE.page + tokens % SHAPE.page) * stride
    keys = tl.load(k_ptr + at[None, :] + offs_d[:, None], mask=inside[None, :] & mask_d[:, None], other=0.0)
    values = tl.load(v_ptr + at[:, None] + offs_d[None, :], mask=inside[:, None] & mask_d[None, :], other=0.0)
    if FORMAT > 0:
        keys, values = upcast(keys, FORMAT, q.dtype), upcast(values, FORMAT, q.dtype)
    scores = dot(q, keys, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    return _weighted(state, q, tl.where(inside[None, :], scores, float("-inf")), values, SHAPE)


@triton.jit(
    do_not_specialize=["num_prompts", "table_width"],
    do_not_specialize_on_alignment=["starts_ptr", "table_ptr", "lengths_ptr"],
)
def _prompt_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, sums_ptr, num_prompts,
    table_width, stride, out_stride, cache_stride, SHAPE: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows of one prompt and one head, to one part of its keys. ``stride``: of the rows of q, k
    and v. ``out``: the result [T, H, D], or of more than one part those [T, H, SPLITS, D] in float32, with their
    log-sum-exp (base 2) ``sums`` [T, H, SPLITS].
    """
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    SPLITS: tl.constexpr = SHAPE.splits
    head = tl.program_id(0)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    begin, end, tile, prompt, part, parts = _find_tile(index, starts_ptr, num_prompts, SHAPE)
    pdl_launch_then_wait(SHAPE.pdl)
    if end > begin:
        offs_d = tl.arange(0, SHAPE.block_d)
        first = begin + tile * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        mask = (rows < end)[:, None] & (offs_d < SHAPE.size)[None, :]
        at = head * SHAPE.size + offs_d
        q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * stride + at[None, :], mask=mask, other=0.0)
        kv_at = head // SHAPE.group * SHAPE.size
        heads = (k_ptr + kv_at, v_ptr + kv_at, stride)
        acc = accumulator(SHAPE.block_m, SHAPE.block_d)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        last = tl.minimum(first + BLOCK_M, end)
        whole = begin + tile * BLOCK_M // BLOCK_N * BLOCK_N  # blocks of keys before every row of the tile end there
        if SHAPE.page > 0:
            length = tl.load(lengths_ptr + prompt)
            start_of_part, end_of_part = tokens_of_part(length, part, parts, BLOCK_N)
            cached = (keys_ptr + kv_at, values_ptr + kv_at, cache_stride, table_ptr + prompt.to(tl.int64) * table_width)
            for start in tl.range(start_of_part, end_of_part, BLOCK_N, num_stages=SHAPE.stages):
                acc, largest, total = _add_cached((acc, largest, total), q, cached, start, end_of_part, SHAPE)
            if SPLITS > 1 and part < parts - 1:  # own rows are the last part's
                begin, whole, last = end, end, end
        for start in tl.range(begin, whole, BLOCK_N, num_stages=SHAPE.stages):
            acc, largest, total = _add_block((acc, largest, total), q, heads, start, rows, end, SHAPE, False)
        for start in tl.range(whole, last, BLOCK_N, num_stages=SHAPE.stages):
            acc, largest, total = _add_block((acc, largest, total), q, heads, start, rows, end, SHAPE, True)
        if SPLITS == 1:
            out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + at[None, :]
            tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            mean = acc / tl.where(total > 0, total, 1.0)[:, None]
            partial = (rows.to(tl.int64) * tl.num_programs(0) + head) * SPLITS + part
            sums = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
            tl.store(sums_ptr + partial, sums, mask=rows < end)
            tl.store(out_ptr + partial[:, None] * SHAPE.size + offs_d[None, :], mean, mask=mask & (total > 0)[:, None])
            unused = tl.arange(0, SPLITS)[None, :]  # behind the last part
            unread = (rows < end)[:, None] & (unused > part) & (part == parts - 1)
            tl.store(sums_ptr + (partial - part)[:, None] + unused, float("-inf"), mask=unread)


class Cached(NamedTuple):
    """Tokens before the rows of N prompts, in the cache of one layer. No kernel in flight may write table and lengths.

    keys, values: ``[num_blocks * block_size, Hkv, D]``, contiguous, of q's dtype or float8_e4m3fn.
    block_table: int32 ``[N, W]``. block_size: tokens of a block.
    lengths: int32 ``[N]``, cached tokens of each prompt, 0 to ``W * block_size``.
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    lengths: Tensor
    block_size: int


def prompt_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, cached: Cached | None = None,
    splits: int | None = None, most_rows: int | None = None,
) -> None:  # fmt: skip
    """Compute causal attention within each of up to N prompts and to their cached tokens, into ``out``.

    Args:
        out: ``[T, H, D]``, overwritten in the rows of prompts, by several parts in all; rows may be apart, heads side
            by side.
        q: ``[T, H, D]``, rotated; float16, bfloat16 or float32; its rows as far apart as those of k and v.
        k: ``[T, Hkv, D]``; H is a multiple of Hkv, D at most 256.
        v: as ``k``.
        starts: int32 ``[N + 1]``, ascending: prompt i is rows ``[starts[i], starts[i + 1])``, which may be none.
        cached: tokens before each prompt (None: none).
        splits: parts of the cached tokens at most, a power of two up to 32; ``None``: by the number of rows. Bits
            depend on it, and if it is not 1 on the prompts beside.
        most_rows: rows of a prompt at most, as far as known: tiles and parts suit so many. Bits depend on it.
    """
    _check(out, q, k, v, starts)
    rows, heads, size = q.shape
    prompts = starts.shape[0] - 1
    check_splits(splits)
    if cached is not None:
        _check_cached(q, k, prompts, cached)
    if not rows or not prompts:
        return
    block_m, block_n, stages, warps = _tile(size, q.element_size(), most_rows, q.device)
    width = block_at_least(size)
    tile_bytes = 2 * block_n * width * q.element_size()
    stages = stages_that_fit(stages, tile_bytes, q.device)
    shape = _Shape(
        heads // k.shape[1], size, block_at_least(prompts, 1), block_m, block_n, width, stages,
        math.log2(math.e) / math.sqrt(size), supports_pdl(q.device),
    )  # fmt: skip
    tensors, table_width = (k, v, starts, starts), 0  # stand for what is not read
    parts, sums, programs = out, out, max_tiles(rows, prompts, block_m)
    if cached is not None:
        tiles = max(1, rows // min(block_m, most_rows or rows))
        splits = splits or choose_splits(tiles, heads, stages * tile_bytes, q.device)
        programs = max(programs, min(splits * tiles, MOST_PROGRAMS))
        shape = shape._replace(page=cached.block_size, format=fp8_format(cached.keys.dtype), splits=splits)
        if splits > 1:
            parts, sums = scratch_of_parts(out, splits)
        tensors = (as_operand(cached.keys), as_operand(cached.values), cached.block_table, cached.lengths)
        table_width = cached.block_table.shape[1]
    launch_alone(
        _prompt_attention_kernel, (heads, programs, 1),
        (q, k, v, parts, starts, *tensors, sums), shape, strides=(q.stride(0), out.stride(0), k.shape[1] * size),
        dtypes=(q.dtype, None if cached is None else cached.keys.dtype), num_warps=warps, counts=(prompts, table_width),
    )  # fmt: skip
    if shape.splits > 1:
        combine(out, parts, sums)


def _tile(size: int, itemsize: int, most_rows: int | None, device: torch.device) -> tuple[int, int, int, int]:
    """Return rows and keys of a tile, stages and warps: the same whatever the prompts are, as the bits depend on it."""
    if itemsize > 2:
        return 32, 16, 2, 4
    if most_rows is not None and most_rows <= FEW_ROWS:
        keys = 128 if stages_that_fit(2, 512 * block_at_least(size), device) == 2 else 64
        return FEW_ROWS, keys, 2 if keys == 128 else 3, 4
    return (128, 32, 2, 8) if size > 128 else (64, 64, 3, 4)


def _check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> None:
    check_runnable(q.device)
    rows, heads, size = check_shape("q", q, (None, None, None))
    _, kv_heads, _ = check_shape("k", k, (rows, None, size))
    check_shape("v", v, (rows, kv_heads, size))
    check_shape("out", out, (rows, heads, size))
    check_shape("starts", starts, (None,))
    check_same(q, k=k, v=v, out=out)
    if not 1 <= size <= MAX_HEAD_SIZE:
        raise ValueError(f"heads must have 1 to {MAX_HEAD_SIZE} elements, got {size}; use SDPA")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, must be a multiple of the {kv_heads} of k and v")
    check_heads(q=q, k=k, v=v, out=out)
    if not q.stride(0) == k.stride(0) == v.stride(0):
        raise ValueError(f"rows of q, k, v must be as far apart, not {q.stride(0)}, {k.stride(0)} and {v.stride(0)}")
    check_numbers(q.device, torch.int32, starts=starts)
    if not len(starts):
        raise ValueError("starts must be [N + 1], got [0]")


def _check_cached(q: Tensor, k: Tensor, prompts: int, cached: Cached) -> None:
    check_cache(cached.keys, cached.values, q)
    check_shape("keys", cached.keys, (None, k.shape[1], k.shape[2]))
    check_shape("block_table", cached.block_table, (prompts, None))
    check_shape("lengths", cached.lengths, (prompts,))
    check_numbers(q.device, torch.int32, block_table=cached.block_table, lengths=cached.lengths)
    if cached.block_size < 1 or cached.keys.shape[0] % cached.block_size:
        raise ValueError(f"block_size must divide the cache's {cached.keys.shape[0]} rows, got {cached.block_size}")
