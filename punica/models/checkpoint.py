"""A checkpoint folder: its tensors by name, as safetensors files store them, and the parameters that they fill.

Names are those that transformers writes for a causal language model. A folder of the bare backbone lacks their prefix
``model.``, which is added. Heads of other tasks are left out with a warning. Quantised weights are refused.

A model describes its checkpoint as a list of :class:`CheckpointEntry`. The *full* tensor of each is passed to the
parameter's ``weight_loader``, which keeps this tensor-parallel rank's part: any number of ranks gets the same numbers.
"""

import json
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from punica.adapters.check import all_finite
from punica.adapters.read import FLOATS
from punica.parallel import get_tensor_model_parallel_rank
from punica.progress import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PREFIX = "model."
_BACKBONE = ("embed_tokens.", "layers.", "norm.")
_OTHER_HEADS = ("v_head.", "value_head.", "score.")
NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that older checkpoints hold beside their weights."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in an open safetensors file, or the part of it at ``index`` (integers, slices with start and stop)."""

    name: str
    file: Any
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    index: tuple[int | slice, ...] = ()

    def part(self, index: tuple[int | slice, ...]) -> "StoredTensor":
        """Return a part of a whole tensor; dimensions beyond ``index`` are whole."""
        lengths = tuple(one.stop - one.start for one in index if isinstance(one, slice))
        return replace(self, index=index, shape=(*lengths, *self.shape[len(index) :]))

    def read(self) -> Tensor:
        found: Tensor = self.file.get_slice(self.name)[self.index] if self.index else self.file.get_tensor(self.name)
        return found


def stored_tensors(folder: str | Path, ignore_suffixes: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """List the tensors of ``model.safetensors``, else of the files of ``model.safetensors.index.json``, without those
    whose name ends with one of ``ignore_suffixes``.

    FileNotFoundError: no such folder, no safetensors in it, or a file of the index is missing. ValueError: a file is no
    safetensors file; the weights are quantised, or no floating-point numbers of 16 bits or more.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(Path(folder).expanduser()):
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is not a readable safetensors file: {error}; save it again") from error
        for name in file.keys():  # noqa: SIM118
            if not name.endswith(ignore_suffixes):
                part = file.get_slice(name)
                found[name] = StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype())
    _check_numbers(found, folder)
    return _of_backbone(found, folder)


def _of_backbone(found: Mapping[str, StoredTensor], folder: str | Path) -> dict[str, StoredTensor]:
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
    for name, one in sorted(found.items()):
        if one.dtype not in FLOATS and not name.startswith(_OTHER_HEADS):
            raise ValueError(
                f"checkpoint in {str(folder)!r} stores {name} as {one.dtype}, as quantised weights are, not as "
                f"{', '.join(FLOATS)}; serve the unquantised checkpoint that it was made from, or write one with "
                "transformers: model.dequantize(), then model.save_pretrained(folder)"
            )


def _files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    files = [single]
    if index.is_file() and not single.is_file():  # as in transformers; an index beside the single file may be older
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f'{str(index)!r} is no index (JSON with "weight_map"): {str(error)[:200]}') from error
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing; give {SINGLE_FILE} or all the files of {INDEX_FILE}")
    return files


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor of a checkpoint, and the parameter it fills, or the ``shard_id`` of a packed one."""

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    shard_id: Hashable = None

    def load(self, full: Tensor) -> None:
        """Copy this rank's part of ``full`` to the parameter and its dtype; all of it without ``weight_loader``."""
        parameter: Any = self.parameter
        if hasattr(parameter, "weight_loader"):
            parameter.weight_loader(parameter, full, self.shard_id)
        else:
            parameter.data.copy_(full)


@torch.no_grad()
def fill_random(entries: Sequence[CheckpointEntry], seed: int, std: float) -> None:
    """Fill matrices with N(0, std), norm weights with 1, biases with 0; equal for any number of ranks. Numbers are
    drawn in float32 on the device of the parameters (a CPU and a GPU draw different ones) and rounded to their dtype.
    """
    device = entries[0].parameter.device
    generator = torch.Generator(device).manual_seed(seed)
    for entry in entries:
        if len(entry.shape) == 2:
            entry.load(torch.empty(entry.shape, device=device).normal_(0.0, std, generator=generator))
        else:
            entry.load(torch.full(entry.shape, 0.0 if entry.name.endswith(".bias") else 1.0, device=device))


def check_tensors(entries: Sequence[CheckpointEntry], stored: Mapping[str, StoredTensor], folder: str | Path) -> None:
    """ValueError, before any weight is read, if tensors are missing, unexpected or of another shape (all listed)."""
    expected = {entry.name for entry in entries}
    problems = [f"missing {name}" for name in sorted(expected - stored.keys())]
    problems += [f"unexpected {name}" for name in sorted(stored.keys() - expected)]
    for entry in entries:
        if entry.name in stored and (found := stored[entry.name].shape) != entry.shape:
            problems.append(f"{entry.name} has shape {found}, the model expects {entry.shape}")
    if problems:
        raise ValueError(
            f"checkpoint in {str(folder)!r} does not fit the model ({len(problems)} problems): "
            f"{'; '.join(problems[:20])}. Build the model from the config.json of the same folder"
        )


def load_tensors(entries: Sequence[CheckpointEntry], stored: Mapping[str, StoredTensor]) -> None:
    """Read every entry from its file; rank 0 shows its progress. ValueError for a tensor with NaN or inf."""
    for entry in entries if get_tensor_model_parallel_rank() else shown(entries, "loading weights", "tensor"):
        full = stored[entry.name].read()
        if not all_finite(full):
            raise ValueError(f"checkpoint tensor {entry.name} contains NaN or inf; download or save it again")
        entry.load(full)
