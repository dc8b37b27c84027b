"""The meaning of every LoRA operator: the oracle of the tests, written to be read.

A batch holds T rows, row t uses the adapter in slot ``l_t`` (``-1``: none). With weights ``W [L, out, in]`` (row-major,
applied transposed, ``[L, 1, out, in]`` also accepted) the two products of the paper's section 4 are

* shrink (hidden size -> rank):  ``out[t, :r] = scaling * x[t] @ W[l_t]^T``, and 0 where ``l_t = -1``;
* expand (rank -> hidden size):  ``out[t, :c] (+)= x[t] @ W[l_t]^T`` with ``c = min(N, out.shape[1])``, rows at -1
  untouched.

Arguments and errors of the six are those of `punica.ops.paper_ops.PaperOps`. All compute in float32 (float64
as soon as one tensor is float64), round once into the dtype of the output, write in place and return ``None``. They
run on every torch device; on ``meta`` they only check. Speed is the business of `punica.ops.torch_ops`.
"""

import torch
from torch import Tensor

from punica.ops.checks import check_slot_range
from punica.ops.paper_ops import PaperOps


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


def _shrink(inputs: Tensor, weights: Tensor, lanes: Tensor, slots: Tensor, scaling: float) -> None:
    _multiply(inputs, weights, lanes, slots, scaling=scaling, add=False, zero_idle=True)


def _expand(inputs: Tensor, weights: Tensor, columns: Tensor, slots: Tensor, add_inputs: bool) -> None:
    _multiply(inputs, weights, columns, slots, scaling=1.0, add=add_inputs, zero_idle=False)


_OPS = PaperOps(_shrink, _expand)
bgmv_shrink, bgmv_expand, bgmv_expand_slice = _OPS.bgmv_shrink, _OPS.bgmv_expand, _OPS.bgmv_expand_slice
sgmv_shrink, sgmv_expand, sgmv_expand_slice = _OPS.sgmv_shrink, _OPS.sgmv_expand, _OPS.sgmv_expand_slice
