"""FP8 scales: the modes of `Scheme`, and the checks of scales and of quantised activations.

Weights ``W [L, N, K]`` are FP8 always, activations are real (*weight-only*) or FP8 (*w8a8*, then with scales of their
own). With stored values q, for row t with slot l and column c:

    per tensor   acc[t, c] = a(t) * b[l] * sum_k qx[t, k] * qw[l, c, k]
    per channel  acc[t, c] = a(t) * b[l, c] * sum_k qx[t, k] * qw[l, c, k]
    block-wise   acc[t, c] = sum_g a(t, g) * b[l, c // group_n, g] * sum_{k in group g} qx[t, k] * qw[l, c, k]

where ``qx`` is the activation itself and ``a = 1`` in weight-only mode. Errors as in `punica.ops.checks`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from punica.ops.checks import FLOATS, Weights, check_device, check_dtype, check_keywords
from punica.ops.quant import FP8_DTYPES


class Scheme(NamedTuple):
    """Layout of the scales of one product: ``quant_args`` of the wrapper, one by one.

    ``group_k``, ``group_n``: block sizes along K and N, both 0 when not block-wise; ``use_fp8_w8a8``: activations are
    FP8 too; ``per_channel_quant``: one scale per output column, else (and not block-wise) one per slot.
    """

    group_k: int = 0
    group_n: int = 0
    use_fp8_w8a8: bool = False
    per_channel_quant: bool = False

    @classmethod
    def of(cls, quant_args: Mapping[str, Any]) -> "Scheme":
        """Build a scheme from a mapping; TypeError for unknown keys or types, ValueError for sizes of no scheme."""
        check_keywords("quant_args", quant_args, cls._fields)
        scheme = cls(**quant_args)
        scheme.check()
        return scheme

    @property
    def block_wise(self) -> bool:
        """True where scales belong to blocks."""
        return self.group_k > 0

    def check(self) -> None:
        """Raise TypeError for a field of another type; ValueError for a negative size, one block size without the
        other, or blocks per channel.
        """
        for name, kind in (("group_k", int), ("group_n", int), ("use_fp8_w8a8", bool), ("per_channel_quant", bool)):
            value = getattr(self, name)
            if type(value) is not kind:
                raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__} {value!r}")
        if min(self.group_k, self.group_n) < 0 or (self.group_k > 0) != (self.group_n > 0):
            raise ValueError(
                f"group_k is {self.group_k} and group_n {self.group_n}; block-wise scales need both positive, others "
                "both 0"
            )
        if self.block_wise and self.per_channel_quant:
            raise ValueError("block-wise scales (group_k, group_n) and per_channel_quant exclude each other; give one")


PLAIN = Scheme()
"""Scheme of weights without scales; with scales: weight-only, one scale per slot."""
PER_CHANNEL = Scheme(per_channel_quant=True)
"""Weight-only with one scale per output column: what the layers hold."""


class Scales(NamedTuple):
    """Strides of the weights' scales, per slice: of slot, column (or column block) and K block; 0 where a scale does
    not depend on it."""

    slot: tuple[int, ...]
    column: tuple[int, ...]
    block: tuple[int, ...]


def check_no_scheme(scheme: Scheme) -> None:
    """Raise TypeError, ValueError for a scheme that needs scales, of weights without them."""
    if scheme.use_fp8_w8a8:
        raise TypeError("use_fp8_w8a8 needs float8 weights with b_scale; these weights are not float8")
    if scheme != PLAIN:
        raise ValueError(f"{scheme} needs float8 weights with b_scale; leave it out for other weights")


def same_activations(shrink: Scheme, expand: Scheme) -> None:
    """Raise ValueError where only one of two products quantises its activations."""
    if shrink.use_fp8_w8a8 != expand.use_fp8_w8a8:
        raise ValueError("use_fp8_w8a8 differs between shrink and expand; quantise the activations of both or neither")


def check_scales(name: str, scales: Any, weights: Weights, rank_is_out: bool, scheme: Scheme) -> Scales:
    """Check the scales of checked weights and return their strides: one float32 tensor per slice, on their device, of
    the shape that the scheme says.

    ``rank_is_out``: the columns are ranks (shrink), and K the widths.
    """
    if scales is not None and not isinstance(scales, (tuple, list)):
        raise TypeError(f"{name} must be a list of tensors, one per slice, got {type(scales).__name__}")
    slices = len(weights.widths)
    if not scales:
        missing = f"{name} is missing: weights of {weights.dtype} need one tensor of scales per slice, {slices}"
        raise ValueError(missing) if scheme.use_fp8_w8a8 else TypeError(missing)
    if len(scales) != slices:
        raise ValueError(f"{name} has {len(scales)} tensors, the weights have {slices} slices; must be equal")
    strides = []
    for i, (scale, width) in enumerate(zip(scales, weights.widths, strict=True)):
        check_dtype(f"{name}[{i}]", scale, (torch.float32,))
        check_device(f"{name}[{i}]", scale, weights.device)
        columns, k = (weights.rank, width) if rank_is_out else (width, weights.rank)
        shape, found = _scale_shape(weights.slots, columns, k, scheme), tuple(scale.shape)
        if found not in (shape, (shape[0], 1, *shape[1:])):
            raise ValueError(
                f"{name}[{i}] has shape {found}, slice {i} needs {shape} (a 1 may follow the slots): {_meaning(scheme)}"
            )
        stride = scale.stride() if found == shape else (scale.stride(0), *scale.stride()[2:])
        strides.append((*stride, 0, 0)[:3])
    slot, column, block = zip(*strides, strict=True)
    return Scales(slot, column, block)


def check_activation(
    name: str, x: Any, x_scale: Any, k: int, scheme: Scheme, weights: Weights
) -> tuple[int, int] | None:
    """Check that x is what scheme and weights say, real or FP8 with scales, and return the strides of ``x_scale`` along
    rows and groups (0: shared), None without scales.

    ``k``: the contraction size of the product; x has its rows in the last dimension but one.
    """
    check_dtype(name, x, (*FLOATS, torch.float64, *FP8_DTYPES))
    if weights.dtype not in FP8_DTYPES and x.dtype in FP8_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}, the weights are not float8: quantise both, or neither")
    if x.dtype in FP8_DTYPES:
        if x_scale is None:
            raise ValueError(f"a_scale required for fp8 activations: {name} has dtype {x.dtype}")
        if not scheme.use_fp8_w8a8:
            raise TypeError(f"{name} has dtype {x.dtype}; float8 activations need use_fp8_w8a8=True")
    elif scheme.use_fp8_w8a8:
        raise TypeError(f"{name} has dtype {x.dtype}; use_fp8_w8a8 needs float8 activations with a_scale")
    elif x_scale is not None:
        raise ValueError(f"a_scale is given, but {name} has dtype {x.dtype}: only float8 activations have scales")
    if x_scale is None:
        return None
    check_dtype("a_scale", x_scale, (torch.float32,))
    check_device("a_scale", x_scale, weights.device)
    rows, shape, strides = x.shape[-2] if x.ndim > 1 else 0, tuple(x_scale.shape), x_scale.stride()
    groups = -(-k // scheme.group_k) if scheme.block_wise else 1
    if math.prod(shape) == 1:
        return 0, 0
    if groups > 1 and shape == (rows, groups):
        return strides[0], strides[1]
    if shape in ((rows,), (rows, 1)):
        return strides[0], 0
    wanted = f"one element, [{rows}] or [{rows}, 1]" + (f" or [{rows}, {groups}]" if groups > 1 else "")
    raise ValueError(f"a_scale has shape {shape}, expected {wanted}")


def _scale_shape(slots: int, columns: int, k: int, scheme: Scheme) -> tuple[int, ...]:
    if scheme.block_wise:
        return slots, -(-columns // scheme.group_n), -(-k // scheme.group_k)
    return (slots, columns) if scheme.per_channel_quant else (slots,)


def _meaning(scheme: Scheme) -> str:
    if scheme.block_wise:
        return f"blocks of group_n {scheme.group_n} x group_k {scheme.group_k}"
    return "one per slot and channel (per_channel_quant)" if scheme.per_channel_quant else "one per slot (per tensor)"
