"""What the FP8 operators demand of scales, and how their scales lie: the modes of `Scheme`.

Weights ``W [L, N, K]`` are FP8 always, activations are real (*weight-only*) or FP8 (*w8a8*, then with scales of their
own). With stored values q, for row t with slot l and column c:

    per tensor   acc[t, c] = a(t) * b[l] * sum_k qx[t, k] * qw[l, c, k]
    per channel  acc[t, c] = a(t) * b[l, c] * sum_k qx[t, k] * qw[l, c, k]
    block-wise   acc[t, c] = sum_g a(t, g) * b[l, c // group_n, g] * sum_{k in group g} qx[t, k] * qw[l, c, k]

where ``qx`` is the activation itself and ``a = 1`` in weight-only mode. Errors as in `punica.ops.checks`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.checks import (
    FLOATS,
    Names,
    Weights,
    check_dtype,
    check_keywords,
    describe_weights,
)
from punica.ops.quant import FP8_DTYPES


class Scheme(NamedTuple):
    """How the scales of one product lie: ``quant_args`` of the wrapper, one by one.

    ``group_k``, ``group_n``: block sizes along K and N, both 0 when not block-wise; ``use_fp8_w8a8``: activations are
    FP8 too; ``per_channel_quant``: one scale per output column, else (and not block-wise) one per slot.
    """

    group_k: int = 0
    group_n: int = 0
    use_fp8_w8a8: bool = False
    per_channel_quant: bool = False

    @classmethod
    def of(cls, quant_args: Mapping[str, Any]) -> "Scheme":
        """From a mapping; TypeError for unknown keys or wrong types, ValueError for sizes that make no scheme."""
        check_keywords("quant_args", quant_args, cls._fields)
        scheme = cls(**quant_args)
        scheme.check()
        return scheme

    @property
    def block_wise(self) -> bool:
        """Whether scales belong to blocks."""
        return self.group_k > 0

    def check(self) -> None:
        """TypeError for a field of another type; ValueError for a negative size, one block size without the other, or
        blocks per channel.
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


PER_CHANNEL = Scheme(per_channel_quant=True)
"""Weight-only with one scale per output column: what the layers hold."""


class Scales(NamedTuple):
    """How the weights' scales of all slices lie: strides of slot, column (or column block) and K block; 0 where a scale
    does not depend on it."""

    slot: tuple[int, ...]
    column: tuple[int, ...]
    block: tuple[int, ...]


def is_plain(weights: Any, b_scale: Any) -> bool:
    """Whether this is the unquantised operator: no scales, and weights that are not FP8."""
    listed = isinstance(weights, (tuple, list)) and len(weights) > 0
    scaled = not (b_scale is None or (isinstance(b_scale, (tuple, list)) and not b_scale))
    return not scaled and not (listed and isinstance(weights[0], Tensor) and weights[0].dtype in FP8_DTYPES)


def check_plain(name: str, x: Any, a_scale: Any, scheme: Scheme) -> None:
    """Nothing of FP8 may be asked for without FP8 weights."""
    scheme.check()
    if scheme.use_fp8_w8a8:
        raise TypeError("use_fp8_w8a8 needs float8 weights with b_scale; these weights are not float8")
    if isinstance(x, Tensor) and x.dtype in FP8_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}, the weights are not float8: quantise both, or neither")
    if a_scale is not None or scheme != Scheme():
        raise ValueError(f"a_scale and {scheme} need float8 weights with b_scale; leave them out for other weights")


class Form(NamedTuple):
    """What of a tensor of scales decides whether it is legal and how it is read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form_of(name: str, scale: Any) -> Form:
    """The form of a tensor of scales; TypeError unless it is float32."""
    check_dtype(name, scale, (torch.float32,))
    return Form(tuple(scale.shape), scale.stride(), scale.dtype, scale.device)


def forms_of(name: str, scales: Any) -> tuple[Form, ...]:
    """The forms of the scales of all slices; none for None."""
    if scales is not None and not isinstance(scales, (tuple, list)):
        raise TypeError(f"{name} must be a list of tensors, one per slice, got {type(scales).__name__}")
    return tuple([form_of(f"{name}[{i}]", scale) for i, scale in enumerate(scales or ())])


def check_scales(name: str, forms: Sequence[Form], weights: Weights, rank_is_out: bool, scheme: Scheme) -> Scales:
    """The scales of checked weights: one tensor per slice, on their device, of the shape that the scheme says.

    ``rank_is_out``: the columns are ranks (shrink), and K the widths.
    """
    slices = len(weights.widths)
    if not forms:
        missing = f"{name} is missing: weights of {weights.dtype} need one tensor of scales per slice, {slices}"
        raise ValueError(missing) if scheme.use_fp8_w8a8 else TypeError(missing)
    if len(forms) != slices:
        raise ValueError(f"{name} has {len(forms)} tensors, the weights have {slices} slices; must be equal")
    strides = []
    for i, (form, width) in enumerate(zip(forms, weights.widths, strict=True)):
        _check_on(f"{name}[{i}]", form, weights)
        columns, k = (weights.rank, width) if rank_is_out else (width, weights.rank)
        shape = _scale_shape(weights.slots, columns, k, scheme)
        if form.shape not in (shape, (shape[0], 1, *shape[1:])):
            raise ValueError(
                f"{name}[{i}] has shape {form.shape}, slice {i} needs {shape} (a 1 may follow the slots): "
                f"{_meaning(scheme)}"
            )
        stride = form.strides if form.shape == shape else (form.strides[0], *form.strides[2:])
        strides.append((*stride, 0, 0)[:3])
    slot, column, block = zip(*strides, strict=True)
    return Scales(slot, column, block)


def check_activation(
    name: str, x: Any, a_scale: Form | None, k: int, scheme: Scheme, weights: Weights
) -> tuple[int, int]:
    """x is what the scheme says, real or FP8 with scales; strides of ``a_scale`` along rows and groups (0: shared).

    ``k``: the contraction size of the product; x has its rows in the last dimension but one.
    """
    check_dtype(name, x, (*FLOATS, *FP8_DTYPES))
    if x.dtype in FP8_DTYPES:
        if a_scale is None:
            raise ValueError(f"a_scale required for fp8 activations: {name} has dtype {x.dtype}")
        if not scheme.use_fp8_w8a8:
            raise TypeError(f"{name} has dtype {x.dtype}; float8 activations need use_fp8_w8a8=True")
    elif scheme.use_fp8_w8a8:
        raise TypeError(f"{name} has dtype {x.dtype}; use_fp8_w8a8 needs float8 activations with a_scale")
    elif a_scale is not None:
        raise ValueError(f"a_scale is given, but {name} has dtype {x.dtype}: only float8 activations have scales")
    if a_scale is None:
        return 0, 0
    _check_on("a_scale", a_scale, weights)
    rows, (shape, strides) = x.shape[-2] if x.ndim > 1 else 0, a_scale[:2]
    groups = -(-k // scheme.group_k) if scheme.block_wise else 1
    if math.prod(shape) == 1:
        return 0, 0
    if groups > 1 and shape == (rows, groups):
        return strides[0], strides[1]
    if shape in ((rows,), (rows, 1)):
        return strides[0], 0
    wanted = f"one element, [{rows}] or [{rows}, 1]" + (f" or [{rows}, {groups}]" if groups > 1 else "")
    raise ValueError(f"a_scale has shape {shape}, expected {wanted}")


def describe_fp8(names: Names, weights: Any, rank_dim: int) -> Weights:
    """`describe_weights` of FP8 weights."""
    return describe_weights(names.a if rank_dim == -2 else names.b, weights, rank_dim, FP8_DTYPES)


def _check_on(name: str, form: Form, weights: Weights) -> None:
    if form.device != weights.device:
        raise ValueError(f"{name} is on {form.device}, the weights are on {weights.device}; move one of them")


def _scale_shape(slots: int, columns: int, k: int, scheme: Scheme) -> tuple[int, ...]:
    if scheme.block_wise:
        return slots, -(-columns // scheme.group_n), -(-k // scheme.group_k)
    return (slots, columns) if scheme.per_channel_quant else (slots,)


def _meaning(scheme: Scheme) -> str:
    if scheme.block_wise:
        return f"blocks of group_n {scheme.group_n} x group_k {scheme.group_k}"
    return "one per slot and channel (per_channel_quant)" if scheme.per_channel_quant else "one per slot (per tensor)"
