"""The meaning of every LoRA operator: the oracle of the tests, written to be read.

A batch holds T rows, row t uses the adapter in slot ``l_t`` (``-1``: none). With weights ``W [L, out, in]`` the two
products of the paper's section 4 are

* shrink (hidden size -> rank):  ``out[t, :r] = scaling * x[t] @ W[l_t]^T``, and 0 where ``l_t = -1``;
* expand (rank -> hidden size):  ``out[t, :c] (+)= x[t] @ W[l_t]^T`` with ``c = min(N, out.shape[1])``, rows at -1
  untouched.

Arguments and errors are those of `punica.ops.paper_ops.PaperOps`. All compute in float32 (float64 as soon as one tensor
is float64), round once, and write in place; on ``meta`` they only check.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from punica.ops.paper_ops import PaperOps


def _multiply(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float,
    *, add: bool = False, zero_idle: bool = True,
) -> None:  # fmt: skip
    if any(tensor.is_meta for tensor in (inputs, weights, output, slots)):
        return
    dtype = torch.float64 if torch.float64 in (inputs.dtype, weights.dtype, output.dtype) else torch.float32
    used, most = slots.unique().tolist(), weights.shape[0] - 1
    bad = [slot for slot in used if not -1 <= slot <= most]
    if bad:
        raise ValueError(f"lora_indices_tensor holds slot {bad[0]}; the weights have slots 0 to {most} (-1: none)")
    if zero_idle:
        output.zero_()
    for slot in set(used) - {-1}:  # -1 would index the last slot
        rows = (slots == slot).nonzero().flatten().to(output.device)
        product = scaling * (inputs[rows].to(dtype) @ weights[slot].to(dtype).t())
        if add:
            product = output[rows].to(dtype) + product
        output[rows] = product.to(output.dtype)


def _expand(inputs: Tensor, weights: Tensor, columns: Tensor, slots: Tensor, add_inputs: bool) -> None:
    _multiply(inputs, weights, columns, slots, 1.0, add=add_inputs, zero_idle=False)


_OPS = PaperOps(_multiply, _expand)
bgmv_shrink, bgmv_expand, bgmv_expand_slice = _OPS.bgmv_shrink, _OPS.bgmv_expand, _OPS.bgmv_expand_slice
sgmv_shrink, sgmv_expand, sgmv_expand_slice = _OPS.sgmv_shrink, _OPS.sgmv_expand, _OPS.sgmv_expand_slice


class Routing(NamedTuple):
    """Pairs of T tokens: local experts and weights ``[T, k]``, slots ``[T]``, enabled slots ``[L+1]``."""

    topk_ids: Tensor
    topk_weights: Tensor
    token_lora_mapping: Tensor
    adapter_enabled: Tensor


def fused_moe_lora(
    output: Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], lora_b_stacked: Sequence[Tensor], routing: Routing,
    mul_routed_weight: bool = False, offset: int = 0, add_inputs: bool = True,
) -> None:  # fmt: skip
    """Add LoRA to every (token, expert) pair, pair by pair, in place.

    Pair ``i = t * k + j`` has the slot ``l`` of its token and the expert ``e = topk_ids[t, j]``:

        output[t, j, offset + s*N : offset + (s+1)*N] (+)= w * (x_i @ A_s[l, e]^T) @ B_s[l, e]^T

    Without ``mul_routed_weight`` (the first expert product) ``x_i = x[t]`` and ``w = 1``; with it (the second)
    ``x_i = x[i]`` and ``w = topk_weights[t, j]``. The row of a pair without slot, of a slot that is not enabled, or of
    an expert that is not here is not written.

    Args:
        output: ``[T, k, W]``. x: ``[T, K]``, or ``[T*k, K]`` with ``mul_routed_weight``.
        lora_a_stacked, lora_b_stacked: n x ``[L, E, R, K]`` and ``[L, E, N, R]``.
    """
    topk_ids, topk_weights, token_lora_mapping, adapter_enabled = routing
    slots, experts, _, _ = lora_a_stacked[0].shape
    tokens, top_k = topk_ids.shape
    for t in range(tokens):
        slot = int(token_lora_mapping[t])
        if not 0 <= slot < slots or not int(adapter_enabled[slot]):
            continue
        for j in range(top_k):
            expert = int(topk_ids[t, j])
            if not 0 <= expert < experts:
                continue
            row = x[t * top_k + j if mul_routed_weight else t].float()
            weight = float(topk_weights[t, j]) if mul_routed_weight else 1.0
            start = offset
            for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True):
                delta = weight * (b[slot, expert].float() @ (a[slot, expert].float() @ row))
                target = output[t, j, start : start + delta.numel()]
                target.copy_(target.float() + delta if add_inputs else delta)
                start += delta.numel()
