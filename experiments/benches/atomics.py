"""Shrink by atomic additions, to measure what determinism costs; the systems of `ext_determinism`. Imports Triton.

Programs add parts of K into one zeroed float32 buffer, so that the last bits change from run to run. All else is as in
the deterministic kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from experiments.benches.operator_lines import Operator
from experiments.benches.operator_pairs import estimated
from experiments.benches.operators import Problem
from experiments.measure.timing import Call
from punica.ops.triton_ops import Options, TritonOps
from punica.ops.triton_ops.device import INDEX_POINTERS, dot, find_tile, max_tiles, pick
from punica.ops.triton_ops.launch import Launch, block_at_least, supports_pdl
from punica.ops.triton_ops.lora_expand import ExpandMode, LowRank, plan_expand
from punica.ops.triton_ops.schedules import Schedule
from punica.ops.weights import LoRAWeights, Stack
from punica.vllm.ops.dense import TensorBatch

SMALLEST_BLOCK = 128  # of K, in elements


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _atomic_shrink_rows_kernel(
    x_ptr, a_ptrs, out_ptr, mapping_ptr,
    num_tokens,
    K: tl.constexpr, R: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row x BLOCK_R ranks x one K split, added into ``out[slice, row]``."""
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    pid_slice = tl.program_id(1)
    offs_k = pid % SPLIT_K * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_r = (pid // SPLIT_K) % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (pid // (SPLIT_K * R_BLOCKS)).to(tl.int64)
    slot = tl.load(mapping_ptr + row)
    if slot >= 0:
        a_ptr = pick(a_ptrs, pid_slice, NUM_SLICES) + slot.to(tl.int64) * (R * K)
        product = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for first_k in tl.range(0, K, BLOCK_K * SPLIT_K):
            mask_k = offs_k < K - first_k
            mask = (offs_r < R)[:, None] & mask_k[None, :]
            a = tl.load(a_ptr + offs_r[:, None] * K + (first_k + offs_k)[None, :], mask=mask, other=0.0)
            x = tl.load(x_ptr + row * K + first_k + offs_k, mask=mask_k, other=0.0)
            product += a.to(tl.float32) * x.to(tl.float32)[None, :]
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        out_ptrs = out_ptr + (pid_slice * num_tokens + row) * R + offs_r
        tl.atomic_add(out_ptrs, tl.sum(product, 1), mask=offs_r < R, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "num_segments"], do_not_specialize_on_alignment=INDEX_POINTERS)
def _atomic_shrink_tiles_kernel(
    x_ptr, a_ptrs, out_ptr, mapping_ptr, sorted_ptr, counts_ptr, starts_ptr, ids_ptr,
    num_tokens, num_segments,
    K: tl.constexpr, R: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one segment x BLOCK_R ranks x one K split, added into ``out[slice, rows]``."""
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    pid = tl.program_id(0)
    pid_slice = tl.program_id(1)
    tile = pid // (SPLIT_K * R_BLOCKS)
    slot, start, num_rows = find_tile(tile, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, BLOCK_SEGMENTS)
    if slot >= 0:
        offs_m = tl.arange(0, BLOCK_M)
        offs_r = (pid // SPLIT_K) % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_k = pid % SPLIT_K * BLOCK_K + tl.arange(0, BLOCK_K)
        mask_m = offs_m < num_rows
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        a_ptr = pick(a_ptrs, pid_slice, NUM_SLICES) + slot.to(tl.int64) * (R * K)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
            columns = step * (BLOCK_K * SPLIT_K) + offs_k
            x = tl.load(x_ptr + rows[:, None] * K + columns[None, :], mask=(columns < K)[None, :], other=0.0)
            mask = (offs_r < R)[None, :] & (columns < K)[:, None]
            a = tl.load(a_ptr + offs_r[None, :] * K + columns[:, None], mask=mask, other=0.0)
            acc = dot(x, a, acc)
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        out_ptrs = out_ptr + (pid_slice * num_tokens + rows)[:, None] * R + offs_r[None, :]
        tl.atomic_add(out_ptrs, acc, mask=mask_m[:, None] & (offs_r < R)[None, :], sem="relaxed")


def prepare_lora_atomics(
    y: torch.Tensor, x: torch.Tensor, lora_a_weights: Sequence[torch.Tensor], lora_b_weights: Sequence[torch.Tensor],
    meta_args: Sequence[Any], shrink: Schedule, expand: Schedule,
    *,
    overlap: bool,
) -> Callable[..., None]:  # fmt: skip
    """``call(y, x, a, b)``: y += (x A^T) B^T by zeroing, an atomic shrink and the deterministic expand, of fixed
    shapes; ``shrink``, ``expand``: schedules; ``overlap``: expand starts early.
    """
    a, b_form = Stack.of_a(lora_a_weights).form.stored, Stack.of_b(lora_b_weights).form
    *meta, flag, count = meta_args
    step = TensorBatch.given(*meta, flag=flag, count=count)
    segments, entries, slices = int(count), meta[4].numel(), len(lora_a_weights)
    tokens, k = x.shape
    split_k, block_k = shrink.split_k, min(shrink.block_k, block_at_least(k))
    h = torch.empty(1, slices, tokens, a.rank, dtype=torch.float32, device=x.device)
    indices: tuple[torch.Tensor, ...]
    shared: dict[str, Any] = {"num_warps": shrink.num_warps, "pdl": False, "device": a.device}
    constants = {"K": k, "R": a.rank, "NUM_SLICES": slices, "BLOCK_K": block_k, "SPLIT_K": split_k, "OVERLAP": overlap}
    if not shrink.block_m:
        block_r = min(shrink.block_n, block_at_least(a.rank, 1))
        grid = (tokens * triton.cdiv(a.rank, block_r) * split_k, slices, 1)
        constants |= {"BLOCK_R": block_r}
        first = Launch(_atomic_shrink_rows_kernel, grid, (a.dtype,), (), constants, **shared)
        indices, counts = (meta[0],), (tokens,)
    else:
        block_m, block_r = shrink.block_m, min(shrink.block_n, block_at_least(a.rank))
        grid = (max_tiles(tokens, segments, block_m) * triton.cdiv(a.rank, block_r) * split_k, slices, 1)
        constants |= {"BLOCK_SEGMENTS": block_at_least(entries), "BLOCK_M": block_m, "BLOCK_R": block_r}
        constants["NUM_STAGES"] = shrink.num_stages
        first = Launch(_atomic_shrink_tiles_kernel, grid, (a.dtype,), (), constants, **shared)
        indices, counts = tuple(meta), (tokens, segments)  # type: ignore[assignment]
    second = plan_expand(LowRank.sums(*h.shape), y, b_form, step, expand, ExpandMode(pdl=overlap))

    def call(y: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
        h.zero_()
        first((x, tuple(a), h, *indices), counts, True)
        second.run(h, b, y, step, None, True)

    return call


def _library(problem: Problem, pdl: bool = True, batch_invariant: bool = False) -> Call:
    weights = LoRAWeights.of((problem.a,), (problem.stored_b,))
    return partial(TritonOps(Options(batch_invariant, pdl)).linear, problem.y, problem.x, weights, problem.step())


def _atomics(problem: Problem, finer: int = 1) -> Call:
    _, h2, rank = problem.b.shape
    shrink, expand = estimated(Operator(problem.x.shape[1], (h2,), rank, problem.sizes))
    if finer > 1:
        block_k = max(SMALLEST_BLOCK, shrink.block_k // finer)
        shrink = shrink._replace(split_k=finer * shrink.split_k, block_k=block_k)
    operands = problem.y, problem.x, (problem.a,), (problem.stored_b,)
    overlap = supports_pdl(problem.x.device)
    call = prepare_lora_atomics(*operands, problem.meta_args(), shrink, expand, overlap=overlap)
    return partial(call, *operands)


VARIANTS: dict[str, Callable[[Problem], Call]] = {
    "deterministic": _library,
    "deterministic, no PDL": partial(_library, pdl=False),
    "batch invariant": partial(_library, batch_invariant=True),
    "atomics": _atomics,
    "atomics, finer split": partial(_atomics, finer=4),
}
"""System of `ext_determinism` -> its call of Triton kernels, at toy sizes also in Triton's interpreter."""
