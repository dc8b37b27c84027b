"""`inner_form`: the methods that a layer calls, of any wrapper.

A `PunicaWrapperBase` has them. A wrapper with the contract's methods alone, or with one of its own in place of the
library's, is called through the contract.
"""

from typing import Any, Protocol

from torch import Tensor

from punica.ops.interface import ALONE, Beside
from punica.ops.weights import LoRAWeights, Stack
from punica.wrapper.base import PunicaWrapperBase


class InnerForm(Protocol):
    """`punica.wrapper.linear`; a platform that cannot update y in place returns the result."""

    def add_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, add_inputs: bool = True, beside: Beside = ALONE
    ) -> Tensor | None: ...
    def add_logits(self, y: Tensor, x: Tensor, weights: LoRAWeights) -> Tensor | None: ...
    def add_shrunk(self, y: Tensor, x: Tensor, a: Stack) -> Tensor | None: ...
    def add_expanded(self, y: Tensor, x: Tensor, b: Stack, offset_start: int = 0) -> Tensor | None: ...
    def add_embedding(self, y: Tensor, x: Tensor, b: Stack) -> Tensor | None: ...


def inner_form(wrapper: Any, method: str) -> InnerForm:
    """The wrapper itself, or the way through its contract where ``method`` of that is not the library's."""
    if method not in vars(wrapper) and getattr(type(wrapper), method, None) is getattr(PunicaWrapperBase, method):
        return wrapper
    return _ThroughContract(wrapper)


class _ThroughContract:
    """The inner form by the contract's methods of a wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def add_linear(
        self, y: Tensor, x: Tensor, weights: LoRAWeights, add_inputs: bool = True, beside: Beside = ALONE
    ) -> Tensor | None:
        a, b, given = weights.a, weights.b, _keywords(weights.a, weights.b)
        given |= {} if add_inputs else {"add_inputs": False}
        return self.wrapper.add_lora_linear(y, x, a.tensors, b.tensors, 1.0, b.form.stored.widths, **given)

    def add_logits(self, y: Tensor, x: Tensor, weights: LoRAWeights) -> Tensor | None:
        a, b = weights.a, weights.b
        return self.wrapper.add_lora_logits(y, x, a.tensors[0], b.tensors[0], 1.0, **_keywords(a, b))

    def add_shrunk(self, y: Tensor, x: Tensor, a: Stack) -> Tensor | None:
        return self.wrapper.add_shrink(y, x, a.tensors, 1.0, **_keywords(a))

    def add_expanded(self, y: Tensor, x: Tensor, b: Stack, offset_start: int = 0) -> Tensor | None:
        return self.wrapper.add_expand(y, x, b.tensors, b.form.stored.widths, offset_start, **_keywords(b))

    def add_embedding(self, y: Tensor, x: Tensor, b: Stack) -> Tensor | None:
        return self.wrapper.add_lora_embedding(y, x, b.tensors[0], **_keywords(b))


def _keywords(*stacks: Stack) -> dict[str, Any]:
    """True ranks, and the scales of FP8 weights."""
    given: dict[str, Any] = {"lora_ranks": stacks[0].ranks}
    for stack in stacks:
        if stack.form.is_fp8:
            given["lora_a_scale" if stack.rank_dim == -2 else "lora_b_scale"] = stack.scales
            given["quant_args"] = stack.form.scheme
    return given
