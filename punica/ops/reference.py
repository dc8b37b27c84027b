"""The meaning of every LoRA operator: the oracle of the tests, written to be read.

A batch holds T rows, row t uses the adapter in slot ``l_t`` (``-1``: none). With weights ``W [L, out, in]`` (row-major,
applied transposed, ``[L, 1, out, in]`` also accepted) the two products of the paper's section 4 are

* shrink (hidden size -> rank):  ``out[t, :r] = scaling * x[t] @ W[l_t]^T``, and 0 where ``l_t = -1``;
* expand (rank -> hidden size):  ``out[t, :c] (+)= x[t] @ W[l_t]^T`` with ``c = min(N, out.shape[1])``, rows at -1
  untouched.

``bgmv_*`` take one slot per row, ``sgmv_*`` one slot per segment of consecutive rows. All compute in float32 (float64
as soon as one tensor is float64), round once into the dtype of the output, write in place and return ``None``. They
run on every torch device; on ``meta`` they only check. Speed is the business of :mod:`punica.ops.torch_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from punica.ops.checks import check_bgmv, check_slice, check_slot_range, segment_slots


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _rows_by_slot(slots: Tensor, num_slots: int) -> list[tuple[int, Tensor]]:
    """``(slot, rows)`` for every slot >= 0 in use. Rows at -1 are left out, so -1 can never index the last slot."""
    used = slots.unique().tolist()
    check_slot_range(used, num_slots, "lora_indices_tensor")
    return [(slot, (slots == slot).nonzero().flatten()) for slot in used if slot >= 0]


def _multiply(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, *, scaling: float, add: bool, zero_idle: bool
) -> None:
    """``output[t] (+)= scaling * inputs[t] @ weights[slots[t]]^T`` for checked arguments, one adapter at a time."""
    if any(tensor.is_meta for tensor in (inputs, weights, output, slots)):
        return
    dtype = _compute_dtype(inputs, weights, output)
    groups = _rows_by_slot(slots, weights.shape[0])
    if zero_idle:
        output.zero_()
    for slot, rows in groups:
        rows = rows.to(output.device)
        product = scaling * (inputs[rows].to(dtype) @ weights[slot].to(dtype).t())
        if add:
            product = output[rows].to(dtype) + product
        output[rows] = product.to(output.dtype)


def bgmv_shrink(
    inputs: Tensor, lora_a_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0
) -> None:
    """``out[t, :r] = scaling * x[t] @ A[l_t]^T``; rows at -1 become 0.

    Args:
        inputs: ``[T, K]`` floating.
        lora_a_weights: ``[L, r, K]`` or ``[L, 1, r, K]``, dtype of ``inputs``.
        output_tensor: ``[T, >= r]``; only columns ``:r`` are written.
        lora_indices_tensor: integer ``[T]``; rows beyond a shorter vector are padding (slot -1).
        scaling: finite factor.

    Raises:
        TypeError: a dtype is not floating (indices: not integer), or inputs and weights differ.
        ValueError: shapes, devices or slots do not fit, or ``scaling`` is not finite.
    """
    weights = check_bgmv(
        inputs, lora_a_weights, output_tensor, lora_indices_tensor, "lora_a_weights", shrink=True, scaling=scaling
    )
    lanes = output_tensor[:, : weights.shape[1]]
    _multiply(inputs, weights, lanes, lora_indices_tensor, scaling=scaling, add=False, zero_idle=True)


def bgmv_expand(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    """``out[t, :c] (+)= x[t] @ B[l_t]^T`` with ``c = min(N, out.shape[1])``; rows at -1 are not written.

    Args:
        inputs: ``[T, r]``, float32 or the dtype of the weights.
        lora_b_weights: ``[L, N, r]`` or ``[L, 1, N, r]``.
        output_tensor: ``[T, W]``.
        lora_indices_tensor: integer ``[T]``, as in :func:`bgmv_shrink`.
        add_inputs: add to the output (True) or overwrite the columns (False).

    Raises: as :func:`bgmv_shrink`.
    """
    weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
    columns = min(weights.shape[1], output_tensor.shape[1])
    _multiply(
        inputs, weights[:, :columns], output_tensor[:, :columns], lora_indices_tensor,
        scaling=1.0, add=add_inputs, zero_idle=False,
    )  # fmt: skip


def bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """:func:`bgmv_expand` into columns ``[slice_offset, slice_offset + slice_size)``; ``slice_size`` must equal N.

    Raises: as :func:`bgmv_shrink`; ``ValueError`` also when the slice does not fit the output or the weights.
    """
    weights = check_bgmv(inputs, lora_b_weights, output_tensor, lora_indices_tensor, "lora_b_weights", shrink=False)
    check_slice(weights, output_tensor, slice_offset, slice_size)
    columns = output_tensor[:, slice_offset : slice_offset + slice_size]
    _multiply(inputs, weights, columns, lora_indices_tensor, scaling=1.0, add=add_inputs, zero_idle=False)


def sgmv_shrink(
    inputs: Tensor,
    lora_a_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    """:func:`bgmv_shrink` with slots given per segment (the outputs of `punica.metadata.compute_meta`).

    Segment b covers rows ``[b_seq_start_loc[b], b_seq_start_loc[b] + seq_len_tensor[b])`` and uses slot
    ``lora_indices_tensor[b]``. The ``batches`` segments cover the first ``token_nums`` rows; later rows have slot -1.
    ``max_seq_length`` is the longest segment; torch needs it for nothing, kernels with a grid do.

    Raises: as :func:`bgmv_shrink`; ``ValueError`` also when the segments do not cover exactly ``token_nums`` rows.
    """
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_shrink(inputs, lora_a_weights, output_tensor, slots, scaling)


def sgmv_expand(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    """:func:`bgmv_expand` with slots given per segment, as in :func:`sgmv_shrink`."""
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_expand(inputs, lora_b_weights, output_tensor, slots, add_inputs)


def sgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    """:func:`bgmv_expand_slice` with slots given per segment, as in :func:`sgmv_shrink`."""
    slots = segment_slots(inputs, b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, token_nums)
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, slots, slice_offset, slice_size, add_inputs)
