"""`LinearMethods`: LoRA of dense layers in a wrapper, with weights as objects, on the step and a backend's `Ops`."""

import math
from typing import Any

import torch
from torch import Tensor

from punica.ops.expect import expect
from punica.ops.interface import ALONE, Beside, Ops
from punica.ops.quant import WITH_FP8
from punica.ops.weights import LoRAWeights, Stack
from punica.wrapper.step import StepMetadata


class LinearMethods(StepMetadata):
    """y and x are rows, as `punica.ops.interface.Ops` takes them; errors are those of the operations.

    ``takes_aside``: `add_linear` takes ``beside``, with which shrink and base product are made beside one another
    (`punica.layers.dual_stream`). With ``beside.base`` nothing was written to ``y`` before.
    """

    takes_aside = False
    _ops: Ops | None = None

    @property
    def ops(self) -> Ops:
        if self._ops is None:
            raise NotImplementedError(f"{type(self).__name__} has no operations; use PunicaWrapperCPU or -GPU")
        return self._ops

    def add_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, add_inputs: bool = True, beside: Beside = ALONE
    ) -> None:
        """``y[t, o_i : ...] (+)= (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``."""
        batch = self._step()
        if beside.base or not batch.no_lora:
            self._debug_check(weights)
            self.ops.linear(y, x, weights, batch, 1.0, add_inputs, None, beside)
        if self.mixtures is not None:
            self.ops.mix(y, x, weights, self.mixtures[0])

    def add_logits(self, y: Tensor, x: Tensor, weights: LoRAWeights) -> None:
        """`add_linear` with the slots of the sampled rows; y may be wider than B."""
        batch = self._step().sampled
        if not batch.no_lora:
            self._debug_check(weights)
            self.ops.linear(viewed_as_rows("y", y), flattened("x", x), weights, batch)
        if self.mixtures is not None:
            self.ops.mix(viewed_as_rows("y", y), flattened("x", x), weights, self.mixtures[1])

    def add_shrunk(self, y: Tensor, x: Tensor, a: Stack) -> None:
        """``y[i, t] += x[t] @ A_i[slot_t]^T`` for every slice i, y ``[n, T', r]``."""
        batch = self._step()
        if not batch.no_lora:
            self._debug_check(a)
            self.ops.shrink(y, x, a, batch, 1.0, True)

    def add_expanded(self, y: Tensor, x: Tensor, b: Stack, offset_start: int = 0) -> None:
        """``y[t, o_i : ...] += x[i, t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, x ``[n, T', r]``."""
        batch = self._step()
        if not batch.no_lora:
            self._debug_check(b)
            self.ops.expand(y, x, b, batch, offset_start)

    def add_embedding(self, y: Tensor, x: Tensor, b: Stack) -> None:
        """``y[t] += x[t] @ B[slot_t]^T`` for rows x ``[T', r]`` already gathered from embedding A."""
        self.add_expanded(y, x.unsqueeze(0), b)


def flattened(name: str, x: torch.Tensor) -> torch.Tensor:
    """Flatten the leading dimensions of ``x`` to rows (a copy where the strides demand it: it is only read)."""
    if isinstance(x, torch.Tensor) and x.ndim == 2:
        return x
    _check_rows(name, x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def viewed_as_rows(name: str, y: torch.Tensor) -> torch.Tensor:
    """View ``y`` as 2-D; ValueError where only a copy would do, since y is written in place."""
    if isinstance(y, torch.Tensor) and y.ndim == 2:
        return y
    _check_rows(name, y)
    try:
        return y.view(math.prod(y.shape[:-1]), y.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} with shape {tuple(y.shape)} and strides {y.stride()} cannot be viewed as 2-D rows without a copy, "
            "so it cannot be updated in place; pass a contiguous tensor"
        ) from None


def _check_rows(name: str, value: Any) -> None:
    expect(name, value, dtype=WITH_FP8)
    if value.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected rows: at least 2 dimensions")
