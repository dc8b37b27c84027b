"""Random operands, steps, and an independent float64 computation for the tests of the operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from punica.metadata import LoRABatch, RowGroups

TOLERANCE = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (4e-3, 2e-3), torch.float32: (1e-4, 1e-4)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale).to(dtype)


def random_slots(rows: int, num_slots: int, seed: int = 0) -> Tensor:
    """Slots in [-1, num_slots), in no order."""
    return torch.randint(-1, num_slots, (rows,), generator=generator(seed))


def step(slots: Sequence[int], device: str = "cpu", slot_count: int = 3, rows: int = 64) -> LoRABatch:
    """A step whose rows use these slots."""
    batch = LoRABatch(rows, slot_count, device)
    batch.fill(RowGroups.of_rows(np.array(slots, np.int64)))
    return batch


def by_ranks(stored: Tensor) -> Tensor:
    """The same with the last two dimensions swapped in memory."""
    return stored.mT.contiguous().mT


def products(
    x: Tensor, weights: Tensor, slots: Sequence[int] | Tensor, scaling: float = 1.0, ranks: Sequence[int] | None = None,
    of_b: bool = False,
) -> Tensor:  # fmt: skip
    """float64 ``[T, out]``: ``scaling * x[t] @ W[slots[t]]^T`` row by row, 0 for rows without adapter.

    ``ranks``: true ranks of the slots, which bound the rows of A, or (``of_b``) the columns of B.
    """
    x, weights = x.cpu().double(), weights.cpu()
    out = torch.zeros(x.shape[0], weights.shape[-2], dtype=torch.float64, device="cpu")
    for row, slot in enumerate(torch.as_tensor(slots).tolist()):
        if slot >= 0:
            live = None if ranks is None else int(ranks[slot])
            weight = weights[slot].double().reshape(weights.shape[-2:])
            if of_b:
                out[row] = scaling * (weight[:, :live] @ x[row, :live])
            else:
                out[row, :live] = scaling * (weight[:live] @ x[row])
    return out


def assert_shrunk(out: Tensor, expected: Tensor) -> None:
    """Tolerance of a float32 shrink buffer."""
    bound = 1e-5 * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=1e-4, atol=bound)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype | None = None, roundings: int = 1) -> None:
    """Tolerance of an output of ``dtype`` (None: its own), rounded so often, perhaps where it was larger."""
    rtol, atol = TOLERANCE[dtype or out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=rtol, atol=roundings * atol)
