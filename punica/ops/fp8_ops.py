"""Products with FP8 weights in plain torch, for `punica.ops.torch_ops`.

Weights are dequantised slot by slot, only those in use and only up to their true rank, and multiplied in float32. The
meaning of the scales is that of `punica.ops.fp8_checks`; any block size is legal here. Operands were checked.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.checks import weights_3d
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import upcast
from punica.ops.weights import Stack


def shrink(
    y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, scale: float, accumulate: bool, x_scale: Tensor | None
) -> None:
    """Compute ``y[i, t] (+)= scale * acc_i[t]`` of `punica.ops.fp8_checks`, N the rank."""
    segments, scheme = list(_segments(batch, a)), a.form.scheme
    if not accumulate:
        y.zero_()
    real = _real_rows(x, x_scale, scheme)
    for slot, rows in segments:
        for i, (stacked, scales) in enumerate(zip(a.tensors, a.scales, strict=True)):
            rank = _rank(a, i, slot)
            sums = scale * (real[rows] @ _real_weight(stacked, scales, slot, scheme)[:rank].t())
            if accumulate:
                sums += y[i, rows, :rank].float()
            y[i, rows, :rank] = sums.to(y.dtype)


def expand(
    y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset_start: int, add_inputs: bool, x_scale: Tensor | None
) -> None:
    """Compute ``y[t, o_i : o_i + N_i] (+)= acc_i[t]`` of `punica.ops.fp8_checks`, K the rank; slices share scales."""
    scheme, widths = b.form.scheme, b.form.stored.widths
    real = _real_rows(x, x_scale, scheme)
    for slot, rows in _segments(batch, b):
        column = offset_start
        for i, (stacked, scales, width) in enumerate(zip(b.tensors, b.scales, widths, strict=True)):
            rank = _rank(b, i, slot)
            sums = real[i, rows, :rank] @ _real_weight(stacked, scales, slot, scheme)[:, :rank].t()
            if add_inputs:
                sums += y[rows, column : column + width].float()
            y[rows, column : column + width] = sums.to(y.dtype)
            column += width


def _segments(batch: LoRABatch, stack: Stack) -> Iterator[tuple[int, Tensor]]:
    """Yield every slot in use and the rows that use it. ValueError: a slot beyond the weights."""
    slots, counts = batch.rows.present
    device, most = stack.form.stored.device, stack.form.stored.slots
    if slots.size and slots[-1] >= most:
        raise ValueError(f"the step uses slot {slots[-1]}; the weights have slots 0 to {most - 1}")
    order, start = torch.from_numpy(batch.rows.order), 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            yield slot, order[start : start + count].to(device)
        start += count


def _rank(stack: Stack, i: int, slot: int) -> int:
    most = stack.form.stored.rank
    rank = most if stack.ranks is None else int(stack.ranks[i, slot])
    if not 0 <= rank <= most:
        raise ValueError(f"lora_ranks holds {rank} for slot {slot}; expected 0 to {most}")
    return rank


def _real_rows(x: Tensor, a_scale: Tensor | None, scheme: Scheme) -> Tensor:
    """Return the activations as float32, ``[..., T, K]``."""
    real = x.float()
    if a_scale is None:
        return real
    if a_scale.numel() == 1:
        return real * a_scale.reshape(())
    if a_scale.ndim == 1 or a_scale.shape[1] == 1:
        return real * a_scale.reshape(-1, 1)
    return real * a_scale.repeat_interleave(scheme.group_k, 1)[:, : x.shape[-1]]


def _real_weight(stacked: Tensor, scales: Tensor, slot: int, scheme: Scheme) -> Tensor:
    """Return slot ``slot`` of the weights as float32 ``[N, K]``."""
    weight, scale = upcast(weights_3d(stacked, "weights")[slot]), scales[slot]
    if scheme.block_wise:
        scale = scale.reshape(scale.shape[-2:])
        scale = scale.repeat_interleave(scheme.group_n, 0)[: weight.shape[0]]
        return weight * scale.repeat_interleave(scheme.group_k, 1)[:, : weight.shape[1]]
    return weight * scale.reshape(-1, 1)
