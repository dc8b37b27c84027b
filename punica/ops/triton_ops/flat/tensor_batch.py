"""`TensorBatch`: a step given by the tensors that the kernels read, as the flat ops take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punica.metadata import StepShape

NAMES = (
    "token_lora_mapping",
    "token_indices_sorted_by_lora_ids",
    "num_tokens_per_lora",
    "lora_token_start_loc",
    "lora_ids",
)

NO_SHAPE = StepShape(0, 0)


class TensorBatch(NamedTuple):
    """A step given by its tensors: a `punica.ops.triton_ops.plan.Batch`, built by `given`.

    ``shape``: as far as it can be told, with the rows spread evenly.
    """

    tensors: tuple[Tensor, ...]
    max_segments: int
    no_lora: bool
    form: tuple
    shape: StepShape

    @classmethod
    def given(cls, *tensors: Tensor, flag: Tensor, count: int | Tensor | None) -> TensorBatch:
        """Build a step from the five tensors, the no-adapter flag and the active count (None: all entries of the ids).

        ValueError: the flag is no bool tensor with one element on the CPU, or the count out of range; TypeError: the
        count is no integer. With the flag set nothing else is looked at. The tensors are checked by `check_tensors`,
        once per ``form``.
        """
        if not isinstance(flag, Tensor) or flag.numel() != 1 or flag.dtype != torch.bool or flag.device.type != "cpu":
            what = f"{flag.dtype} {tuple(flag.shape)} on {flag.device}" if isinstance(flag, Tensor) else repr(flag)
            raise ValueError(f"no_lora_flag_cpu must be a bool tensor with one element on the CPU, got {what}")
        if bool(flag):
            return cls(tensors, 0, True, (), NO_SHAPE)
        entries = tensors[4].numel()
        form = tuple([(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors])
        active = entries if count is None else _active(count, entries)
        return cls(tensors, active, False, form, StepShape.even(active, tensors[0].numel()))

    @property
    def listed(self) -> bool:
        """False: the tensors come without lists of tiles (`punica.metadata.rows`)."""
        return False

    def tiles(self, height: int) -> tuple[Any, ...]:
        """Raise RuntimeError: tensors come without lists."""
        raise RuntimeError("a step given by its tensors has no lists of tiles")

    def check_rows(self, rows: int) -> None:
        """Check nothing: the lengths of the tensors are part of their form."""

    def check_tensors(self, rows: int, device: torch.device) -> None:
        """Check that tensors are int32, contiguous, on ``device``, of the lengths that ``rows`` and the number of
        counts ask for.
        """
        entries = self.tensors[2].numel()
        lengths = (rows, rows, entries, entries + 1, entries)
        for name, tensor, length in zip(NAMES, self.tensors, lengths, strict=True):
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} has dtype {tensor.dtype}; int32 is needed")
            if tensor.shape != (length,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; ({length},) is needed for this call")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the inputs on {device}: all must share one device")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has stride {tensor.stride()}; it must be contiguous")


def _active(count: Any, entries: int) -> int:
    if isinstance(count, Tensor):
        if count.dtype.is_floating_point or count.dtype == torch.bool:
            raise TypeError(f"num_active_loras has dtype {count.dtype}; an integer is needed")
        if count.numel() != 1 or count.device.type != "cpu":
            raise ValueError(
                "num_active_loras must be an int or a CPU tensor with one element, got shape "
                f"{tuple(count.shape)} on {count.device}"
            )
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"num_active_loras must be an int or an int CPU tensor with one element, got {count!r}")
    if not 0 <= count <= entries:
        raise ValueError(
            f"num_active_loras is {count}; it must be in [0, {entries}], the number of entries of lora_ids"
        )
    return count


def verify_indices(tensors: Sequence[Tensor], slots: int) -> None:
    """Check the values on the device, for debugging. Waits for the device. ValueError names the first bad value.

    ``tensors``: mapping, sorted rows, counts, starts, ids, as `LoRABatch.tensors` or `LoRAKernelMeta.meta_args` give
    them; the rows past a step count as rows without adapter.
    """
    mapping, order, counts, starts, ids = (tensor.cpu() for tensor in tensors)
    tokens = mapping.shape[0]
    used = int(starts.max())
    limits = [("token_lora_mapping", mapping, -1, slots - 1), ("lora_ids", ids, -1, slots - 1)]
    limits += [("num_tokens_per_lora", counts, 0, tokens), ("lora_token_start_loc", starts, 0, tokens)]
    for name, values, low, high in (*limits, ("token_indices_sorted_by_lora_ids", order[:used], 0, tokens - 1)):
        bad = ((values < low) | (values > high)).nonzero().flatten()
        if bad.numel():
            position = int(bad[0])
            raise ValueError(f"{name}[{position}] is {int(values[position])}; it must be in [{low}, {high}]")
    for entry, slot in enumerate(ids.tolist()):
        first, count = int(starts[entry]), int(counts[entry])
        rows = order[first : first + count].long()
        if slot >= 0 and (rows.numel() != count or bool((mapping[rows] != slot).any())):
            raise ValueError(
                f"segment {entry} of lora_ids (slot {slot}, sorted positions {first} to {first + count}) holds rows of "
                "another slot: the metadata tensors are not of one step"
            )
