"""Random operands, also in FP8 in every mode; steps, calls on a step, and what they mean, computed apart in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from punica.capture import capture
from punica.metadata import LoRABatch, RowGroups
from punica.ops.interface import ALONE, Beside, Ops
from punica.ops.scales import PLAIN, Scheme
from punica.ops.slot_image import HEADER, image_matrices
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import LoRAWeights, Stack

TOLERANCE = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (4e-3, 2e-3), torch.float32: (1e-4, 1e-4)}


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def random_slots(rows: int, num_slots: int, seed: int = 0) -> Tensor:
    """Slots in [-1, num_slots), in no order."""
    return torch.randint(-1, num_slots, (rows,), generator=torch.Generator().manual_seed(seed))


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


def write_slot(image: Tensor, slots: Sequence[Tensor], ranks: Sequence[Tensor], index: int) -> None:
    """Write an image (`punica.ops.slot_image`) matrix by matrix: the meaning of the kernel of that name."""
    live = image[: len(slots) * HEADER * 8].view(torch.int64).view(-1, HEADER)[:, 3].tolist()
    matrices = image_matrices(image, len(slots), slots[0].dtype)
    for matrix, stacked, rank_of_slot, rank in zip(matrices, slots, ranks, live, strict=True):
        target = stacked[index].view(-1, stacked.shape[-1])
        target.zero_()
        if matrix is not None:
            target[: matrix.shape[0], : matrix.shape[1]] = matrix
        rank_of_slot[index] = rank


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call, after one that compiles it, and what the call returned into it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        result = call()
    return graph, result


def assert_shrunk(out: Tensor, expected: Tensor) -> None:
    """Tolerance of a float32 shrink buffer."""
    bound = 1e-5 * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=1e-4, atol=bound)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype | None = None, roundings: int = 1) -> None:
    """Tolerance of an output of ``dtype`` (None: its own), rounded so often, perhaps where it was larger."""
    rtol, atol = TOLERANCE[dtype or out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu(), rtol=rtol, atol=roundings * atol)


Tensors = Sequence[Tensor]


class StepCalls:
    """``ops(*options)`` makes a backend."""

    def __init__(self, ops: Callable[..., Ops]) -> None:
        self.ops = ops

    def shrink(
        self, x: Tensor, a: Tensors, y: Tensor, step: LoRABatch, scale: float = 1.0,
        *, accumulate: bool = False, lora_ranks: Tensor | None = None, b_scale: Tensors | None = None,
        a_scale: Tensor | None = None, scheme: Scheme = PLAIN, **options: Any,
    ) -> None:  # fmt: skip
        stack = Stack.of_a(a, lora_ranks, b_scale, scheme)
        self.ops(**options).shrink(y, x, stack, step, scale, accumulate, a_scale)

    def expand(
        self, x: Tensor, b: Tensors, y: Tensor, step: LoRABatch, offset_start: int = 0, add_inputs: bool = True,
        *, lora_ranks: Tensor | None = None, b_scale: Tensors | None = None, a_scale: Tensor | None = None,
        scheme: Scheme = PLAIN, **options: Any,
    ) -> None:  # fmt: skip
        stack = Stack.of_b(b, lora_ranks, b_scale, scheme)
        self.ops(**options).expand(y, x, stack, step, offset_start, add_inputs, a_scale)

    def linear(
        self, y: Tensor, x: Tensor, a: Tensors, b: Tensors, step: LoRABatch, scale: float = 1.0,
        *, add_inputs: bool = True, lora_ranks: Tensor | None = None, lora_a_scale: Tensors | None = None,
        lora_b_scale: Tensors | None = None, a_scale: Tensor | None = None, shrink: Scheme = PLAIN,
        expand: Scheme = PLAIN, aside: Callable[[], AbstractContextManager] | None = None, base: Tensors = (),
        **options: Any,
    ) -> None:  # fmt: skip
        weights = LoRAWeights.of(a, b, lora_ranks, (lora_a_scale, lora_b_scale), (shrink, expand))
        beside = ALONE if aside is None and isinstance(base, tuple) and not base else Beside(aside, base)
        self.ops(**options).linear(y, x, weights, step, scale, add_inputs, a_scale, beside)


TORCH = StepCalls(TorchOps)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {"per_channel_quant": True},
    "128x128": {"group_n": 128, "group_k": 128},
    "r x 32": {"group_n": 16, "group_k": 32},
    "32 x r": {"group_n": 32, "group_k": 16},
}


def grid(scale: Tensor, rows: int, columns: int, mode: dict[str, Any]) -> Tensor:
    """One slot's scales as float64 ``[rows, columns]``."""
    scale = scale.double().cpu()
    if mode.get("group_k"):
        blocks = scale.reshape(scale.shape[-2:])
        return blocks[torch.arange(rows) // mode["group_n"]][:, torch.arange(columns) // mode["group_k"]]
    return scale.reshape(-1, 1).expand(rows, columns)


def fp8(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random values in this format."""
    return torch.randn(*shape).to(dtype)


@dataclass
class Fp8Stack:
    """Weights ``[L, 1, N, K]`` of one slice, and scales different in every slot, channel and block."""

    stored: Tensor
    scale: Tensor
    mode: dict[str, Any]

    @classmethod
    def random(cls, slots: int, n: int, k: int, mode: dict[str, Any], dtype: torch.dtype, device: str) -> Fp8Stack:
        shape: tuple[int, ...] = (slots,)
        if mode.get("per_channel_quant"):
            shape = (slots, n)
        elif mode.get("group_k"):
            shape = (slots, -(-n // mode["group_n"]), -(-k // mode["group_k"]))
        return cls(fp8((slots, 1, n, k), dtype).to(device), (torch.rand(shape) + 0.1).to(device) * k**-0.5, mode)

    def real(self) -> Tensor:
        """float64 ``[L, N, K]`` on the CPU."""
        values = self.stored[:, 0].cpu().float().double()
        return torch.stack([v * grid(s, *v.shape, self.mode) for v, s in zip(values, self.scale, strict=True)])


def real_rows(x: Tensor, a_scale: Tensor | None, mode: dict[str, Any]) -> Tensor:
    """Activations as float64 on the CPU."""
    values = x.cpu().float().double() if x.dtype in (E4M3, E5M2) else x.cpu().double()
    if a_scale is None:
        return values
    scale = a_scale.cpu().double()
    if scale.numel() == 1 or scale.ndim == 1 or scale.shape[1] == 1:
        return values * scale.reshape(-1, 1)
    return values * scale[:, torch.arange(x.shape[-1]) // mode["group_k"]]
