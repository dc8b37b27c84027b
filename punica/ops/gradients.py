"""LoRA of a step under `torch.autograd`: many adapters in one batch, in training.

Per segment ``l = s x A^T`` and ``y = x W^T + l B^T``. Of the gradient ``g`` of y, ``dl = s g B`` is a shrink and
``dx = g W + dl A`` an expand. ``dA = dl^T x`` and ``dB = g^T l`` are outer products (`Ops.gradient`). W is frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from punica.metadata import LoRABatch
from punica.ops.expect import WITH_DOUBLE, check_scale, expect
from punica.ops.interface import Ops
from punica.ops.weights import LoRAWeights, Stack


def lora_linear(
    ops: Ops, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float | Tensor = 1.0,
    base: tuple[Tensor, ...] = (), views: Mapping[int, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x W^T + bias + s (x A^T) B^T``, ``[T', sum N_i]`` in the dtype of x, differentiable in x, A and B.

    Args:
        x: ``[T', K]``; for the LoRA term it is cast to the dtype of the weights, which are none in FP8. Of experts:
            (token, expert) pairs, with weights ``[L, E, ...]`` viewed as ``[L * E, ...]``.
        scale: a number, or one of each row, ``[T']``, without a gradient.
        base: frozen ``weight [N, K]`` and perhaps ``bias [N]``; empty: the LoRA term alone.
        views: by slot, views ``[r, K]`` of A ``[L, R, K]`` and ``[N, r]`` of B ``[L, N, R]``, one slice each, which get
            the gradients of slots in the step. None: the tensors of the weights get those of all slots.

    TypeError, ValueError: operands, or a slot beyond the weights. RuntimeError: a base that requires a gradient; at
    ``backward`` another step, or weights changed since the forward.
    """
    a, b = weights.a.form.stored, weights.b.form.stored
    expect("a weight that trains", weights.a.tensors[0], dtype=WITH_DOUBLE)
    sizes = {"K": a.widths[0], "N": sum(b.widths), "of K N": "the LoRA weights"}
    expect("x", x, "T K", dtype=WITH_DOUBLE, device=a.device, sizes=sizes)
    batch.check_rows(x.shape[0], a.slots)
    if isinstance(scale, Tensor):
        expect("scale", scale, "T", dtype=WITH_DOUBLE, device=a.device, sizes=sizes)
    else:
        check_scale("scale", scale)
    for name, one, dims in zip(("base weight", "base bias"), base, ("N K", "N"), strict=False):
        expect(name, one, dims, dtype=(x.dtype,), device=a.device, sizes=sizes)
        if one.requires_grad:
            raise RuntimeError(f"the {name} requires a gradient, and gets none here; freeze it: requires_grad_(False)")
    slots = [slot for slot in batch.rows.present[0].tolist() if slot >= 0]
    if views is not None and (missing := sorted({*slots} - views.keys())):
        raise ValueError(f"the step uses slot {missing[0]}, of which views have no A and B; give all it uses")
    call = ops, weights, batch, scale, base, batch.rows, None if views is None else slots
    if views is None:
        return _LoRALinear.apply(x, call, *weights.a.tensors, *weights.b.tensors)
    return _LoRALinear.apply(x, call, *[views[slot][side] for side in (0, 1) for slot in slots])


class _LoRALinear(torch.autograd.Function):
    """``tensors``: A and then B, by which autograd knows the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ops, weights, batch, _, base, *_ = ctx.call = call
        stored = weights.b.form.stored
        with torch.autocast(x.device.type, enabled=False):
            width = sum(stored.widths)
            y, add = (torch.nn.functional.linear(x, *base), True) if base else _room(x, width, batch)
        dtype = torch.float64 if stored.dtype == torch.float64 else torch.float32
        low = x.new_empty(len(stored.widths), x.shape[0], stored.rank, dtype=dtype)
        _shrink(low, x.to(stored.dtype), weights.a, call)
        ops.expand(y, low, weights.b, batch, add_inputs=add)
        ctx.save_for_backward(x, low, *tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(dy.device.type, enabled=False):
            return _backward(ctx, dy)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    ops, weights, batch, _, base, rows, slots = ctx.call
    (x, low, *tensors), (a, b) = ctx.saved_tensors, (weights.a, weights.b)
    if not rows.equals(batch.rows):
        raise RuntimeError("another step began between forward and backward; give each step a LoRABatch of its own")
    half, (of_x, _, *wanted) = len(tensors) // 2, ctx.needs_input_grad
    of_a, of_b = any(wanted[:half]), any(wanted[half:])
    g, dx, da, db = dy.to(a.form.stored.dtype), None, [None] * half, [None] * half
    if of_b:
        db = _of_views(ops.gradient(b, low, g, batch), slots, 1, tensors[half:])
    if of_x or of_a:
        dl = torch.empty_like(low)
        for i, part in enumerate(g.split_with_sizes(list(b.form.stored.widths), 1)):
            _shrink(dl[i : i + 1], part, b.transposed(i), ctx.call)
    if of_a:
        da = _of_views(ops.gradient(a, dl, x.to(a.form.stored.dtype), batch), slots, 0, tensors)
    if of_x:
        dx, add = (dy @ base[0], True) if base else _room(x, x.shape[1], batch)
        for i in range(len(a.tensors)):
            ops.expand(dx, dl[i : i + 1], a.transposed(i), batch, add_inputs=add or i > 0)
    return dx, None, *da, *db


def _room(x: Tensor, width: int, batch: LoRABatch) -> tuple[Tensor, bool]:
    """Return an output of the LoRA term alone, and whether to add to it: not where every row has an adapter."""
    idle = x.shape[0] > batch.num_rows or bool((batch.rows.present[0] < 0).any())
    return (x.new_zeros if idle else x.new_empty)(x.shape[0], width), idle


def _shrink(low: Tensor, x: Tensor, a: Stack, call: tuple) -> None:
    ops, _, batch, scale, *_ = call
    by_row = isinstance(scale, Tensor)
    ops.shrink(low, x, a, batch, 1.0 if by_row else scale)
    if by_row:
        low.mul_(scale[:, None])


def _of_views(gradients: Any, slots: list[int] | None, dim: int, views: list[Tensor]) -> Any:
    if slots is None:
        return gradients
    return [gradients[0][slot].narrow(dim, 0, view.shape[dim]) for slot, view in zip(slots, views, strict=False)]
