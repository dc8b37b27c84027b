"""What the torch operators demand of their arguments, in one place.

Every function here either returns silently (or returns a normalised view) or raises the one exception of the contract:
``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong shape, size, range or device. None of them writes,
so an operator that calls them first is left unchanged by bad input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER = (torch.int8, torch.int16, torch.int32, torch.int64)


def weights_3d(weights: Tensor, name: str) -> Tensor:
    """View ``[L, out, in]`` or ``[L, 1, out, in]`` weights as ``[L, out, in]``; ``ValueError`` for any other shape."""
    if weights.dim() == 3:
        return weights
    if weights.dim() == 4 and weights.shape[1] == 1:
        return weights.squeeze(1)
    raise ValueError(f"{name} has shape {tuple(weights.shape)}; expected [slots, out, in] or [slots, 1, out, in]")


def check_same_device(named: dict[str, Tensor]) -> None:
    """``ValueError`` unless all tensors (name -> tensor) are on one device."""
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {listing}; move them to the device of the weights")


def check_dtypes(inputs: Tensor, weights: Tensor, output: Tensor, name: str, float32_inputs: bool) -> None:
    """``TypeError`` unless the dtypes may be combined.

    All are float16, bfloat16, float32 or float64. ``inputs`` has the dtype of the weights; beside that float64 may
    stand anywhere (it selects float64 arithmetic), and the input of an expand (``float32_inputs``) may be float32.
    """
    x_dtype, w_dtype = inputs.dtype, weights.dtype
    if x_dtype == w_dtype == output.dtype and w_dtype in FLOATING:
        return
    for label, dtype in (("inputs", x_dtype), (name, w_dtype), ("output_tensor", output.dtype)):
        if dtype not in FLOATING:
            raise TypeError(f"{label} has dtype {dtype}; expected one of float16, bfloat16, float32, float64")
    if x_dtype == w_dtype or torch.float64 in (x_dtype, w_dtype):
        return
    if not (float32_inputs and x_dtype == torch.float32):
        allowed = f"{w_dtype} or float32" if float32_inputs else f"{w_dtype}"
        raise TypeError(f"inputs has dtype {x_dtype} but {name} has {w_dtype}; convert inputs to {allowed}")


def check_scaling(scaling: float) -> None:
    """``TypeError`` unless ``scaling`` is a number, ``ValueError`` unless it is finite."""
    if type(scaling) is float and math.isfinite(scaling):
        return
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float)):
        raise TypeError(f"scaling is {scaling!r} of type {type(scaling).__name__}; expected a Python float")
    if not math.isfinite(scaling):
        raise ValueError(f"scaling is {scaling!r}; expected a finite number (lora_alpha / rank)")


def check_inner_size(inputs: Tensor, weights: Tensor, name: str, what: str) -> None:
    """``ValueError`` unless the last dimension of ``inputs`` is the inner dimension of the weights."""
    if inputs.shape[-1] != weights.shape[-1]:
        raise ValueError(f"{what} of inputs is {inputs.shape[-1]} but {name} expects {weights.shape[-1]}")


def check_slots(slots: Tensor, name: str) -> None:
    """``ValueError`` / ``TypeError`` unless ``slots`` is a vector of integers."""
    if slots.dtype not in INTEGER:
        raise TypeError(f"{name} has dtype {slots.dtype}; expected an integer dtype (slot numbers, -1 = no adapter)")
    if slots.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(slots.shape)}; expected one slot per row, shape [rows]")


def check_slot_range(used: Sequence[int], num_slots: int, name: str) -> None:
    """``ValueError`` unless every slot of ``used`` is in ``[-1, num_slots)``."""
    bad = [slot for slot in used if not -1 <= slot < num_slots]
    if bad:
        raise ValueError(f"{name} holds slot {bad[0]}; the weights have slots 0 to {num_slots - 1} (-1 = no adapter)")


def check_bgmv(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, name: str, *, shrink: bool, scaling: float = 1.0
) -> Tensor:
    """Check the arguments of a per-token op and return the weights as ``[L, out, in]``.

    ``inputs [T, in]``, ``output [T, W]``, ``slots [T]``: one slot per row. Rows beyond ``slots`` are padding, but a
    single slot for several rows is refused, since it could only be a hoped-for broadcast.
    """
    weights = weights_3d(weights, name)
    if inputs.dim() != 2 or output.dim() != 2 or inputs.shape[0] != output.shape[0]:
        shapes = f"{tuple(inputs.shape)} and {tuple(output.shape)}"
        raise ValueError(f"inputs and output_tensor have shapes {shapes}; expected [rows, in], [rows, out], equal rows")
    check_dtypes(inputs, weights, output, name, float32_inputs=not shrink)
    check_inner_size(inputs, weights, name, "hidden size" if shrink else "rank")
    if shrink and output.shape[1] < weights.shape[1]:
        raise ValueError(f"output_tensor has {output.shape[1]} columns; the rank of {name} is {weights.shape[1]}")
    check_scaling(scaling)
    check_slots(slots, "lora_indices_tensor")
    rows, entries = inputs.shape[0], slots.shape[0]
    if entries > rows or (entries == 1 and rows > 1):
        raise ValueError(f"lora_indices_tensor has {entries} entries for {rows} rows; expected one slot per row")
    check_same_device({"inputs": inputs, name: weights, "output_tensor": output})
    return weights


def check_slice(weights: Tensor, output: Tensor, slice_offset: int, slice_size: int) -> None:
    """``ValueError`` unless columns ``[slice_offset, slice_offset + slice_size)`` exist and fit the width of the
    weights."""
    width = weights.shape[-2]
    if slice_size != width:
        raise ValueError(f"slice_size is {slice_size}; it must equal the output size of lora_b_weights, {width}")
    if slice_offset < 0 or slice_offset + slice_size > output.shape[1]:
        raise ValueError(
            f"slice_offset {slice_offset} + slice_size {slice_size} must lie within the {output.shape[1]} columns "
            "of output_tensor"
        )


def segment_slots(
    inputs: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, batches: int, token_nums: int
) -> Tensor:
    """Per-row slots ``[T]`` of segments: slot b repeated ``lengths[b]`` times, rows from ``token_nums`` on get -1.

    ``ValueError`` when the segments are not ``batches`` many, do not follow each other from row 0, do not cover exactly
    ``token_nums`` rows, or ``token_nums`` exceeds the rows of ``inputs``.
    """
    for label, tensor in (("b_seq_start_loc", starts), ("seq_len_tensor", lengths), ("lora_indices_tensor", slots)):
        check_slots(tensor, label)
        if tensor.shape[0] < batches:
            raise ValueError(f"{label} has {tensor.shape[0]} entries for {batches} segments")
    rows = inputs.shape[0]
    if not 0 <= token_nums <= rows:
        raise ValueError(f"token_nums is {token_nums}; inputs has {rows} rows")
    if any(tensor.is_meta for tensor in (starts, lengths, slots)):
        return torch.empty(rows, dtype=slots.dtype, device="meta")
    lengths, starts = lengths[:batches], starts[:batches]
    covered = int(lengths.sum())
    if covered != token_nums:
        raise ValueError(f"seq_len_tensor covers {covered} rows but token_nums is {token_nums}")
    if not torch.equal(starts.to(lengths), torch.cumsum(lengths, 0) - lengths):
        raise ValueError(f"b_seq_start_loc is {starts.tolist()}; expected the running sum of seq_len_tensor from 0")
    per_row = slots.new_full((rows,), -1)
    per_row[:token_nums] = torch.repeat_interleave(slots[:batches], lengths)
    return per_row
