"""The keywords with which a caller hands true ranks and FP8 weights to the wrapper.

``lora_ranks``: int32 ``[n, L]``, the true rank of every slice and slot (None: the slots' width). ``lora_a_scale``,
``lora_b_scale``: the scales of A and of B, one float32 tensor per slice; ``a_scale``: those of an x that is FP8 itself;
``quant_args``: their layout, a `punica.ops.scales.Scheme` or its fields, for one product or both, or
``{"use_fp8_w8a8": ..., "shrink": {...}, "expand": {...}}`` where they differ. Without ``use_fp8_w8a8`` activations stay
as they are (weight-only). The methods for experts take them too, with one more dimension for these: see
`punica.ops.experts`. One set of keywords may go to `add_shrink` and to `add_expand`: each reads its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from punica.ops.expect import check_keywords
from punica.ops.experts import Fp8Experts
from punica.ops.scales import Scheme
from punica.ops.weights import LoRAWeights, Stack

KEYWORDS = ("lora_ranks", "lora_a_scale", "lora_b_scale", "a_scale", "quant_args")


class Keywords(NamedTuple):
    """Keywords of one call, checked as far as no operand is needed."""

    lora_ranks: Tensor | None
    lora_a_scale: Sequence[Tensor] | None
    lora_b_scale: Sequence[Tensor] | None
    a_scale: Tensor | None
    shrink: Scheme
    expand: Scheme

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any], allowed: Sequence[str] = KEYWORDS) -> "Keywords":
        """Read the keywords of ``method``.

        TypeError: keywords that are not ``allowed``, ``quant_args`` that is no mapping or has unknown keys; ValueError:
        sizes that make no scheme.
        """
        check_keywords(method, given, allowed)
        tensors = [given.get(name) for name in KEYWORDS[:-1]]
        return cls._make((*tensors, *_schemes(given.get("quant_args"))))

    def a(self, tensors: Sequence[Tensor]) -> Stack:
        """A of these tensors."""
        return Stack.of_a(tensors, self.lora_ranks, self.lora_a_scale, self.shrink)

    def b(self, tensors: Sequence[Tensor]) -> Stack:
        """B of these tensors."""
        return Stack.of_b(tensors, self.lora_ranks, self.lora_b_scale, self.expand)

    def weights(self, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor]) -> LoRAWeights:
        """A and B of one product."""
        return LoRAWeights(self.a(lora_a), self.b(lora_b))

    def experts(self) -> Fp8Experts | None:
        """Scales of experts; None where nothing is FP8."""
        if self[1:] == _PLAIN:
            return None
        scales = (self.lora_a_scale or (), self.lora_b_scale or (), self.a_scale, None)
        return Fp8Experts(*scales, self.shrink, self.expand)

    def validate(self) -> None:
        """For debugging: the values of the scales. Waits for the device."""
        Fp8Experts(self.lora_a_scale or (), self.lora_b_scale or (), self.a_scale).validate()


_PLAIN = (None, None, None, Scheme(), Scheme())


def _schemes(quant_args: Any) -> tuple[Scheme, Scheme]:
    """Schemes of shrink and expand."""
    if quant_args is None:
        return Scheme(), Scheme()
    if isinstance(quant_args, Scheme):
        return quant_args, quant_args
    if not isinstance(quant_args, Mapping):
        raise TypeError(f"quant_args must be a mapping, got {type(quant_args).__name__}")
    if not {"shrink", "expand"} & set(quant_args):
        scheme = Scheme.of(quant_args)
        return scheme, scheme
    check_keywords("quant_args", quant_args, ("use_fp8_w8a8", "shrink", "expand"))
    both = {"use_fp8_w8a8": quant_args["use_fp8_w8a8"]} if "use_fp8_w8a8" in quant_args else {}
    return Scheme.of(both | dict(quant_args.get("shrink", {}))), Scheme.of(both | dict(quant_args.get("expand", {})))
