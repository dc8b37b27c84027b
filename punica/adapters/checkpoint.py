"""From PEFT tensors to checked (A, B) pairs: nothing unchecked reaches a slot.

An adapter comes from a stranger (a tenant), so names are checked before any tensor is read, and every pair is checked
before anything in the serving process changes. No pickle is ever read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from punica.adapters.peft import (
    NameMapper,
    PEFTHelper,
    configured_module_name,
    is_base_layer_weight,
    is_skipped,
    map_tensor_name,
    parse_fine_tuned_lora_name,
    resolve_adapter_path,
)

WEIGHTS_FILE = "adapter_model.safetensors"
_LOADABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Pair(NamedTuple):
    """The checked matrices of one module, and the name under which the adapter's config has their rank and alpha."""

    a: torch.Tensor
    b: torch.Tensor
    configured_name: str


def find_weights_file(folder: str | Path) -> Path:
    """The `adapter_model.safetensors` of a PEFT folder.

    Raises:
        FileNotFoundError: no folder, or no weights in it. ValueError: only pickled weights (.bin, .pt), which are never
            read.
    """
    directory = resolve_adapter_path(folder)
    file = directory / WEIGHTS_FILE
    if file.is_file():
        return file
    for pickled in ("adapter_model.bin", "adapter_model.pt"):
        if (directory / pickled).is_file():
            raise ValueError(
                f"{str(directory / pickled)!r} is a pickle and is not read; convert the adapter to {WEIGHTS_FILE} "
                "(load it with the peft library and save it with safe_serialization=True)"
            )
    raise FileNotFoundError(f"adapter folder {str(directory)!r} holds no {WEIGHTS_FILE}")


def read_tensors(
    folder: str | Path,
    expected_lora_modules: Collection[str],
    weights_mapper: NameMapper | None,
    skip_prefixes: Sequence[str] | None,
) -> dict[str, torch.Tensor]:
    """Read the tensors of a PEFT folder after checking all their names; skipped and base-layer keys are left out.

    Raises:
        ValueError: the file is no safetensors file, a name is not a LoRA name, or a module is not in
            `expected_lora_modules`.
        FileNotFoundError: as :func:`find_weights_file`.
    """
    file = find_weights_file(folder)
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            wanted = wanted_keys(handle.keys(), weights_mapper, skip_prefixes)
            check_expected_modules(wanted, expected_lora_modules)
            return {key: handle.get_tensor(key) for key in wanted}
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is not a valid safetensors file: {error}") from error


def wanted_keys(
    keys: Iterable[str], weights_mapper: NameMapper | None, skip_prefixes: Sequence[str] | None
) -> dict[str, tuple[str, bool]]:
    """`{key: (module_name, is_lora_a)}` of the LoRA tensors among `keys`.

    Raises:
        ValueError: a key is not a LoRA name, or two keys name the same matrix.
    """
    wanted: dict[str, tuple[str, bool]] = {}
    owner: dict[tuple[str, bool], str] = {}
    for key in keys:
        if is_base_layer_weight(key) or is_skipped(map_tensor_name(key, weights_mapper), skip_prefixes):
            continue
        matrix = parse_fine_tuned_lora_name(key, weights_mapper)
        if matrix in owner:
            raise ValueError(
                f"tensors {owner[matrix]!r} and {key!r} are both {'A' if matrix[1] else 'B'} of module {matrix[0]!r}"
            )
        owner[matrix] = key
        wanted[key] = matrix
    return wanted


def check_expected_modules(wanted: Mapping[str, tuple[str, bool]], expected_lora_modules: Collection[str]) -> None:
    """Every module's last name component must be expected. Raises ValueError listing all offenders and the expected
    set.
    """
    expected = set(expected_lora_modules)
    offenders = sorted({module for module, _ in wanted.values() if module.rpartition(".")[2] not in expected})
    if offenders:
        raise ValueError(
            f"adapter modules {offenders} are not supported by this model; expected names end in {sorted(expected)}"
        )


def build_pairs(
    tensors: Mapping[str, torch.Tensor],
    peft_helper: PEFTHelper,
    device: torch.device | str,
    dtype: torch.dtype | None,
    model_vocab_size: int | None,
    weights_mapper: NameMapper | None,
    skip_prefixes: Sequence[str] | None,
) -> dict[str, Pair]:
    """`{module: Pair(A [r, in], B [out, r], ...)}`, cast to `dtype` (kept when None), on `device`, checked.

    Raises:
        ValueError: no tensors, A without B, shapes or ranks that disagree, NaN or inf, an embedding of another
            vocabulary.
        TypeError: a value is not a tensor, or its dtype is not fp16, bf16, fp32 or fp64 (fp8 would need scales).
    """
    wanted = wanted_keys(tensors, weights_mapper, skip_prefixes)
    if not wanted:
        raise ValueError("the adapter has no LoRA tensors at all")
    sides: dict[str, dict[bool, torch.Tensor]] = {}
    configured: dict[str, str] = {}
    for key, (module, is_a) in wanted.items():
        _check_dtype(key, tensors[key])
        if is_a and "lora_embedding_" in key and model_vocab_size is not None:
            _check_vocabulary(key, tensors[key], model_vocab_size)
        sides.setdefault(module, {})[is_a] = tensors[key]
        configured[module] = configured_module_name(key, weights_mapper)
    incomplete = {
        module: "A without B" if True in pair else "B without A" for module, pair in sides.items() if len(pair) < 2
    }
    if incomplete:
        raise ValueError(f"the adapter is incomplete: {incomplete}; every module needs lora_A and lora_B")
    pairs = {}
    for module, pair in sides.items():
        check_pair_shapes(module, pair[True], pair[False], peft_helper.rank_of(configured[module]))
        a = _place(module, "A", pair[True], device, dtype)
        b = _place(module, "B", pair[False], device, dtype)
        pairs[module] = Pair(a, b, configured[module])
    return pairs


def check_pair_shapes(module: str, a: torch.Tensor, b: torch.Tensor, rank: int) -> None:
    """A is `[rank, in]`, B `[out, rank]`. Raises ValueError naming the module and both values otherwise."""
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"module {module!r}: A and B must be 2-D, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[0] != b.shape[1]:
        raise ValueError(
            f"module {module!r}: A has rank {a.shape[0]} (rows), B has rank {b.shape[1]} (columns); they must agree"
        )
    if a.shape[0] != rank:
        raise ValueError(f"module {module!r}: tensors have rank {a.shape[0]}, the adapter's config says {rank}")


def all_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or inf.

    One reduction instead of an element-wise test: NaN and inf survive a sum, so a finite sum proves all elements
    finite; only a sum that overflowed needs the slow look.
    """
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def _check_dtype(key: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{key!r} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _LOADABLE_DTYPES:
        raise TypeError(f"{key!r} has dtype {tensor.dtype}; LoRA tensors must be float16, bfloat16, float32 or float64")


def _check_vocabulary(key: str, tensor: torch.Tensor, model_vocab_size: int) -> None:
    if tensor.dim() == 2 and tensor.shape[1] != model_vocab_size:
        raise ValueError(f"{key!r} covers a vocabulary of {tensor.shape[1]} ids, the model has {model_vocab_size}")


def _place(
    module: str, side: str, tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None
) -> torch.Tensor:
    placed = tensor.detach().to(device=device, dtype=dtype or tensor.dtype)
    if not all_finite(placed):
        cast = (
            f" after the cast from {tensor.dtype} to {dtype}"
            if placed.dtype != tensor.dtype and all_finite(tensor)
            else ""
        )
        raise ValueError(f"module {module!r}: {side} contains NaN or inf{cast}")
    return placed
