"""Checks of the operators' tensors: one wording for all of them.

Every function here either returns silently (or returns what it learnt) or raises the one exception of the contract:
``TypeError`` for a wrong type or dtype, ``ValueError`` for a wrong shape, size, range or device. None of them writes or
reads a device, so an operator that calls them first is left unchanged by bad input. Only shapes, strides, dtypes
and devices count, so an operator calls them once per combination of those.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WITH_DOUBLE = (*FLOATS, torch.float64)


class Names(NamedTuple):
    """The caller's names of the operands, used in messages."""

    input: str
    output: str
    a: str
    b: str
    scale: str
    a_scale: str = "lora_a_scale"
    b_scale: str = "lora_b_scale"


STEP = Names("x", "y", "lora_a_stacked", "lora_b_stacked", "scale")
"""Operators that take a `LoRABatch`."""
FLAT = Names("inputs", "output_tensor", "lora_a_weights", "lora_b_weights", "scaling")
"""Operators that take tensors of metadata."""


class Weights(NamedTuple):
    """Form of the weights of all n slices: A slices are ``[slots, rank, widths[i]]`` (all widths are K), B slices
    ``[slots, widths[i], rank]``. ``row_major``: stored in this order; else the last two dimensions are swapped.
    """

    slots: int
    rank: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    row_major: bool = True


# --- values ----------------------------------------------------------------------------------------------------------


def check_keywords(method: str, given: Mapping[str, Any], allowed: Sequence[str] = ()) -> None:
    """Raise TypeError listing the keywords that ``method`` does not know."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        known = ", ".join(allowed) or "none"
        raise TypeError(f"{method} got unknown keyword arguments {unknown}; known: {known}")


def check_scale(name: str, scale: Any) -> None:
    """Raise TypeError unless ``scale`` is a Python number, ValueError unless it is finite."""
    if type(scale) is not float and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"{name} must be a Python float, got {type(scale).__name__} {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"{name} is {scale}, must be finite (lora_alpha / rank)")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__} {value!r}")


def check_dtype(name: str, tensor: Any, allowed: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless ``tensor`` is a tensor of an allowed dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(str(dtype) for dtype in allowed)}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is on the device of the weights."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the weights are on {device}; move one of them")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}")


# --- operands --------------------------------------------------------------------------------------------------------


def describe_weights(name: str, weights: Any, rank_dim: int, allowed: Sequence[torch.dtype] = FLOATS) -> Weights:
    """Check ``weights`` and return their form; ``rank_dim`` is the dimension of r: -2 for A, ``[L, (1,) r, K]``, and -1
    for B, ``[L, (1,) N, r]``.
    """
    if not isinstance(weights, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tensors, one per slice, got {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{name} is empty: pass one weight tensor per slice, at least one")
    first = weights[0]
    for i, weight in enumerate(weights):
        label = f"{name}[{i}]"
        check_dtype(label, weight, allowed)
        if weight.ndim not in (3, 4) or (weight.ndim == 4 and weight.shape[1] != 1):
            raise ValueError(
                f"{label} has shape {tuple(weight.shape)}; expected 3 or 4 dimensions, [L, out, in] or [L, 1, out, in] "
                "with 1 as the second"
            )
        if weight.dtype != first.dtype:
            raise TypeError(f"{label} has dtype {weight.dtype}, {name}[0] has {first.dtype}: slices share one dtype")
        if weight.device != first.device:
            raise ValueError(f"{label} is on {weight.device}, {name}[0] on {first.device}: slices share one device")
        same = (weight.shape[0], weight.shape[rank_dim]) == (first.shape[0], first.shape[rank_dim])
        if not same or (rank_dim == -2 and weight.shape[-1] != first.shape[-1]):
            what = "slots, rank and hidden size" if rank_dim == -2 else "slots and rank"
            raise ValueError(
                f"{label} has shape {tuple(weight.shape)}, {name}[0] {tuple(first.shape)}: slices must have equal "
                f"{what}"
            )
    widths = tuple([weight.shape[-3 - rank_dim] for weight in weights])
    return Weights(first.shape[0], first.shape[rank_dim], widths, first.dtype, first.device)


def storage_order(weights: Sequence[Tensor]) -> bool | None:
    """Return the storage order of all slices: True row-major, False with the last two dimensions swapped, else None."""
    orders = set()
    for weight in weights:
        row_major, swapped = weight.is_contiguous(), weight.transpose(-1, -2).is_contiguous()
        if not (row_major or swapped):
            return None
        if not (row_major and swapped):  # a slice of width 1 is stored either way
            orders.add(row_major)
    return None if len(orders) > 1 else orders.pop() if orders else True


def check_input(name: str, x: Any, weights: Weights, hidden: str) -> None:
    """Check x of a shrink: ``[T, K]`` on the device of A (``hidden`` names A), with its dtype unless A is FP8."""
    if weights.dtype.itemsize > 1:
        check_dtype(name, x, (weights.dtype,))
    check_device(name, x, weights.device)
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected rows, [T, {weights.widths[0]}]")
    if x.shape[1] != weights.widths[0]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: hidden size of {name} is {x.shape[1]}, {hidden} has "
            f"{weights.widths[0]}"
        )


def check_low_rank(name: str, h: Any, weights: Weights, rows: int, allowed: Sequence[torch.dtype]) -> None:
    """Check the output of a shrink or input of an expand: ``[n, T, r]`` on the device of the weights."""
    check_dtype(name, h, allowed)
    check_device(name, h, weights.device)
    shape = (len(weights.widths), rows, weights.rank)
    if tuple(h.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(h.shape)}, expected {shape} (slices, rows, rank)")


def check_output(
    name: str, y: Any, weights: Weights, offset_start: Any, allowed: Sequence[torch.dtype] = FLOATS
) -> None:
    """Check y of an expand: ``[T, W]`` on the device of B; all slices fit its columns from ``offset_start`` on."""
    check_dtype(name, y, allowed)
    check_device(name, y, weights.device)
    if isinstance(offset_start, bool) or not isinstance(offset_start, int):
        raise TypeError(f"offset_start must be an int, got {type(offset_start).__name__} {offset_start!r}")
    if y.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(y.shape)}; expected rows, [T, W]")
    end = offset_start + sum(weights.widths)
    if offset_start < 0 or end > y.shape[1]:
        raise ValueError(
            f"offset_start {offset_start} + slices {list(weights.widths)} end at column {end}, outside of {name} with "
            f"{y.shape[1]} columns"
        )


def check_stored_output(name: str, y: Any, weights: Weights, offset_start: Any) -> None:
    """Check y for kernels, which want rows without gaps, too."""
    check_output(name, y, weights, offset_start)
    if y.stride(1) != 1 and y.shape[1] > 1:
        raise ValueError(f"{name} needs stride 1 along its last dimension, got strides {y.stride()}")


def check_equal_rows(names: Names, x: Tensor, y: Tensor) -> None:
    """Raise ValueError unless x and y of a linear have equally many rows."""
    if x.shape[0] != y.shape[0]:
        raise ValueError(
            f"{names.input} has {x.shape[0]} rows and {names.output} has {y.shape[0]}; they must be equal"
        )


def check_ranks(lora_ranks: Any, weights: Weights) -> None:
    """Check true ranks: None (full width), or contiguous int32 ``[n, L]`` on the device of the weights."""
    if lora_ranks is None:
        return
    check_dtype("lora_ranks", lora_ranks, (torch.int32,))
    check_device("lora_ranks", lora_ranks, weights.device)
    shape = (len(weights.widths), weights.slots)
    if tuple(lora_ranks.shape) != shape or not lora_ranks.is_contiguous():
        raise ValueError(
            f"lora_ranks has shape {tuple(lora_ranks.shape)} and strides {lora_ranks.stride()}, expected contiguous "
            f"{shape} (slices, slots)"
        )


def check_slices(output_slices: Any, weights: Any) -> None:
    """Check ``output_slices[i] == B_i.shape[-2]`` for all n slices.

    Weights that are none are left to the operator, which says what is wrong with them.
    """
    if not isinstance(output_slices, (tuple, list)):
        raise TypeError(f"output_slices must be a tuple of ints, got {type(output_slices).__name__}")
    try:
        widths = [weight.shape[-2] for weight in weights]
    except (AttributeError, IndexError, TypeError):
        return
    if list(output_slices) != widths:
        raise ValueError(f"output_slices is {list(output_slices)}, the B weights are {widths} wide; they must be equal")


def check_parts(name: str, parts: Any, weights: Weights, contiguous: bool = False) -> None:
    """Check n low-rank operands ``[T', r]``, one per slice of the weights and all alike."""
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"{name} must be a tensor [n, T, r] or a tuple of n tensors [T, r], got {type(parts).__name__}")
    for i, part in enumerate(parts):
        fp8 = (torch.float8_e4m3fn, torch.float8_e5m2) if weights.dtype.itemsize == 1 else ()
        check_dtype(f"{name}[{i}]", part, (*FLOATS, *fp8))
        check_device(f"{name}[{i}]", part, weights.device)
        if part.dtype != parts[0].dtype:
            raise TypeError(f"{name}[{i}] has dtype {part.dtype}, {name}[0] has {parts[0].dtype}; use one dtype")
        if contiguous:
            check_contiguous(f"{name}[{i}]", part)
    shapes = [tuple(part.shape) for part in parts]
    wanted = (parts[0].shape[0] if parts and parts[0].ndim else 0, weights.rank)
    if shapes != [wanted] * len(weights.widths):
        raise ValueError(
            f"{name} has shape {shapes}, expected {len(weights.widths)} tensors {list(wanted)} (rows, rank)"
        )


# --- one slot or segment at a time: the operators named after the paper's --------------------------------------------


def weights_3d(weights: Tensor, name: str) -> Tensor:
    """View ``[L, out, in]`` or ``[L, 1, out, in]`` weights as ``[L, out, in]``; ``ValueError`` for any other shape."""
    if weights.dim() == 3:
        return weights
    if weights.dim() == 4 and weights.shape[1] == 1:
        return weights.squeeze(1)
    raise ValueError(f"{name} has shape {tuple(weights.shape)}; expected [slots, out, in] or [slots, 1, out, in]")


def check_slot_vector(slots: Tensor, name: str) -> None:
    """Raise ``ValueError`` / ``TypeError`` unless ``slots`` is a vector of integers; on any device, values unread."""
    if slots.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {slots.dtype}; expected an integer dtype (slot numbers, -1 = no adapter)")
    if slots.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(slots.shape)}; expected one slot per row, shape [rows]")


def check_slot_range(used: Sequence[int], num_slots: int, name: str) -> None:
    """Raise ``ValueError`` unless every slot of ``used`` is in ``[-1, num_slots)``."""
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
    for label, tensor in (("inputs", inputs), (name, weights), ("output_tensor", output)):
        check_dtype(label, tensor, WITH_DOUBLE)
        check_device(label, tensor, weights.device)
    # float64 anywhere selects float64 arithmetic; the input of an expand may be the float32 result of a shrink
    if inputs.dtype != weights.dtype and torch.float64 not in (inputs.dtype, weights.dtype):
        check_dtype("inputs", inputs, (weights.dtype,) if shrink else (weights.dtype, torch.float32))
    if inputs.shape[1] != weights.shape[2]:
        what = "hidden size" if shrink else "rank"
        raise ValueError(f"{what} of inputs is {inputs.shape[1]} but {name} expects {weights.shape[2]}")
    if shrink and output.shape[1] < weights.shape[1]:
        raise ValueError(f"output_tensor has {output.shape[1]} columns; the rank of {name} is {weights.shape[1]}")
    check_scale("scaling", scaling)
    check_slot_vector(slots, "lora_indices_tensor")
    rows, entries = inputs.shape[0], slots.shape[0]
    if entries > rows or (entries == 1 and rows > 1):
        raise ValueError(f"lora_indices_tensor has {entries} entries for {rows} rows; expected one slot per row")
    return weights


def check_slice(weights: Tensor, output: Tensor, slice_offset: int, slice_size: int) -> None:
    """Raise ``ValueError`` unless columns ``[slice_offset, slice_offset + slice_size)`` exist and fit the width of the
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
    """Return per-row slots ``[T]`` of segments: slot b ``lengths[b]`` times, -1 for rows from ``token_nums`` on.

    ``ValueError`` when the segments are not ``batches`` many, do not follow each other from row 0, do not cover exactly
    ``token_nums`` rows, or ``token_nums`` exceeds the rows of ``inputs``.
    """
    for label, tensor in (("b_seq_start_loc", starts), ("seq_len_tensor", lengths), ("lora_indices_tensor", slots)):
        check_slot_vector(tensor, label)
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
