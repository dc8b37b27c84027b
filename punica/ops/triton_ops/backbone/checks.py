"""Checks of the backbone kernels' operands."""

import torch
from torch import Tensor

from punica.ops.expect import FLOATS
from punica.ops.quant import E4M3


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the shape of ``tensor``; ValueError when it is not ``shape``, where None is any size."""
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], got {list(tensor.shape)}")
    return tuple(tensor.shape)


def check_same(like: Tensor, **tensors: Tensor) -> None:
    """Raise TypeError: ``like`` has a dtype that no kernel has, or one of ``tensors`` another dtype or device."""
    if like.dtype not in FLOATS:
        raise TypeError(f"dtype must be one of {list(FLOATS)}, got {like.dtype}; convert the model")
    for name, tensor in tensors.items():
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise TypeError(
                f"{name} must be {like.dtype} on {like.device}, got {tensor.dtype} on {tensor.device}; "
                "a model, its activations and its cache share dtype and device"
            )


def check_dense(like: Tensor, **operands: tuple[Tensor, tuple[int | None, ...]]) -> None:
    """Check operands with their shapes: rows without gaps, of the dtype and on the device of ``like``."""
    for name, (tensor, shape) in operands.items():
        check_shape(name, tensor, shape)
        check_rows(name, tensor)
    check_same(like, **{name: tensor for name, (tensor, _) in operands.items()})


def check_row_scales(name: str, weight: Tensor, scale: Tensor | None, device: torch.device) -> bool:
    """Tell whether ``weight [N, K]`` is FP8. TypeError, ValueError: it is float8_e4m3fn on ``device`` and ``scale``, if
    any, float32 ``[N]``; or it has a scale and is not.
    """
    if weight.dtype != E4M3 and scale is None:
        return False
    if weight.dtype != E4M3 or scale is None or weight.device != device:
        given = f"{weight.dtype} on {weight.device} {'without' if scale is None else 'with'} scales"
        raise TypeError(f"{name} must be a float with no scales, or {E4M3} on {device} with them, got {given}")
    check_shape(f"scale of {name}", scale, tuple(weight.shape[:1]))
    check_numbers(device, torch.float32, **{f"scale of {name}": scale})
    return True


def check_cache(keys: Tensor, values: Tensor, like: Tensor) -> None:
    """Check keys and values of one layer: ``[rows, Hkv, D]``, contiguous, of ``like``'s dtype or float8_e4m3fn."""
    check_shape("keys", keys, (None, None, None))
    check_shape("values", values, tuple(keys.shape))
    if keys.dtype == values.dtype == E4M3 and keys.device == values.device == like.device:
        check_same(like)
    else:
        check_same(like, keys=keys, values=values)
    if not keys.shape[1] or not keys.shape[2]:
        raise ValueError(f"keys must have at least one head and one element per head, got {list(keys.shape)}")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be contiguous; give the cache of a layer as it was made")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError when the elements of a row are not side by side."""
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}; make it contiguous")


def check_heads(**tensors: Tensor) -> None:
    """Raise ValueError when the heads of a row are not side by side."""
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            raise ValueError(f"{name} must have heads side by side, got strides {tensor.stride()}; make it contiguous")


def check_numbers(device: torch.device, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise TypeError unless ``tensors`` are of this dtype, on ``device``, ValueError unless they are contiguous."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.device != device:
            given = f"{tensor.dtype} on {tensor.device}"
            raise TypeError(f"{name} must be {dtype} on {device}, got {given}; convert it once per step")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; make it so once per step")
