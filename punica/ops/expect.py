"""`expect`, the checker of the operators' tensors, with one wording: the value, what is expected, and whose sizes that
repeats; and checks of plain arguments.

TypeError for types and dtypes, ValueError for shapes, strides, ranges and devices. Only shapes, strides, dtypes and
devices count: no device is read or written, so an operator that checks first is left undone by bad input.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from punica.checks import check_int, clip

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WITH_DOUBLE = (*FLOATS, torch.float64)
FLOAT32 = (torch.float32,)
MOST_FLOAT32 = torch.finfo(torch.float32).max
INT32 = (torch.int32,)

Sizes = dict[str, Any]
"""Sizes of a call by letter, and by letters the operand that has them: ``{"n": 2, "r": 8, "of n r": "lora_b"}``."""

_WORDS = {
    "T": "rows", "K": "hidden size", "r": "rank", "n": "slices", "L": "slots", "N": "output size", "E": "experts",
    "k": "experts per token", "R": "rank of B", "P": "ids per slot", "B": "blocks per slot", "*": "any",
}  # fmt: skip


_DIMS: dict[str, tuple[int, tuple[tuple[int, str], ...], int, str]] = {}
"""Parsed ``dims``: their number, letters by place, place of ``(1)`` (-1: none), key of their operand in `Sizes`."""


def expect(
    name: str, tensor: Any, dims: str | None = None, *, dtype: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None, sizes: Sizes | None = None, contiguous: bool = False,
) -> None:  # fmt: skip
    """Check one operand.

    Args:
        dims: a letter per dimension, ``"n T r"``; ``*`` for a dimension of any size, ``(1)`` for one of size 1 that may
            be left out.
        sizes: of the letters in this call. Letters that are not there are added.
        device: of the weights.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if dtype is not None and tensor.dtype not in dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtype))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the weights are on {device}; move one of them")
    if dims is not None:
        count, letters, place, key = _DIMS.get(dims) or _parse(dims)
        shape: Sequence[int] = tensor.shape
        if len(shape) != count:
            if len(shape) != count + 1 or place < 0 or shape[place] != 1:
                raise ValueError(_shape_message(name, tensor, dims, sizes or {}))
            shape = (*shape[:place], *shape[place + 1 :])
        if sizes is not None:
            for i, letter in letters:
                size = shape[i]
                if sizes.setdefault(letter, size) != size:
                    raise ValueError(_shape_message(name, tensor, dims, sizes, letter))
            sizes.setdefault(key, name)
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; make it contiguous")


def _parse(dims: str) -> tuple[int, tuple[tuple[int, str], ...], int, str]:
    given = dims.split()
    named = [letter for letter in given if letter != "(1)"]
    letters = tuple([(i, letter) for i, letter in enumerate(named) if letter != "*"])
    _DIMS[dims] = found = len(named), letters, given.index("(1)") if "(1)" in given else -1, f"of {dims}"
    return found


def _shape_message(name: str, tensor: Tensor, dims: str, sizes: Sizes, wrong: str = "") -> str:
    wanted = ", ".join([str(sizes.get(letter, letter)) for letter in dims.split()])
    words = ", ".join([_WORDS.get(letter, letter) for letter in dims.split() if letter != "(1)"])
    owners = [sizes[key] for key in sizes if key.startswith("of ") and wrong in key.split()]
    as_in = f", {_WORDS.get(wrong, wrong)} {sizes[wrong]} as in {owners[0]}" if owners else ""
    return f"{name} has shape {tuple(tensor.shape)}, expected ({wanted}) ({words}){as_in}"


def expect_slices(
    name: str, tensors: Any, dims: str, *, dtype: Sequence[torch.dtype], sizes: Sizes, count: int | None = None,
    device: torch.device | None = None, contiguous: bool = False,
) -> None:  # fmt: skip
    """Check one operand per slice, of one dtype and device; ``count``: number of slices of the weights."""
    check_list(name, tensors, count)
    for i, tensor in enumerate(tensors):
        if i and isinstance(tensor, Tensor) and (tensor.is_contiguous() or not contiguous):
            first = tensors[0]
            if (tensor.shape, tensor.dtype, tensor.device) == (first.shape, first.dtype, first.device):
                continue
        expect(f"{name}[{i}]", tensor, dims, dtype=dtype, device=device, sizes=sizes, contiguous=contiguous)
        if tensor.dtype != tensors[0].dtype:
            both = f"{name}[{i}] has dtype {tensor.dtype}, {name}[0] has {tensors[0].dtype}"
            raise TypeError(f"{both}: slices share one dtype")
        device = tensor.device


def check_list(name: str, tensors: Any, count: int | None = None) -> None:
    if not isinstance(tensors, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tensors, one per slice, got {type(tensors).__name__}")
    if not tensors and count is None:
        raise ValueError(f"{name} is empty: pass one tensor for each of the slices")
    if count is not None and len(tensors) != count:
        raise ValueError(f"{name} has {len(tensors)} tensors, the weights have {count} slices; must be equal")


def check_keywords(method: str, given: Mapping[str, Any], allowed: Sequence[str] = ()) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        known = ", ".join(allowed) or "none"
        raise TypeError(f"{method} got unknown keyword arguments {unknown}; known: {known}")


def check_scale(name: str, scale: Any) -> None:
    """Raise TypeError unless ``scale`` is a Python number, ValueError unless it is finite in float32."""
    if type(scale) is not float and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"{name} must be a Python float, got {type(scale).__name__} {scale!r}")
    if not abs(scale) <= MOST_FLOAT32:
        raise ValueError(f"{name} is {clip(scale)}, must be finite in float32 (lora_alpha / rank)")


def check_columns(name: str, y: Tensor, offset_name: str, offset: Any, widths: Sequence[int]) -> None:
    """Raise ValueError unless slices of these widths fit an output from column ``offset``, an int, on, each in memory
    of its own, which `Tensor.expand` does not give.
    """
    if 0 in y.stride() and any([step == 0 and size > 1 for step, size in zip(y.stride(), y.shape, strict=True)]):
        raise ValueError(f"{name} has strides {y.stride()} for shape {tuple(y.shape)}: rows share memory; clone it")
    end = check_int(offset_name, offset) + sum(widths)
    if offset < 0 or end > y.shape[-1]:
        raise ValueError(f"{offset_name} {offset}: column {end} is outside of {name} with {y.shape[-1]} columns")
