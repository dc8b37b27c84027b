"""`StepMetadata`: which slot each row of the current step uses; the part of a wrapper that changes every step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from punica.checks import check_count
from punica.config import LoRAConfig
from punica.metadata import HostIndices, LoRAMapping, Segments, StagedBuffer, compute_meta, host_indices
from punica.wrapper import operands as op


class StepMetadata:
    """The index buffers of one wrapper: allocated once, refilled for each step.

    ``max_num_batched_tokens`` = N bounds both T and S, ``max_batches`` the runs of equal slot in a prefill. Keywords:
    ``max_loras`` (number of slots; bounds the slot table) and ``lora_config`` (gives ``max_loras`` when it is absent).
    All index buffers are views of one allocation ``[N, 5]``, so that a step refills a contiguous prefix with one copy;
    no address ever changes. ValueError when N or ``max_batches`` is below 1.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        op.check_keywords(type(self).__name__, kwargs, ("max_loras", "lora_config"))
        rows = check_count("max_num_batched_tokens", max_num_batched_tokens)
        runs = check_count("max_batches", max_batches)
        self.device = torch.device(device)
        self.lora_config: LoRAConfig | None = kwargs.get("lora_config")
        self.max_loras = _number_of_slots(kwargs.get("max_loras"), self.lora_config)
        self.max_num_batched_tokens, self.max_batches = rows, runs
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
        self.is_prefill = self.no_lora = False
        self._host: HostIndices | None = None
        self._no_sampled_lora = False

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: Sequence[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Refill the buffers for the next step from adapter ids and the slot table (`punica.metadata.convert_mapping`).

        Runs on the host, without synchronising. TypeError: ``mapping`` is no LoRAMapping, or an unknown keyword.
        ValueError: an id in no slot, T or S above N, more slots than ``max_loras``, or (prefill) more runs of equal
        slot than ``max_batches``. After an exception the previous step's metadata is fully usable.
        """
        op.check_keywords("update_metadata", kwargs)
        host, segments = self._checked(mapping, lora_index_to_id, max_loras, vocab_size)
        self._write_indices(host)
        self.vocab_size, self.is_prefill = vocab_size, mapping.is_prefill
        self.no_lora = not (host.token_slots >= 0).any()
        self._no_sampled_lora = not (host.sampler_slots >= 0).any()
        if segments is not None:
            self._write_segments(segments)
        self._prepare_backend(host)

    def check_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int
    ) -> None:
        """Raise what `update_metadata` would raise, and change nothing: whoever loads adapters first asks here."""
        self._checked(mapping, lora_index_to_id, max_loras, vocab_size)

    def _checked(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int
    ) -> tuple[HostIndices, Segments | None]:
        host = host_indices(mapping, lora_index_to_id, max_loras, vocab_size)
        self._check_capacity(host, len(lora_index_to_id))
        return host, self._checked_segments(host) if mapping.is_prefill else None

    def _check_capacity(self, host: HostIndices, slots: int) -> None:
        limit = self.max_num_batched_tokens
        for name, rows in (("index_mapping", len(host.token_slots)), ("prompt_mapping", len(host.sampler_slots))):
            if rows > limit:
                raise ValueError(f"{name} has {rows} rows, more than max_num_batched_tokens={limit} of this wrapper")
        if self.max_loras is not None and slots > self.max_loras:
            raise ValueError(f"lora_index_to_id has {slots} slots, this wrapper has max_loras={self.max_loras}")

    def _checked_segments(self, host: HostIndices) -> Segments | None:
        """The segments of a prefill; a backend that reads none of them returns None."""
        segments = compute_meta(torch.from_numpy(host.token_slots))
        if segments.batch_size > self.max_batches:
            raise ValueError(
                f"the prefill has {segments.batch_size} runs of equal slot, more than max_batches={self.max_batches}; "
                "group the tokens by adapter or construct the wrapper with a larger max_batches"
            )
        return segments

    def _write_indices(self, host: HostIndices) -> None:
        tokens, sampled = len(host.token_slots), len(host.sampler_slots)
        array = self._indices.begin()
        array[:tokens, 0] = host.token_slots
        array[:sampled, 1] = host.sampler_slots
        array[:sampled, 2] = host.sampler_slots_padded
        array[:tokens, 3:5] = host.embedding_offsets.T
        self._indices.commit(max(tokens, sampled))
        self.indices_len = list(host.lengths)
        self._host = host

    def _write_segments(self, segments: Segments) -> None:
        runs = segments.batch_size
        self._segments.begin()[:runs] = np.stack([part.numpy() for part in segments[:3]], axis=1)
        self._segments.commit(runs)
        self.batch_size, self.max_length, self.token_nums = runs, segments.max_length, segments.token_nums

    def _prepare_backend(self, host: HostIndices) -> None:
        """What a backend derives from the new metadata, once per step."""

    def _current(self) -> HostIndices:
        if self._host is None:
            raise RuntimeError("metadata not set; call update_metadata first")
        return self._host

    @property
    def token_lora_indices(self) -> torch.Tensor:
        """Slot of each token, int64 ``[T]``."""
        return self._token_lora_indices[: self._current().lengths[0]]

    @property
    def sampler_indices(self) -> torch.Tensor:
        """Slot of each sampled row, int64 ``[S]``."""
        return self._sampler_indices[: self._current().lengths[1]]

    @property
    def sampler_indices_padded(self) -> torch.Tensor:
        """``s + S * p`` for each sampled row s, p its slot or ``max_loras - 1``; int64 ``[S]``."""
        return self._sampler_indices_padded[: self._current().lengths[2]]

    @property
    def embeddings_indices(self) -> torch.Tensor:
        """Offsets of each token's table in a flattened embedding A, int64 ``[2, T]``."""
        return self._embeddings_indices[:, : self._current().lengths[3]]

    @property
    def prefill_metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """Starts, lengths and slots of the B segments (int64 ``[B]``), B, the longest, T. RuntimeError on decode."""
        self._check_prefill()
        runs = self.batch_size
        buffers = (self._seq_start_locs[:runs], self._seq_lengths[:runs], self._lora_indices_per_batch[:runs])
        return (*buffers, runs, self.max_length, self.token_nums)

    def _check_prefill(self) -> None:
        self._current()
        if not self.is_prefill:
            raise RuntimeError("prefill_metadata is only set for a step with is_prefill=True; this step is a decode")


def _number_of_slots(max_loras: Any, lora_config: Any) -> int | None:
    if lora_config is not None and not isinstance(lora_config, LoRAConfig):
        raise TypeError(f"lora_config must be a LoRAConfig, got {type(lora_config).__name__}")
    if max_loras is None:
        return None if lora_config is None else lora_config.max_loras
    check_count("max_loras", max_loras)
    if lora_config is not None and lora_config.max_loras != max_loras:
        raise ValueError(f"max_loras is {max_loras}, but lora_config.max_loras is {lora_config.max_loras}; give one")
    return max_loras
