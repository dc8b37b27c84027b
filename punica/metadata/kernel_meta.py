"""`LoRAKernelMeta`: the integer tensors that the Triton kernels read, grouped by adapter instead of by position.

Kernels gather rows through an index sorted by slot: position i of ``active_lora_ids`` owns sorted positions
``[start[i], start[i] + count[i])``. Everything is allocated once at its largest size and refilled in place each step,
as captured CUDA graphs need (paper, section 6: segment indices are built once per model invocation).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from punica.checks import check_bool, check_count
from punica.metadata.rows import HEIGHTS, NO_ROWS, RowGroups, capacities, check_slots
from punica.metadata.staging import StagedBuffer, aligned_offsets

MetaArgs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def get_captured_lora_counts(max_loras: int, specialize: bool) -> list[int]:
    """Counts of distinct slots (``-1`` counted) for which CUDA graphs are captured, ascending.

    ``specialize=False``: only the largest, ``[max_loras + 1]``. ``True``: every power of two up to it, and it:
    8 -> ``[1, 2, 4, 8, 9]``. The single source of truth for capture and for dispatch.
    """
    largest = check_count("max_loras", max_loras) + 1
    check_bool("specialize", specialize)
    powers = [1 << exponent for exponent in range(largest.bit_length())] if specialize else []
    return sorted({*powers, largest})


class LoRAKernelMeta:
    """Kernel metadata for up to N = ``max_num_tokens`` rows and L = ``max_loras`` slots; build with `make`.

    Device tensors (int32, addresses never change):

    - ``token_lora_mapping`` ``[N]``: slot per token, ``-1`` = no adapter and for every row past the step's T.
    - ``token_indices_sorted_by_lora_ids`` ``[N]``: in ``[0, T)`` the token indices, stably sorted by slot.
    - ``active_lora_ids`` ``[L+1]``: distinct slots present, ascending (``-1`` included if present); rest ``-1``.
    - ``num_tokens_per_lora`` ``[L+1]``: tokens of the slot at the same position; rest 0.
    - ``lora_token_start_loc`` ``[L+2]``: prefix sums of the counts, first 0; unused positions 0.

    Of the tiles (`punica.metadata.rows`): ``tile_records``, int64, per height; ``tile_totals``, their numbers.

    Host tensors of one element: ``no_lora_flag_cpu`` (bool, no token has an adapter), ``num_active_loras_cpu`` (int32,
    distinct slots present, rounded up to a captured count; 0 with the flag), ``default_num_active_loras_cpu`` (int32,
    always L+1). They are tensors so that graph tracers see data, not constants.

    ``captured_lora_counts``: ascending counts to round up to; empty = no rounding.
    """

    num_active_loras: int

    def __init__(self, buffer: KernelMetaBuffer, parts: Sequence[slice]) -> None:
        self._buffer, self._parts = buffer, parts
        self._own: dict[int, list[np.ndarray]] = {}
        views = [buffer.staging.tensor[part] for part in parts]
        self.active_lora_ids, self.num_tokens_per_lora, self.lora_token_start_loc = views[:3]
        self.token_lora_mapping, self.token_indices_sorted_by_lora_ids = views[3:5]
        self.tile_totals, *lists = views[5:]
        self.tile_records = [records.view(torch.int64) for records in lists]
        self.captured_lora_counts = buffer.captured_lora_counts
        self.no_lora_flag_cpu = torch.ones(1, dtype=torch.bool, device="cpu")
        self.num_active_loras_cpu = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.default_num_active_loras_cpu = torch.full((1,), len(views[0]), dtype=torch.int32, device="cpu")
        self._flag, self._active = self.no_lora_flag_cpu.numpy(), self.num_active_loras_cpu.numpy()

    @staticmethod
    def make(
        max_loras: int, max_num_tokens: int, device: torch.device | str,
        captured_lora_counts: Sequence[int] | None = None,
    ) -> LoRAKernelMeta:  # fmt: skip
        """Allocate everything, for no rows. ValueError: a size below 1, or a captured count outside ``[1, L+1]``."""
        return KernelMetaBuffer(1, max_loras, max_num_tokens, device, captured_lora_counts).metas[0]

    def prepare_tensors(self, token_lora_mapping: torch.Tensor) -> None:
        """Refill every field for the slots of one step, an integer tensor ``[T]`` with ``-1`` = no adapter.

        One asynchronous copy on the current stream; a device input is read back once. Example with L = 3, slots
        ``[2,-1,0,2,2,0]``: sorted ``[1,2,5,0,3,4]``, ids ``[-1,0,2,-1]``, counts ``[1,2,3,0]``, starts ``[0,1,3,6,0]``.

        TypeError: not an integer tensor. ValueError: not 1-D, T > N, or a slot outside ``[-1, L)``; nothing changes.
        """
        capacity, max_loras = self.token_lora_mapping.shape[0], self.active_lora_ids.shape[0] - 1
        slots = check_slots("token_lora_mapping", token_lora_mapping, max_loras)
        if slots.size > capacity:
            raise ValueError(f"token_lora_mapping has {slots.size} tokens, more than max_num_tokens={capacity}")
        self._buffer.refill({self: RowGroups.of_rows(slots)})

    def meta_args(self, token_nums: int, specialize_active_lora: bool = False) -> MetaArgs:
        """Seven metadata arguments of the flat ops, as views: mapping, sorted indices, counts, starts, ids, flag, and
        the number of grid planes: the active count with ``specialize_active_lora``, else L+1.

        ``token_nums`` rows are addressed, in ``[0, N]`` (ValueError); those past the step's T have slot ``-1``.
        """
        capacity = self.token_lora_mapping.shape[0]
        if not 0 <= token_nums <= capacity:
            raise ValueError(f"token_nums is {token_nums}, must be in [0, {capacity}], the capacity of this metadata")
        return (
            self.token_lora_mapping[:token_nums],
            self.token_indices_sorted_by_lora_ids[:token_nums],
            self.num_tokens_per_lora,
            self.lora_token_start_loc,
            self.active_lora_ids,
            self.no_lora_flag_cpu,
            self.num_active_loras_cpu if specialize_active_lora else self.default_num_active_loras_cpu,
        )

    def write(self, host: np.ndarray, rows: RowGroups) -> None:
        (slots, found), total = rows.present, rows.num_rows
        used, own = slots.size, self._own.get(id(host))
        if own is None:  # of each of the staging buffer's arrays, once
            own = self._own[id(host)] = [host[part] for part in self._parts]
        ids, counts, starts, mapping, order, totals, *lists = own
        ids[:used], ids[used:] = slots, -1
        counts[:used], counts[used:] = found, 0
        starts[1 : 1 + used], starts[1 + used :] = found.cumsum(), 0
        mapping[:total], mapping[total:] = rows.row_slots, -1
        order[:total], totals[:] = rows.order, rows.tiles.totals
        for records, tiles in zip(lists, rows.tiles.records, strict=True):
            records[: 2 * tiles.size].view(np.int64)[:] = tiles
        self._flag[0] = rows.no_lora
        active = 0 if rows.no_lora else used
        captured = self.captured_lora_counts[bisect_left(self.captured_lora_counts, active) :] if active else []
        self.num_active_loras = self._active[0] = captured[0] if captured else active


class KernelMetaBuffer:
    """The allocation of ``number`` kernel metadata of equal size: a refill of all of them is one copy."""

    def __init__(
        self, number: int, max_loras: int, max_num_tokens: int, device: torch.device | str,
        captured_lora_counts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        slots, tokens = check_count("max_loras", max_loras), check_count("max_num_tokens", max_num_tokens)
        counts = {check_count("captured_lora_counts", count) for count in captured_lora_counts or ()}
        self.captured_lora_counts = sorted(counts)
        if self.captured_lora_counts and self.captured_lora_counts[-1] > slots + 1:
            raise ValueError(f"captured_lora_counts has {max(counts)}, more than max_loras + 1 = {slots + 1}")
        records = [2 * most for most in capacities(slots, tokens)]
        lengths = [slots + 1, slots + 1, slots + 2, tokens, tokens, len(HEIGHTS), *records]
        offsets, total = aligned_offsets(lengths * number)
        self.staging = StagedBuffer((total,), torch.int32, torch.device(device))
        parts = [slice(start, start + length) for start, length in zip(offsets, lengths * number, strict=True)]
        self.metas = [LoRAKernelMeta(self, parts[i : i + len(lengths)]) for i in range(0, len(parts), len(lengths))]
        self._rows = dict.fromkeys(self.metas, NO_ROWS)
        self.refill(self._rows)

    def refill(self, rows: dict[LoRAKernelMeta, RowGroups]) -> None:
        """Send new rows of some of the metadata, already checked, and the present ones of the others."""
        self._rows.update(rows)
        host = self.staging.begin()
        for meta, current in self._rows.items():
            meta.write(host, current)
        self.staging.commit(host.size)
