"""Steps given by adapter ids or by slots per token: `LoRAMapping`, `convert_mapping`, `compute_meta`.

An *adapter id* is what the user knows (integer >= 1, 0 = none). A *slot* is the place of its weights on the device
(index below ``max_loras``, ``-1`` = none). A *segment* is a maximal run of neighbouring tokens with one slot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from punica.checks import check_bool, check_count
from punica.metadata.rows import RowGroups, check_slots
from punica.metadata.staging import send


@dataclass(frozen=True)
class LoRAMapping:
    """Adapter ids of one step, compared by value.

    ``index_mapping``: id of every token (length T). ``prompt_mapping``: id of every sampled row (length S): equal to
    the tokens when decoding, one per request in a prefill. 0 = no adapter. Both take sequences of integers, 1-D CPU
    tensors and numpy arrays, and are stored as tuples of int.
    ``is_prefill``: the step contains prompts, so runs of equal slots are long.

    TypeError (with position and value): an element that is bool, float, str or None. ValueError: a negative element.
    """

    index_mapping: Sequence[int]
    prompt_mapping: Sequence[int]
    is_prefill: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "index_mapping", _adapter_ids("index_mapping", self.index_mapping))
        object.__setattr__(self, "prompt_mapping", _adapter_ids("prompt_mapping", self.prompt_mapping))
        check_bool("is_prefill", self.is_prefill)


def _adapter_ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}; mappings are built on the host, pass a CPU tensor or a list")
    if isinstance(values, (torch.Tensor, np.ndarray)):
        if values.ndim != 1:
            raise ValueError(f"{name} must be 1-D, one adapter id per row, got shape {tuple(values.shape)}")
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of adapter ids, got {type(values).__name__} {values!r}")
    ids = tuple(values)
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        ids = tuple(check_count(f"{name}[{i}]", value, 0, "0: no adapter") for i, value in enumerate(ids))
    return ids


def mapped_rows(
    mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int
) -> tuple[RowGroups, RowGroups]:
    """Slots of the tokens and of the sampled rows of a step, in O(T + S + slots). Errors as in `convert_mapping`."""
    if not isinstance(mapping, LoRAMapping):
        raise TypeError(f"mapping must be a LoRAMapping, got {type(mapping).__name__}")
    slot_of = _slot_table(lora_index_to_id)
    check_count("max_loras", max_loras)
    if max_loras < len(lora_index_to_id):
        raise ValueError(f"max_loras is {max_loras}, must be >= {len(lora_index_to_id)}, entries of lora_index_to_id")
    tokens = RowGroups.of_rows(_slots("index_mapping", mapping.index_mapping, slot_of))
    if mapping.prompt_mapping == mapping.index_mapping:
        return tokens, tokens
    return tokens, RowGroups.of_rows(_slots("prompt_mapping", mapping.prompt_mapping, slot_of))


def padded_slots(sampled: np.ndarray, max_loras: int) -> np.ndarray:
    """``s + S * p`` for the slots ``[S]`` of the sampled rows, with p the slot, or ``max_loras - 1`` for none."""
    return np.arange(sampled.size) + sampled.size * np.where(sampled >= 0, sampled, max_loras - 1)


def embedding_offsets(tokens: np.ndarray, vocab_size: int, extra_vocab_size: int = 0) -> np.ndarray:
    """``[2, T]``: ``e * extra_vocab_size`` and ``e * (vocab_size + extra_vocab_size)`` for slots ``e``, of none 0."""
    # rows without adapter point harmlessly into slot 0: the expand that follows skips them
    table = np.maximum(tokens, 0)
    return np.stack((table * extra_vocab_size, table * (vocab_size + extra_vocab_size)))


def convert_mapping(
    mapping: LoRAMapping, lora_index_to_id: Sequence[int | None], max_loras: int, vocab_size: int,
    extra_vocab_size: int, device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:  # fmt: skip
    """Slots and offsets of every row of a step, as int64 tensors on ``device``: views of one allocation.

    ``lora_index_to_id[s]`` is the adapter id in slot s or None; ``max_loras`` (>= its length) encodes "none" in the
    padded indices. Returns ``base_indices`` ``[T]`` and ``sampler_indices`` ``[S]``, slots of tokens and sampled rows;
    `padded_slots` ``[S]``; `embedding_offsets` ``[2, T]``; ``indices_len`` ``[T, S, S, T]``. TypeError: a wrong type.
    ValueError: ids that are in no slot, an id in two slots, a number out of range.
    """
    tokens, sampled = mapped_rows(mapping, lora_index_to_id, max_loras)
    check_count("vocab_size", vocab_size)
    check_count("extra_vocab_size", extra_vocab_size, lowest=0)
    padded = padded_slots(sampled.row_slots, max_loras)
    offsets = embedding_offsets(tokens.row_slots, vocab_size, extra_vocab_size)
    arrays = (tokens.row_slots, sampled.row_slots, padded, offsets)
    lengths = [tokens.num_rows, sampled.num_rows, sampled.num_rows, tokens.num_rows]
    packed = send(np.concatenate([array.ravel() for array in arrays]), torch.int64, torch.device(device))
    *slots, offsets = packed.split([*lengths[:3], 2 * tokens.num_rows])
    return *slots, offsets.view(2, tokens.num_rows), lengths


def _slot_table(lora_index_to_id: Sequence[int | None]) -> dict[int, int]:
    if isinstance(lora_index_to_id, (str, bytes)) or not isinstance(lora_index_to_id, Sequence):
        raise TypeError(f"lora_index_to_id must be a list of ids and None, got {type(lora_index_to_id).__name__}")
    slot_of = {adapter_id: slot for slot, adapter_id in enumerate(lora_index_to_id) if type(adapter_id) is int}
    slot_of[0] = -1
    if len(slot_of) + lora_index_to_id.count(None) != len(lora_index_to_id) + 1 or min(slot_of) < 0:
        for slot, adapter_id in enumerate(lora_index_to_id):
            if adapter_id is None:
                continue
            slot_of[check_count(f"lora_index_to_id[{slot}]", adapter_id)] = slot  # integers of numpy and torch too
            if (first := lora_index_to_id.index(adapter_id)) < slot:
                raise ValueError(f"lora_index_to_id has adapter id {adapter_id} in slots {first} and {slot}: give one")
    return slot_of


def _slots(name: str, ids: Sequence[int], slot_of: dict[int, int]) -> np.ndarray:
    try:
        return np.fromiter(map(slot_of.__getitem__, ids), dtype=np.int64, count=len(ids))
    except KeyError:
        pass
    missing = [adapter_id for adapter_id in dict.fromkeys(ids) if adapter_id not in slot_of]
    unknown = ", ".join(f"{adapter_id} (first at position {ids.index(adapter_id)})" for adapter_id in missing)
    loaded = sorted(set(slot_of) - {0})
    raise ValueError(f"{name} names adapters that are in no slot: {unknown}; loaded ids: {loaded}. Activate them first")


class Segments(NamedTuple):
    """The result of `compute_meta`: starts ``[B]``, lengths ``[B]``, slots ``[B]``, B, longest run, T, no adapter."""

    b_seq_start: torch.Tensor
    seq_length: torch.Tensor
    lora_indices: torch.Tensor
    batch_size: int
    max_length: int
    token_nums: int
    no_lora: bool


def compute_meta(token_lora_tensor: torch.Tensor) -> Segments:
    """Run-length encode the slots of a step (integer tensor ``[T]``, ``-1`` = no adapter) into B segments.

    ``[2,2,2,-1,-1,0,0,2]`` gives starts ``[0,3,5,7]``, lengths ``[3,2,2,1]`` (int64), slots ``[2,-1,0,2]`` (dtype of
    the input), B = 4, longest 3, T = 8, ``no_lora`` False. T = 0 gives empty tensors, zeros and ``no_lora`` True.

    TypeError: not an integer tensor. ValueError: not 1-D, or a value below -1.
    """
    rows = RowGroups.of_rows(check_slots("token_lora_tensor", token_lora_tensor))
    device = token_lora_tensor.device
    starts, lengths, slots = (torch.from_numpy(part).to(device) for part in (rows.starts, rows.lengths, rows.slots))
    longest = int(rows.lengths.max(initial=0))
    return Segments(
        starts, lengths, slots.to(token_lora_tensor.dtype), len(slots), longest, rows.num_rows, rows.no_lora
    )
