"""Parameters of a model from safetensors files with Hugging Face names, or random ones.

A model describes its checkpoint as a list of :class:`CheckpointEntry`. The *full* tensor of each is passed to the
parameter's ``weight_loader``, which keeps this tensor-parallel rank's part: any number of ranks gets the same numbers.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor of a checkpoint, with its full shape, and the parameter it fills.

    ``shard_id`` selects one matrix of a packed parameter (``"q"``, or 1 for the up projection).
    """

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    shard_id: Hashable = None

    def load(self, full: torch.Tensor) -> None:
        """Copy this rank's part of ``full`` to the parameter and its dtype; all of it without ``weight_loader``."""
        parameter: Any = self.parameter
        if hasattr(parameter, "weight_loader"):
            parameter.weight_loader(parameter, full, self.shard_id)
        else:
            parameter.data.copy_(full)


@torch.no_grad()
def fill_random(entries: Sequence[CheckpointEntry], seed: int, std: float) -> None:
    """Fill matrices with N(0, std), norm weights with 1, biases with 0; equal for any number of ranks.

    Numbers are drawn in float32 on the device of the parameters (a CPU and a GPU draw different ones) and rounded to
    their dtype.
    """
    device = entries[0].parameter.device
    generator = torch.Generator(device).manual_seed(seed)
    for entry in entries:
        if len(entry.shape) == 2:
            entry.load(torch.empty(entry.shape, device=device).normal_(0.0, std, generator=generator))
        else:
            entry.load(torch.full(entry.shape, 0.0 if entry.name.endswith(".bias") else 1.0, device=device))


def find_tensors(
    entries: Sequence[CheckpointEntry], folder: str | Path, ignore_suffixes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Open the file of every entry's tensor: ``model.safetensors``, or those of ``model.safetensors.index.json``.

    All names and shapes are compared before any weight is read. Tensors whose name ends with one of ``ignore_suffixes``
    are skipped.

    Raises:
        FileNotFoundError: no such folder, no safetensors in it, or a file of the index is missing.
        ValueError: a file is no safetensors file; tensors are missing, unexpected or of another shape (all of them
        are listed).
    """
    home: dict[str, Any] = {}
    for path in _checkpoint_files(Path(folder).expanduser()):
        handle: Any = _open(path)
        home |= {name: handle for name in handle.keys() if not name.endswith(ignore_suffixes)}  # noqa: SIM118
    expected = {entry.name for entry in entries}
    problems = [f"missing {name}" for name in sorted(expected - home.keys())]
    problems += [f"unexpected {name}" for name in sorted(home.keys() - expected)]
    for entry in entries:
        if entry.name in home:
            found = tuple(home[entry.name].get_slice(entry.name).get_shape())
            if found != entry.shape:
                problems.append(f"{entry.name} has shape {found}, the model expects {entry.shape}")
    if problems:
        raise ValueError(
            f"checkpoint in {str(folder)!r} does not fit the model ({len(problems)} problems): "
            f"{'; '.join(problems[:20])}. Build the model from the config.json of the same folder"
        )
    return home


def load_tensors(entries: Sequence[CheckpointEntry], found: Mapping[str, Any]) -> None:
    """Read every entry from its file of :func:`find_tensors`.

    ValueError for a tensor with NaN or inf; the entries before it have been read then.
    """
    for entry in entries:
        full = found[entry.name].get_tensor(entry.name)
        if full.is_floating_point() and not is_finite(full):
            raise ValueError(
                f"checkpoint tensor {entry.name} contains NaN or inf; download or save the checkpoint again, and load "
                "it before the model is used"
            )
        entry.load(full)


def is_finite(tensor: torch.Tensor) -> bool:
    """Check that no element is NaN or inf: by the sum first, and by each element if that is not finite."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(torch.isfinite(tensor.sum(dtype=wide))) or bool(torch.isfinite(tensor.to(wide)).all())


def _open(path: Path) -> safe_open:
    """Open a safetensors file; ValueError naming the file when it is damaged or of another format."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a readable safetensors file: {error}; download or save it again"
        ) from error


def _checkpoint_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {str(folder)!r} does not exist or is not a folder")
    index = folder / INDEX_FILE
    if not index.is_file():
        files = [folder / SINGLE_FILE]
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
