"""`LoRABatch`: the LoRA metadata of one model invocation. Built once per step, read by every layer.

slots and lengths of the runs of rows  (the engine's layout; or adapter ids, through `mapped_rows`)
  -> `RowGroups`       slot of each row, on the host
  -> `LoRAKernelMeta`  the same for the Triton kernels: grouped by slot, on the device, at fixed addresses
  -> `SegmentPlan`     the same for the torch operators: runs of rows that one batched product serves
"""

from __future__ import annotations

from functools import cached_property

import torch

from punica.checks import check_count
from punica.metadata.kernel_meta import KernelMetaBuffer, LoRAKernelMeta, MetaArgs, get_captured_lora_counts
from punica.metadata.rows import NO_ROWS, RowGroups, StepShape, check_slots
from punica.metadata.segment_plan import SegmentPlan

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class LoRABatch:
    """The slot of every row of the current step; ``sampled`` is the same for the rows whose logits are wanted.

    Args:
        max_num_tokens: most rows, N, also of the sampled ones; ``max_loras``: slots, L. ``None``: no bound, no kernels.
        device: of the kernels' tensors: allocated at first use, at the largest size, then refilled in place.
        specialize_active_lora: tell flat ops the adapters in use, rounded up to a captured count, instead of all L.

    Attributes, of the current step: ``rows``, the rows and their runs on the host; ``num_rows``, T; ``no_lora``, no row
    has an adapter.
    """

    def __init__(
        self, max_num_tokens: int | None = None, max_loras: int | None = None, device: torch.device | str = "cpu",
        *, specialize_active_lora: bool = False, _tokens: LoRABatch | None = None,
    ) -> None:  # fmt: skip
        self.max_num_tokens, self.max_loras = max_num_tokens, max_loras
        self.device, self._specialize = torch.device(device), specialize_active_lora
        self._buffer: KernelMetaBuffer | None = None
        self.what = "tokens" if _tokens is None else "sampled rows"
        self._tokens = _tokens
        self._hold(NO_ROWS)
        if _tokens is None:
            sizes = (max_num_tokens, max_loras, device)
            self.sampled = LoRABatch(*sizes, specialize_active_lora=specialize_active_lora, _tokens=self)

    @classmethod
    def of_slots(cls, slots: torch.Tensor) -> LoRABatch:
        """Build a step of the torch operators from the slot of every row, integers ``[T]``, -1 = no adapter."""
        batch = cls()
        batch.fill(RowGroups.of_rows(check_slots("slots", slots)))
        return batch

    def fill(self, rows: RowGroups, sampled: RowGroups | None = None) -> None:
        """Begin a step with these rows; ``sampled`` None: every row is sampled. Asynchronous on the current stream.

        ValueError, and no change: more rows than N, or a slot outside ``[-1, L)``. RuntimeError: ``sampled`` alone.
        """
        if self._tokens is not None:
            raise RuntimeError("the sampled rows are filled together with their step: fill that one")
        sampled = rows if sampled is None or sampled.equals(rows) else sampled  # a decode step: worked out once
        self._check(rows, self.what)
        if sampled is not rows:
            self._check(sampled, self.sampled.what)
        self._hold(rows)
        self.sampled._hold(sampled)
        self._stage()

    def _check(self, rows: RowGroups, what: str) -> None:
        if self.max_num_tokens is not None and rows.num_rows > self.max_num_tokens:
            raise ValueError(f"the step has {rows.num_rows} {what}, more than max_num_tokens={self.max_num_tokens}")
        lowest, highest = int(rows.slots.min(initial=-1)), int(rows.slots.max(initial=-1))
        if lowest < -1:
            raise ValueError(f"the step's {what} use slot {lowest}; slots are >= 0, and -1 means no adapter")
        if self.max_loras is not None and highest >= self.max_loras:
            raise ValueError(f"the step's {what} use slot {highest}, must be below max_loras={self.max_loras}")

    def _hold(self, rows: RowGroups) -> None:
        self.rows, self.num_rows, self.no_lora = rows, rows.num_rows, rows.no_lora
        self.__dict__.pop("plan", None)

    def check_rows(self, rows: int, slots: int = 1 << 62) -> None:
        """ValueError unless ``rows`` rows (or none) and ``slots`` slots hold those of the step; more are padding."""
        if slots < (self.max_loras or slots + 1) and (highest := int(self.rows.slots.max(initial=-1))) >= slots:
            raise ValueError(f"the step uses slot {highest}; the weights have slots 0 to {slots - 1}")
        most = self.max_num_tokens
        if rows and (rows < self.num_rows or (most is not None and rows > most)):
            limit = "" if most is None else f" and at most max_num_tokens={most}"
            raise ValueError(
                f"got {rows} rows, expected at least the {self.num_rows} {self.what} of the step{limit}; begin a step "
                "(update_metadata) for this batch"
            )

    @cached_property
    def plan(self) -> SegmentPlan:
        """The rows grouped for batched products; made once per step, shared with ``sampled`` if that is the same."""
        if self._tokens is not None and self.rows is self._tokens.rows:
            return self._tokens.plan
        return SegmentPlan.of(self.rows)

    @cached_property
    def kernel_meta(self) -> LoRAKernelMeta:
        """The tensors that the kernels read, filled for the current step."""
        tokens = self if self._tokens is None else self._tokens
        if tokens._buffer is None:
            slots, most = check_count("max_loras", self.max_loras), check_count("max_num_tokens", self.max_num_tokens)
            counts = get_captured_lora_counts(slots, self._specialize)
            tokens._buffer = KernelMetaBuffer(2, slots, most, self.device, counts)
            tokens._stage()
        return tokens._buffer.metas[0 if tokens is self else 1]

    @cached_property
    def tensors(self) -> Tensors:
        """Mapping, sorted rows, counts, starts and ids of `kernel_meta`, at full length."""
        meta = self.kernel_meta
        order, counts = meta.token_indices_sorted_by_lora_ids, meta.num_tokens_per_lora
        return meta.token_lora_mapping, order, counts, meta.lora_token_start_loc, meta.active_lora_ids

    listed = True
    """The step has tile lists."""

    @property
    def shape(self) -> StepShape:
        """Properties of the step that select kernel schedules."""
        return self.rows.tiles.shape

    def tiles(self, height: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Tiles of `HEIGHTS[height]` rows: sorted rows, records, totals on the device, and that of this height."""
        meta, totals = self.kernel_meta, self.rows.tiles.totals
        return meta.token_indices_sorted_by_lora_ids, meta.tile_records[height], meta.tile_totals, totals[height]

    @cached_property
    def form(self) -> tuple:
        """Launch key: number of LoRA ids, and device."""
        ids = self.kernel_meta.active_lora_ids
        return len(ids), ids.device

    def check_tensors(self, rows: int, device: torch.device) -> None:
        """ValueError unless the tensors are on ``device``."""
        if self.kernel_meta.active_lora_ids.device != device:
            raise ValueError(f"the step is on {self.device}, the inputs on {device}: both must share one device")

    def meta_args(self, rows: int) -> MetaArgs:
        """The seven metadata arguments of the flat ops for ``rows`` rows, see `LoRAKernelMeta.meta_args`."""
        return self.kernel_meta.meta_args(rows, self._specialize)

    @property
    def max_segments(self) -> int:
        """Most distinct slots (-1 counted) of a grid."""
        meta = self.kernel_meta
        return meta.num_active_loras if self._specialize else meta.active_lora_ids.shape[0]

    def _stage(self) -> None:
        if (buffer := self._buffer) is not None:
            buffer.refill({buffer.metas[0]: self.rows, buffer.metas[1]: self.sampled.rows})
