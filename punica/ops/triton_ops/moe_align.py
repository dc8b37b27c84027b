"""Alignment of mixture-of-experts LoRA: (token, expert) pairs grouped by slot and expert, in blocks for the kernels.

    sorted_token_ids[l] = pairs of slot l by expert, each expert's padded to a multiple of block_size with T * k
    expert_ids[l, b]    = expert of block b, -1 past the last;     num_tokens_post_pad[l] = padded ids of slot l

One launch and no synchronisation. A program serves a few experts of one slot: a histogram of *all* experts' pairs gives
the first positions of its own, and a second pass stores their pairs there in ascending order, the same every run.
Every program reads all T * k ids, which are few and in the L2 cache.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.experts import check_alignment
from punica.ops.triton_ops.device import INDEX_POINTERS, dot, max_tiles
from punica.ops.triton_ops.launch import Launch, all_aligned, block_at_least, on_device, stages_that_fit
from punica.ops.triton_ops.op import check_runnable, untraced

EXPERTS_PER_PROGRAM = 8


class AlignShape(NamedTuple):
    """Blocks of an alignment. bins: power of two > experts. block: pairs read at once. single_slot: of all tokens."""

    bins: int
    block: int
    block_size: int
    has_map: bool
    has_ids: bool
    single_slot: bool
    experts: int = EXPERTS_PER_PROGRAM


@triton.jit
def _experts_of(topk_ptr, mapping_ptr, map_ptr, offs, slot, pairs, top_k, buckets, SHAPE: tl.constexpr):
    """Local expert of each pair of this slot; bins - 1 for those of other slots, ranks, or no expert at all."""
    mask = offs < pairs
    wide = tl.load(topk_ptr + offs, mask=mask, other=-1)
    ids = wide.to(tl.int32)
    mine = (ids == wide) & (ids >= 0) & (ids < buckets)  # none beyond 32 bits; compared as 64, registers would spill
    if not SHAPE.single_slot:
        mine = mine & (tl.load(mapping_ptr + offs // top_k, mask=mask, other=-1) == slot)
    if SHAPE.has_map:
        ids = tl.load(map_ptr + ids, mask=mine, other=-1)
        mine = mine & (ids >= 0) & (ids < buckets)
    return tl.where(mine, ids, SHAPE.bins - 1)


@triton.jit
def _fill_behind(sorted_ptr, experts_ptr, total, pairs, padded, blocks, SHAPE: tl.constexpr):
    """Fill a slot's ids from ``total`` on with the padding id, and the experts of its unused blocks with -1."""
    BLOCK: tl.constexpr = SHAPE.block
    offs, step = tl.arange(0, BLOCK), tl.num_programs(0) * BLOCK
    for start in tl.range(total + tl.program_id(0) * BLOCK, padded, step):
        tl.store(sorted_ptr + start + offs, tl.zeros([BLOCK], tl.int32) + pairs, mask=start + offs < padded)
    for start in tl.range(total // SHAPE.block_size + tl.program_id(0) * BLOCK, blocks, step):
        tl.store(experts_ptr + start + offs, tl.full([BLOCK], -1, tl.int32), mask=start + offs < blocks)


@triton.jit(
    do_not_specialize=["pairs", "top_k", "buckets", "padded", "blocks", "slots"],
    do_not_specialize_on_alignment=INDEX_POINTERS,
)
def _moe_align_kernel(
    tensors, mapping_ptr, map_ptr, enabled_ptr, ids_ptr, pairs, top_k, buckets, padded, blocks, slots,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Align the slot at place ``program_id(1)`` of the list, if it is one of ``slots``; without a list all of them."""
    topk_ptr, sorted_ptr, experts_ptr, counts_ptr = tensors
    EXPERTS: tl.constexpr = SHAPE.experts
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    slot = tl.program_id(1)
    first = tl.program_id(0) * EXPERTS
    if SHAPE.has_ids:
        slot = tl.load(ids_ptr + slot)
    active = (slot >= 0) & (slot < slots)
    if not SHAPE.single_slot:
        active = tl.load(enabled_ptr + slot, mask=active, other=0) != 0
    offs = tl.arange(0, SHAPE.block)
    bins = tl.arange(0, SHAPE.bins)
    sorted_ptr += slot.to(tl.int64) * padded
    experts_ptr += slot.to(tl.int64) * blocks
    counts = tl.zeros_like(bins)
    if active:
        for start in tl.range(0, pairs, SHAPE.block):
            found = _experts_of(topk_ptr, mapping_ptr, map_ptr, start + offs, slot, pairs, top_k, buckets, SHAPE)
            counts += tl.histogram(found, SHAPE.bins)
    counts = tl.where(bins < buckets, counts, 0)
    used = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    total = tl.sum(used, 0)

    mine = first + tl.arange(0, EXPERTS)
    is_mine = bins[None, :] == mine[:, None]
    own = tl.sum(tl.where(is_mine, counts[None, :], 0), 1)  # [EXPERTS]
    begin = tl.sum(tl.where(bins[None, :] < mine[:, None], used[None, :], 0), 1)
    own_used = (own + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    if tl.sum(own, 0) > 0:
        place = begin
        for start in tl.range(0, pairs, SHAPE.block):
            found = _experts_of(topk_ptr, mapping_ptr, map_ptr, start + offs, slot, pairs, top_k, buckets, SHAPE)
            match = ((found[None, :] == mine[:, None]) & (mine < buckets)[:, None]).to(tl.int32)
            places = place[:, None] + tl.cumsum(match, 1) - 1
            values = (start + offs)[None, :] + tl.zeros([EXPERTS, 1], tl.int32)
            tl.store(sorted_ptr + places, values, mask=match > 0)
            place += tl.sum(match, 1)
        gaps = own[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
        padding_ids = tl.zeros([EXPERTS, BLOCK_SIZE], tl.int32) + pairs
        tl.store(sorted_ptr + begin[:, None] + gaps, padding_ids, mask=gaps < own_used[:, None])
        for block in tl.range(0, tl.max(own_used, 0) // BLOCK_SIZE):
            tl.store(experts_ptr + begin // BLOCK_SIZE + block, mine, mask=block < own_used // BLOCK_SIZE)

    if active | (not SHAPE.has_ids):
        _fill_behind(sorted_ptr, experts_ptr, total, pairs, padded, blocks, SHAPE)
        if first == 0:
            tl.store(counts_ptr + slot, total)


def _launch(
    topk_ids: Tensor, mapping: Tensor | None, sizes: tuple[int, int, int, int, int],
    outputs: tuple[Tensor, Tensor, Tensor], enabled: Tensor | None, lora_ids: Tensor | None, expert_map: Tensor | None,
) -> None:  # fmt: skip
    """Launch on checked operands. No ``lora_ids``: all slots. No ``mapping``: one slot, of all tokens."""
    check_runnable(topk_ids.device)
    buckets, block_size, max_loras, padded, blocks = sizes
    aligned_slots = max_loras if lora_ids is None else len(lora_ids)
    if 0 in (max_loras, aligned_slots):
        return
    topk_ids = topk_ids.contiguous()
    shape = AlignShape(
        block_at_least(buckets + 1), min(1024, block_at_least(topk_ids.numel(), 128)), block_size,
        expert_map is not None, lora_ids is not None, mapping is None,
    )  # fmt: skip
    grid = (max(1, triton.cdiv(buckets, EXPERTS_PER_PROGRAM)), aligned_slots, 1)
    launch = Launch(
        _moe_align_kernel, grid, (topk_ids.dtype,), (), {"SHAPE": shape}, num_warps=4, pdl=False, device=topk_ids.device
    )
    counts = outputs[2]  # fills unused operands
    maybe = (mapping, expert_map, enabled, lora_ids)
    tensors = ((topk_ids, *outputs), *[counts if one is None else one for one in maybe])
    numbers = (topk_ids.numel(), topk_ids.shape[1] or 1, buckets, padded, blocks, max_loras)
    with on_device(topk_ids.get_device()):
        launch(tensors, numbers, all_aligned(topk_ids, *outputs))


@untraced
def align_all(
    topk_ids: Tensor, mapping: Tensor | None, sizes: tuple[int, int, int, int, int], adapter_enabled: Tensor | None,
    expert_map: Tensor | None, lora_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Align checked operands into new flat outputs, in one launch: all slots and every element, or what ``lora_ids``
    lists. ``sizes``: as of `moe_lora_align_block_size`. No ``mapping`` and ``adapter_enabled``: one slot.
    """
    _, _, max_loras, padded, blocks = sizes
    lengths = (max_loras * padded, max_loras * blocks, max_loras)
    starts = [0, -(-lengths[0] // 4) * 4]  # each on an address that is a multiple of 16
    starts.append(starts[1] + -(-lengths[1] // 4) * 4)
    memory = torch.empty(starts[2] + lengths[2], dtype=torch.int32, device=topk_ids.device)
    outputs = tuple(memory[start : start + length] for start, length in zip(starts, lengths, strict=True))
    _launch(topk_ids, mapping, sizes, outputs, adapter_enabled, lora_ids, expert_map)  # type: ignore[arg-type]
    return outputs  # type: ignore[return-value]


@untraced
def moe_lora_align_block_size(
    topk_ids: Tensor, token_lora_mapping: Tensor, num_experts: int, block_size: int, max_loras: int,
    max_num_tokens_padded: int, max_num_m_blocks: int, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_pad: Tensor, adapter_enabled: Tensor, lora_ids: Tensor | None, expert_map: Tensor | None = None,
) -> None:  # fmt: skip
    """Align as the operator of `punica.ops.moe_torch`, in blocks of 16 or more; ``lora_ids`` None: all slots."""
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_pad)
    sizes = (num_experts, block_size, max_loras, max_num_tokens_padded, max_num_m_blocks)
    check_alignment(topk_ids, token_lora_mapping, adapter_enabled, lora_ids, expert_map, sizes, outputs, 16)
    _launch(topk_ids, token_lora_mapping, sizes, outputs, adapter_enabled, lora_ids, expert_map)


class PairGemmShape(NamedTuple):
    """Operands, W [experts, n, k], and schedule of the experts' base product: a constexpr. factor: pairs per row of x.

    y[i] = x[i // factor] @ W[e_i]^T for every pair i, aligned with one slot for all tokens; 0 where e_i is not here. A
    program computes one block of pairs and one of columns, so W is read once per block of an expert's pairs.
    """

    k: int
    n: int
    factor: int
    block_m: int
    block_n: int
    block_k: int
    stages: int


@triton.jit(do_not_specialize=["pairs", "num_tiles"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _moe_gemm_kernel(tensors, sorted_ptr, experts_ptr, total_ptr, pairs, num_tiles, strides, SHAPE: tl.constexpr):
    """Tiles vary fastest, so that programs of one block of columns, which may share an expert, run together."""
    x_ptr, w_ptr, y_ptr = tensors
    stride_xt, stride_xk = strides
    K: tl.constexpr = SHAPE.k
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_K: tl.constexpr = SHAPE.block_k
    tile, first_n = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles * BLOCK_N
    if tile * BLOCK_M < tl.load(total_ptr):
        expert = tl.load(experts_ptr + tile).to(tl.int64)
        found = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        valid = found < pairs
        rows = tl.where(valid, found, 0).to(tl.int64)
        offs_n, offs_k = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        mask_n = (offs_n < SHAPE.n)[None, :]
        x_ptrs = x_ptr + (rows // SHAPE.factor)[:, None] * stride_xt + offs_k[None, :] * stride_xk
        w_ptrs = w_ptr + expert * (SHAPE.n * K) + offs_n[None, :] * K + offs_k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first_k in tl.range(0, K, BLOCK_K, num_stages=SHAPE.stages):
            mask_k = offs_k < (1 << 30 if K % BLOCK_K == 0 else K - first_k)
            x = tl.load(x_ptrs, mask=valid[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
            w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_n, other=0.0)  # [BLOCK_K, BLOCK_N]
            acc = dot(x, w, acc)
            x_ptrs += BLOCK_K * stride_xk
            w_ptrs += BLOCK_K
        y_ptrs = y_ptr + rows[:, None] * SHAPE.n + offs_n[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=valid[:, None] & mask_n)


class PairGroups:
    """The pairs of a routing, grouped by expert once for all products of a layer; no host synchronisation.
    ``topk_ids``: local experts ``[T, k]``, -1 where an expert is on another rank; ``whole``: no -1 occurs.
    """

    def __init__(self, topk_ids: Tensor, experts: int, whole: bool = False) -> None:
        self.shape, self.experts, self.whole = topk_ids.shape, experts, whole
        pairs = topk_ids.numel()
        mean = pairs / experts
        self.block_m = 16 if mean <= 16 else 32 if mean <= 48 else 64
        self.blocks = max_tiles(pairs, experts, self.block_m)
        sizes = (experts, self.block_m, 1, self.blocks * self.block_m, self.blocks)
        self.aligned = align_all(topk_ids, None, sizes, None, None) if pairs else None

    @untraced
    def multiply(self, x: Tensor, weights: Tensor, factor: int) -> Tensor:
        """Multiply ``x [T*k / factor, K]`` and ``weights [E, N, K]`` to ``[T, k, N]`` in x's dtype. Pair i reads row
        ``i // factor``; the row of a pair whose expert is not here is zero.
        """
        (_, width, hidden), size, fill = weights.shape, x.element_size(), torch.empty if self.whole else torch.zeros
        output = fill(*self.shape, width, dtype=x.dtype, device=x.device)
        if self.aligned is None:
            return output
        block_n, block_k = (128 if width >= 128 else block_at_least(width)), min(64, block_at_least(hidden))
        if size == 4:
            block_n, block_k = min(block_n, 64), min(block_k, 32)
        stages = stages_that_fit(4, (self.block_m + block_n) * block_k * size, x.device)
        shape = PairGemmShape(hidden, width, factor, self.block_m, block_n, block_k, stages)
        grid = (self.blocks * triton.cdiv(width, block_n), 1, 1)
        launch = Launch(
            _moe_gemm_kernel, grid, (x.dtype,), x.stride(), {"SHAPE": shape}, num_warps=4, pdl=False, device=x.device
        )
        with on_device(x.get_device()):
            counts = math.prod(self.shape), self.blocks
            launch(((x, weights, output), *self.aligned), counts, all_aligned(x, weights, output))
        return output
