"""`LoRAKernelMeta`: the integer tensors that the Triton kernels read, grouped by adapter instead of by position.

The kernels gather rows through an index sorted by slot, so the tokens of one adapter need not be neighbours: position i
of ``active_lora_ids`` owns sorted positions ``[start[i], start[i] + count[i])``. Everything is allocated once at its
largest size and refilled in place each step (paper, section 6: segment indices are built once per model invocation, not
once per operator), which is also what a captured CUDA graph needs.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from punica.checks import check_count
from punica.metadata.mapping import check_slot_vector
from punica.metadata.staging import StagedBuffer, aligned_offsets

MetaArgs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def get_captured_lora_counts(max_loras: int, specialize: bool) -> list[int]:
    """Counts of distinct slots (``-1`` counted) for which CUDA graphs are captured, ascending.

    ``specialize=False``: only the largest, ``[max_loras + 1]``. ``True``: every power of two up to it, and it:
    8 -> ``[1, 2, 4, 8, 9]``. The single source of truth for capture and for dispatch.
    """
    largest = check_count("max_loras", max_loras) + 1
    if not isinstance(specialize, bool):
        raise TypeError(f"specialize must be a bool, got {specialize!r}")
    if not specialize:
        return [largest]
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({*powers, largest})


@dataclass(eq=False)
class LoRAKernelMeta:
    """Kernel metadata for up to N = ``max_num_tokens`` rows and L = ``max_loras`` slots; build with `make`.

    Device tensors (int32, addresses never change):

    - ``token_lora_mapping`` ``[N]``: slot per token, ``-1`` = no adapter and for every row past the step's T.
    - ``token_indices_sorted_by_lora_ids`` ``[N]``: in ``[0, T)`` the token indices, stably sorted by slot.
    - ``active_lora_ids`` ``[L+1]``: distinct slots present, ascending (``-1`` included if present); rest ``-1``.
    - ``num_tokens_per_lora`` ``[L+1]``: tokens of the slot at the same position; rest 0.
    - ``lora_token_start_loc`` ``[L+2]``: prefix sums of the counts, first 0; unused positions 0.

    Host tensors of one element: ``no_lora_flag_cpu`` (bool, no token has an adapter), ``num_active_loras_cpu`` (int32,
    distinct slots present, rounded up to a captured count; 0 with the flag), ``default_num_active_loras_cpu`` (int32,
    always L+1). They are tensors so that graph tracers see data, not constants.

    ``captured_lora_counts``: ascending counts to round up to; empty = no rounding.
    """

    token_lora_mapping: torch.Tensor
    token_indices_sorted_by_lora_ids: torch.Tensor
    active_lora_ids: torch.Tensor
    num_tokens_per_lora: torch.Tensor
    lora_token_start_loc: torch.Tensor
    no_lora_flag_cpu: torch.Tensor
    num_active_loras_cpu: torch.Tensor
    default_num_active_loras_cpu: torch.Tensor
    captured_lora_counts: list[int]
    _staging: StagedBuffer = field(repr=False)
    _offsets: list[int] = field(repr=False)

    @staticmethod
    def make(
        max_loras: int,
        max_num_tokens: int,
        device: torch.device | str,
        captured_lora_counts: Sequence[int] | None = None,
    ) -> "LoRAKernelMeta":
        """Allocate everything, in the state that follows an empty mapping.

        ValueError when ``max_loras`` or ``max_num_tokens`` is below 1 or a captured count is outside ``[1, L+1]``.
        """
        slots, tokens = check_count("max_loras", max_loras), check_count("max_num_tokens", max_num_tokens)
        captured = sorted({check_count("captured_lora_counts", count) for count in captured_lora_counts or ()})
        if captured and captured[-1] > slots + 1:
            raise ValueError(
                f"captured_lora_counts has {captured[-1]}, more than max_loras + 1 = {slots + 1} (every slot and -1)"
            )
        lengths = [tokens, tokens, slots + 1, slots + 1, slots + 2]
        offsets, total = aligned_offsets(lengths)
        staging = StagedBuffer((total,), torch.int32, torch.device(device))
        views = [staging.tensor[start : start + length] for start, length in zip(offsets, lengths, strict=True)]
        mapping, indices, ids, counts, starts = views
        meta = LoRAKernelMeta(
            token_lora_mapping=mapping,
            token_indices_sorted_by_lora_ids=indices,
            active_lora_ids=ids,
            num_tokens_per_lora=counts,
            lora_token_start_loc=starts,
            no_lora_flag_cpu=torch.ones(1, dtype=torch.bool),
            num_active_loras_cpu=torch.zeros(1, dtype=torch.int32),
            default_num_active_loras_cpu=torch.full((1,), slots + 1, dtype=torch.int32),
            captured_lora_counts=captured,
            _staging=staging,
            _offsets=offsets,
        )
        meta.prepare_tensors(torch.empty(0, dtype=torch.int64))
        return meta

    def prepare_tensors(self, token_lora_mapping: torch.Tensor) -> None:
        """Refill every field for the slots of one step, an integer tensor ``[T]`` with ``-1`` = no adapter.

        A CPU input never synchronises with the device: the fields are computed on the host and sent by one asynchronous
        copy on the current stream. A device input is read back once. Example with L = 3, slots ``[2,-1,0,2,2,0]``:
        sorted ``[1,2,5,0,3,4]``, ids ``[-1,0,2,-1]``, counts ``[1,2,3,0]``, starts ``[0,1,3,6,0]``, active 3.

        TypeError: not an integer tensor. ValueError: not 1-D, T > N, or a slot outside ``[-1, L)``. Nothing is changed
        by a call that raises.
        """
        slots = self._checked(token_lora_mapping)
        total = slots.size
        capacity, ids = self.token_lora_mapping.shape[0], self.active_lora_ids.shape[0]
        # numpy sorts 16-bit integers by radix, which at 8192 tokens is several times faster than its merge sort
        sort_keys = slots.astype(np.int16) if ids <= 2**15 else slots
        per_slot = np.bincount(slots + 1, minlength=ids)
        present = np.flatnonzero(per_slot)
        used = present.size
        counts = per_slot[present]

        host = self._staging.begin()
        mapping_at, sorted_at, ids_at, counts_at, starts_at = self._offsets
        host[mapping_at : mapping_at + total] = slots
        host[mapping_at + total : mapping_at + capacity] = -1
        host[sorted_at : sorted_at + total] = sort_keys.argsort(kind="stable")
        host[ids_at : ids_at + used] = present - 1
        host[ids_at + used : ids_at + ids] = -1
        host[counts_at : starts_at + ids + 1] = 0
        host[counts_at : counts_at + used] = counts
        host[starts_at + 1 : starts_at + 1 + used] = counts.cumsum()
        self._staging.commit(host.size)

        no_lora = bool(used == 0 or present[-1] == 0)
        self.no_lora_flag_cpu.fill_(no_lora)
        self.num_active_loras_cpu.fill_(0 if no_lora else self._rounded(used))

    def meta_args(self, token_nums: int, specialize_active_lora: bool = False) -> MetaArgs:
        """The seven metadata arguments of ``lora_shrink`` and ``lora_expand``, in their order; views, no copies.

        ``token_nums`` rows are addressed (may exceed the step's T: those rows have slot ``-1``). The last item, the
        number of grid planes, is the active count with ``specialize_active_lora``, else L+1.
        ValueError when ``token_nums`` is outside ``[0, N]``.
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

    def _checked(self, token_lora_mapping: torch.Tensor) -> np.ndarray:
        """The slots as a host int64 array, after every check of `prepare_tensors`."""
        check_slot_vector("token_lora_mapping", token_lora_mapping)
        capacity, max_loras = self.token_lora_mapping.shape[0], self.active_lora_ids.shape[0] - 1
        total = token_lora_mapping.shape[0]
        if total > capacity:
            raise ValueError(f"token_lora_mapping has {total} tokens, more than the capacity max_num_tokens={capacity}")
        slots = token_lora_mapping.cpu().numpy().astype(np.int64, copy=False)
        if total and not (slots.min() >= -1 and slots.max() < max_loras):
            first = int(np.flatnonzero((slots < -1) | (slots >= max_loras))[0])
            raise ValueError(
                f"token_lora_mapping[{first}] is {int(slots[first])}, must be in [-1, {max_loras}): "
                f"-1 for no adapter, else a slot below max_loras={max_loras}"
            )
        return slots

    def _rounded(self, active: int) -> int:
        """The smallest captured count >= ``active``; ``active`` itself when there is none."""
        position = bisect_left(self.captured_lora_counts, active)
        return self.captured_lora_counts[position] if position < len(self.captured_lora_counts) else active
