"""Weights given by their tensors: objects (`punica.ops.weights`) made once, and the keywords of their scales.

An object is kept while all of its tensors live. It is recognised by their identity, and is made anew where one of them
has got other memory, another shape, strides or dtype. It holds aliases of the tensors: a tensor that is freed takes the
object with it, before another one may have its address.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from punica.ops.expect import check_keywords
from punica.ops.experts import Fp8Experts
from punica.ops.scales import PLAIN, Scheme
from punica.ops.weights import STEP, LoRAWeights, Names, Scaled, Stack, is_traced, kept

T = TypeVar("T")
Group = Any  # a tensor, a sequence of them, or None


class _Known(NamedTuple):
    layouts: list[tuple]
    made: Any
    tensors: list[weakref.ref]


_KNOWN: dict[tuple, _Known] = {}


def known_stack(
    tensors: Sequence[Tensor], rank_dim: int, ranks: Tensor | None, scales: Scaled, scheme: Scheme, names: Names = STEP
) -> Stack:
    return _known((tensors, ranks, scales), (rank_dim, scheme), lambda t, r, s: Stack(t, rank_dim, r, s, scheme, names))


def known_weights(
    lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], ranks: Tensor | None, scales: tuple[Scaled, Scaled],
    schemes: tuple[Scheme, Scheme], names: Names = STEP,
) -> LoRAWeights:  # fmt: skip
    groups = (lora_a, lora_b, ranks, *scales)
    return _known(groups, schemes, lambda a, b, r, *s: LoRAWeights.of(a, b, r, s, schemes, names))


def _known(groups: tuple[Group, ...], rest: tuple, make: Callable[..., T]) -> T:
    if is_traced():
        return make(*groups)
    parts: list[Any] = [rest]
    tensors = []
    for group in groups:
        parts.append(type(group))
        if group is not None:
            for one in group if isinstance(group, (tuple, list)) else (group,):
                parts.append(id(one))
                tensors.append(one)
    try:
        if any(t.requires_grad for t in tensors):  # aliases have no gradients
            return make(*groups)
        layouts = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    except (AttributeError, RuntimeError):  # not tensors, which the checks name, or without memory
        return make(*groups)
    key = tuple(parts)
    found = _KNOWN.get(key)
    if found is not None and found.layouts == layouts:
        return found.made
    made = make(*map(_aliases, groups))
    refs = [weakref.ref(t, lambda _: _KNOWN.pop(key, None)) for t in tensors]
    return kept(_KNOWN, key, _Known(layouts, made, refs)).made


def _aliases(group: Group) -> Group:
    if isinstance(group, (tuple, list)):
        return [one.detach() for one in group]
    return None if group is None else group.detach()


KEYWORDS = ("lora_ranks", "lora_a_scale", "lora_b_scale", "a_scale", "quant_args")


class Keywords(NamedTuple):
    """Keywords of a call of the wrapper, checked as far as no operand is needed.

    ``lora_ranks``: int32 ``[n, L]``, the true rank of every slice and slot (None: the slots' width). ``lora_a_scale``,
    ``lora_b_scale``: the scales of A and of B, one float32 tensor per slice; ``a_scale``: those of an x that is FP8
    itself. ``quant_args``: their layout, a `Scheme` or its fields, for one product or both, or
    ``{"use_fp8_w8a8": ..., "shrink": {...}, "expand": {...}}`` where they differ. Without ``use_fp8_w8a8`` activations
    stay as they are (weight-only). Experts have one more dimension, see `punica.ops.experts`. One set of keywords may
    go to `add_shrink` and to `add_expand`: each reads its own.
    """

    lora_ranks: Tensor | None = None
    lora_a_scale: Scaled = None
    lora_b_scale: Scaled = None
    a_scale: Tensor | None = None
    shrink: Scheme = PLAIN
    expand: Scheme = PLAIN

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any], allowed: Sequence[str] = KEYWORDS) -> "Keywords":
        """The keywords of ``method``. TypeError: unknown ones, or ``quant_args`` no mapping; ValueError: no scheme."""
        if not given:
            return _NONE
        check_keywords(method, given, allowed)
        return cls._make((*[given.get(name) for name in KEYWORDS[:-1]], *_schemes(given.get("quant_args"))))

    def experts(self) -> Fp8Experts | None:
        """Return the scales of experts; None where nothing is FP8."""
        if self[1:] == _NONE[1:]:
            return None
        scales = (self.lora_a_scale or (), self.lora_b_scale or (), self.a_scale, None)
        return Fp8Experts(*scales, self.shrink, self.expand)

    def validate(self) -> None:
        """Check the values of the scales, for debugging. Waits for the device."""
        Fp8Experts(self.lora_a_scale or (), self.lora_b_scale or (), self.a_scale).validate()


_NONE = Keywords()


def _schemes(quant_args: Any) -> tuple[Scheme, Scheme]:
    if quant_args is None or isinstance(quant_args, Scheme):
        scheme = quant_args or PLAIN
        return scheme, scheme
    if not isinstance(quant_args, Mapping):
        raise TypeError(f"quant_args must be a mapping, got {type(quant_args).__name__}")
    if not {"shrink", "expand"} & set(quant_args):
        scheme = Scheme.of(quant_args)
        return scheme, scheme
    check_keywords("quant_args", quant_args, ("use_fp8_w8a8", "shrink", "expand"))
    both = {"use_fp8_w8a8": quant_args["use_fp8_w8a8"]} if "use_fp8_w8a8" in quant_args else {}
    return Scheme.of(both | dict(quant_args.get("shrink", {}))), Scheme.of(both | dict(quant_args.get("expand", {})))
