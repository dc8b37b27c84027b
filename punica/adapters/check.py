"""Rules for the tensors of an adapter: names, dtypes, shapes and numbers.

An adapter is untrusted input. Its config is checked first (:meth:`punica.adapters.PEFTHelper.validate_legal`), names
before any tensor is read, and everything before the serving process changes.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from punica.adapters.doubts import BASE_WEIGHTS
from punica.adapters.wrap import adapter_component
from punica.checks import clip
from punica.layers.packing import Slices
from punica.layers.utils import ADAPTER_DTYPES
from punica.ops.expect import expect
from punica.ops.quant import FP8_DTYPES, Fp8Matrix, validate_scales

RESIZED = (
    "; the vocabulary was resized for the training: serve the adapter on that model (save_pretrained after the "
    "resize), or merge it there (merge_and_unload) and serve that"
)
NOT_READ = (*BASE_WEIGHTS, ".lora_velora_embed")
"""Ends of the names of tensors that are left out; VeLoRA's are of its backward pass alone."""
SCALE_SUFFIX = "_scale"
"""Suffix of a tensor's name in the name of its scales: ``lora_A.weight`` and ``lora_A.weight_scale``."""


_INFINITIES = {
    torch.float16: (torch.int16, "uint16", 0x7C00, 0xFC00),
    torch.bfloat16: (torch.int16, "uint16", 0x7F80, 0xFF80),
    torch.float32: (torch.int32, "uint32", 0x7F80_0000, 0xFF80_0000),
    torch.float64: (torch.int64, "uint64", 0x7FF0 << 48, 0xFFF0 << 48),
}
"""Integers of each dtype's size, and inf and -inf read as those."""


def check_expected_modules(modules: Iterable[str], expected_lora_modules: Collection[str]) -> None:
    """Check the last name component of every module (of experts, the part from `experts` on).

    ValueError with all unexpected ones, and what is expected.
    """
    expected = set(expected_lora_modules)
    offenders = sorted({module for module in modules if adapter_component(module) not in expected})
    if offenders:
        endings = sorted(expected)
        shown = f"{endings[:40]} and {len(endings) - 40} more" if len(endings) > 40 else str(endings)
        raise ValueError(
            f"adapter modules {clip(offenders)} are not supported by this model; expected names end in {shown}"
        )


def remedy_of(key: str) -> str:
    """Explain the name of a trained bias, or a whole embedding or head, beside the LoRA weights."""
    if key.endswith(".bias"):
        return ". It is a bias, trained with bias='all' or 'lora_only': train with bias='none', or merge the adapter"
    if not key.endswith(("embed_tokens.weight", "lm_head.weight")):
        return ""
    return (
        ". PEFT saves whole embeddings along after the vocabulary was resized or with save_embedding_layers=True: if "
        "the vocabulary is the model's, save the adapter again with save_embedding_layers=False; if it was resized, "
        "merge the adapter into the resized model (merge_and_unload) and serve that as a model of its own"
    )


def check_any(names: Mapping[str, object]) -> None:
    """ValueError where an adapter has no LoRA tensors."""
    if not names:
        raise ValueError("the adapter has no LoRA tensors at all")


def check_tensors(
    names: Mapping[str, tuple[str, bool, str]], tensors: Mapping[str, Tensor | Fp8Matrix], model_vocab_size: int | None
) -> dict[str, dict[bool, str]]:
    """Check dtypes, that A and B come together, and the vocabulary of embeddings. `names` are the `TensorName`s.

    Returns:
        `{module: {True: key of A, False: key of B}}`.

    Raises:
        TypeError: a value is not a tensor, or its dtype is not fp16, bf16, fp32 or fp64, or FP8 without scales.
        ValueError: no tensors, A without B, or an embedding of another vocabulary.
    """
    check_any(names)
    sides: dict[str, dict[bool, str]] = {}
    for key, (module, is_a, _) in names.items():
        tensor = tensors[key]
        if not isinstance(tensor, (Tensor, Fp8Matrix)):
            raise TypeError(f"{key!r} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in ADAPTER_DTYPES and not isinstance(tensor, Fp8Matrix):
            raise TypeError(
                f"{key!r} has dtype {tensor.dtype}; LoRA tensors must be float16, bfloat16, float32 or float64, or "
                f"float8 with scales in {key + SCALE_SUFFIX!r}"
            )
        of_embedding = is_a and "lora_embedding_" in key and tensor.ndim == 2
        if of_embedding and model_vocab_size not in (None, tensor.shape[1]):
            raise ValueError(
                f"{key!r} covers a vocabulary of {tensor.shape[1]} ids, the model has {model_vocab_size}{RESIZED}"
            )
        of_head = (
            not is_a and "lora_embedding_" not in key and module.rpartition(".")[2] == "lm_head" and tensor.ndim == 2
        )
        if of_head and model_vocab_size not in (None, tensor.shape[0]):
            raise ValueError(
                f"{key!r}: the model's vocabulary has {model_vocab_size} rows, got {tensor.shape[0]}{RESIZED}"
            )
        sides.setdefault(module, {})[is_a] = key
    incomplete = {
        module: "A without B" if True in found else "B without A" for module, found in sides.items() if len(found) < 2
    }
    if incomplete:
        raise ValueError(f"the adapter is incomplete: {clip(incomplete)}; every module needs lora_A and lora_B")
    return sides


def check_pair(module: str, a: Tensor | Fp8Matrix, b: Tensor | Fp8Matrix, rank: int) -> None:
    """Check A `[rank, in]` and B `[out, rank]`. Raises ValueError naming the module and both values."""
    if a.ndim != 2 or b.ndim != 2:
        empty = "; the trainer saved them empty: gather its shards before (DeepSpeed ZeRO-3, FSDP)" * (0 in a.shape)
        raise ValueError(
            f"module {module!r}: A and B must be 2-D, got shapes {tuple(a.shape)} and {tuple(b.shape)}{empty}"
        )
    if a.shape[0] != b.shape[1]:
        raise ValueError(
            f"module {module!r}: A has rank {a.shape[0]} (rows), B has rank {b.shape[1]} (columns); they must agree"
        )
    if a.shape[0] != rank:
        raise ValueError(f"module {module!r}: tensors have rank {a.shape[0]}, the adapter's config says {rank}")


def check_experts(module: str, a: Tensor | Fp8Matrix, b: Tensor | Fp8Matrix, rank: int) -> None:
    """Check A `[E*rank, in]` and B `[out, E*rank]` of all experts of a layer. Raises as :func:`check_pair`."""
    check_pair(module, a, b, a.shape[0] if a.ndim else 0)
    if a.shape[0] % rank:
        raise ValueError(
            f"module {module!r}: {a.shape[0]} rows of A are no multiple of the rank {rank}, which the adapter's config "
            "says every expert has"
        )


def join_scales(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Join FP8 tensors with their scales: ``<name>`` ``[N, K]`` float8 and ``<name>_scale``, one factor per tensor (one
    element) or per row (``[N]`` or ``[N, 1]``).

    TypeError: scales of a tensor that is not FP8. ValueError: scales of another shape, or not all finite and >= 0.
    """
    joined: dict[str, Any] = {}
    for key, tensor in tensors.items():
        name = key + SCALE_SUFFIX
        if is_scale_of_another(key, tensors):
            continue
        scale = tensors.get(name)
        joined[key] = tensor if scale is None else _with_scale(key, tensor, name, scale)
    return joined


def is_scale_of_another(key: str, keys: Container[str]) -> bool:
    """Tell if ``key`` names the scales of another tensor among ``keys``."""
    return key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in keys


def _with_scale(key: str, values: Any, name: str, scale: Any) -> Fp8Matrix:
    if not isinstance(values, Tensor) or values.dtype not in FP8_DTYPES:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{key!r} is {kind} and has scales in {name!r}; only float8 tensors have scales, drop them")
    expect(repr(name), scale, dtype=ADAPTER_DTYPES)
    rows = values.shape[0] if values.ndim else 0
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(rows)
    elif tuple(scale.shape) not in ((rows,), (rows, 1)):
        raise ValueError(
            f"{name!r} has shape {tuple(scale.shape)}; {key!r} {tuple(values.shape)} needs one scale, or one per row: "
            f"({rows},) or ({rows}, 1). Dequantise block-wise scales first"
        )
    scale = scale.reshape(rows).float().contiguous()
    if not scale.is_meta:
        validate_scales(scale, repr(name))
    return Fp8Matrix(values.detach(), scale)


def check_finite(module: str, is_a: bool, placed: Tensor | Fp8Matrix, read: Tensor | Fp8Matrix) -> None:
    """ValueError if a matrix holds NaN or inf as `placed`; tells if the cast of the `read` one overflowed."""
    if isinstance(placed, Fp8Matrix):  # its scales were checked; values may be NaN, and inf in e5m2
        placed = read = placed.values.float()
    elif isinstance(read, Fp8Matrix):
        read = read.real()
    if all_finite(placed):
        return
    cast = placed.dtype != read.dtype and all_finite(read)
    after = f" after the cast from {read.dtype} to {placed.dtype}" if cast else ""
    raise ValueError(f"module {module!r}: {'A' if is_a else 'B'} contains NaN or inf{after}")


def check_scaled(adapter_id: int, name: str, slices: Slices) -> None:
    """ValueError if the scaling made a B overflow."""
    if not all(b is None or all_finite(b.scale if isinstance(b, Fp8Matrix) else b) for _, b in slices):
        raise ValueError(f"adapter {adapter_id}, module {name!r}: B contains NaN or inf after scaling")


def all_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or inf; always true of meta tensors.

    In NaN and inf all bits of the exponent are set. Read as integers, positive ones are larger than all finite numbers
    with a sign, negative ones without; numpy finds the largest integer at the speed of the cache.
    """
    if tensor.is_meta or not tensor.numel():
        return True
    if tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    signed, unsigned, inf, minus_inf = _INFINITIES[tensor.dtype]
    values = tensor.detach().view(signed).numpy()
    return bool(values.max() < inf and values.view(unsigned).max() < minus_inf)
