"""The highest of each row of logits, and whether there is a NaN among them, one launch, where torch takes five:

    out[s] = min {i : logits[s, i] = max_j logits[s, j]},      or `no_index` where some logits[s, j] is NaN

A program takes a row, block after block: every lane keeps the highest that it has seen, and where.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica.ops.triton_ops.backbone.checks import check_rows, check_same, check_shape
from punica.ops.triton_ops.device import pdl_launch_then_wait
from punica.ops.triton_ops.launch import block_at_least, launch_alone, supports_pdl
from punica.ops.triton_ops.op import check_runnable

_MOST_LANES = 8192
_NO_PLACE = tl.constexpr(0x7FFFFFFF)


class _Shape(NamedTuple):
    vocab: int
    block: int
    no_index: int
    pdl: bool


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, stride, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    offs = tl.arange(0, SHAPE.block)
    pdl_launch_then_wait(SHAPE.pdl)
    best = tl.load(row_ptr + offs, mask=offs < SHAPE.vocab, other=float("-inf")).to(tl.float32)
    place, none = offs, (best != best).to(tl.int32)
    for start in tl.range(SHAPE.block, SHAPE.vocab, SHAPE.block, loop_unroll_factor=4):  # several loads in flight
        here = start + offs
        value = tl.load(row_ptr + here, mask=here < SHAPE.vocab, other=float("-inf")).to(tl.float32)
        none |= (value != value).to(tl.int32)
        higher = value > best
        best, place = tl.where(higher, value, best), tl.where(higher, here, place)
    first = tl.min(tl.where(best == tl.max(best, 0), place, _NO_PLACE), 0)
    tl.store(out_ptr + row, tl.where(tl.max(none, 0) > 0, SHAPE.no_index, first).to(tl.int64))


def argmax(out: Tensor, logits: Tensor, no_index: int) -> None:
    """Write the index of the highest element of each row, of equal ones the lowest.

    Args:
        out: int64 ``[S]``, contiguous.
        logits: ``[S, vocab]`` in float16, bfloat16 or float32, elements of a row side by side; ``vocab`` at least 1.
        no_index: for a row that holds NaN; negative.

    ValueError, TypeError: shapes, layouts, dtypes or devices; RuntimeError: no Triton kernel runs on this device.
    """
    check_runnable(logits.device)
    rows, vocab = check_shape("logits", logits, (None, None))
    check_shape("out", out, (rows,))
    check_same(logits)
    check_rows("logits", logits)
    if vocab == 0:
        raise ValueError("logits must have at least one column, got 0; give those of a vocabulary")
    if out.dtype != torch.int64 or out.device != logits.device or not out.is_contiguous():
        raise TypeError(f"out must be contiguous torch.int64 on {logits.device}, got {out.dtype} on {out.device}")
    if rows == 0:
        return
    block = min(_MOST_LANES, block_at_least(vocab))
    launch_alone(
        _argmax_kernel, (rows, 1, 1), (logits, out), _Shape(vocab, block, no_index, supports_pdl(logits.device)),
        strides=(logits.stride(0),), dtypes=(logits.dtype,), num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
