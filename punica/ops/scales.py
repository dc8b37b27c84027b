"""Scales of FP8 products: the modes of `Scheme`, checks of scales and activations, and the float32 values behind them.

Weights ``W [L, N, K]`` are FP8 always, activations are real (*weight-only*) or FP8 (*w8a8*, then with scales of their
own). With stored values q, for row t with slot l and column c:

    per tensor   acc[t, c] = a(t) * b[l] * sum_k qx[t, k] * qw[l, c, k]
    per channel  acc[t, c] = a(t) * b[l, c] * sum_k qx[t, k] * qw[l, c, k]
    block-wise   acc[t, c] = sum_g a(t, g) * b[l, c // group_n, g] * sum_{k in group g} qx[t, k] * qw[l, c, k]

where ``qx`` is the activation itself and ``a = 1`` in weight-only mode. Weights of experts, ``[L, E, N, K]``, and
their scales have a dimension more. Scales of activations: one element, one per row, or one per row and group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.expect import FLOAT32, WITH_DOUBLE, check_keywords, check_list, expect
from punica.ops.quant import FP8_DTYPES, FP8_MAX, block_counts, over_elements, upcast


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
    def of(cls, quant_args: Mapping[str, Any]) -> Scheme:
        """Build a scheme from a mapping; TypeError for unknown keys or types, ValueError for sizes of no scheme."""
        check_keywords("quant_args", quant_args, cls._fields)
        scheme = cls(**quant_args)
        scheme.check()
        return scheme

    @property
    def block_wise(self) -> bool:
        return self.group_k > 0

    def check(self) -> None:
        """Raise TypeError for a field of another type; ValueError for sizes that make no scheme."""
        kinds = int, int, bool, bool
        if tuple(map(type, self)) != kinds:
            for name, value, kind in zip(self._fields, self, kinds, strict=True):
                if type(value) is not kind:
                    raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__} {value!r}")
        if min(self.group_k, self.group_n) < 0 or (self.group_k > 0) != (self.group_n > 0):
            sizes = f"group_k is {self.group_k} and group_n {self.group_n}"
            raise ValueError(f"{sizes}; block-wise scales need both positive, others both 0")
        if self.block_wise and self.per_channel_quant:
            raise ValueError("block-wise scales (group_k, group_n) and per_channel_quant exclude each other; give one")

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of one weight ``[n, k]``."""
        if self.block_wise:
            return -(-n // self.group_n), -(-k // self.group_k)
        return (n,) if self.per_channel_quant else ()

    def meaning(self) -> str:
        if self.block_wise:
            return f"blocks of group_n {self.group_n} x group_k {self.group_k}"
        return "one per slot and channel (per_channel_quant)" if self.per_channel_quant else "one per slot (per tensor)"


PLAIN = Scheme()
"""Scheme of weights without scales; with scales: weight-only, one scale per slot."""
PER_CHANNEL = Scheme(per_channel_quant=True)
"""Weight-only with one scale per output column: what the layers hold."""


ACTIVATIONS = (*WITH_DOUBLE, *FP8_DTYPES)


def check_scales(
    name: str, scales: Any, weights: Sequence[Tensor], scheme: Scheme, *, of_experts: bool = False
) -> None:
    """Check the scales of FP8 weights: one float32 tensor per slice, on their device, of the scheme's shape. A 1 may
    follow the slots of ``weights [L, (1,) N, K]``, and come last for ``[L, E, N, K]`` (``of_experts``).
    """
    if scales is None or (isinstance(scales, (tuple, list)) and not scales):
        missing = f"{name} is missing: weights of {weights[0].dtype} need one tensor of scales per slice"
        raise ValueError(missing) if scheme.use_fp8_w8a8 else TypeError(missing)
    check_list(name, scales, len(weights))
    for i, (scale, weight) in enumerate(zip(scales, weights, strict=True)):
        expect(f"{name}[{i}]", scale, dtype=FLOAT32, device=weight.device)
        found, whole = scale.shape, weight.shape
        shape = (*whole[: 1 + of_experts], *scheme.shape(whole[-2], whole[-1]))
        place = len(shape) if of_experts else 1
        if found != shape and found != (*shape[:place], 1, *shape[place:]):
            where = "follow the slots" if place == 1 else "be last"
            raise ValueError(
                f"{name}[{i}] has shape {tuple(found)}, slice {i} needs {shape} (a 1 may {where}): {scheme.meaning()}"
            )


def check_activation(
    name: str, x: Any, x_scale: Any, k: int, scheme: Scheme, weights: Any, scale_name: str = "a_scale"
) -> tuple[int, int] | None:
    """Check that x is what scheme and weights (one of them, or their form) say, real or FP8 with scales of k columns.
    Return the strides of ``x_scale`` along rows and groups (0: shared), None without scales.
    """
    dtype, of_weights = getattr(x, "dtype", None), weights.dtype in FP8_DTYPES
    if dtype in FP8_DTYPES:
        if not of_weights:
            raise TypeError(f"{name} has dtype {x.dtype}, the weights are not float8: quantise both, or neither")
        if x_scale is None:
            raise ValueError(f"a_scale required for fp8 activations: {name} has dtype {x.dtype}")
        if not scheme.use_fp8_w8a8:
            raise TypeError(f"{name} has dtype {x.dtype}; float8 activations need use_fp8_w8a8=True")
        return check_row_scales(scale_name, x_scale, x.shape[-2] if x.ndim > 1 else 0, k, scheme, weights.device)
    if of_weights:  # with others x has their dtype, which the operator checks
        expect(name, x, dtype=ACTIVATIONS)
    if scheme.use_fp8_w8a8:
        raise TypeError(f"{name} has dtype {dtype}; use_fp8_w8a8 needs float8 activations with a_scale")
    if x_scale is not None:
        raise ValueError(f"{scale_name} is given, but {name} has dtype {dtype}: only float8 has scales, leave it out")
    return None


def check_row_scales(name: str, scale: Any, rows: int, k: int, scheme: Scheme, device: torch.device) -> tuple[int, int]:
    """Check float32 scales of rows of k columns; return their strides along rows and groups, 0 where shared."""
    expect(name, scale, dtype=FLOAT32, device=device)
    shape, strides = tuple(scale.shape), scale.stride()
    groups = -(-k // scheme.group_k) if scheme.block_wise else 1
    if math.prod(shape) == 1:
        return 0, 0
    if groups > 1 and shape == (rows, groups):
        return strides[0], strides[1]
    if shape in ((rows,), (rows, 1)):
        return strides[0], 0
    wanted = f"one element, [{rows}] or [{rows}, 1]" + (f" or [{rows}, {groups}]" if groups > 1 else "")
    raise ValueError(f"{name} has shape {shape}, expected {wanted}")


def real_weight(stored: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    weight = upcast(stored)
    if scheme.block_wise:
        blocks = scheme.group_n, scheme.group_k
        return weight * over_elements(scale.reshape(block_counts(weight, blocks)), weight.shape, blocks)
    return weight * scale.reshape(-1, 1)


def real_rows(x: Tensor, scale: Tensor | None, scheme: Scheme) -> Tensor:
    """Return activations ``[..., T, K]``, multiplied by their scales if there are some, as float32."""
    return x.float() if scale is None else x.float() * over_columns(scale, x.shape[-1], scheme)


def over_columns(scale: Tensor, k: int, scheme: Scheme) -> Tensor:
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale.reshape(-1, 1)
    return scale.repeat_interleave(scheme.group_k, 1)[:, :k]


def rounded(low: Tensor, scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Round ``low [..., T, r]`` to FP8 ``dtype`` with these scales; float32 again."""
    factor, limit = over_columns(scale, low.shape[-1], scheme), FP8_MAX[dtype]
    return (low / factor).clamp(-limit, limit).to(dtype).float() * factor
