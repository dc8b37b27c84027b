"""Rules that all LoRA layers share: replaceable base layers, device of slots, arguments of `set_lora`."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from punica.checks import check_int
from punica.layers.packing import Slices
from punica.ops.quant import Fp8Matrix

# FP8 values go with their scales, as an `Fp8Matrix`: a plain cast would drop them; integers are no weights.
ADAPTER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_replacements: dict[str, type[nn.Module]] = {}


def register_layer_class(name: str, replacement: type[nn.Module]) -> None:
    """Substitute ``replacement`` for the base layer class called ``name``, for deployments with their own subclass.
    The replacement rules that ask for *exactly* that class then accept the substitute, and no longer the original.
    """
    if not (isinstance(replacement, type) and issubclass(replacement, nn.Module)):
        raise TypeError(f"replacement for {name!r} must be an nn.Module class, got {replacement!r}")
    _replacements[name] = replacement


def resolve_layer_class(cls: type[nn.Module]) -> type[nn.Module]:
    return _replacements.get(cls.__name__, cls)


def is_exactly(layer: object, cls: type[nn.Module]) -> bool:
    """True for a layer of the class registered for ``cls``, subclasses excluded."""
    return type(layer) is resolve_layer_class(cls)


def is_kind_of(layer: object, cls: type[nn.Module]) -> bool:
    """True for a layer of the class registered for ``cls``, of ``cls``, or of a subclass of either."""
    return isinstance(layer, (cls, resolve_layer_class(cls)))


def _not_fully_sharded_can_replace(can_replace: Callable[..., bool]) -> Callable[..., bool]:
    """Decorate ``can_replace_layer``: the wrapped answer AND ``not lora_config.fully_sharded_loras``, unless
    ``decorate=False``, by which a fully sharded subclass reuses its parent's test.
    """
    return _with_condition(can_replace, lambda lora_config: not lora_config.fully_sharded_loras)


def _fully_sharded_can_replace(can_replace: Callable[..., bool]) -> Callable[..., bool]:
    return _with_condition(can_replace, lambda lora_config: bool(lora_config.fully_sharded_loras))


def _with_condition(can_replace: Callable[..., bool], condition: Callable[[Any], bool]) -> Callable[..., bool]:
    @functools.wraps(can_replace)
    def conditional(cls: type, *, lora_config: Any, decorate: bool = True, **layer: Any) -> bool:
        return (not decorate or condition(lora_config)) and can_replace(cls, lora_config=lora_config, **layer)

    return conditional


def base_weight(base_layer: nn.Module) -> Tensor:
    """The first weight that ``base_layer`` has, on the device of the LoRA buffers: ``weight``, ``weight_packed``,
    ``qweight``, then ``w2_weight`` (on ``routed_experts`` if there is one). ``ValueError``: none of them.
    """
    experts = getattr(base_layer, "routed_experts", base_layer)
    owners = {"weight": base_layer, "weight_packed": base_layer, "qweight": base_layer, "w2_weight": experts}
    for name, owner in owners.items():
        if isinstance(weight := getattr(owner, name, None), Tensor):
            return weight
    raise ValueError(f"unsupported base layer {type(base_layer).__name__}: it has none of {', '.join(owners)}")


def check_slot_index(index: object, num_slots: int) -> None:
    """``TypeError`` unless ``index`` is an int, ``ValueError`` unless it is a slot in ``[0, num_slots)``."""
    if not 0 <= check_int("index", index) < num_slots:
        raise ValueError(f"index must be a slot in [0, {num_slots}), got {index}; max_loras={num_slots} slots exist")


def check_lora_pair(name: str, lora_a: Any, lora_b: Any, max_rank: int, lead: tuple[int, ...] = ()) -> None:
    """Check one pair A ``[*lead, r, in]``, B ``[*lead, out, r]``, all but the sizes in and out.

    ``TypeError``: not dense tensors, or a dtype other than fp16, bf16, fp32, fp64 (FP8 comes as `Fp8Matrix`).
    ``ValueError``: only one of them is ``None``, another number of dimensions or experts, ranks differ or too large.
    """
    if lora_a is None and lora_b is None:
        return
    for side, tensor in (("lora_a", lora_a), ("lora_b", lora_b)):
        if tensor is None:
            raise ValueError(f"{name}: {side} is None but its partner is not; give both, or None for both")
        if not isinstance(tensor, (Tensor, Fp8Matrix)):
            raise TypeError(f"{name}: {side} must be a tensor or None, got {type(tensor).__name__}")
        if isinstance(tensor, Tensor) and tensor.dtype not in ADAPTER_DTYPES:
            raise TypeError(
                f"{name}: {side} must be float16, bfloat16, float32 or float64, got {tensor.dtype}; give float8 with "
                "its scales (punica.ops.quant.Fp8Matrix), or dequantise it first"
            )
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            raise TypeError(f"{name}: {side} must be a dense tensor, it is of layout {tensor.layout}; densify it first")
        if tensor.ndim != len(lead) + 2 or tuple(tensor.shape[:-2]) != lead:
            wanted = f"[{lead[0]}, rows, cols], restricted to this rank's local experts first" if lead else "2-D"
            raise ValueError(f"{name}: {side} must be {wanted}, got shape {tuple(tensor.shape)}")
    rank = lora_a.shape[-2]
    if rank != lora_b.shape[-1]:
        raise ValueError(f"{name}: lora_a has rank {rank} (its rows), lora_b has rank {lora_b.shape[-1]} (its columns)")
    if rank > max_rank:
        raise ValueError(f"{name}: rank {rank} exceeds max_lora_rank {max_rank}; raise LoRAConfig.max_lora_rank")


def check_has_data(groups: Slices) -> None:
    """``TypeError`` for a meta tensor."""
    for i, pair in enumerate(groups):
        for side, tensor in zip(("lora_a", "lora_b"), pair, strict=True):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                raise TypeError(f"slice {i}: {side} must be dense, it is a meta tensor without data; load it first")


def listed_groups(lora_a: Any, lora_b: Any) -> Slices:
    """Pair the lists that ``set_lora`` takes for a layer of several slices."""
    for name, value in (("lora_a", lora_a), ("lora_b", lora_b)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list with one tensor or None per slice, got {type(value).__name__}")
    if len(lora_a) != len(lora_b):
        raise ValueError(f"lora_a and lora_b must have equally many entries, got {len(lora_a)} and {len(lora_b)}")
    return list(zip(lora_a, lora_b, strict=True))


def has_no_lora(wrapper: object) -> bool:
    """True where the wrapper knows that no token of the step has an adapter, on any rank: all see the same mapping."""
    return getattr(wrapper, "no_lora", False)


# Of a thread each: engines of two threads may capture at the same time.
_rehearsing = ContextVar("rehearsing", default=False)
_captures_vocabulary = ContextVar("captures_vocabulary", default=True)


@contextmanager
def _set(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


rehearsal = functools.partial(_set, _rehearsing, True)
"""Context in which layers do what they would do in a capture, so that a graph finds its kernels compiled and loaded."""
capturing_vocabulary = functools.partial(_set, _captures_vocabulary)
"""Context in which captures have the LoRA work of embedding and head, or (False) not: no adapter is for them."""


def is_being_captured(tensor: Tensor) -> bool:
    """True where work on ``tensor`` goes into a CUDA graph now, or in its `rehearsal`."""
    return tensor.is_cuda and (_rehearsing.get() or torch.cuda.is_current_stream_capturing())


def has_vocabulary_work(filled_slots: Collection[int], tensor: Tensor) -> bool:
    """True where embedding or head has LoRA work to do on ``tensor``: a slot is filled, or may be in a graph."""
    return _captures_vocabulary.get() if is_being_captured(tensor) else bool(filled_slots)


def as_rows(tensor: Tensor) -> Tensor:
    """``[..., width]`` as ``[T, width]``; itself where it is that already, which costs the host nothing."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])
