"""LoRA weights as objects: the stacked tensors of a layer, checked once, and the plans made for them.

A `Stack` is one factor, A or B, of all n slices: its tensors, their scales where they are FP8, and the table of true
ranks. `LoRAWeights` is the A and B of one product. The layer that owns the tensors builds them once. Weights may change
*in place* at any time (an adapter loaded into a slot); tensors that move or change their shape need a new object.

Kernel plans depend on the form of the weights and not on their addresses, so objects of one form share them. The torch
operators' plans are views of the weights (`punica.ops.segment_gemm`) and belong to one stack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.ops.expect import FLOATS, INT32, WITH_DOUBLE, Sizes, expect, expect_slices
from punica.ops.quant import FP8_DTYPES, WITH_FP8, validate_scales
from punica.ops.scales import PLAIN, Scheme, check_scales

Scaled = Sequence[Tensor] | None
"""Scales of FP8 weights, one tensor per slice; None of others."""


def is_traced() -> bool:
    """Tell whether a graph tracer is active: an op is then one node of its graph. A profiler is none."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


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
    """Form of the weights of all n slices: A ``[slots, rank, widths[i]]`` (all widths are K), B ``[slots, widths[i],
    rank]``. ``row_major``: stored in this order; else the last two dimensions are swapped.
    """

    slots: int
    rank: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    row_major: bool = True

    def sizes(self, owner: str) -> Sizes:
        """Sizes of a call with these weights, for `expect`."""
        return {"n": len(self.widths), "r": self.rank, "L": self.slots, "of n r L": owner}


class Scales(NamedTuple):
    """Strides of the weights' scales per slice, 0 where a scale depends not on slot, column (block) or K block."""

    slot: tuple[int, ...]
    column: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, scales: Sequence[Tensor], dims: int) -> Scales:
        strides = [one.stride() if one.ndim == dims else (one.stride(0), *one.stride()[2:]) for one in scales]
        return cls(*zip(*[(*stride, 0, 0)[:3] for stride in strides], strict=True))


class Form(NamedTuple):
    """Everything about a stack that a plan depends on. ``addressable``: for kernels, contiguous or with the last two
    dimensions swapped, all slices alike. ``scales``: strides of FP8 weights' scales; else None.
    """

    stored: Weights
    addressable: bool
    has_ranks: bool
    scheme: Scheme = PLAIN
    scales: Scales | None = None

    @property
    def is_fp8(self) -> bool:
        return self.scales is not None


class Stack:
    """One factor of the n slices of a layer: A ``[L, (1,) r, K]`` or B ``[L, (1,) N_i, r]``, one tensor per slice.

    Args:
        rank_dim: -2 for A, -1 for B.
        ranks: int32 ``[n, L]``, true rank per slice and slot (None: r).
        scales: of FP8 weights one float32 tensor per slice, shaped as ``scheme`` says (`punica.ops.scales`).
        names: the caller's names of the operands, for messages.

    Attributes: ``tensors``, ``ranks``, ``scales``, ``form``; ``plans`` of the Triton operators, shared by all stacks of
    this form; ``operands``, as kernels take them; ``cuts`` of the torch operators: a step, and the cuts for it.

    TypeError: dtypes. ValueError: shapes, devices, sizes.
    """

    def __init__(
        self, tensors: Sequence[Tensor], rank_dim: int, ranks: Tensor | None = None,
        scales: Sequence[Tensor] | None = None, scheme: Scheme = PLAIN, names: Names = STEP,
    ) -> None:  # fmt: skip
        self.form = _form(tensors, rank_dim, ranks, scales, scheme, names)
        self.tensors, self.ranks, self.rank_dim = tuple(tensors), ranks, rank_dim
        self.scales, self.plans = tuple(scales or ()), plans_of(self.form)
        self.operands: tuple[Tensor, ...] = ()
        self.cuts: tuple[Any, dict[tuple, Any]] = (None, {})

    @classmethod
    def of_a(cls, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Stack:
        return cls(tensors, -2, *args, **kwargs)

    @classmethod
    def of_b(cls, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Stack:
        return cls(tensors, -1, *args, **kwargs)

    def slice(self, i: int) -> Stack:
        ranks = None if self.ranks is None else self.ranks[i : i + 1]
        return Stack(self.tensors[i : i + 1], self.rank_dim, ranks, self.scales[i : i + 1], self.form.scheme)

    def transposed(self, i: int) -> Stack:
        ranks = None if self.ranks is None else self.ranks[i : i + 1]
        return Stack((self.tensors[i].mT,), -3 - self.rank_dim, ranks)

    def gradients(self, low: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
        """Return zeros for gradients from low ``[n, T, r]``, contiguous and float32 (float64 for such weights), and x
        ``[T, W]`` in the dtype of the weights: a buffer, its parts ``[L, r, width]``, and these shaped as the weights.
        """
        stored, is_a = self.form.stored, self.rank_dim == -2
        expect("a weight that trains", self.tensors[0], dtype=WITH_DOUBLE)
        sizes = stored.sizes("the weights") | {"K": stored.widths[0] if is_a else sum(stored.widths), "of K": "them"}
        of_low = torch.float64 if stored.dtype == torch.float64 else torch.float32
        expect("low", low, "n T r", dtype=(of_low,), device=stored.device, sizes=sizes, contiguous=True)
        expect("x", x, "T K", dtype=(stored.dtype,), device=stored.device, sizes=sizes)
        shapes = [(stored.slots, stored.rank, width) for width in stored.widths]
        whole = x.new_zeros(sum(map(prod, shapes)))
        parts = [part.view(shape) for part, shape in zip(whole.split([*map(prod, shapes)]), shapes, strict=True)]
        shaped = [(part if is_a else part.mT).view(of.shape) for part, of in zip(parts, self.tensors, strict=True)]
        return whole, parts, tuple(shaped)

    def validate(self) -> None:
        validate_scales(self.scales, "lora_a_scale" if self.rank_dim == -2 else "lora_b_scale")

    @functools.cached_property
    def low_bits(self) -> int:
        """Lowest four bits of the addresses: 0 where all are multiples of 16."""
        bits = 0
        for tensor in (*self.tensors, *self.scales):
            bits |= tensor.data_ptr()
        return bits & 15


class LoRAWeights:
    """A and B of one product, ``y += scale * (x A^T) B^T``; ValueError, TypeError: forms that do not fit."""

    def __init__(self, a: Stack, b: Stack, names: Names = STEP) -> None:
        _check_pair(a.form, b.form, names)
        self.a, self.b, self.plans = a, b, plans_of(a.form, b.form)

    @classmethod
    def of(
        cls, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], ranks: Tensor | None = None,
        scales: tuple[Scaled, Scaled] = (None, None), schemes: tuple[Scheme, Scheme] = (PLAIN, PLAIN),
        names: Names = STEP,
    ) -> LoRAWeights:  # fmt: skip
        """Build both from their tensors; ``scales`` and ``schemes`` of A and of B."""
        a = Stack.of_a(lora_a, ranks, scales[0], schemes[0], names)
        return cls(a, Stack.of_b(lora_b, ranks, scales[1], schemes[1], names), names)

    def validate(self) -> None:
        self.a.validate()
        self.b.validate()


_FORMS: dict[tuple, Form] = {}
_PLANS: dict[tuple[Form, ...], dict[tuple, Any]] = {}
_MOST_KEPT = 4096  # of each table


def plans_of(*forms: Form) -> dict[tuple, Any]:
    """Return the table of plans for weights of these forms; a new one where sizes are symbols, which have no hash."""
    try:
        known = _PLANS.get(forms)
    except TypeError:
        return {}
    return kept(_PLANS, forms, {}) if known is None else known


def kept(table: dict[Any, Any], key: tuple, value: Any) -> Any:
    """Return ``value``, put into ``table``; a full one starts anew."""
    if len(table) >= _MOST_KEPT:
        table.clear()
    table[key] = value
    return value


def forget_plans() -> None:
    """Empty the tables of plans, also those that weights in use and the operations of experts hold."""
    for table in _PLANS.values():
        table.clear()


def _form(tensors: Sequence[Tensor], rank_dim: int, ranks: Any, scales: Any, scheme: Scheme, names: Names) -> Form:
    """Check each combination of shapes, strides, dtypes and devices once."""
    lists = isinstance(tensors, (tuple, list)), scales is None or isinstance(scales, (tuple, list))
    try:
        key = (
            rank_dim, scheme, lists, len(tensors),
            *[(t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, *(() if scales is None else scales))],
            ranks if ranks is None else (ranks.shape, ranks.stride(), ranks.dtype, ranks.device),
        )  # fmt: skip
        known = _FORMS.get(key)
    except (AttributeError, TypeError):  # not tensors, which the checks name; or sizes are symbols, which have no hash
        return _checked(tensors, rank_dim, ranks, scales, scheme, names)
    return known or kept(_FORMS, key, _checked(tensors, rank_dim, ranks, scales, scheme, names))


def _checked(tensors: Sequence[Tensor], rank_dim: int, ranks: Any, scales: Any, scheme: Scheme, names: Names) -> Form:
    is_a = rank_dim == -2
    label, scale_label = (names.a, names.a_scale) if is_a else (names.b, names.b_scale)
    scheme.check()
    first = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else None
    scaled = len(scales) > 0 if isinstance(scales, (tuple, list)) else scales is not None
    plain = not scaled and getattr(first, "dtype", None) not in FP8_DTYPES
    dims = "L (1) r K" if is_a else "L (1) * r"
    expect_slices(label, tensors, dims, dtype=WITH_DOUBLE if plain else FP8_DTYPES, sizes={})
    weight, order = tensors[0], _storage_order(tensors)
    widths = tuple([tensor.shape[-3 - rank_dim] for tensor in tensors])
    stored = Weights(weight.shape[0], weight.shape[rank_dim], widths, weight.dtype, weight.device, order is not False)
    if ranks is not None:
        sizes = stored.sizes(label)
        expect("lora_ranks", ranks, "n L", dtype=INT32, device=stored.device, sizes=sizes, contiguous=True)
    form = Form(stored, order is not None, ranks is not None)
    if not plain:
        check_scales(scale_label, scales, tensors, scheme)
        return form._replace(scheme=scheme, scales=Scales.of(scales, 1 + len(scheme.shape(1, 1))))
    if scheme.use_fp8_w8a8:
        raise TypeError("use_fp8_w8a8 needs float8 weights with b_scale; these weights are not float8")
    if scheme != PLAIN:
        raise ValueError(f"{scheme} needs float8 weights with b_scale; leave it out for other weights")
    return form


def _storage_order(weights: Sequence[Tensor]) -> bool | None:
    """Return True where all slices are row-major, False with the last two dimensions swapped, else None."""
    orders = set()
    for weight in weights:
        row_major, swapped = weight.is_contiguous(), weight.transpose(-1, -2).is_contiguous()
        if not (row_major or swapped):
            return None
        if not (row_major and swapped):  # a slice of width 1 is stored either way
            orders.add(row_major)
    return None if len(orders) > 1 else orders.pop() if orders else True


def weights_3d(weights: Tensor) -> Tensor:
    """View checked weights ``[L, (1,) out, in]`` without the 1."""
    return weights if weights.ndim == 3 else weights.squeeze(1)


def check_stored(stack: Stack, name: str) -> None:
    """Check a stack for kernels: 16 or 32 bits or FP8, and memory in one order."""
    dtype = stack.form.stored.dtype
    if dtype not in WITH_FP8:
        raise TypeError(f"{name} has dtype {dtype}, expected {' or '.join(map(str, FLOATS))}")
    if stack.form.addressable:
        return
    for i, weight in enumerate(stack.tensors):
        if _storage_order([weight]) is None:
            form = f"{name}[{i}] (shape {tuple(weight.shape)}, strides {weight.stride()})"
            raise ValueError(f"{form} is contiguous neither row-major nor with its last two dimensions swapped; pass a "
                             "contiguous tensor")  # fmt: skip
    raise ValueError(f"slices of {name} mix row-major and transposed storage: store all the same way")


def _check_pair(a_form: Form, b_form: Form, names: Names) -> None:
    a, b = a_form.stored, b_form.stored
    if a.dtype != b.dtype:
        raise TypeError(f"{names.a} has dtype {a.dtype}, {names.b} has dtype {b.dtype}; must be equal")
    for what, of_a, of_b in (("slices", len(a.widths), len(b.widths)), ("slots", a.slots, b.slots)):
        if of_a != of_b:
            raise ValueError(f"{names.a} has {of_a} {what}, {names.b} {of_b} {what}; must be equal")
    if a.device != b.device:
        raise ValueError(f"{names.a} is on {a.device}, {names.b} on {b.device}; move one of them")
    if a_form.has_ranks != b_form.has_ranks:
        raise ValueError(f"one of {names.a} and {names.b} has a table of true ranks; give both, or neither")
    if a.rank != b.rank:
        raise ValueError(
            f"{names.a} has rank {a.rank}, {names.b} rank {b.rank}; must be equal. Rank-sharded weights go through "
            "add_shrink (lora_shrink), a collective and add_expand (lora_expand)"
        )
    if a_form.scheme.use_fp8_w8a8 != b_form.scheme.use_fp8_w8a8:
        raise ValueError("use_fp8_w8a8 differs between shrink and expand; quantise the activations of both or neither")
