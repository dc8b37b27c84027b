"""Forms of `skinny_gemm`: its two kernels and how they cut the work, chosen by the shape.

A weight in FP8 is read in words of several values where its rows are whole units of 16 bytes.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from punica.ops.triton_ops.fp8_device import fp8_format
from punica.ops.triton_ops.launch import IS_ROCM, block_at_least

MAX_ROWS = 2
"""Rows up to which multiplying and adding beats the tensor cores on an H200 (see `choose_form`)."""


class RowsForm(NamedTuple):
    """The rows kernel and its block of the weight."""

    block_n: int
    block_k: int
    num_warps: int


class TilesForm(NamedTuple):
    """The tiles kernel and how it cuts the work.

    block_t: tokens multiplied at once, at least T. num_stages: tiles of weights in shared memory. ahead: weights of
    each row that are prefetched into L2 before the PDL wait.
    """

    block_t: int
    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int
    ahead: int


GemmForm = RowsForm | TilesForm


class WeightForm(NamedTuple):
    """Shape, layout and format of ``weight [n, k]``, and its bias. whole: rows are whole units of 16 bytes."""

    n: int
    k: int
    stride: int
    has_bias: bool
    whole: bool
    format: int

    @property
    def words(self) -> bool:
        """Tell whether FP8 values are read several at a time."""
        return self.whole and self.format > 0

    def in_pairs(self, dtype: torch.dtype) -> bool:
        """Tell whether tiles are read two values at a time; not on ROCm: Triton 3.6 fails on four stages of them."""
        return self.words and dtype != torch.float32 and not IS_ROCM


def weight_form(weight: Tensor, bias: Tensor | None) -> WeightForm:
    (n, k), stride = weight.shape, weight.stride(0)
    whole = weight.data_ptr() % 16 == 0 and (k | stride) * weight.element_size() % 16 == 0
    return WeightForm(n, k, stride, bias is not None, whole, fp8_format(weight.dtype))


def choose_form(
    weight: WeightForm, tokens: int, dtype: torch.dtype, processors: int, batch_invariant: bool
) -> GemmForm:
    """Choose the kernel for a shape. ``batch_invariant``: the same for every number of tokens.

    Fitted on an H200 to the projections of Llama-2 7B and 13B, each behind the kernel that it follows in a layer. One
    row takes 3.3 ms for all weights of the 7B, where their bytes take 3.1 and cuBLAS 3.8; 32 rows 3.7 and 4.0.
    """
    k, wide = weight.k, dtype == torch.float32
    if weight.format:
        if weight.words and not wide and tokens == 1 and not batch_invariant:
            return RowsForm(4, min(2048, block_at_least(k)), 4)
    elif tokens <= MAX_ROWS and not batch_invariant and (tokens == 1 or k % 2048 == 0):
        if k % 2048 == 0 and not wide:
            return RowsForm(2, 2048, 8 if tokens == 1 else 4)
        block_k = min(1024 if k > 8192 else 512, block_at_least(k))
        return RowsForm(4, block_k, 4)
    return choose_tiles(weight, tokens, dtype, processors)


def choose_tiles(weight: WeightForm, tokens: int, dtype: torch.dtype, processors: int) -> TilesForm:
    """Choose the schedule of the tiles kernel; bits follow block_k and split_k, which tokens do not change. Per byte of
    FP8 x is read twice as often, from L2: those tiles are larger. Of more than 32 rows two programs fit a processor
    with three stages, one with four.
    """
    n, k, *_ = weight
    words, many = weight.in_pairs(dtype), triton.cdiv(n, 128) >= processors
    least = block_at_least(k, 32 if words else 16)  # operands are halves of a block of words
    block_k = min(32 if dtype == torch.float32 else 256 if words and not many else 128, least)
    wanted, most = 2 * processors // triton.cdiv(n, 64), triton.cdiv(k, 4 * block_k)  # enough programs, none idle
    split_k = max(1, min(wanted, most, 8))
    block_n, stages, warps = 64, 4 if tokens <= 32 else 3, 4
    if words and many:
        block_n = 128
    elif words and tokens > 32:
        block_n, stages, warps = 128, 3, 8
    return TilesForm(block_at_least(tokens), block_n, block_k, split_k, stages, warps, block_k)
