"""`StepIndices`: the step as index tensors."""

from typing import Any

import numpy as np
import torch

from punica.config import LoRAConfig
from punica.metadata import RowGroups, embedding_offsets, padded_slots
from punica.metadata.staging import StagedBuffer
from punica.wrapper.step import StepMetadata

PrefillMetadata = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


def _rows(buffer: str, which: int, doc: str) -> Any:
    return property(lambda step: getattr(step, buffer)[..., : step._indexed_rows(which)], doc=doc)


class StepIndices(StepMetadata):
    """Slots and offsets of every row as int64 tensors, views of one allocation ``[N, 5]`` whose address never changes.

    They are written when they are first asked for, and from then on at every step, so that a captured graph which reads
    them stays right.

    Attributes, of the current step: ``vocab_size``; ``indices_len`` ``[T, S, S, T]``; of the last prefill:
    ``batch_size``, ``max_length``, ``token_nums``.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str,
        *, max_loras: int | None = None, lora_config: LoRAConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras=max_loras, lora_config=lora_config)
        self._indices = StagedBuffer((max_num_batched_tokens, 5), torch.int64, self.device, (-1, -1, -1, 0, 0))
        columns = self._indices.tensor
        self._token_lora_indices, self._sampler_indices, self._sampler_indices_padded, _, _ = columns.unbind(1)
        self._embeddings_indices = columns[:, 3:].t()
        self._segments = StagedBuffer((max_batches, 3), torch.int64, self.device, (-1, -1, -1))
        self._seq_start_locs, self._seq_lengths, self._lora_indices_per_batch = self._segments.tensor.unbind(1)
        self.indices_len: list[int | None] = [None] * 4
        self.max_length = self.token_nums = 0
        self.vocab_size: int | None = None
        self.batch_size = -1
        self._padding_slot = 0  # "no adapter" in the padded indices
        self._indices_wanted = self._indices_written = False

    def begin_step(
        self, tokens: RowGroups, sampled: RowGroups, vocab_size: int,
        *, is_prefill: bool = False, padding_slot: int | None = None,
    ) -> None:  # fmt: skip
        """Begin the next step. ``padding_slot``: "no adapter" in padded indices (None: one past the last slot)."""
        super().begin_step(tokens, sampled, vocab_size, is_prefill=is_prefill)
        self.indices_len = [tokens.num_rows, sampled.num_rows, sampled.num_rows, tokens.num_rows]
        self.vocab_size, self._indices_written = vocab_size, False
        self._padding_slot = (self.max_loras or 0) if padding_slot is None else padding_slot
        if self._indices_wanted:
            self._write_indices()
        if is_prefill:
            self.batch_size, self.token_nums = tokens.slots.size, tokens.num_rows
            self.max_length = int(tokens.lengths.max(initial=0))

    token_lora_indices = _rows("_token_lora_indices", 0, "Slot of each token, int64 ``[T]``.")
    sampler_indices = _rows("_sampler_indices", 1, "Slot of each sampled row, int64 ``[S]``.")
    sampler_indices_padded = _rows(
        "_sampler_indices_padded",
        2,
        "``s + S * p`` for each sampled row s, p its slot or ``max_loras - 1``; int64 ``[S]``.",
    )
    embeddings_indices = _rows(
        "_embeddings_indices", 3, "Offsets of each token's table in a flattened embedding A, int64 ``[2, T]``."
    )

    @property
    def prefill_metadata(self) -> PrefillMetadata:
        """Starts, lengths and slots of the B segments (int64 ``[B]``), B, the longest, T. RuntimeError on decode. Views
        of one buffer for up to ``max_batches`` segments, tensors of their own for more.
        """
        rows, runs = self._step().rows, self.batch_size
        if not self.is_prefill:
            raise RuntimeError("prefill_metadata is only set for a step with is_prefill=True; this step is a decode")
        segments = np.stack((rows.starts, rows.lengths, rows.slots), axis=1)
        if runs <= self.max_batches:
            self._segments.begin()[:runs] = segments
            self._segments.commit(runs)
            starts, lengths, slots = self._segments.tensor[:runs].unbind(1)
        else:
            starts, lengths, slots = torch.from_numpy(segments).to(self.device).unbind(1)
        return starts, lengths, slots, runs, self.max_length, self.token_nums

    def _indexed_rows(self, which: int) -> int:
        self._step()
        if not self._indices_written:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("index tensors must be read once before a CUDA graph that reads them is captured")
            self._indices_wanted = True
            self._write_indices()
        return self.indices_len[which] or 0

    def _write_indices(self) -> None:
        tokens, sampled = self.batch.rows.row_slots, self.batch.sampled.rows.row_slots
        array = self._indices.begin()
        array[: tokens.size, 0] = tokens
        array[: sampled.size, 1] = sampled
        array[: sampled.size, 2] = padded_slots(sampled, self._padding_slot + 1)
        array[: tokens.size, 3:] = embedding_offsets(tokens, self.vocab_size or 1).T
        self._indices.commit(max(tokens.size, sampled.size))
        self._indices_written = True
