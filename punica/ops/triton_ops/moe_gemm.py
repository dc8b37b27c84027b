"""The base product of experts, for every (token, expert) pair in one launch.

    y[i] = x[i // factor] @ W[e_i]^T                x [rows, K], W [E, N, K], y [T*k, N]; 0 where e_i is not here

Pairs are aligned by expert as in the LoRA kernels, with one slot for all tokens. A program computes one block of pairs
and one of columns, so an expert's weights are read once per block of its pairs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.device import dot, max_tiles
from punica.ops.triton_ops.launch import (
    Launch,
    all_aligned,
    block_at_least,
    on_device,
    stages_that_fit,
)
from punica.ops.triton_ops.moe_align import align_all
from punica.ops.triton_ops.op import custom_op


class PairGemmShape(NamedTuple):
    """Operands, W [experts, n, k], and schedule of the product: a constexpr. factor: pairs per row of x."""

    k: int
    n: int
    factor: int
    block_m: int
    block_n: int
    block_k: int
    stages: int


@triton.jit(
    do_not_specialize=["pairs", "num_tiles"], do_not_specialize_on_alignment=["sorted_ptr", "experts_ptr", "total_ptr"]
)
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
    """The pairs of a routing, grouped by expert once for all products of a layer. No host synchronisation.

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

    def multiply(self, x: Tensor, weights: Tensor, factor: int) -> Tensor:
        """Multiply ``x [T*k / factor, K]`` and ``weights [E, N, K]`` to ``[T, k, N]`` in x's dtype.

        Pair i reads row ``i // factor``; the row of a pair whose expert is not here is zero.
        """
        fill = torch.empty if self.whole else torch.zeros
        output = fill(*self.shape, weights.shape[1], dtype=x.dtype, device=x.device)
        if self.aligned is not None:
            moe_pair_gemm(output, x, weights, *self.aligned, factor, self.block_m)
        return output


@custom_op(mutates="output")
def moe_pair_gemm(
    output: Tensor, x: Tensor, weights: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
    factor: int, block_m: int,
) -> None:  # fmt: skip
    """The product of one aligned routing, ``output [T, k, N]``; operands as of `PairGroups.multiply`, aligned in blocks
    of ``block_m``.
    """
    _, width, hidden = weights.shape
    pairs, blocks, size = output.shape[0] * output.shape[1], expert_ids.numel(), x.element_size()
    block_n, block_k = (128 if width >= 128 else block_at_least(width)), min(64, block_at_least(hidden))
    if size == 4:
        block_n, block_k = min(block_n, 64), min(block_k, 32)
    stages = stages_that_fit(4, (block_m + block_n) * block_k * size, x.device)
    constants = {"SHAPE": PairGemmShape(hidden, width, factor, block_m, block_n, block_k, stages)}
    grid = (blocks * triton.cdiv(width, block_n), 1, 1)
    launch = Launch(_moe_gemm_kernel, grid, (x.dtype,), x.stride(), constants, num_warps=4, pdl=False, device=x.device)
    tensors = ((x, weights, output), sorted_token_ids, expert_ids, num_tokens_post_pad)
    with on_device(x.get_device()):
        launch(tensors, (pairs, blocks), all_aligned(x, weights, output))
