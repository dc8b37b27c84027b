"""`Ops`: the operations of a backend, those of `punica.ops.torch_ops.TorchOps` and `punica.ops.triton_ops.TritonOps`.

All write in place, check everything before they write, and take weights as objects (`punica.ops.weights`), whatever
their format. TypeError: dtypes that may not be combined. ValueError: shapes, devices, slots, ranks or scale.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.quant import FP8_DTYPES
from punica.ops.weights import LoRAWeights, Stack


class Beside(NamedTuple):
    """A base product that is computed beside the shrink.

    ``aside``: context that puts launches on another stream and joins that to the current one (None: no other stream).
    ``base``: ``weight [N, K]`` and perhaps ``bias [N]`` of a product that y gets first (it may be uninitialised).
    """

    aside: Callable[[], AbstractContextManager] | None = None
    base: Sequence[Tensor] = ()


ALONE = Beside()


class Ops(Protocol):
    """The operations of a backend. T' rows hold the step's T; later rows have no adapter."""

    contiguous_shrinks: bool
    """The y of a shrink must be contiguous."""

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
        """Compute ``y[t, o_i : o_i + N_i] (+)= x[i, t] @ B_i[slot(t)]^T``, ``o_0 = offset_start``, slices in a row.

        x: ``[n, T', r]``, float32 or the dtype of B; y: ``[T', W]``. Rows without adapter are not written.
        """

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, batch: LoRABatch, scale: float = 1.0,
        add_inputs: bool = True, x_scale: Tensor | None = None, beside: Beside = ALONE,
    ) -> None:  # fmt: skip
        """Run `shrink` into float32 ``[n, T', r]``, then `expand`. With ``use_fp8_w8a8`` an x that is not FP8 is
        quantised per token, and so is the intermediate.
        """

    def quantize(self, x: Tensor, group_k: int = 0) -> tuple[Tensor, Tensor]:
        """Quantise as `punica.ops.quant.quantize_per_token`, without its check of values."""


def low_rank_of(
    ops: Ops, x: Tensor, weights: LoRAWeights, batch: Any, scale: float, x_scale: Tensor | None
) -> Tensor:
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
