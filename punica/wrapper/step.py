"""`StepMetadata`: the step of a wrapper, described by adapter ids; the part of a wrapper that changes every step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from punica.checks import check_count
from punica.config import LoRAConfig
from punica.metadata import LoRABatch, LoRAMapping, RowGroups, embedding_offsets, mapped_rows, padded_slots
from punica.metadata.staging import StagedBuffer
from punica.ops.checks import check_keywords

PrefillMetadata = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]


class StepMetadata:
    """Holds the `LoRABatch` that layers work on, and shows it as index tensors to callers who want those.

    ``max_num_batched_tokens`` = N bounds both T and S, ``max_batches`` the runs of equal slot in a prefill. Keywords:
    ``max_loras`` (number of slots; bounds the slot table) and ``lora_config`` (gives ``max_loras`` when it is absent).
    ValueError when N or ``max_batches`` is below 1.

    The index tensors are written when they are first asked for, and from then on at every step, so that a captured
    graph which reads them stays right: all are views of one allocation ``[N, 5]``, and no address ever changes.

    Attributes, of the current step: ``is_prefill``; ``no_lora``, whether no token has an adapter; ``vocab_size``;
    ``indices_len`` ``[T, S, S, T]``; of the last prefill: ``batch_size``, ``max_length``, ``token_nums``.
    """

    limits_runs = True
    """Whether a prefill may have no more than ``max_batches`` runs of equal slot."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        check_keywords(type(self).__name__, kwargs, ("max_loras", "lora_config"))
        rows = check_count("max_num_batched_tokens", max_num_batched_tokens)
        runs = check_count("max_batches", max_batches)
        self.device = torch.device(device)
        self.lora_config: LoRAConfig | None = kwargs.get("lora_config")
        self.max_loras = _number_of_slots(kwargs.get("max_loras"), self.lora_config)
        self.max_num_batched_tokens, self.max_batches = rows, runs
        specialize = self.lora_config is not None and self.lora_config.specialize_active_lora
        self.batch = LoRABatch(rows, self.max_loras, self.device, specialize_active_lora=specialize)
        self._indices = StagedBuffer((rows, 5), torch.int64, self.device, initial=(-1, -1, -1, 0, 0))
        columns = self._indices.tensor
        self._token_lora_indices = columns[:, 0]
        self._sampler_indices = columns[:, 1]
        self._sampler_indices_padded = columns[:, 2]
        self._embeddings_indices = columns[:, 3:5].t()
        self._segments = StagedBuffer((runs, 3), torch.int64, self.device, initial=(-1, -1, -1))
        self._seq_start_locs, self._seq_lengths, self._lora_indices_per_batch = self._segments.tensor.unbind(1)
        self.indices_len: list[int | None] = [None] * 4
        self.max_length = self.token_nums = 0
        self.vocab_size: int | None = None
        self.batch_size = -1
        self.is_prefill = self.no_lora = self._is_set = False
        self._padding_slot = 0  # what stands for "no adapter" in the padded indices
        self._indices_wanted = self._indices_written = False

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: Sequence[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Begin the next step, given by adapter ids and the slot table (`punica.metadata.convert_mapping`).

        Runs on the host, without synchronising. TypeError: ``mapping`` is no LoRAMapping, or an unknown keyword.
        ValueError: an id in no slot, T or S above N, more slots than ``max_loras``, or (prefill) more runs of equal
        slot than ``max_batches``. After an exception the previous step's metadata is fully usable.
        """
        check_keywords("update_metadata", kwargs)
        tokens, sampled = self._checked(mapping, lora_index_to_id, max_loras, vocab_size)
        self.begin_step(tokens, sampled, vocab_size, is_prefill=mapping.is_prefill, padding_slot=max_loras - 1)

    def check_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int
    ) -> None:
        """Raise what `update_metadata` would raise, and change nothing: for callers that load adapters first."""
        self._checked(mapping, lora_index_to_id, max_loras, vocab_size)

    def begin_step(
        self,
        tokens: RowGroups,
        sampled: RowGroups,
        vocab_size: int,
        *,
        is_prefill: bool = False,
        padding_slot: int | None = None,
    ) -> None:
        """Begin the next step, given by the slots of its rows and of its sampled rows.

        ``padding_slot`` encodes "no adapter" in `sampler_indices_padded` (None: one past the last slot). ValueError,
        and no change, when there are more than N of either or a slot is not below ``max_loras``.
        """
        self.batch.fill(tokens, sampled)
        self.indices_len = [tokens.num_rows, sampled.num_rows, sampled.num_rows, tokens.num_rows]
        self.vocab_size, self.is_prefill, self.no_lora = vocab_size, is_prefill, tokens.no_lora
        self._is_set, self._indices_written = True, False
        self._padding_slot = (self.max_loras or 0) if padding_slot is None else padding_slot
        if self._indices_wanted:
            self._write_indices()
        if is_prefill:
            self.batch_size, self.token_nums = tokens.slots.size, tokens.num_rows
            self.max_length = int(tokens.lengths.max(initial=0))

    def _checked(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int
    ) -> tuple[RowGroups, RowGroups]:
        tokens, sampled = mapped_rows(mapping, lora_index_to_id, max_loras)
        check_count("vocab_size", vocab_size)
        limit, slots = self.max_num_batched_tokens, len(lora_index_to_id)
        for name, rows in (("index_mapping", tokens.num_rows), ("prompt_mapping", sampled.num_rows)):
            if rows > limit:
                raise ValueError(f"{name} has {rows} rows, more than max_num_batched_tokens={limit} of this wrapper")
        if self.max_loras is not None and slots > self.max_loras:
            raise ValueError(f"lora_index_to_id has {slots} slots, this wrapper has max_loras={self.max_loras}")
        if self.limits_runs and mapping.is_prefill and tokens.slots.size > self.max_batches:
            raise ValueError(
                f"the prefill has {tokens.slots.size} runs of equal slot, more than max_batches={self.max_batches}; "
                "group the tokens by adapter or construct the wrapper with a larger max_batches"
            )
        return tokens, sampled

    def _step(self) -> LoRABatch:
        """The current step; RuntimeError before the first one."""
        if not self._is_set:
            raise RuntimeError("metadata not set; call update_metadata first")
        return self.batch

    # --- the step as index tensors ---------------------------------------------------------------------------------

    @property
    def token_lora_indices(self) -> torch.Tensor:
        """Slot of each token, int64 ``[T]``."""
        return self._token_lora_indices[: self._indexed_rows(0)]

    @property
    def sampler_indices(self) -> torch.Tensor:
        """Slot of each sampled row, int64 ``[S]``."""
        return self._sampler_indices[: self._indexed_rows(1)]

    @property
    def sampler_indices_padded(self) -> torch.Tensor:
        """``s + S * p`` for each sampled row s, p its slot or ``max_loras - 1``; int64 ``[S]``."""
        return self._sampler_indices_padded[: self._indexed_rows(2)]

    @property
    def embeddings_indices(self) -> torch.Tensor:
        """Offsets of each token's table in a flattened embedding A, int64 ``[2, T]``."""
        return self._embeddings_indices[:, : self._indexed_rows(3)]

    @property
    def prefill_metadata(self) -> PrefillMetadata:
        """Starts, lengths and slots of the B segments (int64 ``[B]``), B, the longest, T. RuntimeError on decode.

        Views of one buffer for up to ``max_batches`` segments, tensors of their own for more.
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
        array[: tokens.size, 3:5] = embedding_offsets(tokens, self.vocab_size or 1).T
        self._indices.commit(max(tokens.size, sampled.size))
        self._indices_written = True


def _number_of_slots(max_loras: Any, lora_config: Any) -> int | None:
    if lora_config is not None and not isinstance(lora_config, LoRAConfig):
        raise TypeError(f"lora_config must be a LoRAConfig, got {type(lora_config).__name__}")
    if max_loras is None:
        return None if lora_config is None else lora_config.max_loras
    check_count("max_loras", max_loras)
    if lora_config is not None and lora_config.max_loras != max_loras:
        raise ValueError(f"max_loras is {max_loras}, but lora_config.max_loras is {lora_config.max_loras}; give one")
    return max_loras
