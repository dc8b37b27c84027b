"""Is an adapter legal? The names, types, shapes and contents of its tensors, and whether it fits the model.

An adapter comes from a stranger (a tenant), so nothing unchecked reaches a slot: its config is checked first (by
:meth:`punica.adapters.PEFTHelper.validate_legal`), names before any tensor is read, and all of it before anything in
the serving process changes. Every rule stands here once; the stations around ask where they first have what it needs.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from punica.adapters.wrap import adapter_component
from punica.layers import BaseLayerWithLoRA
from punica.layers.base import LoRAInput
from punica.layers.utils import ADAPTER_DTYPES


def check_expected_modules(modules: Iterable[str], expected_lora_modules: Collection[str]) -> None:
    """The last name component of every module (of experts, the part from `experts` on) must be expected. Raises
    ValueError with all offenders and what is.
    """
    expected = set(expected_lora_modules)
    offenders = sorted({module for module in modules if adapter_component(module) not in expected})
    if offenders:
        endings = sorted(expected)
        shown = f"{endings[:40]} and {len(endings) - 40} more" if len(endings) > 40 else str(endings)
        raise ValueError(f"adapter modules {offenders} are not supported by this model; expected names end in {shown}")


def check_tensors(
    names: Mapping[str, tuple[str, bool, str]], tensors: Mapping[str, Tensor], model_vocab_size: int | None
) -> dict[str, dict[bool, str]]:
    """Types and dtypes, A with B everywhere, embeddings of the model's vocabulary. `names` are the `TensorName`s.

    Returns:
        `{module: {True: key of A, False: key of B}}`.

    Raises:
        TypeError: a value is not a tensor, or its dtype is not fp16, bf16, fp32 or fp64 (fp8 would need scales).
        ValueError: no tensors, A without B, or an embedding of another vocabulary.
    """
    if not names:
        raise ValueError("the adapter has no LoRA tensors at all")
    sides: dict[str, dict[bool, str]] = {}
    for key, (module, is_a, _) in names.items():
        tensor = tensors[key]
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{key!r} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in ADAPTER_DTYPES:
            raise TypeError(
                f"{key!r} has dtype {tensor.dtype}; LoRA tensors must be float16, bfloat16, float32 or float64"
            )
        of_embedding = is_a and "lora_embedding_" in key and tensor.dim() == 2
        if of_embedding and model_vocab_size not in (None, tensor.shape[1]):
            raise ValueError(f"{key!r} covers a vocabulary of {tensor.shape[1]} ids, the model has {model_vocab_size}")
        sides.setdefault(module, {})[is_a] = key
    incomplete = {
        module: "A without B" if True in found else "B without A" for module, found in sides.items() if len(found) < 2
    }
    if incomplete:
        raise ValueError(f"the adapter is incomplete: {incomplete}; every module needs lora_A and lora_B")
    return sides


def check_pair(module: str, a: Tensor, b: Tensor, rank: int) -> None:
    """A is `[rank, in]`, B `[out, rank]`. Raises ValueError naming the module and both values otherwise."""
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"module {module!r}: A and B must be 2-D, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[0] != b.shape[1]:
        raise ValueError(
            f"module {module!r}: A has rank {a.shape[0]} (rows), B has rank {b.shape[1]} (columns); they must agree"
        )
    if a.shape[0] != rank:
        raise ValueError(f"module {module!r}: tensors have rank {a.shape[0]}, the adapter's config says {rank}")


def check_finite(module: str, is_a: bool, placed: Tensor, read: Tensor) -> None:
    """ValueError if a matrix holds NaN or inf as `placed`, and whether only the cast of what was `read` brought it."""
    if _all_finite(placed):
        return
    cast = placed.dtype != read.dtype and _all_finite(read)
    after = f" after the cast from {read.dtype} to {placed.dtype}" if cast else ""
    raise ValueError(f"module {module!r}: {'A' if is_a else 'B'} contains NaN or inf{after}")


def check_fits(adapter_id: int, name: str, lora_a: LoRAInput, lora_b: LoRAInput, layer: BaseLayerWithLoRA) -> None:
    """All that the layer's `set_lora` would object to, so that activation cannot fail half-way; and overflow of B.

    Raises TypeError or ValueError with the adapter's id and the module in front.
    """
    try:
        _, slices_b = layer.check_lora(lora_a, lora_b)
    except (TypeError, ValueError) as error:
        raise type(error)(f"adapter {adapter_id}, module {name!r}: {error}") from error
    if not all(b is None or _all_finite(b) for b in slices_b):
        raise ValueError(f"adapter {adapter_id}, module {name!r}: B contains NaN or inf after scaling")


def _all_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or inf.

    One reduction instead of an element-wise test: NaN and inf survive a sum, so a finite sum proves all elements
    finite; only a sum that overflowed needs the slow look.
    """
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
