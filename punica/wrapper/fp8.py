"""The keywords with which a layer hands FP8 weights to the wrapper, and what they mean.

``lora_a_scale``, ``lora_b_scale``: the scales of A and of B, one float32 tensor per slice; ``a_scale``: those of an x
that is FP8 itself; ``quant_args``: their layout, a `punica.ops.fp8_checks.Scheme` or its fields, for one product or
both, or ``{"use_fp8_w8a8": ..., "shrink": {...}, "expand": {...}}`` where they differ. Without ``use_fp8_w8a8``
activations stay as they are (weight-only). The methods for experts take them too, with one more dimension for these:
see `punica.ops.experts`. One set of keywords may go to `add_shrink` and to `add_expand`: each looks
at its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from punica.ops.checks import check_keywords
from punica.ops.fp8_checks import Scheme
from punica.ops.quant import validate_scales
from punica.ops.weights import LoRAWeights

FP8_KEYWORDS = ("lora_a_scale", "lora_b_scale", "a_scale", "quant_args")


class Fp8Keywords(NamedTuple):
    """What was given, checked as far as no operand is needed."""

    lora_a_scale: Sequence[Tensor] | None
    lora_b_scale: Sequence[Tensor] | None
    a_scale: Tensor | None
    shrink: Scheme
    expand: Scheme

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> "Fp8Keywords | None":
        """From the keywords of a call; None where they ask for nothing of FP8.

        TypeError: ``quant_args`` is no mapping or has unknown keys; ValueError: sizes that make no scheme.
        """
        shrink, expand = _schemes(kwargs.get("quant_args"))
        fp8 = cls(kwargs.get("lora_a_scale"), kwargs.get("lora_b_scale"), kwargs.get("a_scale"), shrink, expand)
        return None if fp8 == NOTHING else fp8

    def validate(self) -> None:
        """For debugging: the values of the scales. Waits for the device."""
        for name, scales in (("lora_a_scale", self.lora_a_scale), ("lora_b_scale", self.lora_b_scale)):
            validate_scales(scales or (), name)
        if self.a_scale is not None:
            validate_scales(self.a_scale, "a_scale")

    def weights(self, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], lora_ranks: Tensor | None) -> LoRAWeights:
        """A and B with these scales."""
        scales, schemes = (self.lora_a_scale, self.lora_b_scale), (self.shrink, self.expand)
        return LoRAWeights.of(lora_a, lora_b, lora_ranks, scales, schemes)


NOTHING = Fp8Keywords(None, None, None, Scheme(), Scheme())


def _schemes(quant_args: Any) -> tuple[Scheme, Scheme]:
    """Those of shrink and expand."""
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
