"""`PunicaWrapperBase`: the wrapper that every LoRA layer calls. It owns the metadata of a step.

A layer hands over its rows and its weights as an object (`punica.ops.weights`); a backend supplies the operations on a
step, `punica.ops.interface.Ops`. The methods for callers who hold tensors are in `punica.wrapper.contract`.
"""

from typing import Protocol

import torch
from torch import Tensor

from punica.ops.interface import ALONE, Beside, Ops
from punica.ops.weights import LoRAWeights, Stack
from punica.wrapper.contract import ContractMethods, flattened, viewed_as_rows
from punica.wrapper.contract import PunicaWrapperABC as PunicaWrapperABC
from punica.wrapper.moe import MoEMethods
from punica.wrapper.step import StepMetadata


class _Debuggable(Protocol):
    def validate(self) -> None:
        """ValueError: values that no scale may have. Waits for the device."""


class PunicaWrapperBase(StepMetadata, MoEMethods, ContractMethods):
    """The inner form of the ``add_*`` methods, on the current step and on top of a backend's operations.

    Constructed as `StepMetadata`. y and x are rows, as `punica.ops.interface.Ops` takes them; errors are those of the
    operations.

    ``takes_aside``: `add_linear` takes ``beside``, with which shrink and base product are made beside one another
    (`punica.layers.dual_stream`). With ``beside.base`` nothing was written to ``y`` before.
    """

    takes_aside = False
    _ops: Ops | None = None

    @property
    def ops(self) -> Ops:
        """The backend's operations."""
        if self._ops is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no operations; use PunicaWrapperCPU or PunicaWrapperGPU"
            )
        return self._ops

    def add_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, add_inputs: bool = True, beside: Beside = ALONE
    ) -> None:
        """``y[t, o_i : ...] (+)= (x[t] @ A_i[slot_t]^T) @ B_i[slot_t]^T`` for every slice i, ``o_0 = 0``."""
        batch = self._step()
        if beside.base or not batch.no_lora:
            self._look_at(weights)
            self.ops.linear(y, x, weights, batch, 1.0, add_inputs, None, beside)

    def add_logits(self, y: Tensor, x: Tensor, weights: LoRAWeights) -> None:
        """`add_linear` with the slots of the sampled rows; y may be wider than B."""
        batch = self._step().sampled
        if not batch.no_lora:
            self._look_at(weights)
            self.ops.linear(viewed_as_rows("y", y), flattened("x", x), weights, batch)

    def add_shrunk(self, y: Tensor, x: Tensor, a: Stack) -> None:
        """``y[i, t] += x[t] @ A_i[slot_t]^T`` for every slice i, y ``[n, T', r]``."""
        batch = self._step()
        if not batch.no_lora:
            self._look_at(a)
            self.ops.shrink(y, x, a, batch, 1.0, True)

    def add_expanded(self, y: Tensor, x: Tensor, b: Stack, offset_start: int = 0) -> None:
        """``y[t, o_i : ...] += x[i, t] @ B_i[slot_t]^T``, ``o_0 = offset_start``, x ``[n, T', r]``."""
        batch = self._step()
        if not batch.no_lora:
            self._look_at(b)
            self.ops.expand(y, x, b, batch, offset_start)

    def add_embedding(self, y: Tensor, x: Tensor, b: Stack) -> None:
        """``y[t] += x[t] @ B[slot_t]^T`` for rows x ``[T', r]`` already gathered from embedding A."""
        self.add_expanded(y, x.unsqueeze(0), b)

    def _look_at(self, given: _Debuggable) -> None:
        """With ``debug_checks`` the values of scales are verified, but not during a capture."""
        if self.lora_config is None or not self.lora_config.debug_checks:
            return
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            given.validate()
