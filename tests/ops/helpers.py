"""Random operands and an independent float64 computation for the tests of the operators."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (4e-3, 2e-3), torch.float32: (1e-4, 1e-4)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def random_slots(rows: int, num_slots: int, seed: int = 0) -> Tensor:
    """Slots in [-1, num_slots), in no order."""
    return torch.randint(-1, num_slots, (rows,), generator=generator(seed))


def products(x: Tensor, weights: Tensor, slots: Tensor, scaling: float = 1.0) -> Tensor:
    """float64 ``[T, out]``: ``scaling * x[t] @ W[slots[t]]^T`` row by row, 0 for rows without adapter."""
    out = torch.zeros(x.shape[0], weights.shape[-2], dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[row] = scaling * (weights[slot].double().reshape(weights.shape[-2:]) @ x[row].double())
    return out


def assert_shrunk(out: Tensor, expected: Tensor) -> None:
    """Tolerance of a float32 shrink buffer."""
    bound = 1e-5 * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=1e-4, atol=bound)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype | None = None, roundings: int = 1) -> None:
    """Tolerance of an output of ``dtype`` (None: its own), rounded so often, perhaps where it was larger."""
    rtol, atol = TOLERANCE[dtype or out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=rtol, atol=roundings * atol)
