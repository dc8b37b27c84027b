"""`StepBuffers`: the integers of a step where the model reads them, allocated once and refilled by every step."""

from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.staging import StagedBuffer
from punica.scheduling import StepLayout


class StepRows(NamedTuple):
    """Views of the buffers, int64 on the device: ``[T]``, ``[T]``, ``[T]`` and ``[S]``, as in ``StepLayout``."""

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    sampled_rows: Tensor


class StepBuffers:
    """Token ids, positions, cache rows and sampled rows of up to ``max_tokens`` rows, 32 bytes for each.

    Their addresses never change, which is what a captured CUDA graph needs, and one copy sends them to the device,
    asynchronous on CUDA. A step gets views of the first T (or S) entries. What lies behind those is left over from
    earlier steps and read by nobody: whoever runs more rows than a step has must fill in the rest first.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._staged = StagedBuffer((len(StepRows._fields), max_tokens), torch.int64, device)

    def fill(self, layout: StepLayout) -> StepRows:
        """Refill from a layout of at most ``max_tokens`` rows; the views hold until the next call."""
        arrays = (layout.token_ids, layout.positions, layout.kv_rows, layout.sampled_rows)
        for row, values in zip(self._staged.begin(), arrays, strict=True):
            row[: len(values)] = values
        self._staged.commit(len(arrays))
        return StepRows(*(row[: len(values)] for row, values in zip(self._staged.tensor, arrays, strict=True)))
