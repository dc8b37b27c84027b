"""`StepInputs`: the integer inputs of a step on the device, allocated once and refilled in place."""

from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.staging import StagedBuffer
from punica.scheduling import StepLayout


class StepRows(NamedTuple):
    """Views of the inputs, int64 on the device: three of ``[T]``, padded rows included, and one of ``[S]``."""

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    sampled_rows: Tensor


class StepInputs:
    """Token ids, positions, cache rows and sampled rows of up to ``max_tokens`` rows, 32 bytes each.

    Their addresses never change, as a captured CUDA graph requires. One copy per step sends them to the device,
    asynchronously on CUDA. A step reads the first entries only; the others are stale.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._staged = StagedBuffer((len(StepRows._fields), max_tokens), torch.int64, device)

    def fill(self, layout: StepLayout, num_rows: int = 0, num_sampled: int = 0) -> StepRows:
        """Refill from a layout, padded to ``num_rows`` and ``num_sampled``; the views hold until the next call.

        Padding: token 0, position 0, cache row -1 (none), sampled row 0.
        """
        num_rows, num_sampled = max(num_rows, len(layout.token_ids)), max(num_sampled, len(layout.spans))
        arrays = (layout.token_ids, layout.positions, layout.kv_rows, layout.sampled_rows)
        lengths = (num_rows, num_rows, num_rows, num_sampled)
        for row, values, length, padding in zip(self._staged.begin(), arrays, lengths, (0, 0, -1, 0), strict=True):
            row[: len(values)] = values
            row[len(values) : length] = padding
        self._staged.commit(len(arrays))
        return self.first(num_rows, num_sampled)

    def first(self, num_rows: int, num_sampled: int) -> StepRows:
        """Return views of the first rows, without refilling them."""
        lengths = (num_rows, num_rows, num_rows, num_sampled)
        return StepRows(*(row[:length] for row, length in zip(self._staged.tensor, lengths, strict=True)))
