"""The operations of a backend on a step, for tests that hold the tensors of the weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from punica.metadata import LoRABatch
from punica.ops.interface import ALONE, Beside, Ops
from punica.ops.scales import PLAIN, Scheme
from punica.ops.torch_ops import TorchOps
from punica.ops.weights import LoRAWeights, Stack

Tensors = Sequence[Tensor]


class StepCalls:
    """``ops(*options)`` makes a backend."""

    def __init__(self, ops: Callable[..., Ops]) -> None:
        self.ops = ops

    def shrink(
        self, x: Tensor, a: Tensors, y: Tensor, step: LoRABatch, scale: float = 1.0,
        *, accumulate: bool = False, lora_ranks: Tensor | None = None, b_scale: Tensors | None = None,
        a_scale: Tensor | None = None, scheme: Scheme = PLAIN, **options: Any,
    ) -> None:  # fmt: skip
        stack = Stack.of_a(a, lora_ranks, b_scale, scheme)
        self.ops(**options).shrink(y, x, stack, step, scale, accumulate, a_scale)

    def expand(
        self, x: Tensor, b: Tensors, y: Tensor, step: LoRABatch, offset_start: int = 0, add_inputs: bool = True,
        *, lora_ranks: Tensor | None = None, b_scale: Tensors | None = None, a_scale: Tensor | None = None,
        scheme: Scheme = PLAIN, **options: Any,
    ) -> None:  # fmt: skip
        stack = Stack.of_b(b, lora_ranks, b_scale, scheme)
        self.ops(**options).expand(y, x, stack, step, offset_start, add_inputs, a_scale)

    def linear(
        self, y: Tensor, x: Tensor, a: Tensors, b: Tensors, step: LoRABatch, scale: float = 1.0,
        *, add_inputs: bool = True, lora_ranks: Tensor | None = None, lora_a_scale: Tensors | None = None,
        lora_b_scale: Tensors | None = None, a_scale: Tensor | None = None, shrink: Scheme = PLAIN,
        expand: Scheme = PLAIN, aside: Callable[[], AbstractContextManager] | None = None, base: Tensors = (),
        **options: Any,
    ) -> None:  # fmt: skip
        weights = LoRAWeights.of(a, b, lora_ranks, (lora_a_scale, lora_b_scale), (shrink, expand))
        beside = ALONE if aside is None and isinstance(base, tuple) and not base else Beside(aside, base)
        self.ops(**options).linear(y, x, weights, step, scale, add_inputs, a_scale, beside)


TORCH = StepCalls(TorchOps)
