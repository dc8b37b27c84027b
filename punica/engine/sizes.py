"""How much memory an engine takes, and sizes that fit the machine."""

from dataclasses import dataclass
from typing import Any

import torch

from punica.adapters import LoRAModelManager
from punica.engine.config import EngineConfig
from punica.models import LlamaForCausalLM
from punica.parallel import free_bytes, tensor_model_parallel_all_gather

DEFAULT_MODEL_LEN = 8192
"""Most tokens of a request when nobody says: longer ones are legal, but every step's buffers are made for them."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on the device of one rank: ``weights`` of the backbone, ``adapter_slots`` (``slot_bytes`` each, used or
    not), ``kv_cache`` (``token_bytes`` for each token that it holds).
    """

    weights: int
    adapter_slots: int
    slot_bytes: int
    kv_cache: int
    token_bytes: int


def token_bytes(model: LlamaForCausalLM) -> int:
    """Bytes of the keys and values of one token in all layers of this rank."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.lm_head.weight.element_size()


def slot_bytes(model: LlamaForCausalLM, rank: int, itemsize: int) -> int:
    """Most bytes that one adapter slot of ``rank`` takes in all layers: both matrices of every weight matrix.

    Exact for one rank whose ``target_modules`` name every layer, an upper bound otherwise.
    """
    shapes: list[Any] = [entry.shape for entry in model.checkpoint_entries() if len(entry.shape) == 2]
    if model.config.tie_word_embeddings:
        shapes.append((model.config.vocab_size, model.config.hidden_size))
    return sum(rank * itemsize * sum(shape) for shape in shapes)


def memory_of(model: LlamaForCausalLM, manager: LoRAModelManager | None, config: EngineConfig) -> EngineMemory:
    """What an engine of these parts holds."""
    slots, per_slot = (0, 0) if manager is None else (manager.lora_slots, manager.slot_bytes)
    tokens = config.total_blocks * config.block_size
    return EngineMemory(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        adapter_slots=slots * per_slot,
        slot_bytes=per_slot,
        kv_cache=tokens * token_bytes(model),
        token_bytes=token_bytes(model),
    )


def fit_blocks(model: LlamaForCausalLM, wanted: int, block_size: int, reserved: int, memory_fraction: float) -> int:
    """KV blocks that fit: ``wanted``, or fewer when ``memory_fraction`` of what is free, less ``reserved`` bytes (for
    adapter slots), holds no more; the same number on every rank.

    RuntimeError when not a single block fits.
    """
    device = model.lm_head.weight.device
    block_bytes = block_size * token_bytes(model)
    free = free_bytes(device)
    fits = int((memory_fraction * free - reserved) // block_bytes)
    fits = int(tensor_model_parallel_all_gather(torch.tensor([fits], device=device), 0).min())
    if fits < 1:
        raise RuntimeError(
            f"no KV block of {block_bytes} bytes fits: {free} bytes are free on {device}, of which memory_fraction "
            f"{memory_fraction} may be used and {reserved} are for adapter slots; lower max_loras or max_lora_rank, "
            "or serve with fewer bytes per weight (dtype)"
        )
    return min(wanted, fits)
