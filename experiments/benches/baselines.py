"""Baselines of SGMV in the paper (Figure 8), and torch's own grouped matmul.

All add ``scale * (x[t] @ A[l_t]^T) @ B[l_t]^T`` to row t of ``y``, in place, in the dtype of the model, on any device:

============  =======================================================================================================
Loop          per adapter two matmuls over its rows and an addition: ``y[seg] += x[seg] @ A @ B``.
Gather        copy A and B of every row side by side, ``[T, r, h1]`` and ``[T, h2, r]``.
BMM           two batched matmuls on gathered weights.
Gather-BMM    both, which is what a batch needs when its adapters change from step to step.
grouped_mm    ``torch.nn.functional.grouped_mm`` over rows sorted by slot, where torch has it.
============  =======================================================================================================

Shapes: ``y [T, h2]``, ``x [T, h1]``, ``a [L, r, h1]``, ``b [L, h2, r]``, one dtype and device. Every row has an
adapter. These are comparisons: arguments are trusted, and nothing here is tuned beyond what the paper describes.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _scaled(hidden: Tensor, scale: float) -> Tensor:
    """Scale the narrow intermediate; the paper's code has no scale, so a factor of 1 must cost nothing."""
    return hidden if scale == 1.0 else hidden * scale


def lora_loop(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, segments: Sequence[tuple[int, int, int]], scale: float = 1.0
) -> None:
    """Loop: one adapter after the other.

    Args:
        segments: ``(slot, start, end)`` of each adapter's rows, on the host, as the paper's segment indices.
    """
    for slot, start, end in segments:
        y[start:end] += _scaled(x[start:end] @ a[slot].t(), scale) @ b[slot].t()


def gather_weights(a: Tensor, b: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gather: the weights of every row, ``a[slots] [T, r, h1]`` and ``b[slots] [T, h2, r]`` (``slots`` int64 ``[T]``).

    Reads and writes T weight pairs even when all rows share one. A slot of -1 is an index error, not the last slot.
    """
    return a.index_select(0, slots), b.index_select(0, slots)


def lora_bmm(y: Tensor, x: Tensor, a_rows: Tensor, b_rows: Tensor, scale: float = 1.0) -> None:
    """BMM: two batched matmuls with the weights of :func:`gather_weights`, one row each."""
    hidden = torch.bmm(x.unsqueeze(1), a_rows.transpose(1, 2))
    y += torch.bmm(_scaled(hidden, scale), b_rows.transpose(1, 2)).squeeze(1)


def lora_gather_bmm(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Gather-BMM: :func:`gather_weights`, then :func:`lora_bmm`."""
    a_rows, b_rows = gather_weights(a, b, slots)
    lora_bmm(y, x, a_rows, b_rows, scale)


def _grouped_mm() -> Callable[..., Tensor] | None:
    """torch's grouped matmul: public from 2.10 on, before that under a private name."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@functools.cache
def grouped_mm_available(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Check by one product that this torch multiplies groups of ``dtype`` matrices on ``device``.

    Which dtypes and devices are served changed with nearly every release, so a list would be wrong somewhere: torch
    2.13 on a CPU serves float32, bfloat16 and float16; earlier CUDA builds bfloat16 only.
    """
    product = _grouped_mm()
    if product is None:
        return False
    x = torch.ones(32, 32, device=device, dtype=dtype)
    w = torch.ones(2, 16, 32, device=device, dtype=dtype)
    ends = torch.tensor([16, 32], device=device, dtype=torch.int32)
    try:
        result = product(x, w.transpose(1, 2), offs=ends)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((result == 32).all())


def slot_ends(slots: Tensor, num_slots: int) -> Tensor:
    """int32 ``[num_slots]``: one past the last row of every slot, for rows sorted by ``slots`` (integer ``[T]``)."""
    counts = torch.bincount(slots, minlength=num_slots)
    return torch.cumsum(counts, 0).to(torch.int32)


def lora_grouped_mm(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Tensor, scale: float = 1.0) -> None:
    """grouped_mm: two library calls over all slots, on rows sorted by slot.

    Args:
        ends: :func:`slot_ends` of the rows; slots without rows are empty groups. On CUDA r, h1 and h2 must be multiples
            of 16 bytes.

    Raises:
        RuntimeError: this torch has no grouped matmul for the device and dtype (see :func:`grouped_mm_available`).
    """
    product = _grouped_mm()
    if product is None or not grouped_mm_available(x.device, x.dtype):
        raise RuntimeError(f"torch {torch.__version__} has no grouped_mm for {x.dtype} on {x.device}; use lora_loop")
    hidden = product(x, a.transpose(1, 2), offs=ends)
    y += product(_scaled(hidden, scale), b.transpose(1, 2), offs=ends)
