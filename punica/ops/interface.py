"""`Ops`: the operations of a backend, those of `punica.ops.torch_ops.TorchOps` and `punica.ops.triton_ops.TritonOps`.

All write in place, check everything before they write, and take weights as objects (`punica.ops.weights`), whatever
their format. TypeError: dtypes that may not be combined. ValueError: shapes, devices, slots, ranks or scale.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from punica.metadata import LoRABatch, MixedBatch
from punica.ops.expect import FLOATS, Sizes, check_columns, expect, expect_slices
from punica.ops.quant import FP8_DTYPES, WITH_FP8
from punica.ops.scales import check_activation
from punica.ops.weights import Form, LoRAWeights, Names, Stack, Weights


class Beside(NamedTuple):
    """A base product that is computed beside the shrink.

    ``aside``: context that puts launches on another stream and joins that to the current one (None: no other stream).
    ``base``: ``weight [N, K]`` and perhaps ``bias [N]`` of a product that y gets first (it may be uninitialised); of a
    weight in float8_e4m3fn, bias or None, and scales of its rows, float32 ``[N]``.
    """

    aside: Callable[[], AbstractContextManager] | None = None
    base: Sequence[Any] = ()


ALONE = Beside()


class Ops(Protocol):
    """Operations of a backend on T' >= T rows. ``contiguous_shrinks``: the y of a shrink must be contiguous."""

    contiguous_shrinks: bool

    def shrink(
        self, y: Tensor, x: Tensor, a: Stack, batch: LoRABatch, scale: float = 1.0,
        accumulate: bool = False, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute ``y[i, t] (+)= scale * x[t] @ A_i[slot(t)]^T`` for every slice i.

        x: ``[T', K]`` in the dtype of A; for A in FP8 any float, or FP8 with scales ``x_scale``. y: ``[n, T', r]``;
        float32 keeps the precision. Rows without adapter become 0, or stay as they are with ``accumulate``.
        """

    def expand(
        self, y: Tensor, x: Tensor, b: Stack, batch: LoRABatch, offset_start: int = 0,
        add_inputs: bool = True, x_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute ``y[t, o_i : o_i + N_i] (+)= x[i, t] @ B_i[slot(t)]^T``, ``o_0 = offset_start``, slices in a row. x:
        ``[n, T', r]``, float32 or the dtype of B; y: ``[T', W]``. Rows without adapter are not written.
        """

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float = 1.0,
        add_inputs: bool = True, x_scale: Tensor | None = None, beside: Beside = ALONE,
    ) -> None:  # fmt: skip
        """`shrink` into float32 ``[n, T', r]``, then `expand`; with ``use_fp8_w8a8`` both inputs in FP8, per token."""

    def mix(self, y: Tensor, x: Tensor, weights: LoRAWeights, mixed: MixedBatch) -> None:
        """Add the terms of rows with several adapters; sums are float32 and rounded once, other rows not written."""

    def quantize(self, x: Tensor, group_k: int = 0) -> tuple[Tensor, Tensor]:
        """Quantise as `punica.ops.quant.quantize_per_token`, without its check of values."""

    def gradient(self, stack: Stack, low: Tensor, x: Tensor, batch: LoRABatch) -> tuple[Tensor, ...]:
        """Return the gradients of A (or B) of all slices, shaped like its tensors: in each slot the sum over its rows
        of ``low[i, t]^T x[t]`` (B: ``x[t, o_i : o_i + N_i]^T low[i, t]``), else 0. low, x: as of `Stack.gradients`.
        """


def low_rank_of(ops: Ops, x: Tensor, weights: LoRAWeights, batch: Any, scale: float, x_scale: Tensor | None) -> Tensor:
    """Return the intermediate of `Ops.linear`, float32 ``[n, T', r]``. ``batch``: as ``ops`` take it."""
    a, stored = weights.a.form, weights.b.form.stored
    if a.scheme.use_fp8_w8a8 and x.dtype not in FP8_DTYPES:
        if x_scale is not None:
            raise ValueError(f"a_scale is given, but x has dtype {x.dtype}: it is quantised here, leave a_scale out")
        x, x_scale = ops.quantize(x, a.scheme.group_k)
    low = torch.empty(len(stored.widths), x.shape[0], stored.rank, dtype=torch.float32, device=x.device)
    ops.shrink(low, x, weights.a, batch, scale, False, x_scale)
    return low


def add_low_rank(ops: Ops, y: Tensor, low: Tensor, weights: LoRAWeights, batch: Any, add_inputs: bool) -> None:
    """Add the expand of `low_rank_of`, the other half."""
    scheme = weights.b.form.scheme
    low, low_scale = ops.quantize(low, scheme.group_k) if scheme.use_fp8_w8a8 else (low, None)
    ops.expand(y, low, weights.b, batch, 0, add_inputs, low_scale)


def check_shrink(
    names: Names, y: Tensor, x: Tensor, a: Form, x_scale: Tensor | None, of_y: Sequence[torch.dtype]
) -> tuple[int, int] | None:
    """Check x ``[T, K]`` and y ``[n, T, r]`` of a dtype in ``of_y``; return the strides of ``x_scale``."""
    stored = a.stored
    strides = check_activation(names.input, x, x_scale, stored.widths[0], a.scheme, stored)
    sizes = check_input(names, x, stored)
    expect(names.output, y, "n T r", dtype=of_y, device=stored.device, sizes=sizes)
    return strides


def check_input(names: Names, x: Tensor, a: Weights) -> Sizes:
    """Check x ``[T, K]``, whose dtype is A's unless that is FP8; return the sizes of the call."""
    sizes = {"n": len(a.widths), "r": a.rank, "K": a.widths[0], "of n r K": names.a}
    expect(names.input, x, "T K", dtype=(a.dtype,) if a.dtype.itemsize > 1 else None, device=a.device, sizes=sizes)
    return sizes


def check_expand(
    names: Names, y: Tensor, x: Tensor, b: Form, offset_start: Any, x_scale: Tensor | None,
    of_y: Sequence[torch.dtype],
) -> tuple[int, int] | None:  # fmt: skip
    """Check x ``[n, T, r]``, float32 or of B's dtype, and `check_output`; return the strides of ``x_scale``."""
    stored = b.stored
    strides = check_activation(names.input, x, x_scale, stored.rank, b.scheme, stored)
    sizes = check_output(names, y, stored, offset_start, of_y)
    of_x = (x.dtype,) if b.is_fp8 else (torch.float32, stored.dtype)
    expect(names.input, x, "n T r", dtype=of_x, device=stored.device, sizes=sizes)
    return strides


def check_output(
    names: Names, y: Tensor, b: Weights, offset_start: Any, allowed: Sequence[torch.dtype] = FLOATS
) -> Sizes:
    """Check y ``[T, W]``: all slices fit its columns from ``offset_start`` on. Return the sizes of the call."""
    sizes = {"n": len(b.widths), "r": b.rank, "of n r": names.b}
    expect(names.output, y, "T *", dtype=allowed, device=b.device, sizes=sizes)
    check_columns(names.output, y, "offset_start", offset_start, b.widths)
    return sizes


def check_last_stride(name: str, y: Tensor) -> None:
    if y.stride(-1) != 1 and y.shape[-1] > 1:
        raise ValueError(f"{name} needs stride 1 along its last dimension, got strides {y.stride()}")


def check_equal_rows(names: Names, x: Tensor, y: Tensor) -> None:
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"{names.input} has {x.shape[0]} rows and {names.output} has {y.shape[0]}; they must be equal")


def check_slices(output_slices: Any, weights: Any) -> None:
    """Check ``output_slices[i] == B_i.shape[-2]`` for all n slices. Weights that are none are left to the operator."""
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
    allowed = WITH_FP8 if weights.dtype.itemsize == 1 else FLOATS
    expect_slices(
        name, parts, "T r", dtype=allowed, sizes=weights.sizes("the weights"), count=len(weights.widths),
        device=weights.device, contiguous=contiguous,
    )  # fmt: skip
