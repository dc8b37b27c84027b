"""Checks and views of the operands of the ``add_*`` methods, shared by all backends.

Everything here looks only at shapes, dtypes and devices, so it never synchronises, and it runs before the first write:
after an exception every tensor is as it was.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Slices = torch.Tensor | Sequence[torch.Tensor]
Weights = tuple[torch.Tensor, ...]


def check_keywords(method: str, given: Mapping[str, Any], allowed: Sequence[str] = ()) -> None:
    """TypeError listing the keywords that ``method`` does not know."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        known = ", ".join(allowed) or "none"
        raise TypeError(f"{method} got unknown keyword arguments {unknown}; known: {known}")


def check_scale(scale: Any) -> None:
    """TypeError unless ``scale`` is a Python number, ValueError unless it is finite."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a Python float, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, must be finite")


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is a bool, TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__} {value!r}")
    return value


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype] = FLOAT_DTYPES) -> None:
    """TypeError unless ``tensor`` is a tensor of an allowed dtype."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected one of {[str(dtype) for dtype in allowed]}")


def stacked(name: str, weights: Any, *, same_shape: bool) -> Weights:
    """The stacked weights of n slices as a tuple, each ``[L, out, in]`` or ``[L, 1, out, in]``.

    All slices agree in dtype, device, L and last dimension; with ``same_shape`` also in ``out``.
    """
    if isinstance(weights, torch.Tensor) or not isinstance(weights, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tensors, one per slice, got {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{name} is empty, expected one tensor per slice")
    first = weights[0]
    for i, weight in enumerate(weights):
        check_dtype(f"{name}[{i}]", weight)
        if i and weight.shape == first.shape and weight.dtype == first.dtype and weight.device == first.device:
            continue
        if weight.ndim not in (3, 4) or (weight.ndim == 4 and weight.shape[1] != 1):
            raise ValueError(f"{name}[{i}] has shape {tuple(weight.shape)}, expected [L, out, in] or [L, 1, out, in]")
        if weight.dtype != first.dtype:
            raise TypeError(f"{name}[{i}] has dtype {weight.dtype}, {name}[0] has {first.dtype}; use one dtype")
        if weight.device != first.device:
            raise ValueError(f"{name}[{i}] is on {weight.device}, {name}[0] on {first.device}; slices share a device")
        agree = (weight.shape[0], weight.shape[-1]) == (first.shape[0], first.shape[-1])
        if not agree or (same_shape and weight.shape != first.shape):
            what = "the same shape" if same_shape else "equal slots and rank"
            raise ValueError(
                f"{name}[{i}] has shape {tuple(weight.shape)}, {name}[0] {tuple(first.shape)}; slices must have {what}"
            )
    return tuple(weights)


def check_ranks(lora_ranks: Any, weights: Weights) -> torch.Tensor | None:
    """True ranks: None (full width) or an int32 tensor ``[n_slices, L]`` on the device of the weights."""
    if lora_ranks is None:
        return None
    check_dtype("lora_ranks", lora_ranks, (torch.int32,))
    expected = (len(weights), weights[0].shape[0])
    if tuple(lora_ranks.shape) != expected:
        raise ValueError(f"lora_ranks has shape {tuple(lora_ranks.shape)}, expected [n_slices, L] = {list(expected)}")
    check_device("lora_ranks", lora_ranks, weights)
    return lora_ranks


def check_device(name: str, tensor: torch.Tensor, weights: Weights) -> None:
    """ValueError unless ``tensor`` lies on the device of the weights."""
    if tensor.device != weights[0].device:
        raise ValueError(f"{name} is on {tensor.device}, the weights are on {weights[0].device}; move one of them")


def flattened(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` with its leading dimensions flattened to rows (a copy where the strides demand it: it is only read)."""
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected rows: at least 2 dimensions")
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def viewed_as_rows(name: str, y: torch.Tensor) -> torch.Tensor:
    """``y`` as a 2-D view of its memory; ValueError where only a copy would do, since y is written in place."""
    if y.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(y.shape)}, expected rows: at least 2 dimensions")
    try:
        return y.view(math.prod(y.shape[:-1]), y.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} with shape {tuple(y.shape)} and strides {y.stride()} cannot be viewed as 2-D rows without a copy, "
            "so it cannot be updated in place; pass a contiguous tensor"
        ) from None


def check_low_rank(
    name: str, value: Any, weights: Weights, rows: int, rank: int, allowed: Sequence[torch.dtype] = FLOAT_DTYPES
) -> None:
    """Check a low-rank operand: one tensor ``[n, T', r]``, or n tensors ``[T', r]`` of one dtype."""
    if isinstance(value, torch.Tensor):
        check_dtype(name, value, allowed)
        shapes = [tuple(value.shape[1:])] * value.shape[0] if value.ndim == 3 else [tuple(value.shape)]
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            check_dtype(f"{name}[{i}]", part, allowed)
            if part.dtype != value[0].dtype:
                raise TypeError(f"{name}[{i}] has dtype {part.dtype}, {name}[0] has {value[0].dtype}; use one dtype")
        shapes = [tuple(part.shape) for part in value]
    else:
        raise TypeError(f"{name} must be a tensor [n, T, r] or a tuple of n tensors [T, r], got {type(value).__name__}")
    slices = len(weights)
    if shapes != [(rows, rank)] * slices:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else shapes
        raise ValueError(
            f"{name} has shape {got}, expected a tensor {[slices, rows, rank]} or {slices} tensors {[rows, rank]} "
            "(slices, rows, rank)"
        )
    for part in (value,) if isinstance(value, torch.Tensor) else value:
        check_device(name, part, weights)


def slice_groups(value: Slices, weights: Weights, lora_ranks: torch.Tensor | None) -> Iterator[tuple]:
    """``(first slice, operand [m, T', r], weights of its m slices, their ranks)``, one op call each.

    A tensor over all slices is one call. Separate tensors are addressed one by one, without copying them together.
    """
    if isinstance(value, torch.Tensor):
        yield 0, value, weights, lora_ranks
        return
    for i, part in enumerate(value):
        yield i, part.unsqueeze(0), weights[i : i + 1], None if lora_ranks is None else lora_ranks[i : i + 1]


def shrink_input(x: Any, weights: Weights) -> torch.Tensor:
    """``x`` as rows ``[T', in]``, checked against the A weights: dtype, device and hidden size."""
    check_dtype("x", x, (weights[0].dtype,))
    check_device("x", x, weights)
    if x.shape[-1:] != weights[0].shape[-1:]:
        raise ValueError(f"x has shape {tuple(x.shape)}, the hidden size of the A weights is {weights[0].shape[-1]}")
    return flattened("x", x)


def expand_output(y: Any, weights: Weights) -> torch.Tensor:
    """``y`` as a view of rows ``[T', W]``, checked for dtype and device."""
    check_dtype("y", y)
    check_device("y", y, weights)
    return viewed_as_rows("y", y)


def check_pair(weights_a: Weights, weights_b: Weights) -> None:
    """A and B belong together: as many slices, one rank, one device, as many slots."""
    if len(weights_a) != len(weights_b):
        raise ValueError(f"lora_a_stacked has {len(weights_a)} slices, lora_b_stacked {len(weights_b)}; must be equal")
    check_device("lora_a_stacked", weights_a[0], weights_b)
    (slots_a, rank_a), (slots_b, rank_b) = (
        (weights_a[0].shape[0], weights_a[0].shape[-2]),
        (weights_b[0].shape[0], weights_b[0].shape[-1]),
    )
    if rank_a != rank_b:
        raise ValueError(
            f"lora_a_stacked has rank {rank_a}, lora_b_stacked {rank_b}; must be equal. Rank-sharded weights go "
            "through add_shrink, a collective and add_expand"
        )
    if slots_a != slots_b:
        raise ValueError(f"lora_a_stacked has {slots_a} slots, lora_b_stacked {slots_b}; must be equal")


def check_columns(output_slices: Any, weights: Weights, offset_start: Any, width: int) -> None:
    """``output_slices[i] == B_i.shape[-2]`` for all n slices, and all of them fit in ``width`` columns of y."""
    if isinstance(offset_start, bool) or not isinstance(offset_start, int):
        raise TypeError(f"offset_start must be an int, got {type(offset_start).__name__} {offset_start!r}")
    if not isinstance(output_slices, (tuple, list)):
        raise TypeError(f"output_slices must be a tuple of ints, got {type(output_slices).__name__}")
    widths = [weight.shape[-2] for weight in weights]
    if list(output_slices) != widths:
        raise ValueError(f"output_slices is {list(output_slices)}, the B weights are {widths} wide; they must be equal")
    if offset_start < 0 or offset_start + sum(widths) > width:
        raise ValueError(
            f"offset_start {offset_start} + slices {widths} end at column {offset_start + sum(widths)}, "
            f"outside of y with {width} columns"
        )
