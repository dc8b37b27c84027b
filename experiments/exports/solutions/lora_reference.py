"""LoRA of a linear layer for rows of different adapters: y[t] + scale * (x[t] @ A[l]^T) @ B[l]^T, l = slots[t]."""

import torch
from torch import Tensor


def run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, *step: Tensor) -> Tensor:
    slots, *_ = step  # the rest is the same step, grouped by slot
    out = y.to(torch.float32, copy=True)
    for slot in slots.unique().tolist():
        if slot >= 0:  # -1: no adapter
            rows = (slots == slot).nonzero().flatten()
            out[rows] += scale * (x[rows].float() @ a[slot].float().T) @ b[slot].float().T
    return out.to(y.dtype)
