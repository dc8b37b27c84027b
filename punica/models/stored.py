"""Tensors of a checkpoint folder by name, as its safetensors files store them, before any is read.

Names are those that transformers writes for a causal language model. A folder of the bare backbone lacks their prefix
``model.``, which is added. Heads of other tasks beside it are left out with a warning. Tensors of quantised weights are
refused: their numbers mean nothing without scales, and their layers are not served.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNQUANTISED = "serve the unquantised checkpoint that it was made from, or write one with transformers: " \
    "model.dequantize(), then model.save_pretrained(folder)"  # fmt: skip
"""Remedy for a quantised checkpoint."""
_PREFIX = "model."
_BACKBONE = ("embed_tokens.", "layers.", "norm.")
_OTHER_HEADS = ("v_head.", "value_head.", "score.")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights by their names in safetensors."""
NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that older checkpoints hold beside their weights."""
_QUANTISED = {
    "GPTQ or AWQ": (".qweight", ".qzeros", ".g_idx"),
    "bitsandbytes (bnb)": (".absmax", ".quant_map", ".SCB", "__nf4", "__fp4"),
    "FP8": (".weight_scale", ".weight_scale_inv", ".input_scale"),
    "compressed-tensors": (".weight_packed",),
}
"""Ways to quantise, by how names of their tensors end."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in an open safetensors file, or the part of it at ``index`` (integers and slices with a start and stop).

    ``dtype``: as safetensors names it.
    """

    name: str
    file: Any
    shape: tuple[int, ...]
    dtype: str
    index: tuple[int | slice, ...] = ()

    def part(self, index: tuple[int | slice, ...]) -> "StoredTensor":
        """Return a part of a whole tensor; dimensions beyond ``index`` are whole."""
        lengths = tuple(one.stop - one.start for one in index if isinstance(one, slice))
        return replace(self, index=index, shape=(*lengths, *self.shape[len(index) :]))

    def read(self) -> Tensor:
        """Read its numbers."""
        found: Tensor = self.file.get_slice(self.name)[self.index] if self.index else self.file.get_tensor(self.name)
        return found


def stored_tensors(folder: str | Path, ignore_suffixes: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """List the tensors of ``model.safetensors``, else of the files of ``model.safetensors.index.json``.

    As in transformers, the single file takes precedence over an index beside it, which may be older. Tensors whose name
    ends with one of ``ignore_suffixes`` are left out.

    Raises:
        FileNotFoundError: no such folder, no safetensors in it, or a file of the index is missing.
        ValueError: a file is no safetensors file; the weights are quantised, or no floating-point numbers of 16 bits or
            more.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(Path(folder).expanduser()):
        file: Any = _open(path)
        for name in file.keys():  # noqa: SIM118
            if not name.endswith(ignore_suffixes):
                part = file.get_slice(name)
                found[name] = StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype())
    _check_numbers(found, folder)
    return _of_backbone(found, folder)


def _of_backbone(found: Mapping[str, StoredTensor], folder: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors under the names of a causal language model, without other heads, which are warned of."""
    others = sorted({name.partition(".")[0] for name in found if name.startswith(_OTHER_HEADS)})
    if others:
        warnings.warn(
            f"checkpoint in {str(folder)!r} holds {', '.join(others)} beside the language model; it is not served",
            stacklevel=2,
        )
    kept = {name: one for name, one in found.items() if not name.startswith(_OTHER_HEADS)}
    if any(name.startswith(_PREFIX) for name in kept):
        return kept
    return {_PREFIX + name if name.startswith(_BACKBONE) else name: one for name, one in kept.items()}


def _check_numbers(found: Mapping[str, StoredTensor], folder: str | Path) -> None:
    where = f"checkpoint in {str(folder)!r}"
    for kind, suffixes in _QUANTISED.items():
        signs = [name for name in sorted(found) if name.endswith(suffixes)]
        if signs:
            raise ValueError(f"{where} is quantised by {kind}, as its tensor {signs[0]} tells; {UNQUANTISED}")
    for name, one in sorted(found.items()):
        if one.dtype in FLOATS or name.startswith(_OTHER_HEADS):
            continue
        if one.dtype.startswith("F8"):
            raise ValueError(
                f"{where} stores {name} in float8 ({one.dtype}) without scales, so its numbers need not be the "
                f"weights; {UNQUANTISED}"
            )
        raise ValueError(f"{where} stores {name} as {one.dtype}, must be one of {', '.join(FLOATS)}; {UNQUANTISED}")


def _open(path: Path) -> safe_open:
    """Open a safetensors file; ValueError naming the file when it is damaged or of another format."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a readable safetensors file: {error}; download or save it again"
        ) from error


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {str(folder)!r} does not exist or is not a folder")
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file() or not index.is_file():
        files = [single]
    else:
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(
                f'{str(index)!r} is not a safetensors index (JSON with "weight_map"): {str(error)[:200]}'
            ) from error
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is missing; a model folder holds {SINGLE_FILE} or all the files of {INDEX_FILE}"
            )
    return files
