"""Rules for the tensors of an adapter: dtypes, shapes and numbers.

An adapter is untrusted input: all is checked before the serving process changes, names before any tensor is read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from punica.adapters.config import PEFTHelper
from punica.adapters.names import TensorName, is_projection_name, is_stacked_name
from punica.checks import clip
from punica.layers.utils import ADAPTER_DTYPES

_RESIZED = (
    "; the vocabulary was resized for the training: serve the adapter on that model (save_pretrained after the "
    "resize), or merge it there (merge_and_unload) and serve that"
)
_INFINITIES = {
    torch.float16: (torch.int16, "uint16", 0x7C00, 0xFC00),
    torch.bfloat16: (torch.int16, "uint16", 0x7F80, 0xFF80),
    torch.float32: (torch.int32, "uint32", 0x7F80_0000, 0xFF80_0000),
    torch.float64: (torch.int64, "uint64", 0x7FF0 << 48, 0xFFF0 << 48),
}
"""Integers of each dtype's size, and inf and -inf read as those."""


def dtype_error(key: str, dtype: object) -> TypeError:
    return TypeError(f"{key!r} has dtype {dtype}; LoRA tensors must be float16, bfloat16, float32 or float64")


class ModuleEntry(NamedTuple):
    """One module in a checkpoint: its name, the keys of A and B, and what the adapter's config says of it."""

    module: str
    key_a: str
    key_b: str
    rank: int
    lora_alpha: float
    scaling: float
    is_stacked: bool


def table_of_contents(
    tensors: Mapping[str, Tensor], names: Mapping[str, TensorName], peft_helper: PEFTHelper, vocab_size: int | None
) -> list[ModuleEntry]:
    """Check dtypes, shapes and ranks of an adapter's named tensors, all but the numbers; one entry per module. Meta
    tensors will do.

    TypeError: no tensor, or its dtype is not fp16, bf16, fp32 or fp64. ValueError: A without B, an embedding of another
    vocabulary, or shapes and ranks that disagree.
    """
    sides: dict[str, dict[bool, str]] = {}
    for key, (module, is_a, _) in names.items():
        _check_tensor(key, tensors[key], module, is_a, vocab_size)
        sides.setdefault(module, {})[is_a] = key
    if incomplete := {
        module: "A without B" if True in found else "B without A" for module, found in sides.items() if len(found) < 2
    }:
        raise ValueError(f"the adapter is incomplete: {clip(incomplete)}; every module needs lora_A and lora_B")
    if (invocation := peft_helper.alora_invocation_tokens) is not None:
        if vocab_size is not None and max(invocation) >= vocab_size:
            raise ValueError(f"invoked by token {clip(max(invocation))}, the model's vocabulary {vocab_size} ids")
        if embedding := next((key for key in names if "lora_embedding_" in key), None):
            raise ValueError(f"alora_invocation_tokens and an embedding, {embedding!r}, do not go together, as in PEFT")
    peft_helper.resolve(name.configured for name in names.values())
    contents = []
    for module, keys in sides.items():
        key_a, key_b, configured = keys[True], keys[False], names[keys[False]].configured
        rank, is_stacked = peft_helper.rank_of(configured), is_stacked_name(module)
        a, b = tensors[key_a], tensors[key_b]
        if is_projection_name(module):
            _check_projection(module, a, b, rank)
        else:
            check_pair(module, a, b, rank, is_stacked, partial(peft_helper.source_of_rank, configured))
        alpha, scaling = peft_helper.alpha_of(configured), peft_helper.scaling_of(configured)
        contents.append(ModuleEntry(module, key_a, key_b, rank, alpha, scaling, is_stacked))
    return contents


def _check_tensor(key: str, tensor: object, module: str, is_a: bool, vocab_size: int | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{key!r} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in ADAPTER_DTYPES:
        raise dtype_error(key, tensor.dtype)
    if vocab_size is None or tensor.ndim != 2:
        return
    if "lora_embedding_" in key:
        if is_a and tensor.shape[1] != vocab_size:
            raise ValueError(f"{key!r}: vocabulary of {tensor.shape[1]} ids, the model has {vocab_size}{_RESIZED}")
    elif not is_a and module.rpartition(".")[2] == "lm_head" and tensor.shape[0] != vocab_size:
        raise ValueError(f"{key!r}: the model's vocabulary has {vocab_size} rows, got {tensor.shape[0]}{_RESIZED}")


def check_pair(
    module: str, a: Tensor, b: Tensor, rank: int, is_stacked: bool = False, source: Callable[[], str] = str
) -> None:
    """Check A `[rank, in]` and B `[out, rank]`, or of all experts of a layer A `[E*rank, in]` and B `[out, E*rank]`.
    `source` tells for an error where in the config the rank is.
    """
    if a.ndim != 2 or b.ndim != 2:
        empty = "; the trainer saved them empty: gather its shards before (DeepSpeed ZeRO-3, FSDP)" * (0 in a.shape)
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}{empty}"
        raise ValueError(f"module {module!r}: A and B must be 2-D, got shapes {shapes}")
    if a.shape[0] != b.shape[1]:
        raise ValueError(f"module {module!r}: A has rank {a.shape[0]} (rows), B has rank {b.shape[1]} (columns)")
    if is_stacked and a.shape[0] % rank:
        rows = f"{a.shape[0]} rows of A are no multiple of the config's rank {rank}"
        raise ValueError(f"module {module!r}: {rows}{source()}")
    if not is_stacked and a.shape[0] != rank:
        ranks = f"tensors have rank {a.shape[0]}, the adapter's config says {rank}"
        raise ValueError(f"module {module!r}: {ranks}{source()}")


def _check_projection(module: str, a: Tensor, b: Tensor, rank: int) -> None:
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    if a.ndim != 3 or b.ndim != 3 or len({a.shape[0], b.shape[0]} - {1}) > 1:
        raise ValueError(f"module {module!r}: A and B must be [E, r, in] and [E, out, r] (E or 1), got {shapes}")
    if (a.shape[1], b.shape[2]) != (rank, rank):
        raise ValueError(f"module {module!r}: A and B have shapes {shapes}, the adapter's config says rank {rank}")


def check_finite(module: str, is_a: bool, placed: Tensor, read: Tensor) -> None:
    """ValueError if a matrix holds NaN or inf as `placed`; tells if the cast of the `read` one overflowed."""
    if all_finite(placed):
        return
    cast = placed.dtype != read.dtype and all_finite(read)
    after = f" after the cast from {read.dtype} to {placed.dtype}" if cast else ""
    raise ValueError(f"module {module!r}: {'A' if is_a else 'B'} contains NaN or inf{after}")


def all_finite(tensor: Tensor) -> bool:
    """Tell if no element is NaN or inf (all bits of the exponent set): numpy's largest integer, at cache speed."""
    if tensor.is_meta or not tensor.numel():
        return True
    if tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    if tensor.dtype.itemsize > 2 and bool(torch.isfinite(tensor.sum())):  # twice as fast as integers of this size
        return True
    signed, unsigned, inf, minus_inf = _INFINITIES[tensor.dtype]
    values = tensor.detach().view(signed).numpy()
    return bool(values.max() < inf and values.view(unsigned).max() < minus_inf)
