"""LoRA of experts, their second product: y[t, j] + w[t, j] * (x[t, j] @ A[l, e]^T) @ B[l, e]^T, e = experts[t, j]."""

import torch
from torch import Tensor


def run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    out = y.to(torch.float32, copy=True)
    for slot in slots.unique().tolist():
        for expert in experts.unique().tolist():
            rows, choices = ((slots[:, None] == slot) & (experts == expert)).nonzero(as_tuple=True)
            if slot >= 0 and len(rows):  # -1: no adapter
                low = x[rows, choices].float() @ a[slot, expert].float().T
                out[rows, choices] += weights[rows, choices, None] * (low @ b[slot, expert].float().T)
    return out.to(y.dtype)
