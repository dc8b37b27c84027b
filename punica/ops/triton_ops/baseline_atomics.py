"""What determinism is compared with: a split-K shrink whose partial sums meet by atomic adds.

K is cut among programs and each adds its part into one fp32 buffer ``v [1, T, r]`` with a relaxed atomic add, which needs
``v`` to be filled with zeros by a kernel of its own first. The parts arrive in whatever order programs end, and fp32
addition depends on the order, so the bits of v change from run to run. Other systems serve this way; here it exists for
`experiments.ext_determinism` alone, and no layer or wrapper can choose it. One slice, no table of ranks; arguments are
trusted.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from punica.ops.triton_ops.checks import active_segments, split_count
from punica.ops.triton_ops.device import find_tile, max_tiles
from punica.ops.triton_ops.launch import INTERPRETED, Launch, all_aligned, block_at_least, cdiv, on_device
from punica.ops.triton_ops.lora_expand import lora_expand

__all__ = ["atomic_linear", "plan_atomic_shrink"]

BLOCK_M, SMALLEST_BLOCK_K, LARGEST_BLOCK_K, PROGRAMS = 16, 128, 512, 512


@triton.jit(do_not_specialize=["num_segments"])
def _shrink_add_kernel(
    x_ptr,
    a_ptr,
    v_ptr,
    sorted_ptr,
    counts_ptr,
    starts_ptr,
    ids_ptr,
    num_segments,
    scaling,
    stride_xt,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """BLOCK_M rows of one segment x all ranks x every SPLIT_K-th block of K, added into v."""
    pid = tl.program_id(0)
    pid_k = pid % SPLIT_K
    slot, start, num_rows = find_tile(
        pid // SPLIT_K, ids_ptr, counts_ptr, starts_ptr, num_segments, BLOCK_M, BLOCK_SEGMENTS
    )
    if slot >= 0:
        offs_m = tl.arange(0, BLOCK_M)
        offs_r = tl.arange(0, BLOCK_R)
        offs_k = tl.arange(0, BLOCK_K)
        mask_m = offs_m < num_rows
        mask_r = offs_r < R
        rows = tl.load(sorted_ptr + start + tl.where(mask_m, offs_m, 0)).to(tl.int64)
        a_ptrs = a_ptr + slot.to(tl.int64) * (R * K) + offs_r[None, :] * K
        x_ptrs = x_ptr + rows[:, None] * stride_xt
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for first_k in tl.range(pid_k * BLOCK_K, K, BLOCK_K * SPLIT_K):
            k = first_k + offs_k
            x = tl.load(x_ptrs + k[None, :], mask=(k < K)[None, :], other=0.0)
            a = tl.load(a_ptrs + k[:, None], mask=mask_r[None, :] & (k < K)[:, None], other=0.0)
            if UPCAST:  # the interpreter multiplies bfloat16 as integers
                x = x.to(tl.float32)
                a = a.to(tl.float32)
            acc = tl.dot(x, a, acc, input_precision="ieee")
        mask = mask_m[:, None] & mask_r[None, :]
        tl.atomic_add(v_ptr + rows[:, None] * R + offs_r[None, :], acc * scaling, mask=mask, sem="relaxed")


def plan_atomic_shrink(x: torch.Tensor, a: torch.Tensor, segments: int, entries: int) -> Launch:
    """The launch for x [T, K] and A [L, r, K]: K is split until about `PROGRAMS` programs run, into blocks of 128 to 512."""
    tokens, k = x.shape
    tiles = max_tiles(tokens, segments, BLOCK_M)
    split_k = max(1, min(cdiv(k, SMALLEST_BLOCK_K), PROGRAMS // tiles))
    block_k = min(LARGEST_BLOCK_K, block_at_least(cdiv(k, split_k)))
    rank = a.shape[1]
    constants = (k, rank, block_at_least(entries), BLOCK_M, block_at_least(rank), block_k, split_k, INTERPRETED)
    return Launch(_shrink_add_kernel, (tiles * split_k, 1, 1), (x.stride(0),), constants, 4, False)


def atomic_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    meta: Sequence[torch.Tensor],
    scaling: float = 1.0,
) -> Callable[[], None]:
    """A call that does ``y[t] += scaling * (x[t] @ A[slot(t)]^T) @ B[slot(t)]^T``: zero-fill, shrink by atomics, expand.

    y [T, N], x [T, K], A [L, r, K], B [L, N, r]; `meta` are the seven of `LoRAKernelMeta.meta_args`.
    """
    *indices, flag, active = meta
    segments = active_segments(*split_count(active), indices[4].numel())
    launch = plan_atomic_shrink(x, a, segments, indices[4].numel())
    aligned = all_aligned(x, a, *indices)

    def call() -> None:
        with on_device(x.get_device()):
            v = torch.zeros(1, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
            launch((x, a, v, *indices[1:]), (segments, scaling), aligned)
            lora_expand(v, (b,), y, *indices, flag, active, add_inputs=True)

    return call
