"""`StepInputs`: the integers of a step where the model reads them, allocated once and refilled by every step."""

from typing import NamedTuple

import torch
from torch import Tensor

from punica.metadata.staging import StagedBuffer
from punica.scheduling import StepLayout


class StepRows(NamedTuple):
    """Views of the buffers, int64 on the device: ``[T]``, ``[T]``, ``[T]`` and ``[S]``, as in ``StepLayout``; with rows
    that pad the step behind the first three.
    """

    token_ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    sampled_rows: Tensor


class StepInputs:
    """Token ids, positions, cache rows and sampled rows of up to ``max_tokens`` rows, 32 bytes for each.

    Their addresses never change, which is what a captured CUDA graph needs, and one copy sends them to the device,
    asynchronous on CUDA. A step gets views of the first entries; what lies behind those is left over from earlier steps
    and read by nobody.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._staged = StagedBuffer((len(StepRows._fields), max_tokens), torch.int64, device)

    def fill(self, layout: StepLayout, num_rows: int = 0, num_sampled: int = 0) -> StepRows:
        """Refill from a layout of T rows and S requests, padded to ``num_rows`` and ``num_sampled`` where these are
        more: token 0 at position 0, no row of the cache (-1), and row 0 sampled. The views hold until the next call.
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
        """Views of that many rows, whatever they hold."""
        lengths = (num_rows, num_rows, num_rows, num_sampled)
        return StepRows(*(row[:length] for row, length in zip(self._staged.tensor, lengths, strict=True)))
