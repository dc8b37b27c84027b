"""`StepMetadata`: the step of a wrapper, given by slots or by adapter ids."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch

from punica.checks import check_count
from punica.config import LoRAConfig
from punica.metadata import LoRABatch, LoRAMapping, MixedBatch, MixedRows, RowGroups, mapped_rows
from punica.ops.expect import check_keywords


class StepMetadata:
    """Holds the `LoRABatch` that layers work on.

    ``max_num_batched_tokens`` = N bounds both T and S, ``max_batches`` the runs of equal slot in a prefill;
    ``max_loras`` is the number of slots (None: that of ``lora_config``, if there is one). ValueError when N or
    ``max_batches`` is below 1.

    Attributes, of the current step: ``no_lora``, whether no token has an adapter; ``is_prefill``;
    ``mixtures``: those of the tokens and of the sampled rows (None: there are none).
    """

    limits_runs = True
    """Limit of ``max_batches`` runs of equal slot in a prefill."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str,
        *, max_loras: int | None = None, lora_config: LoRAConfig | None = None,
    ) -> None:  # fmt: skip
        self.max_num_batched_tokens = check_count("max_num_batched_tokens", max_num_batched_tokens)
        self.max_batches = check_count("max_batches", max_batches)
        self.device, self.lora_config = torch.device(device), lora_config
        self.max_loras = _number_of_slots(max_loras, lora_config)
        specialize = lora_config is not None and lora_config.specialize_active_lora
        self.batch = LoRABatch(max_num_batched_tokens, self.max_loras, self.device, specialize_active_lora=specialize)
        self.is_prefill = self.no_lora = self._is_set = False
        self.mixtures: tuple[MixedBatch, ...] | None = None
        self._mixtures: tuple[MixedBatch, ...] = ()

    def __deepcopy__(self, _: Any) -> Self:
        """Return itself: copies of a layer take part in its steps."""
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the sizes alone: tensors would come without the arrays that fill them. The loaded one has no step."""
        sizes = self.max_num_batched_tokens, self.max_batches, self.device
        return partial(type(self), *sizes, max_loras=self.max_loras, lora_config=self.lora_config), ()

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Begin the next step, given by adapter ids and the slot table (`punica.metadata.convert_mapping`).

        Runs on the host, without synchronising. TypeError: ``mapping`` is no LoRAMapping, or an unknown keyword.
        ValueError: an id in no slot, T or S above N, more slots than ``max_loras``, or (prefill) more runs of equal
        slot than ``max_batches``. After an exception the previous step's metadata is fully usable.
        """
        check_keywords("update_metadata", kwargs)
        tokens, sampled = self.check_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.begin_step(tokens, sampled, vocab_size, is_prefill=mapping.is_prefill, padding_slot=max_loras - 1)

    def begin_step(
        self, tokens: RowGroups, sampled: RowGroups, vocab_size: int,
        *, is_prefill: bool = False, padding_slot: int | None = None,
    ) -> None:  # fmt: skip
        """Begin the next step, given by the slots of its rows and of its sampled rows.

        ``vocab_size`` and ``padding_slot``: of the index tensors (`punica.vllm.indices`). ValueError, and
        no change, when there are more than N of either or a slot is not below ``max_loras``.
        """
        self.batch.fill(tokens, sampled)
        self.is_prefill, self.no_lora, self._is_set = is_prefill, tokens.no_lora, True
        self.mixtures = None

    def begin_mixtures(self, tokens: MixedRows, sampled: MixedRows) -> None:
        """Add mixtures to the step of `begin_step`, in linear layers and head. ValueError: as `MixedBatch.check`."""
        if not self._mixtures:
            sizes = self.max_num_batched_tokens, self.max_loras, self.device
            self._mixtures = MixedBatch(*sizes), MixedBatch(*sizes)
        self._step()
        self._mixtures[1].check(sampled)
        self._mixtures[0].fill(tokens)
        self._mixtures[1].fill(sampled)
        self.mixtures, self.no_lora = self._mixtures, False

    def check_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int
    ) -> tuple[RowGroups, RowGroups]:
        """Return the slots of rows and of sampled rows, or raise what `update_metadata` would raise."""
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
        if not self._is_set:
            raise RuntimeError("metadata not set; call update_metadata first")
        return self.batch

    def _debug_check(self, given: Any) -> None:
        """Verify the values of scales with ``debug_checks``, but not during a capture."""
        if self.lora_config is None or not self.lora_config.debug_checks or given is None:
            return
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            given.validate()


def _number_of_slots(max_loras: Any, lora_config: Any) -> int | None:
    if lora_config is not None and not isinstance(lora_config, LoRAConfig):
        raise TypeError(f"lora_config must be a LoRAConfig, got {type(lora_config).__name__}")
    if max_loras is None:
        return None if lora_config is None else lora_config.max_loras
    check_count("max_loras", max_loras)
    if lora_config is not None and lora_config.max_loras != max_loras:
        raise ValueError(f"max_loras is {max_loras}, but lora_config.max_loras is {lora_config.max_loras}; give one")
    return max_loras
