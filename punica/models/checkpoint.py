"""Parameters of a model from safetensors files with Hugging Face names, or random ones.

A model describes its checkpoint as a list of :class:`CheckpointEntry`. The *full* tensor of each is passed to the
parameter's ``weight_loader``, which keeps this tensor-parallel rank's part: any number of ranks gets the same numbers.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from punica.models.stored import StoredTensor
from punica.parallel import get_tensor_model_parallel_rank
from punica.progress import shown


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


def check_tensors(entries: Sequence[CheckpointEntry], stored: Mapping[str, StoredTensor], folder: str | Path) -> None:
    """Compare names and shapes of ``stored`` with the model's, before any weight is read.

    ValueError: tensors are missing, unexpected or of another shape (all of them are listed).
    """
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
    """Read every entry from its file; rank 0 shows its progress.

    ValueError for a tensor with NaN or inf; the entries before it have been read then.
    """
    for entry in entries if get_tensor_model_parallel_rank() else shown(entries, "loading weights", "tensor"):
        full = stored[entry.name].read()
        if not is_finite(full):
            raise ValueError(
                f"checkpoint tensor {entry.name} contains NaN or inf; download or save the checkpoint again, and load "
                "it before the model is used"
            )
        entry.load(full)


def is_finite(tensor: torch.Tensor) -> bool:
    """Check that no element is NaN or inf: by the sum first, and by each element if that is not finite."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(torch.isfinite(tensor.sum(dtype=wide))) or bool(torch.isfinite(tensor.to(wide)).all())
